//! Owns the rule for the gateway's memory: its peak stays within what its budgets allow.

use pd_harness_common::usage;
use routing::config::Config;

use crate::run::gateway::Gateway;

/// Memory of a gateway process at rest.
#[derive(Clone, Copy, Debug)]
pub struct IdleMemory {
    process: u32,
    /// Bytes.
    resident: u64,
}

/// Peak memory of a gateway above its memory at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// Bytes.
    pub held: u64,
    /// Bytes that the budgets allow.
    pub allowed: u64,
}

impl IdleMemory {
    /// Memory of a gateway without load; `None` if it is no separate process but part of this one, with all engines and clients.
    pub fn of(gateway: &Gateway) -> Option<Self> {
        let process = gateway.process()?;
        let resident = usage::of(&[process]).resident;
        Some(Self { process, resident })
    }

    /// The peak so far, against what this configuration allows for that many threads.
    pub fn peak(self, config: &Config, threads: u16) -> Peak {
        let peak: u64 = usage::family(&[self.process])
            .into_iter()
            .filter_map(usage::peak)
            .sum();
        let allowed = config.most_bytes(threads.into());
        Peak {
            held: peak.saturating_sub(self.resident),
            allowed: u64::try_from(allowed).unwrap_or(u64::MAX),
        }
    }
}
