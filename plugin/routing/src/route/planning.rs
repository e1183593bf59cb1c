//! Owns the plans: which workers a request gets and what is booked, at once or after a wait in the queue.

use std::time::Duration;

use super::choice::{Step, admitted_pair, choose_pair, pick_whole};
use super::conditional::stays;
use super::forward::{forward_by_load, forward_decode, forward_pair, forward_whole};
use super::notes::Facts;
use super::pinned::Pinned;
use super::selection_request::{Demand, SelectionContext, SelectionRequest, context, overrides};
use super::serving::{choose_model_key, choose_serving, look_up};
use super::waiting::{QueueTicket, QueuedChoice, QueuedRequest};
use super::{
    Assignment, Dispatch, Explain, Fallback, Plan, PlanInput, PrefillPhase, Refusal, Router,
    picker, query, split,
};
use crate::admission::{Full, QueueKey, Waiter};
use crate::fleet::{Condition, Role, Target};
use crate::handoff::{HandoffPair, Prefill};
use crate::load::BookedAnswer;
use crate::model_state::ModelKey;
use crate::rendezvous::{NotServed, ServingDecision};
use crate::request::rename::{self, Renamed};
use crate::request::{Generation, Head, Kind, Request, RoutingOverrides, check_unread};
use crate::selection::eligibility::{Filter, Subset};

impl Router {
    /// The kind of a request, by its line and headers alone.
    ///
    /// # Errors
    /// [`Refusal::UnknownPath`] if the pool does not forward its path.
    pub fn kind(&self, head: Head<'_>) -> Result<Kind, Refusal> {
        match self.pool.forwards(head.path) {
            true => Ok(head.kind()),
            false => Err(Refusal::UnknownPath),
        }
    }

    /// The request's body with the model name given by the pool's rewrites, or by the gateway in front; none if unchanged.
    /// `headers` are the routing overrides of a trusted caller.
    pub fn rename(&mut self, body: &[u8], headers: picker::OverrideHeaders<'_>) -> Option<Renamed> {
        let (wanted, rewrites) = (picker::model(headers), &self.pool.model_rewrites);
        rename::rename(body, wanted, rewrites, self.chooser.random())
    }

    /// A request that generates nothing: sent to the least loaded healthy worker.
    ///
    /// # Errors
    /// When there is no worker.
    pub fn plain(&mut self, subset: Option<&Subset>) -> Result<(Dispatch, Assignment), Refusal> {
        plain_to_one(self, subset).or_else(|refusal| or_anywhere(self, refusal, subset))
    }

    /// Plans a request that generates text, from its body.
    ///
    /// # Errors
    /// [`Refusal`] says what is wrong with the request, or which worker is missing.
    pub fn plan(
        &mut self,
        generation: Generation,
        body: &[u8],
        input: PlanInput<'_>,
    ) -> Result<Plan, Refusal> {
        self.advance(input.now);
        self.chooser.explain(input.explain, &self.pool);
        let outcome = plan_body(self, generation, body, input);
        outcome.or_else(|refusal| forwarded(or_anywhere(self, refusal, input.subset)))
    }

    /// Plans a body that its headers declare encoded, like one that cannot be read. An engine may read it all the same: the
    /// header is only the client's claim.
    ///
    /// # Errors
    /// As [`Router::plan_unread`], and if the body names a hand-off, which a client must not set.
    pub fn plan_encoded(&mut self, body: &[u8], subset: Option<&Subset>) -> Result<Plan, Refusal> {
        if body.is_empty() {
            return plan_empty(self, Generation::Other, subset);
        }
        if !self.pool.trust_clients {
            check_unread(body)?;
        }
        self.plan_unread(Refusal::Encoded, subset)
    }

    /// Plans a body that cannot be read: by load alone, to a worker that needs no hand-off in the body; else refuses it with
    /// `otherwise`.
    ///
    /// # Errors
    /// `otherwise`, if there is no such worker.
    pub fn plan_unread(
        &mut self,
        otherwise: Refusal,
        subset: Option<&Subset>,
    ) -> Result<Plan, Refusal> {
        // A body that is not read cannot be at fault.
        let otherwise = match self.workers.is_open(&self.pool) {
            true => Refusal::NoFleet,
            false => otherwise,
        };
        let outcome = forward_by_load(self, otherwise, subset);
        outcome.or_else(|refusal| forwarded(or_anywhere(self, refusal, subset)))
    }

