//! Owns the hand-off: the prefill leg, concurrent with decode or before it, and what follows from each possible answer.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::after_prefill::{AbortLeg, AfterPrefill, CleanUpLeg, Client, PrefillEnd};
use super::choice::{Chosen, Pair, Step, choose_prefill, replace_decode, take};
use super::dispatch::rank_header;
use super::health::EndedCall;
use super::recovery::{Recovery, RetryBudget, Way, excluded};
use super::retry::RetrySnapshot;
use super::selection_request::SelectionContext;
use super::{Assignment, Dispatch, Fallback, Plan, PrefillFailure, Refusal, Router};
use crate::answer::Verdict;
use crate::answer::usage;
use crate::config::OnPrefillFailure;
use crate::fleet::{Role, Target, TargetKey, Worker, WorkerId};
use crate::handoff::terminal::Terminal;
use crate::handoff::{
    Handoff, HeaderValue, LegOrder, MAX_CALL_ANSWER, Prefill, Staged, without_handoff_fields,
};
use crate::json::Edits;
use crate::load::PrefillCharge;
use crate::outcome::{self, Before, Came, Follows, LeftOut, Leg, judge};
use crate::rendezvous::NotServed;
use crate::request::Request;

/// A request whose prefill worker is being called. Consumed by the answer; its charge ends with the call.
#[derive(Debug)]
pub struct PrefillPhase {
    snapshot: Arc<RetrySnapshot>,
    prefill: Chosen,
    decode: Chosen,
    others: Vec<Target>,
    charge: Option<PrefillCharge>,
    /// Deadline of the call.
    timeout: Duration,
    order: LegOrder,
    handoff: Box<dyn Handoff>,
    /// Edits that turn the client's body into that of an aggregated request.
    whole: Option<Edits>,
}

/// How a call to a worker ended: of prefill, of a decode worker that takes over, or of clean-up.
#[derive(Debug, Clone, Copy)]
pub enum CallEnd<'a> {
    /// The proxy refuses the call for its content: the request is at fault.
    Unsendable,
    /// The proxy would not make the call: it has no such host, or a circuit breaker is open.
    NotSent,
    /// The connection broke after the answer had begun.
    Broken,
    /// A complete answer, from the worker or, with 503 and 504, from the proxy that could not get one.
    Whole {
        /// Its status.
        status: u16,
        /// Its body.
        body: &'a [u8],
    },
}

impl<'a> CallEnd<'a> {
    /// A complete answer; one of more than [`MAX_CALL_ANSWER`] bytes counts as broken off, since it has not been read to
    /// its end.
    pub fn whole(status: u16, body: &'a [u8]) -> Self {
        match body.len() <= MAX_CALL_ANSWER {
            true => Self::Whole { status, body },
            false => Self::Broken,
        }
    }

    /// The outcome, as far as the status shows it; none for a 2xx, whose body is to be read.
    pub fn came(self) -> Option<Came> {
        match self {
            Self::Unsendable => Some(Came::Unsendable),
            Self::NotSent => Some(Came::NotSent),
            Self::Broken => Some(Came::Cut),
            Self::Whole {
                status: 200..=299, ..
            } => None,
            Self::Whole { status, body } => {
                Some(outcome::of_call(status, body).unwrap_or(Came::Status(status)))
            }
        }
    }
}

impl fmt::Display for CallEnd<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsendable => out.write_str("cannot be sent"),
            Self::NotSent => out.write_str("not sent"),
            Self::Broken => out.write_str("broken off"),
            Self::Whole { status, .. } => write!(out, "status {status}"),
        }
    }
}

/// Time that a worker may take over the prompts booked on it now.
pub(super) fn reading(router: &Router, key: TargetKey) -> Duration {
    let tokens = router.ledger.load_in_all(key).prefill_tokens;
    router.pool.prefill.deadline(tokens)
}

/// Deadline of a call to a prefill worker.
fn deadline(router: &Router, key: TargetKey) -> Duration {
    reading(router, key).max(router.health.grace(key.worker))
}

/// The hand-off of a request from another prefill worker. None if the worker lacks a needed binding.
fn renewed(
    router: &mut Router,
    handoff: &dyn Handoff,
    prefill: &Target,
) -> Option<Box<dyn Handoff>> {
    let prefill = Prefill {
        target: prefill,
        binding: router.workers.bindings().get(prefill.worker.id),
    };
    handoff.renewed(&prefill, router.chooser.rooms())
}

