//! Owns the retry snapshot: what must be known of a request to place it again after its body is gone.

use std::time::Duration;

use super::Router;
use super::dispatch::Patience;
use super::selection_request::{Admit, Demand, SelectionContext, context};
use super::trail::SharedTrail;
use crate::fleet::WorkerId;
use crate::model_state::ModelKey;
use crate::request::{AnswerForm, Generation, Request, RoutingOverrides};

/// A request that has been placed once.
#[derive(Debug, Clone)]
pub(super) struct RetrySnapshot {
    pub(super) key: ModelKey,
    pub(super) overrides: RoutingOverrides,
    pub(super) demand: Demand,
    pub(super) form: AnswerForm,
    pub(super) generation: Generation,
    /// The most output tokens that the client allows, if it sets a limit.
    pub(super) max_tokens: Option<u64>,
    /// Whether the client wants the prompt's logprobs, which only SGLang's prefill worker knows.
    pub(super) wants_logprobs: bool,
    /// The request's trail so far.
    pub(super) trail: SharedTrail,
}

impl RetrySnapshot {
    pub(super) fn of(context: &SelectionContext<'_>, request: &Request<'_>) -> Self {
        Self {
            key: context.key.clone(),
            overrides: context.overrides.clone(),
            demand: context.demand.clone(),
            form: request.form(),
            generation: request.generation,
            max_tokens: request.max_tokens(),
            wants_logprobs: wants_logprobs(request),
            trail: context.trail.clone().unwrap_or_default(),
        }
    }

    /// The selection context of a retry: admitted already, and without the workers that have failed the request.
    pub(super) fn context<'a>(
        &'a self,
        router: &mut Router,
        excluded: &'a [WorkerId],
    ) -> SelectionContext<'a> {
        SelectionContext {
            admit: Admit::Anyone,
            excluded,
            trail: Some(self.trail.clone()),
            ..context(router, &self.key, &self.overrides, &self.demand)
        }
    }

    /// Deadlines of a worker's answer; `reading`: time that the worker needs before it can decode.
    pub(super) fn patience(
        &self,
        router: &Router,
        worker: WorkerId,
        reading: Duration,
    ) -> Patience {
        let leg = &router.pool.decode;
        let grace = router.health.grace(worker);
        let and_reading = |time: Duration| time.saturating_add(reading).max(grace);
        let whole = leg.whole_deadline(self.max_tokens).map(and_reading);
        let (first, total) = match self.form {
            AnswerForm::Unstreamed => (whole, whole),
            AnswerForm::Stream { .. } => (leg.first_token_deadline().map(and_reading), None),
        };
        Patience {
            first,
            silence: leg.silence(),
            total,
            whole,
        }
    }
}

fn wants_logprobs(request: &Request<'_>) -> bool {
    let asked = request.body.get("return_logprob");
    request.generation == Generation::Generate
        && asked.is_some_and(|member| member.value != "false")
}
