//! Owns the workers of a model key by role, listed once for each fleet, so that a choice needs no look-up.

use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;
use std::time::Duration;

use super::reports::Reports;
use crate::config::Pool;
use crate::fleet::{Capacity, Condition, Fleet, Role, Target, Worker};
use crate::load::{Ledger, PrefillRate};
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
    pub workers: Vec<Rc<Worker>>,
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
    observed: [Observed; Role::ALL.len()],
}

/// The prefill rate of the workers of a role, and when it was computed.
#[derive(Debug, Default)]
struct Observed {
    at: Cell<Option<Duration>>,
    rate: Cell<Option<PrefillRate>>,
    /// Slowness of each worker against that rate, in the order of the rank slots.
    slowness: RefCell<Vec<f32>>,
}

/// The most tokens that any of these takes; none if the limit of one is unknown.
fn longest(members: &[RankSlot]) -> Option<u64> {
    let limits = members.iter().map(|member| member.capacity.max_model_len);
    limits.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

/// Time for which a computed prefill rate is reused: many prompts make up the rate, and it changes slowly.
const RATE_LASTS: Duration = Duration::from_millis(20);

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
            model_workers.workers.push(Rc::clone(worker));
        }
        let of_roles = [
            longest(&model_workers.prefill),
            longest(&model_workers.decode),
        ];
        model_workers.longest = of_roles.into_iter().flatten().min();
        model_workers
    }

    /// The common prefill rate of a role, none if unknown, and the slowness of each of its workers, in their order.
    pub fn rate(&self, role: Role, ledger: &Ledger) -> (Option<PrefillRate>, Ref<'_, Vec<f32>>) {
        let [of_prefill, of_decode, of_whole] = &self.observed;
        let observed = match role {
            Role::Prefill => of_prefill,
            Role::Decode => of_decode,
            Role::Aggregated => of_whole,
        };
        let now = ledger.now();
        let at = observed.at.get();
        if at.is_none_or(|at| now.saturating_sub(at) >= RATE_LASTS) {
            observed.at.set(Some(now));
            self.observe(observed, role, ledger);
        }
        (observed.rate.get(), observed.slowness.borrow())
    }

    fn observe(&self, observed: &Observed, role: Role, ledger: &Ledger) {
        let slots = self.of_role(role).iter().map(|member| member.slot);
        let rate = ledger.rate(slots.clone());
        observed.rate.set(rate);
        let mut slowness = observed.slowness.borrow_mut();
        slowness.clear();
        slowness.extend(slots.map(|slot| ledger.slowness(slot, rate) as f32));
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
