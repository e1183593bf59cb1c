//! Owns which pairs may exchange KV: the taints that a prefill worker's topology demands of the decode worker.
//!
//! Every worker carries the taint `dynamo.topology/<domain>=<value>` for each of its domains, so that the demand is a plain
//! test of sets. A demand that cannot be derived fails closed: a pair that must not exchange KV costs more than a refusal.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::fleet::Worker;
use crate::fleet::topology::{Enforcement, Topology, place};

/// Taints that a worker must and should carry.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Constraints {
    /// Taints that the worker must carry, all of them.
    pub required_taints: BTreeSet<String>,
    /// Taint → weight.
    pub preferred_taints: BTreeMap<String, f64>,
}

/// Why constraints cannot be derived.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// Some worker's transfers are restricted, and this worker has no topology.
    #[error("worker {worker} has no topology, while others must stay within theirs")]
    Unknown {
        /// The prefill worker.
        worker: String,
    },
    /// The domain that transfers must stay within is not among the worker's own.
    #[error("worker {worker} must keep transfers within `{domain}` but has no place in it")]
    NoPlace {
        /// The prefill worker.
        worker: String,
        /// The domain.
        domain: String,
    },
    /// A domain without an enforcement, or `preferred` without a weight.
    #[error(
        "worker {worker} names a transfer domain without an enforcement, or prefers one without a weight"
    )]
    Incomplete {
        /// The prefill worker.
        worker: String,
    },
}

/// What the transfer from `prefill` demands of a decode worker, in a fleet where some workers may have no topology.
///
/// # Errors
/// When the demand cannot be derived.
pub fn constraints<'a>(
    prefill: &Worker,
    mut fleet: impl Iterator<Item = &'a Worker>,
) -> Result<Constraints, TopologyError> {
    let worker = || prefill.name.clone();
    let Some(topology) = &prefill.topology else {
        let restricted =
            fleet.any(|other| other.topology.as_ref().is_some_and(Topology::is_required));
        return match restricted {
            true => Err(TopologyError::Unknown { worker: worker() }),
            false => Ok(Constraints::default()),
        };
    };
    let Some(domain) = &topology.kv_transfer_domain else {
        return Ok(Constraints::default());
    };
    let Some(value) = topology.domains.get(domain) else {
        return Err(TopologyError::NoPlace {
            worker: worker(),
            domain: domain.clone(),
        });
    };
    let taint = place(domain, value);
    match (
        topology.kv_transfer_enforcement,
        topology.kv_transfer_preferred_weight,
    ) {
        (Some(Enforcement::Required), _) => Ok(Constraints {
            required_taints: BTreeSet::from([taint]),
            ..Constraints::default()
        }),
        (Some(Enforcement::Preferred), Some(weight)) if weight.is_finite() => Ok(Constraints {
            preferred_taints: BTreeMap::from([(taint, weight)]),
            ..Constraints::default()
        }),
        _ => Err(TopologyError::Incomplete { worker: worker() }),
    }
}

fn carries(worker: &Worker, taint: &str) -> bool {
    let topology = worker.topology.as_ref();
    topology.is_some_and(|topology| topology.carries(taint))
}

impl Constraints {
    /// These constraints and the `derived` ones; where both weigh a taint, the derived weight counts.
    pub fn merged(mut self, derived: Self) -> Self {
        self.required_taints.extend(derived.required_taints);
        self.preferred_taints.extend(derived.preferred_taints);
        self
    }

    /// Whether a worker carries every required taint.
    pub fn admit(&self, worker: &Worker) -> bool {
        self.required_taints
            .iter()
            .all(|taint| carries(worker, taint))
    }

    /// How much a worker is preferred: the sum of the weights of the taints that it carries.
    pub fn preference(&self, worker: &Worker) -> f64 {
        let weights = self.preferred_taints.iter();
        let carried = weights.filter(|(taint, _)| carries(worker, taint));
        carried.map(|(_, weight)| weight).sum()
    }

    /// The factor on a worker's cost: `exp(−tanh(preference))`, between 0.368 and 2.718.
    pub fn cost_factor(&self, worker: &Worker) -> f64 {
        (-self.preference(worker).tanh()).exp()
    }
}