    /// Selects the workers for a parsed request and books them, in one step: a pair, or an aggregated worker. `now` is the
    /// time since 1970; virtual time is possible. Dropping the assignment frees everything.
    ///
    /// # Errors
    /// The refusal that the request would get.
    pub fn reserve(
        &mut self,
        ask: &SelectionRequest<'_>,
        now: Duration,
    ) -> Result<Assignment, Refusal> {
        self.advance(now);
        let overrides = RoutingOverrides::default();
        let (model, adapter) = self.workers.model_of(ask.model, &self.pool)?;
        let (key, decision) = choose_model_key(self, Some(&model), &overrides, None)?;
        let demand = Demand {
            adapter,
            ..Demand::of(ask, self.pool.selection.kv)
        };
        let context = context(self, &key, &overrides, &demand);
        match decision {
            ServingDecision::Refused(reason) => Err(Refusal::NotServed(reason)),
            ServingDecision::Pair => {
                let pair = admitted_pair(self, &context)?;
                Ok(pair.assign(&demand, &self.pool, &mut self.ledger))
            }
            ServingDecision::Whole => {
                let whole = pick_whole(self, &context)?;
                Ok(whole.assign(&demand, &self.pool, &mut self.ledger))
            }
        }
    }

    /// Tries a queued request; none: the request stays queued.
    pub fn plan_queued(
        &mut self,
        queued: &mut QueuedRequest,
        now: Duration,
        explain: Explain,
    ) -> Option<Result<Plan, Refusal>> {
        self.advance(now);
        self.chooser.explain(explain, &self.pool);
        let outcome = plan_by_terms(self, queued, now);
        let has_queue = self.pool.admission.queue.is_some();
        if has_queue && matches!(outcome, Err(Refusal::Overloaded { .. })) {
            return None;
        }
        self.queue.serve(queued.waiter);
        let subset = queued.terms.demand.subset.as_deref();
        Some(outcome.or_else(|refusal| forwarded(or_anywhere(self, refusal, subset))))
    }

    /// The requests to be tried now, in order, after a booking has ended or the fleet has changed.
    pub fn called(&self) -> Vec<Waiter> {
        match &self.pool.admission.queue {
            Some(queue) if self.queue.count() > 0 => self.queue.in_order(queue.policy),
            _ => Vec::new(),
        }
    }

    /// Removes the requests that have waited too long, and returns each with its refusal.
    pub fn late(&mut self, now: Duration) -> Vec<(Waiter, Refusal)> {
        let Some(queue) = &self.pool.admission.queue else {
            return Vec::new();
        };
        let deadline_ms = queue.deadline_ms;
        let late = self.queue.late(now, queue);
        for waiter in &late {
            self.queue.leave(*waiter);
        }
        let refused = |waiter| (waiter, Refusal::QueueDeadline { deadline_ms });
        late.into_iter().map(refused).collect()
    }

    /// Removes a request whose client has left.
    pub fn gives_up(&mut self, waiter: Waiter) {
        self.queue.leave(waiter);
    }

    /// Number of queued requests.
    pub fn waiting(&self) -> usize {
        self.queue.count()
    }

    /// The explanation of the last plan's choices, as JSON; none if not wanted, or if no worker was chosen.
    pub fn take_explanation(&mut self) -> Option<String> {
        self.chooser.take_explanation()
    }
}

/// In an open pool, a refused request goes to the host that the cluster picks, unless the gateway limits the endpoints.
fn or_anywhere(
    router: &Router,
    refusal: Refusal,
    subset: Option<&Subset>,
) -> Result<(Dispatch, Assignment), Refusal> {
    if !refusal.is_emptiness() || subset.is_some() || !router.workers.is_open(&router.pool) {
        return Err(refusal);
    }
    let assignment = Assignment {
        fallback: Some(Fallback::FleetEmpty),
        ..Assignment::default()
    };
    Ok((Dispatch::default(), assignment))
}

fn forwarded(outcome: Result<(Dispatch, Assignment), Refusal>) -> Result<Plan, Refusal> {
    outcome.map(|(dispatch, assignment)| Plan::Forward(dispatch, assignment))
}

