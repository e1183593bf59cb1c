//! Owns the parts of a request that matter to a choice.

use std::rc::Rc;

use super::explain;
use super::model_workers::ModelWorkers;
use super::trail::SharedTrail;
use super::{Explain, PlanInput, Refusal, Router};
use crate::config::KvWeights;
use crate::fleet::{Role, WorkerId};
use crate::load::{BookedAnswer, PrefillRate};
use crate::model_state::ModelKey;
use crate::prefix::{Blocks, RunLength};
use crate::request::prompt::{self, Identity, Prompt};
use crate::request::{Request, RoutingOverrides};
use crate::selection::cost::{DecodeCredit, Tracking};
use crate::selection::eligibility::Subset;
use crate::selection::{Reads, Task};

/// A parsed request: from a body, a trace or a benchmark.
#[derive(Debug, Clone, Copy)]
pub struct SelectionRequest<'a> {
    /// The model, or an adapter of one.
    pub model: &'a str,
    /// The prompt's length in tokens.
    pub prompt_tokens: u64,
    /// The prompt's full blocks; empty if unknown.
    pub blocks: &'a Blocks,
    /// Expected output tokens of each sequence, if a source gives them.
    pub expected_tokens: Option<u64>,
    /// Sequences generated for the prompt.
    pub sequences: u64,
    /// The session of the request.
    pub session: Option<&'a [u8]>,
}

/// A prompt is recorded by its first blocks, at most one part in this many of the prefix index: it must not evict all others.
const ONE_PROMPTS_PART: usize = 8;

static NO_BLOCKS: Blocks = Blocks {
    scope: 0,
    sequence: Vec::new(),
    run_length: RunLength::Even,
};

impl Default for SelectionRequest<'_> {
    fn default() -> Self {
        Self {
            model: "",
            prompt_tokens: 1,
            blocks: &NO_BLOCKS,
            expected_tokens: None,
            sequences: 1,
            session: None,
        }
    }
}

/// The owned form of a [`SelectionRequest`]: a request may have to be placed again after its body is gone.
#[derive(Debug, Clone)]
pub(super) struct Demand {
    pub(super) prompt_tokens: u64,
    pub(super) blocks: Rc<Blocks>,
    pub(super) expected_tokens: Option<u64>,
    pub(super) sequences: u64,
    pub(super) session: Option<Rc<[u8]>>,
    pub(super) adapter: Option<Rc<str>>,
    pub(super) subset: Option<Rc<Subset>>,
    pub(super) weights: KvWeights,
    pub(super) tracking: Tracking,
}

impl Demand {
    /// The demand of a request of which nothing is known.
    pub(super) fn nothing(weights: KvWeights) -> Self {
        Self::of(&SelectionRequest::default(), weights)
    }

    pub(super) fn of(ask: &SelectionRequest<'_>, weights: KvWeights) -> Self {
        Self {
            prompt_tokens: ask.prompt_tokens,
            blocks: Rc::new(ask.blocks.clone()),
            expected_tokens: ask.expected_tokens,
            sequences: ask.sequences,
            session: ask.session.map(Rc::from),
            adapter: None,
            subset: None,
            weights,
            tracking: Tracking::Prefill,
        }
    }

    /// The answer to book.
    pub(super) fn answer(&self, block_tokens: u32) -> BookedAnswer {
        BookedAnswer {
            prompt_tokens: self.prompt_tokens,
            block_tokens,
            expected_tokens: self.expected_tokens,
            sequences: self.sequences,
        }
    }
}

/// Whether workers above their busy threshold are skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admit {
    /// They are skipped.
    WhoIsFree,
    /// They are not skipped: the request was admitted already, and goes wherever possible.
    Anyone,
}

/// One request for one model key: the input of every step of a choice.
#[derive(Debug, Clone)]
pub(super) struct SelectionContext<'a> {
    pub(super) key: &'a ModelKey,
    pub(super) model_workers: Rc<ModelWorkers>,
    pub(super) overrides: &'a RoutingOverrides,
    pub(super) demand: &'a Demand,
    pub(super) admit: Admit,
    /// Workers that have failed this request already.
    pub(super) excluded: &'a [WorkerId],
    /// The request's trail so far, on a retry.
    pub(super) trail: Option<SharedTrail>,
}

