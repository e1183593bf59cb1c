//! Owns the topology of a worker: its place in each domain, and how far its KV may travel.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Places of a worker, and how far its KV may travel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Topology {
    /// Domain → the worker's place in that domain, as `{"rack": "r7"}`.
    pub domains: BTreeMap<String, String>,
    /// Prefill workers: domain that a transfer of their KV must, or should, stay within; absent: anywhere.
    pub kv_transfer_domain: Option<String>,
    /// Whether a transfer of KV must or should stay within `kv_transfer_domain`. Without it, or with `preferred` and no weight,
    /// a domain is an error: the worker's requests get 503.
    pub kv_transfer_enforcement: Option<Enforcement>,
    /// With `preferred`: weight of the same place. A positive weight attracts, a negative one repels.
    pub kv_transfer_preferred_weight: Option<f64>,
    /// Further taints of the operator's own, for requests that demand them.
    pub taints: BTreeSet<String>,
}

/// Whether a transfer must or should stay within a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Enforcement {
    /// Only pairs in the same place.
    Required,
    /// The cost of a decode worker in the same place is multiplied by `exp(-tanh(weight))`.
    Preferred,
}

/// The taint of every worker at this place of a domain.
pub fn place(domain: &str, value: &str) -> String {
    format!("dynamo.topology/{domain}={value}")
}

impl Topology {
    /// Whether a worker with this topology carries `taint`.
    pub fn carries(&self, taint: &str) -> bool {
        self.taints.contains(taint)
            || self
                .domains
                .iter()
                .any(|(domain, value)| place(domain, value) == taint)
    }

    /// Whether transfers from a worker with this topology must stay within a domain.
    pub fn is_required(&self) -> bool {
        self.kv_transfer_enforcement == Some(Enforcement::Required)
    }
}
