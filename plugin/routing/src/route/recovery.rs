//! Owns the recovery from a decode leg that has failed before its client has read any of the answer: another pair of
//! workers, or another aggregated worker, within the pool's budget.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::choice::{pick_whole, replace_decode};
use super::forward::forward_whole;
use super::planning::book_pair;
use super::retry::RetrySnapshot;
use super::{Assignment, Dispatch, Plan, Refusal, Router};
use crate::config::{DecodeLeg, Pool};
use crate::fleet::{Fleet, Role, Worker, WorkerId};
use crate::handoff::Staged;
use crate::outcome::{Cost, Follows, LeftOut, Leg, Meaning};
use crate::request::Request;

/// How a request would be retried.
#[derive(Debug, Clone)]
pub struct Recovery {
    pub(super) snapshot: Arc<RetrySnapshot>,
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
        if cost == Cost::Nothing
            && let Some(attempts) = self.attempts.checked_sub(1)
        {
            return Some(Self { attempts, ..self });
        }
        let recoveries = self.recoveries.checked_sub(1)?;
        Some(Self { recoveries, ..self })
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
    pub(super) fn new(snapshot: Arc<RetrySnapshot>, way: Way, budget: RetryBudget) -> Self {
        Self {
            snapshot,
            way,
            budget,
            staged: None,
        }
    }

    /// Whether the pool allows another try.
    pub fn is_allowed(&self) -> bool {
        self.budget.is_left()
    }
}

/// Places a request again after its decode leg has failed, from `body`, the client's own. None if nothing is left to try.
pub(super) fn recover(
    router: &mut Router,
    assignment: &mut Assignment,
    failed: &Failed<'_>,
    body: &[u8],
) -> Option<Plan> {
    let recovery = assignment.recovery.as_mut()?;
    let budget = recovery.budget.charged(failed.meaning.cost)?;
    let again = match failed.meaning.follows {
        Follows::PassedOn => None,
        Follows::SameBytes => place_same_bytes(router, assignment, failed)
            .or_else(|| place_anew(router, assignment, LeftOut::Worker, failed, body)),
        Follows::Anew(left_out) => place_anew(router, assignment, left_out, failed, body),
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
    router: &mut Router,
    assignment: &mut Assignment,
    failed: &Failed<'_>,
) -> Option<Plan> {
    let prefill = assignment.prefill.as_ref()?;
    let recovery = assignment.recovery.as_mut()?;
    let now = router.ledger.now();
    let staged = recovery.staged.as_ref();
    let staged = staged.filter(|staged| !staged.has_expired(now))?;
    let ways_out = ways_out(failed.leg, LeftOut::Worker, failed.workers, None);
    let (left_out, plan) = ways_out.into_iter().find_map(|left_out| {
        let plan = offer_again(router, prefill, recovery, staged, &left_out)?;
        Some((left_out, plan))
    })?;
    let trail = &recovery.snapshot.trail;
    trail.get().leave_all_out(failed.leg, &left_out);
    recovery.staged = None;
    Some(plan)
}

fn offer_again(
    router: &mut Router,
    prefill: &Arc<Worker>,
    recovery: &Recovery,
    staged: &Staged,
    left_out: &[(Leg, WorkerId)],
) -> Option<Plan> {
    let snapshot = &recovery.snapshot;
    let bases = excluded(router.workers.fleet(), snapshot, Leg::Decode);
    let (decode, others) = bases.into_iter().find_map(|mut excluded| {
        excluded.extend(left_out.iter().map(|(_, worker)| *worker));
        let context = snapshot.context(router, &excluded);
        replace_decode(router, &context, prefill).ok()
    })?;
    let pool = &router.pool;
    let mut dispatch = Dispatch::to(&decode.target, &others, pool);
    dispatch.edits = Some(staged.decode.clone());
    dispatch.patience = snapshot.patience(router, decode.target.worker.id, Duration::ZERO);
    let assignment = Assignment {
        prefill: Some(Arc::clone(prefill)),
        decode_charge: Some(decode.charge_decode(&snapshot.demand, pool, &mut router.ledger)),
        decode: Some(decode.target.worker),
        trail: Some(snapshot.trail.clone()),
        recovery: Some(Recovery {
            way: Way::Pair,
            ..recovery.clone()
        }),
        ..Assignment::default()
    };
    Some(Plan::Forward(dispatch, assignment))
}

/// Places the request from its beginning.
fn place_anew(
    router: &mut Router,
    assignment: &Assignment,
    left_out: LeftOut,
    failed: &Failed<'_>,
    body: &[u8],
) -> Option<Plan> {
    let Recovery { snapshot, way, .. } = assignment.recovery.as_ref()?;
    let request = Request::read(snapshot.generation, body).ok()?;
    let prefill = assignment.prefill.as_ref().map(|worker| worker.id);
    let ways_out = ways_out(failed.leg, left_out, failed.workers, prefill);
    let bases = excluded(router.workers.fleet(), snapshot, failed.leg);
    for left_out in &ways_out {
        for base in &bases {
            let mut excluded = base.clone();
            excluded.extend(snapshot.trail.get().left_out());
            excluded.extend(left_out.iter().map(|(_, worker)| *worker));
            let plan = place_again(router, snapshot, *way, &excluded, &request).ok();
            let Some(plan) = plan.and_then(|plan| to_others(plan, failed, &router.pool)) else {
                continue;
            };
            let trail = &snapshot.trail;
            trail.get().leave_all_out(failed.leg, left_out);
            return Some(plan);
        }
    }
    None
}

/// Direct mode: only frontends that were not tried yet.
fn to_others(mut plan: Plan, failed: &Failed<'_>, pool: &Pool) -> Option<Plan> {
    if let Plan::Forward(dispatch, _) = &mut plan
        && !pool.rules().reaches_workers
    {
        let is_left = |frontend: &SocketAddr| !failed.frontends.contains(frontend);
        dispatch.destinations.retain(is_left);
        dispatch.destinations.first()?;
    }
    Some(plan)
}

/// Workers excluded from the next try of a leg: the sets to be tried in turn.
pub(super) fn excluded(fleet: &Fleet, snapshot: &RetrySnapshot, leg: Leg) -> [Vec<WorkerId>; 2] {
    let is_prefills = leg.role() == Role::Prefill;
    let all = fleet.workers();
    let all = all.filter(|worker| (worker.role == Role::Prefill) == is_prefills);
    let trail = snapshot.trail.get();
    trail.excluded(leg, all.map(|worker| worker.id))
}

fn place_again(
    router: &mut Router,
    snapshot: &Arc<RetrySnapshot>,
    way: Way,
    excluded: &[WorkerId],
    request: &Request<'_>,
) -> Result<Plan, Refusal> {
    let context = snapshot.context(router, excluded);
    match way {
        Way::Whole => {
            let whole = pick_whole(router, &context)?;
            Ok(forward_whole(router, whole, &context, None, Some(request)))
        }
        Way::Pair => book_pair(router, &context, request),
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