impl Router {
    /// Starts to collect an explanation, if wanted.
    pub(super) fn explain(&mut self, wanted: Explain) {
        let is_collected = match wanted {
            Explain::No => false,
            Explain::ForLog => true,
            Explain::ForCaller => self.pool.trust_clients,
        };
        self.explained = is_collected.then(Vec::new);
    }

    /// The explanation of the last plan's choices, as JSON; none if not wanted, or if no worker was chosen.
    pub fn take_explanation(&mut self) -> Option<String> {
        let explained = self.explained.take()?;
        (!explained.is_empty()).then(|| explain::to_json(&explained))
    }

    /// The caller's routing overrides, read only if the pool trusts its callers.
    pub(super) fn overrides(
        &self,
        request: &Request<'_>,
        input: PlanInput<'_>,
    ) -> Result<RoutingOverrides, Refusal> {
        if !self.pool.trust_clients {
            return Ok(RoutingOverrides::default());
        }
        let headers = input
            .headers
            .iter()
            .map(|(name, value)| (name.as_slice(), value.as_slice()));
        RoutingOverrides::read(
            headers,
            request.body.get("nvext").map(|member| member.value),
        )
    }

    /// The requested model, and the adapter if the name is one's.
    pub(super) fn model_of(&self, name: &str) -> Result<(String, Option<Rc<str>>), Refusal> {
        let base = self.adapters.get(name);
        let adapter = base.is_some().then(|| Rc::from(name));
        let model = base.cloned().flatten().unwrap_or_else(|| name.to_owned());
        self.check_model(&model)?;
        Ok((model, adapter))
    }

    /// The demand of a request: the parts that matter to a choice.
    pub(super) fn demand(
        &self,
        request: &Request<'_>,
        overrides: &RoutingOverrides,
        input: PlanInput<'_>,
        adapter: Option<Rc<str>>,
    ) -> Demand {
        let mut prompt = self.prompt(request, overrides, input, adapter.as_deref());
        let most = self.pool.prefixes.max_blocks / ONE_PROMPTS_PART;
        prompt.blocks.sequence.truncate(most);
        Demand {
            prompt_tokens: prompt.tokens,
            blocks: Rc::new(prompt.blocks),
            expected_tokens: overrides
                .hints
                .expected_tokens
                .or_else(|| request.max_tokens()),
            sequences: request.sequences().written(),
            session: input.session.map(Rc::from),
            adapter,
            subset: input.subset.cloned().map(Rc::new),
            weights: overrides.weights.over(self.pool.selection.kv),
            tracking: overrides.weights.tracking(),
        }
    }

    /// The prompt's blocks, if any policy reads them.
    pub(super) fn prompt(
        &self,
        request: &Request<'_>,
        overrides: &RoutingOverrides,
        input: PlanInput<'_>,
        adapter: Option<&str>,
    ) -> Prompt {
        let reads = self.prefill_policy.reads().max(self.decode_policy.reads());
        if reads == Reads::Nothing {
            return Prompt {
                blocks: Blocks::default(),
                tokens: request.prompt_tokens,
            };
        }
        let identity = Identity {
            model: &request.model,
            adapter,
            cache_salt: input.tenant,
            token_data: overrides.token_data.as_deref(),
            block_tokens: self.pool.block_tokens,
            run_length: RunLength::of(self.pool.block_tokens),
        };
        prompt::read(request, &identity)
    }

    pub(super) fn check_model(&self, model: &str) -> Result<(), Refusal> {
        if self.is_open() || self.model_states.states().next().is_none() {
            return Err(Refusal::NoFleet);
        }
        match self.model_states.of_model(Some(model)).is_empty() {
            true => Err(Refusal::UnknownModel {
                model: model.to_owned(),
            }),
            false => Ok(()),
        }
    }
}

/// The task that a worker is picked for.
pub(super) fn task<'c>(
    context: &'c SelectionContext<'_>,
    role: Role,
    rate: Option<PrefillRate>,
    decode_credit: DecodeCredit,
    block_tokens: u32,
) -> Task<'c> {
    Task {
        role,
        prompt_tokens: context.demand.prompt_tokens,
        block_tokens,
        blocks: &context.demand.blocks,
        session: context.demand.session.as_deref(),
        weights: context.demand.weights,
        tracking: context.demand.tracking,
        decode_credit,
        rate,
    }
}
