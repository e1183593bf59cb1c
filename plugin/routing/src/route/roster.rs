//! Owns who is at a place: its workers by role, listed once for each fleet, so that a choice looks nobody up.

use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;
use std::time::Duration;

use super::reports::Reports;
use super::{capacity, runs_whole};
use crate::config::Pool;
use crate::fleet::{Capacity, Condition, Fleet, Role, Target, Worker};
use crate::load::{Ledger, PrefillRate};
use crate::prefill_router::ModelKey;

/// A worker rank, and the number under which it is booked and remembered.
#[derive(Debug)]
pub struct RankSlot {
    /// The rank.
    pub target: Target,
    /// Its number.
    pub slot: usize,
    /// What it can hold and do: what it says itself, else what the pool says.
    pub capacity: Capacity,
}

/// The workers of one place, but for those who drain: nobody is picked among them.
#[derive(Debug, Default)]
pub struct ModelWorkers {
    /// All of them.
    pub workers: Vec<Rc<Worker>>,
    prefill: Vec<RankSlot>,
    decode: Vec<RankSlot>,
    whole: Vec<RankSlot>,
    /// Whether any of them has a topology: only then is anything demanded of a pair by itself.
    pub has_topology: bool,
    /// Whether any of them says which adapters it has.
    pub has_adapters: bool,
    /// Whether the source of any of them says that it is not well.
    pub has_unhealthy: bool,
    /// Tokens of a prompt and its answer together that a pair may take at most; none where some worker's limit is not known.
    pub longest: Option<u64>,
    observed: [Observed; Role::ALL.len()],
}

/// How quickly the workers of a role read prompts, and when that was worked out.
#[derive(Debug, Default)]
struct Observed {
    at: Cell<Option<Duration>>,
    pace: Cell<Option<PrefillRate>>,
    /// How many times slower than all together each of them is, in the order of the members.
    slowness: RefCell<Vec<f32>>,
}

/// The most tokens that any of these takes; none where that of one is not known.
fn longest(members: &[RankSlot]) -> Option<u64> {
    let limits = members.iter().map(|member| member.capacity.max_model_len);
    limits.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

/// How long a pace is taken for the present one: it is the work of many prompts, and changes slowly.
const PACE_LASTS: Duration = Duration::from_millis(20);

impl ModelWorkers {
    pub(super) fn of(
        place: &ModelKey,
        fleet: &Fleet,
        pool: &Pool,
        reports: &Reports,
        ledger: &mut Ledger,
    ) -> Self {
        let here = fleet.open().filter(|worker| place.holds(worker));
        let mut roster = Self::default();
        for worker in here {
            roster.has_topology |= worker.topology.is_some();
            roster.has_adapters |= !worker.adapters.is_empty();
            roster.has_unhealthy |= worker.condition == Condition::Unhealthy;
            let mut members = || {
                let targets = worker.targets();
                let capacity = capacity(pool, reports, worker);
                let member = |target: Target| RankSlot {
                    capacity,
                    slot: ledger.slot(target.key()),
                    target,
                };
                targets.map(member).collect::<Vec<_>>()
            };
            match worker.role {
                Role::Prefill => roster.prefill.extend(members()),
                Role::Decode => roster.decode.extend(members()),
                Role::Aggregated => {}
            }
            if runs_whole(pool, worker) {
                roster.whole.extend(members());
            }
            roster.workers.push(Rc::clone(worker));
        }
        let of_roles = [longest(&roster.prefill), longest(&roster.decode)];
        roster.longest = of_roles.into_iter().flatten().min();
        roster
    }

    /// How quickly those of a role read prompts all in all, none where that is not known; and how many times slower each of
    /// them is, in their order.
    pub fn pace(&self, role: Role, ledger: &Ledger) -> (Option<PrefillRate>, Ref<'_, Vec<f32>>) {
        let [of_prefill, of_decode, of_whole] = &self.observed;
        let observed = match role {
            Role::Prefill => of_prefill,
            Role::Decode => of_decode,
            Role::Aggregated => of_whole,
        };
        let now = ledger.now();
        let at = observed.at.get();
        if at.is_none_or(|at| now.saturating_sub(at) >= PACE_LASTS) {
            observed.at.set(Some(now));
            self.observe(observed, role, ledger);
        }
        (observed.pace.get(), observed.slowness.borrow())
    }

    fn observe(&self, observed: &Observed, role: Role, ledger: &Ledger) {
        let slots = self.of_role(role).iter().map(|member| member.slot);
        let pace = ledger.pace(slots.clone());
        observed.pace.set(pace);
        let mut slowness = observed.slowness.borrow_mut();
        slowness.clear();
        slowness.extend(slots.map(|slot| ledger.slowness(slot, pace) as f32));
    }

    /// Those who can take that part. `Aggregated` stands for running a request whole, whoever does.
    pub fn of_role(&self, role: Role) -> &[RankSlot] {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
            Role::Aggregated => &self.whole,
        }
    }
}