fn plain_to_one(
    router: &mut Router,
    subset: Option<&Subset>,
) -> Result<(Dispatch, Assignment), Refusal> {
    let Router {
        pool,
        workers,
        ledger,
        health,
        chooser,
        ..
    } = router;
    if !pool.rules().reaches_workers {
        let dispatch = Dispatch::to_frontends(pool, chooser);
        return Ok((dispatch, Assignment::default()));
    }
    let decoders = workers.fleet().open();
    let decoders = decoders
        .filter(|worker| worker.role != Role::Prefill)
        .filter(|worker| subset.is_none_or(|subset| subset.holds(worker.address)));
    let mut targets: Vec<Target> = decoders.map(Target::whole).collect();
    chooser.random().shuffle(&mut targets);
    let now = ledger.now();
    targets.sort_by_cached_key(|target| {
        let held = health.held(target.worker.id, now);
        let is_ready = target.worker.condition == Condition::Ready;
        let load = ledger.worker_load_in_all(&target.worker);
        (!is_ready, held, load.decodes)
    });
    let Some((first, others)) = targets.split_first() else {
        return Err(match subset {
            None => Refusal::NotServed(NotServed::Vacant),
            Some(_) => Refusal::NoneEligible {
                role: Role::Decode,
                filter: Filter::Subset,
            },
        });
    };
    // A small charge, so that many such requests do not meet on one worker.
    let answer = BookedAnswer {
        prompt_tokens: 1,
        block_tokens: pool.block_tokens,
        expected_tokens: None,
        sequences: 1,
    };
    let assignment = Assignment {
        errand_charge: Some(ledger.charge_decode(first.key(), answer)),
        ..Assignment::default()
    };
    Ok((Dispatch::to(first, others, pool), assignment))
}

/// Plans a body, without the pass-through of an open pool.
fn plan_body(
    router: &mut Router,
    generation: Generation,
    body: &[u8],
    input: PlanInput<'_>,
) -> Result<Plan, Refusal> {
    let generation = match generation {
        Generation::Generate if !router.pool.rules().has_generate_api => Generation::Other,
        known => known,
    };
    if body.is_empty() {
        return plan_empty(router, generation, input.subset);
    }
    router.notes.read(body.len());
    let request = match Request::read(generation, body) {
        Ok(request) => request,
        Err(refusal @ (Refusal::NotJson { .. } | Refusal::NoHandoffForPath)) => {
            if !router.pool.trust_clients {
                check_unread(body)?;
            }
            return router.plan_unread(refusal, input.subset);
        }
        Err(refusal) => return Err(refusal),
    };
    if !router.pool.trust_clients {
        request.check_handoff_is_ours()?;
    }
    let mut overrides = overrides(&request, input, &router.pool)?;
    let looked_up = look_up(router, &request.model, &mut overrides);
    // The request's own errors come first.
    let (model, adapter) = looked_up.or_else(|refusal| request.check().and(Err(refusal)))?;
    let subset = input.subset;
    let (key, decision) = choose_serving(router, &request, model.as_deref(), &overrides, subset)?;
    let (pool, reads) = (&router.pool, router.chooser.reads());
    let demand = Demand::read(&request, &overrides, input, adapter, reads, pool);
    let queue_key = QueueKey {
        rank: picker::objective(input.headers, pool),
        flow: picker::flow(input.headers),
        priority: overrides.hints.priority,
        tokens: demand.prompt_tokens,
        since: input.now,
    };
    let context = context(router, &key, &overrides, &demand);
    match plan_at(router, &context, decision, &request, input.now) {
        // A sheddable request does not wait.
        Err(overloaded @ Refusal::Overloaded { .. }) if !overrides.query && queue_key.rank >= 0 => {
            let terms = QueuedChoice {
                adopted: router.workers.adopted(),
                overrides,
                demand,
                model,
            };
            wait(router, &key, queue_key, &request, terms, overloaded)
        }
        outcome => outcome,
    }
}

/// Queues a request, if allowed.
fn wait(
    router: &mut Router,
    key: &ModelKey,
    queue_key: QueueKey,
    request: &Request<'_>,
    terms: QueuedChoice,
    overloaded: Refusal,
) -> Result<Plan, Refusal> {
    let Some(queue) = &router.pool.admission.queue else {
        return Err(overloaded);
    };
    match router.queue.join(key, queue_key, queue) {
        Ok(waiter) => Ok(Plan::Wait(Box::new(QueueTicket {
            waiter,
            parsed: request.parsed(),
            terms,
        }))),
        Err(Full { waiting, allowed }) => Err(Refusal::QueueFull { waiting, allowed }),
    }
}

/// Plans a request without a body, from which nothing is generated: on an unknown path, any worker may answer.
///
/// # Errors
/// If there is no worker, and if the path demands a body and no worker runs requests aggregated.
fn plan_empty(
    router: &mut Router,
    generation: Generation,
    subset: Option<&Subset>,
) -> Result<Plan, Refusal> {
    match generation {
        Generation::Other => forwarded(router.plain(subset)),
        _ => {
            let missing = Refusal::Field {
                name: "body",
                problem: "is missing; a JSON object is required",
            };
            router.plan_unread(missing, subset)
        }
    }
}

