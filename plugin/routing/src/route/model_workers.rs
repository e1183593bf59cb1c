//! Owns the workers of a model key by role, listed once for each fleet, so that a choice needs no look-up.

use std::sync::Arc;

use super::reports::Reports;
use crate::config::Pool;
use crate::fleet::{Capacity, Condition, Fleet, Role, Target, Worker};
use crate::load::{Ledger, ObservedRates, RateCache};
use crate::model_state::ModelKey;

/// A worker rank, with its slot in the load table and the prefix index.
#[derive(Debug)]
pub struct RankSlot {
    /// The rank.
    pub target: Target,
    /// Its slot.
    pub slot: usize,
    /// Its capacity: from its source, else from its engine's report, else from the pool.
    pub capacity: Capacity,
}

/// The workers of one model key, except draining ones: those are not picked.
#[derive(Debug, Default)]
pub struct ModelWorkers {
    /// All workers.
    pub workers: Vec<Arc<Worker>>,
    prefill: Vec<RankSlot>,
    decode: Vec<RankSlot>,
    whole: Vec<RankSlot>,
    /// Whether any worker has a topology: only then does a pair have constraints of its own.
    pub has_topology: bool,
    /// Whether any worker declares its adapters.
    pub has_adapters: bool,
    /// Whether the source of any worker reports it as unhealthy.
    pub has_unhealthy: bool,
    /// Most tokens of a prompt and its answer together that a pair takes. A role with a worker of unknown limit is left out;
    /// none if both are.
    pub longest: Option<u64>,
    rates: [RateCache; Role::ALL.len()],
}

/// The most tokens that any of these takes; none if the limit of one is unknown.
fn longest(members: &[RankSlot]) -> Option<u64> {
    let limits = members.iter().map(|member| member.capacity.max_model_len);
    limits.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

impl ModelWorkers {
    pub(super) fn of(
        key: &ModelKey,
        fleet: &Fleet,
        pool: &Pool,
        reports: &Reports,
        ledger: &mut Ledger,
    ) -> Self {
        let here = fleet.open().filter(|worker| key.holds(worker));
        let mut model_workers = Self::default();
        for worker in here {
            model_workers.has_topology |= worker.topology.is_some();
            model_workers.has_adapters |= !worker.adapters.is_empty();
            model_workers.has_unhealthy |= worker.condition == Condition::Unhealthy;
            let mut members = || {
                let targets = worker.targets();
                let capacity = reports.capacity(worker, pool);
                let member = |target: Target| RankSlot {
                    capacity,
                    slot: ledger.slot(target.key()),
                    target,
                };
                targets.map(member).collect::<Vec<_>>()
            };
            match worker.role {
                Role::Prefill => model_workers.prefill.extend(members()),
                Role::Decode => model_workers.decode.extend(members()),
                Role::Aggregated => {}
            }
            if runs_whole(pool, worker) {
                model_workers.whole.extend(members());
            }
            model_workers.workers.push(Arc::clone(worker));
        }
        let of_roles = [
            longest(&model_workers.prefill),
            longest(&model_workers.decode),
        ];
        model_workers.longest = of_roles.into_iter().flatten().min();
        model_workers
    }

    /// The observed prefill rates of a role's workers, in their order.
    pub fn rates(&self, role: Role, ledger: &Ledger) -> ObservedRates {
        let [of_prefill, of_decode, of_whole] = &self.rates;
        let cache = match role {
            Role::Prefill => of_prefill,
            Role::Decode => of_decode,
            Role::Aggregated => of_whole,
        };
        cache.rates(self.of_role(role).iter().map(|member| member.slot), ledger)
    }

    /// The rank slots of a role. `Aggregated` stands for all that run requests aggregated, of any role.
    pub fn of_role(&self, role: Role) -> &[RankSlot] {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
            Role::Aggregated => &self.whole,
        }
    }
}

/// Whether a worker runs requests aggregated.
pub(super) fn runs_whole(pool: &Pool, worker: &Worker) -> bool {
    match worker.role {
        Role::Aggregated => true,
        Role::Decode => pool.decode.runs_whole_requests,
        Role::Prefill => false,
    }
}
