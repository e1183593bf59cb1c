//! Owns who is at a place: its workers by role, listed once for each fleet, so that a choice looks nobody up.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::runs_whole;
use crate::config::Pool;
use crate::fleet::{Capacity, Fleet, Role, Target, Worker};
use crate::load::{Ledger, Pace};
use crate::prefill_router::Place;

/// A worker rank, and the number under which it is booked and remembered.
#[derive(Debug)]
pub struct Member {
    /// The rank.
    pub target: Target,
    /// Its number.
    pub slot: usize,
    /// What it can hold and do: what it says itself, else what the pool says.
    pub capacity: Capacity,
}

/// The workers of one place.
#[derive(Debug, Default)]
pub struct Roster {
    /// All of them.
    pub workers: Vec<Rc<Worker>>,
    prefill: Vec<Member>,
    decode: Vec<Member>,
    whole: Vec<Member>,
    /// Whether any of them has a topology: only then is anything demanded of a pair by itself.
    pub has_topology: bool,
    /// Whether any of them says which adapters it has.
    pub has_adapters: bool,
    paces: [Cell<Observed>; Role::ALL.len()],
}

/// How quickly the workers of a role read prompts all in all, and when that was worked out.
#[derive(Debug, Clone, Copy, Default)]
struct Observed {
    at: Option<Duration>,
    pace: Option<Pace>,
}

/// How long a pace is taken for the present one: it is the work of many prompts, and changes slowly.
const PACE_LASTS: Duration = Duration::from_millis(20);

impl Roster {
    pub(super) fn of(place: &Place, fleet: &Fleet, pool: &Pool, ledger: &mut Ledger) -> Self {
        let here = fleet.workers().filter(|worker| place.holds(worker));
        let mut roster = Self::default();
        for worker in here {
            roster.has_topology |= worker.topology.is_some();
            roster.has_adapters |= !worker.adapters.is_empty();
            let mut members = || {
                let targets = worker.targets();
                let capacity = Capacity {
                    kv_blocks: worker.capacity.kv_blocks.or(pool.kv_blocks),
                    ..worker.capacity
                };
                let member = |target: Target| Member {
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
        roster
    }

    /// How quickly those of a role read prompts all in all; none where that is not known.
    pub fn pace(&self, role: Role, ledger: &Ledger) -> Option<Pace> {
        let observed = self.paces.get(role as usize)?;
        let now = ledger.now();
        if let Observed { at: Some(at), pace } = observed.get()
            && now.saturating_sub(at) < PACE_LASTS
        {
            return pace;
        }
        let pace = ledger.pace(self.of_role(role).iter().map(|member| member.slot));
        observed.set(Observed {
            at: Some(now),
            pace,
        });
        pace
    }

    /// Those who can take that part. `Aggregated` stands for running a request whole, whoever does.
    pub fn of_role(&self, role: Role) -> &[Member] {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
            Role::Aggregated => &self.whole,
        }
    }
}