impl PrefillPhase {
    /// Books a pair for a hand-off.
    pub(super) fn plan(
        pair: Pair,
        handoff: Box<dyn Handoff>,
        context: &SelectionContext<'_>,
        request: &Request<'_>,
        router: &mut Router,
    ) -> Plan {
        let snapshot = Arc::new(RetrySnapshot::of(context, request));
        let Router { pool, ledger, .. } = router;
        let budget = RetryBudget::of(&pool.decode);
        snapshot.trail.get().placed();
        let assignment = Assignment {
            trail: Some(snapshot.trail.clone()),
            prefill: Some(Arc::clone(&pair.prefill.target.worker)),
            decode: Some(Arc::clone(&pair.decode.target.worker)),
            decode_charge: Some(pair.decode.charge_decode(context.demand, pool, ledger)),
            recovery: Some(Recovery::new(Arc::clone(&snapshot), Way::Pair, budget)),
            ..Assignment::default()
        };
        let charge = pair.prefill.charge_prefill(context.demand, pool, ledger);
        let phase = Self {
            snapshot,
            charge: Some(charge),
            timeout: deadline(router, pair.prefill.key()),
            prefill: pair.prefill,
            decode: pair.decode,
            others: pair.others,
            order: router.pool.rules().order,
            handoff,
            whole: without_handoff_fields(request),
        };
        Plan::Prefill(phase, assignment)
    }

