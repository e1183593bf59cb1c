//! Owns the trail of one request at the workers tried for it: which are excluded, which are suspected of what, and whether
//! another one may still be tried.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::fleet::{Incarnation, WorkerId};
use crate::outcome::{Before, Came, Leg, is_one_workers_refusal};

/// Workers at which a request died before no further one is tried: the request itself may kill them.
const MOST_DEATHS: usize = 2;

/// The trail of one request, shared by everything under way for it.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedTrail(Arc<Mutex<Trail>>);

impl SharedTrail {
    /// The trail. The guard outlives no other call.
    pub(super) fn get(&self) -> MutexGuard<'_, Trail> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The history of a request so far.
#[derive(Debug, Default)]
pub(super) struct Trail {
    prefill: Met,
    decode: Met,
    suspects: Vec<Suspect>,
}

/// The history of one of its legs.
#[derive(Debug, Default)]
struct Met {
    /// Calls of this leg since the request was placed last.
    calls: usize,
    /// Workers that are not tried again.
    left_out: Vec<WorkerId>,
    /// Workers that have completed this leg, and are tried again only if no other is left: the other leg failed, perhaps
    /// because of them.
    spared: Vec<WorkerId>,
    /// Workers that broke the connection, in order, since the leg last succeeded.
    deaths: Vec<WorkerId>,
    /// Of these, connections that were reset before the first byte.
    resets: usize,
    has_asked_another: bool,
}

/// A failure whose cause, of several workers, is not known yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Suspect {
    /// The leg that failed.
    pub(super) leg: Leg,
    /// The called worker, by incarnation.
    pub(super) worker: Incarnation,
    /// The other worker of the pair, if it may be at fault as well.
    pub(super) partner: Option<Incarnation>,
    symptom: Symptom,
}

/// The kind of failure, to recognise the same failure at another worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Symptom {
    ServerError,
    Status(u16),
    Died,
    Late,
    SaidNothing,
}

impl Symptom {
    fn of(came: Came) -> Self {
        match came {
            Came::Status(500..=599) => Self::ServerError,
            Came::Status(status) => Self::Status(status),
            Came::TimedOut | Came::Silent | Came::Unread => Self::Late,
            Came::Reset | Came::Cut | Came::Refused | Came::Left => Self::Died,
            Came::Good
            | Came::Unsendable
            | Came::NotSent
            | Came::Empty
            | Came::FailedInside
            | Came::NoHandoff => Self::SaidNothing,
        }
    }
}

impl Trail {
    fn of(&self, leg: Leg) -> &Met {
        match leg {
            Leg::Prefill => &self.prefill,
            Leg::Decode | Leg::Aggregated | Leg::Sidecar | Leg::Frontend => &self.decode,
        }
    }

    fn of_mut(&mut self, leg: Leg) -> &mut Met {
        match leg {
            Leg::Prefill => &mut self.prefill,
            Leg::Decode | Leg::Aggregated | Leg::Sidecar | Leg::Frontend => &mut self.decode,
        }
    }

    /// The history of a leg before its current call.
    pub(super) fn before(&self, leg: Leg) -> Before {
        let met = self.of(leg);
        Before {
            called_off: false,
            resets: met.resets,
            has_asked_another: met.has_asked_another,
        }
    }

    /// The request is placed, and its prefill leg is called for the first time since.
    pub(super) fn placed(&mut self) {
        self.prefill.calls = 1;
    }

    /// Counts a call of a leg.
    pub(super) fn called(&mut self, leg: Leg) {
        let met = self.of_mut(leg);
        met.calls = met.calls.saturating_add(1);
    }

    /// Calls of a leg since the request was placed.
    pub(super) fn calls(&self, leg: Leg) -> usize {
        self.of(leg).calls
    }

    /// Records the failure of a leg at a worker.
    pub(super) fn ended(&mut self, leg: Leg, worker: WorkerId, came: Came) {
        let met = self.of_mut(leg);
        match came {
            Came::Reset => {
                met.resets = met.resets.saturating_add(1);
                met.deaths.push(worker);
            }
            Came::Cut => met.deaths.push(worker),
            Came::Status(status) if is_one_workers_refusal(status) => met.has_asked_another = true,
            _ => {}
        }
    }

    /// Records a failure whose cause is not known.
    pub(super) fn suspect(
        &mut self,
        leg: Leg,
        worker: Incarnation,
        partner: Option<Incarnation>,
        came: Came,
    ) {
        self.suspects.push(Suspect {
            leg,
            worker,
            partner,
            symptom: Symptom::of(came),
        });
    }

    /// A leg has succeeded: returns the failures of that leg at other workers, which were theirs.
    pub(super) fn succeeded(&mut self, leg: Leg) -> Vec<Suspect> {
        let met = self.of_mut(leg);
        met.deaths.clear();
        met.resets = 0;
        let is_same = |suspect: &Suspect| (suspect.leg == Leg::Prefill) == (leg == Leg::Prefill);
        let (theirs, others) = self.suspects.drain(..).partition(is_same);
        self.suspects = others;
        theirs
    }

    /// The request has ended, and no other worker has served what these failed. Where several failed in the same way, the
    /// request was the cause, and the suspicion is dropped; returns the others.
    pub(super) fn settle(&mut self) -> Vec<Suspect> {
        let suspects = std::mem::take(&mut self.suspects);
        let has_twin = |one: &Suspect| {
            suspects.iter().any(|other| {
                other.worker.id != one.worker.id
                    && other.symptom == one.symptom
                    && other.leg.role() == one.leg.role()
            })
        };
        suspects
            .iter()
            .filter(|one| !has_twin(one))
            .copied()
            .collect()
    }

    /// Excludes a worker from further tries.
    pub(super) fn leave_out(&mut self, leg: Leg, worker: WorkerId) {
        let met = self.of_mut(leg);
        if !met.left_out.contains(&worker) {
            met.left_out.push(worker);
        }
    }

    /// Excludes workers of one leg or both after `failed` has failed; one that did the prefill before it is tried again only
    /// if no other takes that.
    pub(super) fn leave_all_out(&mut self, failed: Leg, workers: &[(Leg, WorkerId)]) {
        for (leg, worker) in workers {
            match (failed, leg) {
                (Leg::Decode, Leg::Prefill) => self.prefill.spared.push(*worker),
                _ => self.leave_out(*leg, *worker),
            }
        }
    }

    /// Workers excluded from the next try of a leg: the sets to be tried in turn, the widest first. A worker that reset a
    /// connection may be tried again if no other is left; after deaths at several workers, no further one is tried. `all`
    /// are the existing workers.
    pub(super) fn excluded(
        &self,
        leg: Leg,
        all: impl Iterator<Item = WorkerId>,
    ) -> [Vec<WorkerId>; 2] {
        let met = self.of(leg);
        let with = |some: &[WorkerId]| [met.left_out.as_slice(), some].concat();
        let mut distinct = met.deaths.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() < MOST_DEATHS {
            return [
                with(&[met.deaths.as_slice(), &met.spared].concat()),
                with(&[]),
            ];
        }
        let others: Vec<WorkerId> = all.filter(|id| !distinct.contains(id)).collect();
        let last = met.deaths.last().copied();
        let and_last: Vec<WorkerId> = others.iter().copied().chain(last).collect();
        [with(&and_last), with(&others)]
    }

    /// Workers of both legs that are excluded for good.
    pub(super) fn left_out(&self) -> Vec<WorkerId> {
        [self.prefill.left_out.as_slice(), &self.decode.left_out].concat()
    }
}
