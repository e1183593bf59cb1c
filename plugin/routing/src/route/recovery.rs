//! Owns the recovery from a decode leg that has failed before its client has read any of the answer: another pair of
//! workers, or another aggregated worker, within the pool's budget.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::assignment::Assignment;
use super::retry::RetrySnapshot;
use super::{Plan, Refusal, Router};
use crate::config::DecodeLeg;
use crate::fleet::{Role, Worker, WorkerId};
use crate::handoff::Staged;
use crate::outcome::{Cost, Follows, LeftOut, Leg, Meaning};
use crate::request::Request;

/// How a request would be retried.
#[derive(Debug, Clone)]
pub struct Recovery {
    snapshot: Rc<RetrySnapshot>,
    way: Way,
    budget: RetryBudget,
    /// KV that prefill has computed, as long as its decode leg is not known to have begun.
    pub(super) staged: Option<Staged>,
}

/// How often a request may be placed again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RetryBudget {
    /// Retries after a leg that an engine may have worked on.
    recoveries: u32,
    /// Retries after a leg that reached no worker.
    attempts: u32,
}

impl RetryBudget {
    /// The pool's budget. A pool without recoveries keeps no bodies, without which no request is placed again.
    pub(super) fn of(leg: &DecodeLeg) -> Self {
        let attempts = match leg.recoveries {
            0 => 0,
            _ => leg.attempts.saturating_sub(1),
        };
        Self {
            recoveries: leg.recoveries,
            attempts,
        }
    }

    fn is_left(self) -> bool {
        self.recoveries > 0 || self.attempts > 0
    }

    /// The budget left after a failure of this cost. A failure that cost nothing is charged to the recoveries only if no
    /// attempts are left.
    fn charged(self, cost: Cost) -> Option<Self> {
        let Self {
            recoveries,
            attempts,
        } = self;
        if cost == Cost::Nothing
            && let Some(attempts) = attempts.checked_sub(1)
        {
            return Some(Self {
                recoveries,
                attempts,
            });
        }
        let recoveries = recoveries.checked_sub(1)?;
        Some(Self {
            recoveries,
            attempts,
        })
    }
}

/// A failed decode leg.
#[derive(Debug, Clone, Copy)]
pub struct Failed<'f> {
    /// The leg that failed: decode, or the concurrent prefill.
    pub leg: Leg,
    /// The meaning of the failure.
    pub meaning: Meaning,
    /// The workers tried for the leg, in order.
    pub workers: &'f [WorkerId],
    /// Direct mode: the frontends tried.
    pub frontends: &'f [SocketAddr],
}

/// How the request was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// On a pair.
    Pair,
    /// On one worker.
    Whole,
}

impl Recovery {
    /// For a request that has just been placed for the first time.
    pub(super) fn new(snapshot: Rc<RetrySnapshot>, way: Way, budget: RetryBudget) -> Self {
        Self {
            snapshot,
            way,
            budget,
            staged: None,
        }
    }

    /// The request's retry snapshot.
    pub(super) fn snapshot(&self) -> Rc<RetrySnapshot> {
        Rc::clone(&self.snapshot)
    }

    /// Whether the pool allows another try.
    pub fn is_allowed(&self) -> bool {
        self.budget.is_left()
    }
}

impl Router {
    /// Places a request again after its decode leg has failed. `assignment` is its own, `body` the client's own. None if
    /// nothing is left to try: the failure is then the client's answer, and a staged hand-off stays with the assignment.
    pub fn recover(
        &mut self,
        assignment: &mut Assignment,
        failed: &Failed<'_>,
        body: &[u8],
        now: Duration,
    ) -> Option<Plan> {
        self.advance(now);
        let recovery = assignment.recovery.as_mut()?;
        let budget = recovery.budget.charged(failed.meaning.cost)?;
        let (snapshot, way) = (Rc::clone(&recovery.snapshot), recovery.way);
        let again = match failed.meaning.follows {
            Follows::PassedOn => return None,
            Follows::SameBytes => self
                .place_same_bytes(assignment, &snapshot, failed)
                .or_else(|| {
                    self.place_anew(assignment, &snapshot, way, LeftOut::Worker, failed, body)
                }),
            Follows::Anew(left_out) => {
                self.place_anew(assignment, &snapshot, way, left_out, failed, body)
            }
        };
        let mut plan = again?;
        if let Plan::Forward(_, assignment) | Plan::Prefill(_, assignment) = &mut plan
            && let Some(recovery) = &mut assignment.recovery
        {
            recovery.budget = budget;
        }
        Some(plan)
    }

    /// Sends the staged hand-off to another decode worker, whose leg carries the same bytes.
    fn place_same_bytes(
        &mut self,
        assignment: &mut Assignment,
        snapshot: &Rc<RetrySnapshot>,
        failed: &Failed<'_>,
    ) -> Option<Plan> {
        let recovery = assignment.recovery.as_ref()?;
        let now = self.ledger.now();
        let staged = recovery.staged.clone();
        let staged = staged.filter(|staged| !staged.has_expired(now))?;
        let budget = recovery.budget;
        let ways_out = ways_out(failed.leg, LeftOut::Worker, failed.workers, None);
        let (left_out, plan) = ways_out.into_iter().find_map(|left_out| {
            let plan = self.offer_again(assignment, snapshot, &staged, budget, &left_out)?;
            Some((left_out, plan))
        })?;
        snapshot
            .trail
            .borrow_mut()
            .leave_all_out(failed.leg, &left_out);
        if let Some(recovery) = &mut assignment.recovery {
            recovery.staged = None;
        }
        Some(plan)
    }