    /// The called worker.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.prefill.target.worker
    }

    /// Where the call goes; never none, since configuration demands an address.
    pub fn destination(&self) -> Option<SocketAddr> {
        self.prefill.target.worker.address
    }

    /// Deadline of the call: longer for a prompt of which more must be computed.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Headers to set on the call.
    pub fn headers(&self) -> Vec<HeaderValue> {
        rank_header(&self.prefill.target)
    }

    /// The call's body, made from the client's.
    pub fn body(&self, client: &[u8]) -> Vec<u8> {
        self.handoff.prefill().apply(client)
    }

    /// Whether the client wants the prompt's logprobs, which only prefill knows.
    pub fn wants_logprobs(&self) -> bool {
        self.snapshot.wants_logprobs && self.order == LegOrder::Concurrent
    }

    /// Whether decode runs concurrently with prefill, or waits for its answer.
    pub fn order(&self) -> LegOrder {
        self.order
    }

    /// The decode leg of a concurrent hand-off: due as soon as the call has been made. The room belongs to the first decode
    /// worker that enters it: another one may, as long as none has.
    pub fn decode_beside(&self, router: &mut Router) -> Option<Dispatch> {
        let edits = self.handoff.decode_at_once()?;
        Some(self.decode_leg(Some(edits), self.timeout, router))
    }

    /// The leg to the decode worker, which needs `reading` before it can decode.
    fn decode_leg(&self, edits: Option<Edits>, reading: Duration, router: &Router) -> Dispatch {
        let Self { decode, others, .. } = self;
        let patience = self
            .snapshot
            .patience(router, decode.target.worker.id, reading);
        Dispatch {
            edits,
            patience,
            ..Dispatch::to(&decode.target, others, &router.pool)
        }
    }

    /// The call that aborts the request on the worker after its client has left; none if the engine has no abort.
    pub fn abort_leg(&self) -> Option<AbortLeg> {
        Some(AbortLeg {
            destination: self.destination()?,
            call: self.handoff.abort()?,
        })
    }

    /// The same for a second worker while the answer of the first is late; the first good answer counts. None if no other
    /// worker may be called.
    pub fn hedge(&self, router: &mut Router) -> Option<Self> {
        if self.order != LegOrder::Sequential {
            return None;
        }
        let next = self.next_prefill(&[self.prefill.target.worker.id], router)?;
        let handoff = renewed(router, self.handoff.as_ref(), &next.target)?;
        let charge = next.charge_prefill(&self.snapshot.demand, &router.pool, &mut router.ledger);
        Some(Self {
            snapshot: Arc::clone(&self.snapshot),
            charge: Some(charge),
            timeout: deadline(router, next.key()),
            prefill: next,
            decode: self.decode.clone(),
            others: self.others.clone(),
            order: self.order,
            handoff,
            whole: self.whole.clone(),
        })
    }

    /// Absorbs a failure while a second call for the same request is under way, which goes on alone. After any other answer,
    /// the phase is given back.
    ///
    /// # Errors
    /// The phase, if the answer is good or the client's.
    pub fn absorb_failure(self, answer: CallEnd<'_>, router: &mut Router) -> Result<(), Box<Self>> {
        if let CallEnd::Whole {
            status: 200..=499, ..
        } = answer
        {
            return Err(Box::new(self));
        }
        let came = answer.came().unwrap_or(Came::NoHandoff);
        let end = self.ended(came, Client::Waits, router);
        self.leave_out(end.meaning.follows);
        Ok(())
    }

    /// Records how the call has ended, and returns what that means.
    fn ended(&self, came: Came, client: Client, router: &mut Router) -> PrefillEnd {
        let trail = &self.snapshot.trail;
        let before = Before {
            // The call's answer is awaited no longer, and the leg can be aborted: the worker was sent an abort.
            called_off: client != Client::Waits && self.handoff.abort().is_some(),
            ..trail.get().before(Leg::Prefill)
        };
        let meaning = judge(Leg::Prefill, came, before);
        let worker = self.prefill.target.worker.incarnation();
        let call = EndedCall {
            leg: Leg::Prefill,
            worker,
            partner: None,
            came,
        };
        router.blame(meaning.blame, &call, trail);
        match came {
            Came::Good => router.leg_succeeded(trail, Leg::Prefill),
            _ => trail.get().ended(Leg::Prefill, worker.id, came),
        }
        if client == Client::Left {
            router.settle_trail(trail);
        }
        PrefillEnd { came, meaning }
    }

    fn leave_out(&self, follows: Follows) {
        let is_for_good = matches!(
            follows,
            Follows::SameBytes | Follows::Anew(LeftOut::Worker | LeftOut::Pair)
        );
        if is_for_good {
            let worker = self.prefill.target.worker.id;
            let trail = &self.snapshot.trail;
            trail.get().leave_out(Leg::Prefill, worker);
        }
    }

    /// Takes the answer and returns what follows. [`Router::advance`] must have set the time.
    pub fn answered(
        self,
        answer: CallEnd<'_>,
        client: Client,
        router: &mut Router,
    ) -> AfterPrefill {
        let came = match (answer.came(), answer) {
            (None, CallEnd::Whole { body, .. }) => {
                return self.succeeded(body, client, router);
            }
            (came, _) => came.unwrap_or(Came::NotSent),
        };
        let end = self.ended(came, client, router);
        let cause = match (came, answer) {
            (Came::Unsendable, _) if client == Client::Waits => {
                return AfterPrefill::Refused(Refusal::Unsendable);
            }
            (Came::NotSent, _) => PrefillFailure::NotSent,
            (Came::Cut, _) => PrefillFailure::Broken,
            (_, CallEnd::Whole { status, .. }) => PrefillFailure::Status(status),
            (_, _) => PrefillFailure::Broken,
        };
        let is_clients = matches!(came, Came::Status(400..=499));
        match (client, end.meaning.follows) {
            (Client::Waits, Follows::PassedOn) if is_clients => AfterPrefill::Answer,
            (Client::Waits, _) if is_clients => self.refused(end, cause, router),
            _ => self.failed(end, cause, client, router),
        }
    }

    /// The worker has refused the request, which another one may take: another one is tried, if the pool's policy on
    /// failures includes `RetryOther`.
    fn refused(self, end: PrefillEnd, cause: PrefillFailure, router: &mut Router) -> AfterPrefill {
        self.leave_out(end.meaning.follows);
        let policy = &router.pool.on_prefill_failure;
        if !policy.contains(&OnPrefillFailure::RetryOther) {
            return AfterPrefill::Answer;
        }
        let is_beside = self.order == LegOrder::Concurrent;
        match self.again(cause, router) {
            Ok(next) => AfterPrefill::Again(next),
            Err(_) if is_beside => AfterPrefill::AnswerUnlessPair(end),
            Err(_) => AfterPrefill::Answer,
        }
    }

    fn succeeded(mut self, body: &[u8], client: Client, router: &mut Router) -> AfterPrefill {
        if let Some(charge) = self.charge.take() {
            charge.finish(router.ledger.now());
        }
        if self.order == LegOrder::Concurrent {
            if matches!(Verdict::of_prefill(body), Verdict::Failed(_)) {
                let end = self.ended(Came::FailedInside, client, router);
                return self.failed(end, PrefillFailure::NoHandoff, client, router);
            }
            self.ended(Came::Good, client, router);
            return self.done_beside(body, client, router.pool.block_tokens);
        }
        let staged = self.handoff.staged(body, router.pool.block_tokens);
        let Some(staged) = staged else {
            return self.ended_or_failed(body, client, router);
        };
        let now = router.ledger.now();
        let staged = staged.leased(router.pool.handoff.lease(), now);
        if staged.has_expired(now) {
            router.notes.lose(staged.blocks);
            return self.ended_or_failed(body, client, router);
        }
        let Router { notes, pool, .. } = router;
        let networks = &pool.handoff.networks;
        if !notes.allow_hosts(self.worker(), &staged.hosts, networks) {
            router.notes.lose(staged.blocks);
            // The hand-off would send decode to a host that is not allowed: it is dropped, and the worker has failed.
            let end = self.ended(Came::NoHandoff, client, router);
            return self.failed(end, PrefillFailure::ForeignHost, client, router);
        }
        self.ended(Came::Good, client, router);
        match (client, Terminal::read(body, self.snapshot.form)) {
            (Client::Waits, Some(answer)) => {
                let rest = Box::new(self.clean_up(staged, router));
                AfterPrefill::TerminalStaged(answer, rest)
            }
            (Client::Waits, None) => self.decode(staged, router),
            (Client::Superseded | Client::Left, _) => self.clean_up(staged, router),
        }
    }

    /// Prefill has done its part of a concurrent hand-off. If decode was given up or the client has left, the worker may
    /// hold the KV for ever: the request is aborted.
    fn done_beside(self, body: &[u8], client: Client, block_tokens: u32) -> AfterPrefill {
        match (client, self.abort_leg()) {
            (Client::Waits, _) => AfterPrefill::Good,
            (Client::Superseded | Client::Left, Some(leg)) => AfterPrefill::CallOff {
                leg,
                blocks: usage::prompt_blocks(body, block_tokens).max(1),
            },
            (Client::Superseded | Client::Left, None) => AfterPrefill::Nothing,
        }
    }

    /// An answer that leaves nothing for decode: generation has ended by itself, or prefill has failed.
    fn ended_or_failed(self, body: &[u8], client: Client, router: &mut Router) -> AfterPrefill {
        let Some(terminal) = Terminal::read(body, self.snapshot.form) else {
            let end = self.ended(Came::NoHandoff, client, router);
            return self.failed(end, PrefillFailure::NoHandoff, client, router);
        };
        self.ended(Came::Good, client, router);
        match client {
            Client::Waits => AfterPrefill::Terminal(terminal),
            Client::Superseded | Client::Left => AfterPrefill::Nothing,
        }
    }

    /// The decode leg, to the picked worker if it is still there, else to another one.
    fn decode(mut self, staged: Staged, router: &mut Router) -> AfterPrefill {
        if let Err(refusal) = self.revalidate_decode(router) {
            router.notes.lose(staged.blocks);
            return AfterPrefill::Refused(refusal);
        }
        AfterPrefill::Decode {
            dispatch: self.decode_leg(Some(staged.decode.clone()), Duration::ZERO, router),
            target: (Arc::clone(&self.decode.target.worker), self.decode.key()),
            staged,
        }
    }

    /// Workers may have left since they were picked, or be draining. A draining worker is spared a new leg if another one
    /// can take it; else the leg is part of what it has still to finish.
    fn revalidate_decode(&mut self, router: &mut Router) -> Result<(), Refusal> {
        self.keep_open_others(router);
        let decode = &self.decode.target.worker;
        let is_named = self.snapshot.overrides.decode_pin().worker.is_some();
        match router.workers.fleet().alive(&decode.incarnation()) {
            Some(worker) if worker.is_draining() && !is_named => {
                // An error is ignored: the draining worker can still take the leg.
                let _ = self.replace_decode(router);
                Ok(())
            }
            Some(_) => Ok(()),
            None => self.replace_decode(router),
        }
    }

    /// Keeps only those alternatives for the same bytes that still take new requests.
    fn keep_open_others(&mut self, router: &Router) {
        let is_open = |other: &Target| {
            let known = router.workers.fleet().alive(&other.worker.incarnation());
            known.is_some_and(|worker| !worker.is_draining())
        };
        self.others.retain(is_open);
    }

    /// Replaces the picked decode worker by another one.
    fn replace_decode(&mut self, router: &mut Router) -> Result<(), Refusal> {
        if self.snapshot.overrides.decode_pin().worker.is_some() {
            // The worker was there when it was named: the caller made no mistake.
            return Err(Refusal::NotServed(NotServed::NoDecode));
        }
        let prefill = Arc::clone(&self.prefill.target.worker);
        let context = self.snapshot.context(router, &[]);
        let (decode, others) = replace_decode(router, &context, &prefill)?;
        self.decode = decode;
        self.others = others;
        Ok(())
    }

    fn clean_up(mut self, staged: Staged, router: &mut Router) -> AfterPrefill {
        let blocks = staged.blocks;
        // Any worker may fetch the blocks: the answer is not read.
        let overrides = &mut Arc::make_mut(&mut self.snapshot).overrides;
        overrides.decode.worker = None;
        overrides.backend = None;
        if self.revalidate_decode(router).is_err() {
            return AfterPrefill::Leaked { blocks };
        }
        let dispatch = Dispatch {
            edits: Some(staged.cleanup),
            ..Dispatch::to(&self.decode.target, &self.others, &router.pool)
        };
        AfterPrefill::CleanUp(CleanUpLeg { dispatch, blocks })
    }

    /// Applies the pool's policy on failures, step by step, if the client still waits.
    fn failed(
        mut self,
        end: PrefillEnd,
        cause: PrefillFailure,
        client: Client,
        router: &mut Router,
    ) -> AfterPrefill {
        if client != Client::Waits {
            return AfterPrefill::Nothing;
        }
        self.leave_out(end.meaning.follows);
        for step in router.pool.on_prefill_failure.clone() {
            match step {
                OnPrefillFailure::RetryOther => match self.again(cause, router) {
                    Ok(next) => return AfterPrefill::Again(next),
                    Err(this) => self = *this,
                },
                OnPrefillFailure::DecodeOnly => {
                    if let Some(after) = self.run_whole(router) {
                        return after;
                    }
                }
                OnPrefillFailure::Fail => break,
            }
        }
        let refusal = Refusal::PrefillFailed {
            tried: self.snapshot.trail.get().calls(Leg::Prefill),
            cause,
        };
        match self.order {
            LegOrder::Concurrent => AfterPrefill::FailedBeside(refusal, end),
            LegOrder::Sequential | LegOrder::Backend | LegOrder::NoHandoff => {
                AfterPrefill::Refused(refusal)
            }
        }
    }

    /// The same on another worker that may hand over to the same decode worker. None if the decode leg is under way: its
    /// room is used up.
    fn again(mut self, cause: PrefillFailure, router: &mut Router) -> Result<Self, Box<Self>> {
        let under_way = self.order == LegOrder::Concurrent && cause != PrefillFailure::NotSent;
        if under_way {
            return Err(Box::new(self));
        }
        let next = self.next_prefill(&[], router);
        let next = next.and_then(|next| {
            let handoff = renewed(router, self.handoff.as_ref(), &next.target)?;
            Some((handoff, next))
        });
        let Some((handoff, next)) = next else {
            return Err(Box::new(self));
        };
        let Router { pool, ledger, .. } = router;
        self.charge = Some(next.charge_prefill(&self.snapshot.demand, pool, ledger));
        self.timeout = deadline(router, next.key());
        self.handoff = handoff;
        self.prefill = next;
        Ok(self)
    }

    /// Another worker that may hand over to the same decode worker, except `besides`; none if the caller named the worker. A
    /// worker that reset the connection is tried again if no other is left.
    fn next_prefill(&self, besides: &[WorkerId], router: &mut Router) -> Option<Chosen> {
        let allowed = usize::try_from(router.pool.prefill.attempts).unwrap_or(usize::MAX);
        let is_named = self.snapshot.overrides.prefill.worker.is_some();
        let trail = self.snapshot.trail.get();
        let (calls, resets) = (trail.calls(Leg::Prefill), trail.before(Leg::Prefill).resets);
        drop(trail);
        // A named worker may have closed a connection that was kept alive: then it is tried again.
        if is_named && resets == 0 || calls >= allowed {
            return None;
        }
        let excluded = excluded(router.workers.fleet(), &self.snapshot, Leg::Prefill);
        let decode = &self.decode.target.worker;
        let next = excluded.iter().find_map(|excluded| {
            let excluded = [excluded.as_slice(), besides].concat();
            let context = self.snapshot.context(router, &excluded);
            let next = choose_prefill(router, &context, Some(decode), Step::Commit).ok()?;
            take(router, Role::Prefill, &context, &next);
            Some(next)
        })?;
        self.snapshot.trail.get().called(Leg::Prefill);
        Some(next)
    }

    /// Runs the request aggregated on the decode worker: only if the configuration allows it, which demands that decode
    /// workers can.
    fn run_whole(&mut self, router: &mut Router) -> Option<AfterPrefill> {
        if self.order != LegOrder::Sequential
            || !router.pool.decode.runs_whole_requests
            || !router
                .workers
                .fleet()
                .lives(&self.decode.target.worker.incarnation())
        {
            return None;
        }
        self.keep_open_others(router);
        let (whole, tokens) = (self.whole.take(), self.snapshot.demand.prompt_tokens);
        let reading = router.pool.prefill.deadline(tokens);
        Some(AfterPrefill::Whole {
            dispatch: self.decode_leg(whole, reading, router),
            fallback: Fallback::PrefillFailed,
        })
    }
}
