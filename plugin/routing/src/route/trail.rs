//! Owns what one request has met at the workers that were asked for it: who is left out, who is suspected of what, and how
//! often another one may still be asked.

use std::cell::RefCell;
use std::rc::Rc;

use crate::fleet::{Incarnation, WorkerId};
use crate::outcome::{Before, Came, Leg, is_one_workers_refusal};

/// Workers at which a request died before no further one is asked: it may be the request that kills them.
const MOST_DEATHS: usize = 2;

/// The trail of one request, shared by what is under way for it.
pub(super) type SharedTrail = Rc<RefCell<Trail>>;

/// What a request has met so far.
#[derive(Debug, Default)]
pub(super) struct Trail {
    prefill: Met,
    decode: Met,
    suspects: Vec<Suspect>,
}

/// What it has met on one of its legs.
#[derive(Debug, Default)]
struct Met {
    /// Calls of this leg since the request was placed last.
    calls: usize,
    /// Workers that are asked no more.
    left_out: Vec<WorkerId>,
    /// Workers that have done their leg, and are asked again only where nobody else is left: the other leg failed, and may have
    /// failed by theirs.
    spared: Vec<WorkerId>,
    /// Workers that broke the connection, in their order, since the leg last succeeded.
    deaths: Vec<WorkerId>,
    /// Of these, connections that were reset before the first byte.
    resets: usize,
    has_asked_another: bool,
}

/// A failure of which it is not known yet whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Suspect {
    /// The leg that failed.
    pub(super) leg: Leg,
    /// The worker that was called, in the life that it was in.
    pub(super) worker: Incarnation,
    /// The other one of the pair, where it may be to blame as well.
    pub(super) partner: Option<Incarnation>,
    symptom: Symptom,
}

/// How it failed, so that the same failure at another worker is known as such.
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

    /// What a leg had met before.
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

    /// A leg is called.
    pub(super) fn called(&mut self, leg: Leg) {
        let met = self.of_mut(leg);
        met.calls = met.calls.saturating_add(1);
    }

    /// Calls of a leg since the request was placed.
    pub(super) fn calls(&self, leg: Leg) -> usize {
        self.of(leg).calls
    }

    /// A leg has ended badly at a worker.
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

    /// It is not known whose failure it was.
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

    /// A leg has succeeded: the failures of that leg at others were theirs.
    pub(super) fn succeeded(&mut self, leg: Leg) -> Vec<Suspect> {
        let met = self.of_mut(leg);
        met.deaths.clear();
        met.resets = 0;
        let is_same = |suspect: &Suspect| (suspect.leg == Leg::Prefill) == (leg == Leg::Prefill);
        let (theirs, others) = self.suspects.drain(..).partition(is_same);
        self.suspects = others;
        theirs
    }

    /// The request has ended, and no other worker has served what these failed. Where several failed in the same way it was the
    /// request's doing, and nothing is left of it.
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

    /// A worker is not asked again.
    pub(super) fn leave_out(&mut self, leg: Leg, worker: WorkerId) {
        let met = self.of_mut(leg);
        if !met.left_out.contains(&worker) {
            met.left_out.push(worker);
        }
    }

    /// Workers of one leg or both are not asked again after `failed` has failed; one that did the prefill before it only where
    /// nobody else takes that.
    pub(super) fn leave_all_out(&mut self, failed: Leg, workers: &[(Leg, WorkerId)]) {
        for (leg, worker) in workers {
            match (failed, leg) {
                (Leg::Decode, Leg::Prefill) => self.prefill.spared.push(*worker),
                _ => self.leave_out(*leg, *worker),
            }
        }
    }

    /// Who is left out at the next try of a leg: the sets to be tried in turn, the widest first. One that reset a connection may be
    /// asked again where no other is left; and where the request has died at several, no further one is asked. `all` are the
    /// workers that there are.
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

    /// Workers of both legs that are left out for good.
    pub(super) fn left_out(&self) -> Vec<WorkerId> {
        [self.prefill.left_out.as_slice(), &self.decode.left_out].concat()
    }
}