    fn offer_again(
        &mut self,
        assignment: &Assignment,
        snapshot: &Rc<RetrySnapshot>,
        staged: &Staged,
        budget: RetryBudget,
        left_out: &[(Leg, WorkerId)],
    ) -> Option<Plan> {
        let prefill = assignment.prefill.clone()?;
        let bases = self.excluded(snapshot, Leg::Decode);
        let (decode, others) = bases.into_iter().find_map(|mut excluded| {
            excluded.extend(left_out.iter().map(|(_, worker)| *worker));
            let context = snapshot.context(self, &excluded);
            self.replace_decode(&context, &prefill).ok()
        })?;
        let mut dispatch = self.dispatch_to(&decode.target, &others);
        dispatch.edits = Some(staged.decode.clone());
        dispatch.patience = snapshot.patience(self, decode.target.worker.id, Duration::ZERO);
        let assignment = Assignment {
            prefill: Some(prefill),
            decode_charge: Some(self.charge_decode(&decode, &snapshot.demand)),
            decode: Some(decode.target.worker),
            trail: Some(Rc::clone(&snapshot.trail)),
            recovery: Some(Recovery {
                snapshot: Rc::clone(snapshot),
                way: Way::Pair,
                budget,
                staged: Some(staged.clone()),
            }),
            ..Assignment::default()
        };
        Some(Plan::Forward(dispatch, assignment))
    }

    /// Places the request from its beginning.
    fn place_anew(
        &mut self,
        assignment: &Assignment,
        snapshot: &Rc<RetrySnapshot>,
        way: Way,
        left_out: LeftOut,
        failed: &Failed<'_>,
        body: &[u8],
    ) -> Option<Plan> {
        let request = Request::read(snapshot.generation, body).ok()?;
        let prefill = assignment.prefill.as_ref().map(|worker| worker.id);
        let ways_out = ways_out(failed.leg, left_out, failed.workers, prefill);
        let bases = self.excluded(snapshot, failed.leg);
        for left_out in &ways_out {
            for base in &bases {
                let mut excluded = base.clone();
                excluded.extend(snapshot.trail.borrow().left_out());
                excluded.extend(left_out.iter().map(|(_, worker)| *worker));
                let plan = self.place_again(snapshot, way, &excluded, &request);
                let Some(plan) = plan.ok().and_then(|plan| self.to_others(plan, failed)) else {
                    continue;
                };
                snapshot
                    .trail
                    .borrow_mut()
                    .leave_all_out(failed.leg, left_out);
                return Some(plan);
            }
        }
        None
    }

    /// Direct mode: only frontends that were not tried yet.
    fn to_others(&self, mut plan: Plan, failed: &Failed<'_>) -> Option<Plan> {
        if let Plan::Forward(dispatch, _) = &mut plan
            && !self.pool.rules().reaches_workers
        {
            dispatch
                .destinations
                .retain(|frontend| !failed.frontends.contains(frontend));
            dispatch.destinations.first()?;
        }
        Some(plan)
    }

    /// Workers excluded from the next try of a leg: the sets to be tried in turn.
    pub(super) fn excluded(&self, snapshot: &RetrySnapshot, leg: Leg) -> [Vec<WorkerId>; 2] {
        let role = leg.role();
        let is_prefills =
            |worker: &&Rc<Worker>| (worker.role == Role::Prefill) == (role == Role::Prefill);
        let all = self.fleet.workers().filter(is_prefills);
        snapshot
            .trail
            .borrow()
            .excluded(leg, all.map(|worker| worker.id))
    }

    fn place_again(
        &mut self,
        snapshot: &Rc<RetrySnapshot>,
        way: Way,
        excluded: &[WorkerId],
        request: &Request<'_>,
    ) -> Result<Plan, Refusal> {
        let context = snapshot.context(self, excluded);
        match way {
            Way::Whole => {
                let whole = self.pick_whole(&context)?;
                Ok(self.forward_whole(whole, &context, None, Some(request)))
            }
            Way::Pair => self.book_pair(&context, request),
        }
    }
}

/// Which of a failed leg's workers are excluded, as sets to be tried in turn: of a pair both, else the one that is likelier
/// to be at fault, else the other one.
fn ways_out(
    leg: Leg,
    left_out: LeftOut,
    workers: &[WorkerId],
    prefill: Option<WorkerId>,
) -> Vec<Vec<(Leg, WorkerId)>> {
    let own: Vec<(Leg, WorkerId)> = workers.iter().map(|worker| (leg, *worker)).collect();
    let first: Vec<(Leg, WorkerId)> = own.first().copied().into_iter().collect();
    match (left_out, prefill) {
        // The connection may have been a stale one: the trail decides which worker is tried first.
        (LeftOut::WorkerAtFirst, _) => vec![Vec::new()],
        (LeftOut::Pair, Some(prefill)) => {
            let partner = vec![(Leg::Prefill, prefill)];
            let both = [own.as_slice(), &partner].concat();
            match leg {
                Leg::Sidecar => vec![both, partner, own],
                _ => vec![both, own, partner],
            }
        }
        // Of several that took no connection, the proxy does not say which: exclude the first at least.
        (LeftOut::Worker | LeftOut::Pair, _) => vec![own, first],
    }
}
