//! Owns the rule for the gateway's memory: its peak stays within what its budgets allow.

use std::fs;

use routing::config::Config;

use crate::bench::usage;
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
            .filter_map(high_water)
            .sum();
        let allowed = config.most_bytes(threads.into());
        Peak {
            held: peak.saturating_sub(self.resident),
            allowed: u64::try_from(allowed).unwrap_or(u64::MAX),
        }
    }
}

/// High-water mark of a process's memory, in bytes.
fn high_water(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_stays_when_what_was_held_is_given_back() {
        const HELD: usize = 64 << 20;
        let held = vec![1_u8; HELD];
        assert!(held.iter().all(|byte| *byte == 1));
        drop(held);
        let peak = high_water(std::process::id()).unwrap();
        assert!(peak >= HELD as u64, "{peak}");
        assert_eq!(high_water(u32::MAX), None);
    }
}