fn plan_by_terms(
    router: &mut Router,
    queued: &mut QueuedRequest,
    now: Duration,
) -> Result<Plan, Refusal> {
    let QueuedRequest { request, terms, .. } = queued;
    let request = request.request();
    let adopted = router.workers.adopted();
    if terms.adopted != adopted {
        // The model may be another one or gone, and so may the workers that the caller names.
        (terms.model, terms.demand.adapter) =
            look_up(router, &request.model, &mut terms.overrides)?;
        terms.adopted = adopted;
    }
    let QueuedChoice {
        overrides,
        demand,
        model,
        ..
    } = &*terms;
    let subset = demand.subset.as_deref();
    let (key, decision) = choose_serving(router, &request, model.as_deref(), overrides, subset)?;
    let context = context(router, &key, overrides, demand);
    plan_at(router, &context, decision, &request, now)
}

/// The plan of a request for its model key.
fn plan_at(
    router: &mut Router,
    context: &SelectionContext<'_>,
    decision: ServingDecision,
    request: &Request<'_>,
    now: Duration,
) -> Result<Plan, Refusal> {
    let mut outcome = match decision {
        ServingDecision::Refused(reason) => Err(Refusal::NotServed(reason)),
        ServingDecision::Pair if request.hands_off_itself() => {
            Pinned::check_unused(context.overrides, router.workers.fleet())?;
            forward_decode(router, context, request)
        }
        ServingDecision::Pair => match split::obstacle(&router.pool, request) {
            Some(obstacle) => plan_whole(router, context, request, now, obstacle),
            None => {
                let longest = context.model_workers.longest;
                split::check_length(router.pool.rules(), longest, request)?;
                plan_pair(router, context, request, now)
            }
        },
        ServingDecision::Whole => {
            let otherwise = Refusal::NotServed(NotServed::NotActivated);
            plan_whole(router, context, request, now, otherwise)
        }
    };
    if let Ok(Plan::Forward(_, assignment) | Plan::Prefill(_, assignment)) = &mut outcome {
        assignment.facts = Facts::of(context.key, context.demand);
    }
    outcome
}

fn plan_pair(
    router: &mut Router,
    context: &SelectionContext<'_>,
    request: &Request<'_>,
    now: Duration,
) -> Result<Plan, Refusal> {
    if context.overrides.query {
        let pair = choose_pair(router, context, Step::Peek)?;
        let (prefill, decode) = (Some(&pair.prefill.target), &pair.decode.target);
        let block_tokens = router.pool.block_tokens;
        let answer = query::answer(request, context, prefill, decode, block_tokens, now);
        return Ok(Plan::Answer(answer));
    }
    if let Some(whole) = stays(router, context) {
        let why = Some(Fallback::NotWorthIt);
        return Ok(forward_whole(router, whole, context, why, Some(request)));
    }
    book_pair(router, context, request)
}

/// Picks and books a pair.
pub(super) fn book_pair(
    router: &mut Router,
    context: &SelectionContext<'_>,
    request: &Request<'_>,
) -> Result<Plan, Refusal> {
    let pair = admitted_pair(router, context)?;
    if !router.pool.rules().order.is_ours() {
        return Ok(forward_pair(router, pair, context, Some(request)));
    }
    let prefill = &pair.prefill.target;
    let partners = HandoffPair {
        prefill: Prefill {
            target: prefill,
            binding: router.workers.bindings().get(prefill.worker.id),
        },
        decode_rank: pair.decode.target.rank,
    };
    let engine = router.pool.engine();
    let handoff = engine.handoff(&partners, request, router.chooser.rooms())?;
    Ok(PrefillPhase::plan(pair, handoff, context, request, router))
}

fn plan_whole(
    router: &mut Router,
    context: &SelectionContext<'_>,
    request: &Request<'_>,
    now: Duration,
    otherwise: Refusal,
) -> Result<Plan, Refusal> {
    Pinned::check_unused(context.overrides, router.workers.fleet())?;
    let whole = match pick_whole(router, context) {
        Ok(whole) => whole,
        Err(Refusal::NotServed(_)) => return Err(otherwise),
        Err(refusal) => return Err(refusal),
    };
    let decode = &whole.decode.target;
    if context.overrides.query {
        let block_tokens = router.pool.block_tokens;
        let answer = query::answer(request, context, None, decode, block_tokens, now);
        return Ok(Plan::Answer(answer));
    }
    let fallback = (decode.worker.role == Role::Decode).then_some(Fallback::PrefillAbsent);
    Ok(forward_whole(
        router,
        whole,
        context,
        fallback,
        Some(request),
    ))
}
