//! Owns what follows from the answer to a prefill call, for the request that it was made for.

use std::borrow::Cow;
use std::sync::Arc;

use super::effect::{CallAnswer, Effect, Note, OnStream, StepContext, WorkerReply};
use super::{ConcurrentPrefill, Failure, Session, Stage};
use crate::answer::{EventEdit, PromptLogprobs, usage};
use crate::fleet::Worker;
use crate::handoff::LegOrder;
use crate::refusal::{PrefillFailure, Refusal};
use crate::route::fate::Handed;
use crate::route::{AfterPrefill, CallEnd, Client, Dispatch, PrefillEnd, PrefillPhase, Router};

impl Session {
    /// Whether a prefill call is due: the client waits for one.
    pub fn needs_prefill(&self) -> bool {
        matches!(self.stage, Stage::Prefilling | Stage::Recovering)
    }

    /// Notes a prefill call for the present attempt.
    pub fn prefill_called(&mut self) {
        self.racing = self.racing.saturating_add(1);
        self.prefill_calls = self.prefill_calls.saturating_add(1);
    }

    /// Begins decode right after the call to prefill, if both legs run at once.
    pub fn decode_beside(
        &mut self,
        router: &mut Router,
        phase: &PrefillPhase,
    ) -> Option<Effect<'static>> {
        let dispatch = phase.decode_beside(router)?;
        self.response.set_prefill(match phase.wants_logprobs() {
            true => ConcurrentPrefill::RunningWithLogprobs,
            false => ConcurrentPrefill::Running,
        });
        self.abort = phase.abort_leg();
        Some(self.decode(dispatch))
    }

    /// What follows from the answer to a prefill call of this `attempt`.
    pub fn prefill_answered<'a>(
        &mut self,
        with: &mut StepContext<'_>,
        phase: PrefillPhase,
        attempt: u32,
        call: CallAnswer<'a>,
    ) -> Vec<Effect<'a>> {
        self.prefill_calls = self.prefill_calls.saturating_sub(1);
        let effects = self.answer_of_attempt(with, phase, attempt, call);
        let cleans_up = |effect: &Effect<'_>| matches!(effect, Effect::CleanUp(..));
        if self.prefill_calls == 0 && !effects.iter().any(cleans_up) {
            // No further call can leave blocks behind.
            with.bodies.cleanup = None;
        }
        effects
    }

    fn answer_of_attempt<'a>(
        &mut self,
        with: &mut StepContext<'_>,
        phase: PrefillPhase,
        attempt: u32,
        call: CallAnswer<'a>,
    ) -> Vec<Effect<'a>> {
        if !self.waits_for(attempt) {
            let client = match self.stage {
                Stage::Ended => Client::Left,
                _ => Client::Superseded,
            };
            return self.after_prefill(with, phase, client, call);
        }
        self.racing = self.racing.saturating_sub(1);
        if self.racing == 0 {
            return self.after_prefill(with, phase, Client::Waits, call);
        }
        match phase.absorb_failure(call.answer, with.router) {
            Ok(()) => Vec::new(),
            Err(phase) => {
                let mut effects = self.after_prefill(with, *phase, Client::Waits, call);
                // Blocks that the other call computes must be fetched too.
                effects.push(Effect::CopyRequest);
                effects
            }
        }
    }

    fn after_prefill<'a>(
        &mut self,
        with: &mut StepContext<'_>,
        phase: PrefillPhase,
        client: Client,
        call: CallAnswer<'a>,
    ) -> Vec<Effect<'a>> {
        let worker = Arc::clone(phase.worker());
        let order = phase.order();
        let cached = cached_tokens(call.answer);
        let mut effects: Vec<Effect<'a>> = Vec::new();
        if let Some(tokens) = cached {
            let block = u64::from(with.router.pool().block_tokens.max(1));
            effects.push(Effect::Note(Note::Cached(tokens / block)));
        }
        let after = phase.answered(call.answer, client, with.router);
        let is_last = !matches!(after, AfterPrefill::Again(_));
        if client == Client::Waits && order == LegOrder::Sequential && is_last {
            // Other calls of the same attempt are late now.
            self.supersede_calls();
            self.assignment.prefill = Some(Arc::clone(&worker));
        }
        let follows = match after {
            AfterPrefill::Again(next) => {
                let note = Note::PrefillReplaced {
                    failed: worker,
                    next: Arc::clone(next.worker()),
                    answer: call.answer.to_string(),
                };
                self.assignment.prefill = Some(Arc::clone(next.worker()));
                vec![Effect::Note(note), Effect::CallPrefill(Box::new(next))]
            }
            AfterPrefill::Decode {
                dispatch,
                target: (worker, key),
                staged,
            } => {
                self.handed = Some(Handed::over(staged.blocks));
                let router = &mut *with.router;
                router.assign_decode(&mut self.assignment, &worker, key, staged);
                if router.pool().report_cached_tokens {
                    let edit = EventEdit::CachedTokens(cached.unwrap_or_default());
                    self.response.edit(edit);
                }
                vec![self.decode(dispatch)]
            }
            AfterPrefill::Whole { dispatch, fallback } => {
                let answer = call.answer.to_string();
                let note = Note::RunsWhole { fallback, answer };
                vec![Effect::Note(note), self.decode(dispatch)]
            }
            AfterPrefill::Good => self.good_beside(with, call.answer),
            AfterPrefill::CallOff { leg, blocks } => vec![Effect::CallOff(leg, blocks)],
            AfterPrefill::Answer => self.pass_on(call),
            AfterPrefill::AnswerUnlessPair(end) => self.pass_on_unless_pair(with, call, end),
            AfterPrefill::Terminal(terminal) => vec![OnStream::AnswerTerminal(terminal).into()],
            AfterPrefill::TerminalStaged(terminal, rest) => {
                let answer = [
                    Effect::KeepRequest,
                    OnStream::AnswerTerminal(terminal).into(),
                ];
                answer.into_iter().chain(clean_up(*rest, worker)).collect()
            }
            AfterPrefill::Refused(refusal) => self.prefill_refused(with, refusal),
            AfterPrefill::FailedBeside(refusal, end) => self.failed_beside(with, refusal, end),
            rest @ (AfterPrefill::CleanUp(_)
            | AfterPrefill::Leaked { .. }
            | AfterPrefill::Nothing) => clean_up(rest, worker).into_iter().collect(),
        };
        effects.extend(follows);
        effects
    }

    /// Begins decode: the request is forwarded or, if it was forwarded before, a call is made.
    fn decode(&mut self, dispatch: Dispatch) -> Effect<'static> {
        let dispatch = Box::new(dispatch);
        match self.stage {
            Stage::Recovering => {
                let failure = self.failure.take().unwrap_or(Failure::Unreached);
                Effect::CallDecode(dispatch, failure)
            }
            _ => OnStream::Forward(dispatch).into(),
        }
    }

    /// The concurrent prefill was good: what was held back for it goes to the client.
    fn good_beside(
        &mut self,
        with: &mut StepContext<'_>,
        answer: CallEnd<'_>,
    ) -> Vec<Effect<'static>> {
        let CallEnd::Whole { body, .. } = answer else {
            return Vec::new();
        };
        if self.response.awaits_logprobs()
            && let Some(logprobs) = PromptLogprobs::read(body)
        {
            self.response.edit(EventEdit::PromptLogprobs(logprobs));
        }
        let blocks = usage::prompt_blocks(body, with.router.pool().block_tokens);
        let mut effects = Vec::new();
        if self.prefill_is_good(blocks) {
            effects.push(OnStream::ReleaseHeld.into());
        }
        if let Some(held) = self.held_reply.take() {
            effects.extend(self.deliver(with, held.reply));
        }
        effects
    }

    /// Passes the worker's error to the client: the request was at fault. A decode answer that has begun is reset instead.
    fn pass_on<'a>(&mut self, call: CallAnswer<'a>) -> Vec<Effect<'a>> {
        let CallEnd::Whole { status, body } = call.answer else {
            return Vec::new();
        };
        if self.response.prefill_runs() && self.response.has_begun() {
            let cause = PrefillFailure::Status(status);
            return self.break_off_for(Refusal::PrefillFailed { tried: 1, cause });
        }
        self.response.set_prefill(ConcurrentPrefill::Nothing);
        self.assignment.release();
        let reply = WorkerReply {
            status,
            headers: (call.headers)(),
            body: Cow::Borrowed(body),
        };
        vec![OnStream::Answer(reply).into()]
    }

    /// Asks another pair: prefill has refused the request while decode waits for it.
    fn pass_on_unless_pair<'a>(
        &mut self,
        with: &mut StepContext<'_>,
        call: CallAnswer<'a>,
        end: PrefillEnd,
    ) -> Vec<Effect<'a>> {
        match call.answer {
            CallEnd::Whole { status, body } if !self.response.has_begun() => {
                self.drop_prefill();
                let failure = Failure::AnsweredWithError(WorkerReply {
                    status,
                    headers: (call.headers)(),
                    body: Cow::Owned(body.to_vec()),
                });
                self.replace_leg(with, failure, end.into())
            }
            _ => self.pass_on(call),
        }
    }

    /// Ends a request whose prefill has failed for good.
    fn prefill_refused(
        &mut self,
        with: &mut StepContext<'_>,
        refusal: Refusal,
    ) -> Vec<Effect<'static>> {
        let mut effects = vec![Effect::Note(Note::PrefillFailed(refusal.clone()))];
        match self.stage {
            Stage::Recovering => {
                let failure = self.failure.take().unwrap_or(Failure::Refused(refusal));
                effects.extend(self.give_up(with, failure));
            }
            _ => effects.push(OnStream::Refuse(refusal).into()),
        }
        effects
    }

    /// Handles a failed concurrent prefill: while the client has read nothing, another pair is asked.
    fn failed_beside(
        &mut self,
        with: &mut StepContext<'_>,
        refusal: Refusal,
        end: PrefillEnd,
    ) -> Vec<Effect<'static>> {
        if !self.response.prefill_runs() {
            return self.prefill_refused(with, refusal);
        }
        let mut effects = vec![Effect::Note(Note::PrefillFailed(refusal.clone()))];
        effects.extend(match self.response.has_begun() {
            true => self.break_off_for(refusal),
            false => {
                self.drop_prefill();
                self.replace_leg(with, Failure::Refused(refusal), end.into())
            }
        });
        effects
    }

    /// Gives up the concurrent prefill, if there is one, and what would abort it.
    fn drop_prefill(&mut self) {
        self.response.set_prefill(ConcurrentPrefill::Nothing);
        self.abort = None;
    }

    /// Ends an answer that has begun with a reset, since its concurrent prefill has failed: it must not end as a success.
    fn break_off_for(&mut self, reason: Refusal) -> Vec<Effect<'static>> {
        self.abort = None;
        self.response.break_off_for(reason);
        vec![Effect::Watch]
    }
}

/// Tokens that the prefill worker had cached; none without a good answer.
fn cached_tokens(answer: CallEnd<'_>) -> Option<u64> {
    match answer {
        CallEnd::Whole {
            status: 200..=299,
            body,
        } => Some(usage::cached_tokens(body)),
        _ => None,
    }
}

/// Cleans up blocks that prefill has staged and no decode fetches.
fn clean_up(after: AfterPrefill, worker: Arc<Worker>) -> Option<Effect<'static>> {
    match after {
        AfterPrefill::CleanUp(leg) => Some(Effect::CleanUp(Box::new(leg), worker)),
        AfterPrefill::Leaked { blocks } => Some(Effect::Note(Note::Leaked { blocks, worker })),
        _ => None,
    }
}
