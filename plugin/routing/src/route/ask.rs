//! Owns what of a request matters to a choice.

use std::rc::Rc;

use super::explain;
use super::roster::ModelWorkers;
use super::trail::SharedTrail;
use super::{Explain, PlanInput, Refusal, Router};
use crate::config::KvWeights;
use crate::fleet::WorkerId;
use crate::load::Answer;
use crate::prefill_router::ModelKey;
use crate::prefix::{Blocks, RunLength};
use crate::request::prompt::{self, Identity, Prompt};
use crate::request::{Request, Steering};
use crate::selection::Reads;
use crate::selection::cost::Tracking;
use crate::selection::eligibility::Subset;

/// A request that has been read already: by a body's reader, a trace's or a benchmark's.
#[derive(Debug, Clone, Copy)]
pub struct SelectionRequest<'a> {
    /// The model, or an adapter of one.
    pub model: &'a str,
    /// The prompt's length in tokens.
    pub prompt_tokens: u64,
    /// The prompt's full blocks; none: nothing is known of it.
    pub blocks: &'a Blocks,
    /// Tokens that the answer is expected to have, each of its sequences, where something says so.
    pub expected_tokens: Option<u64>,
    /// How many sequences are written for the prompt.
    pub sequences: u64,
    /// The session it belongs to.
    pub session: Option<&'a [u8]>,
}

/// One prompt is known by its first blocks, one of so many parts of what is remembered at most: it must not drive out all
/// others.
const ONE_PROMPTS_PART: usize = 8;

static NO_BLOCKS: Blocks = Blocks {
    scope: 0,
    sequence: Vec::new(),
    grain: RunLength::Even,
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

/// The same, to be kept: a request may have to be placed again after its body is gone.
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
    /// What is asked by one of whom nothing is known.
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

    /// What is booked for its answer.
    pub(super) fn answer(&self, block_tokens: u32) -> Answer {
        Answer {
            prompt_tokens: self.prompt_tokens,
            block_tokens,
            expected_tokens: self.expected_tokens,
            sequences: self.sequences,
        }
    }
}

/// Whether workers that are too busy are passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admit {
    /// They are.
    WhoIsFree,
    /// They are not: the request was let in already, and goes on where it can.
    Anyone,
}

/// One request at one place: what every step of a choice needs.
#[derive(Debug, Clone)]
pub(super) struct SelectionContext<'a> {
    pub(super) place: &'a ModelKey,
    pub(super) roster: Rc<ModelWorkers>,
    pub(super) steering: &'a Steering,
    pub(super) asked: &'a Demand,
    pub(super) admit: Admit,
    /// Workers that have failed this request already.
    pub(super) excluded: &'a [WorkerId],
    /// What the request has met at workers so far, where it is placed again.
    pub(super) trail: Option<SharedTrail>,
}

impl Router {
    /// Begins an explanation, or none.
    pub(super) fn explain(&mut self, wanted: Explain) {
        let is_heard = match wanted {
            Explain::No => false,
            Explain::ForLog => true,
            Explain::ForCaller => self.pool.trust_clients,
        };
        self.explained = is_heard.then(Vec::new);
    }

    /// The explanation of the last plan's choices, as JSON; none where none was wanted, or nobody was chosen.
    pub fn take_explanation(&mut self) -> Option<String> {
        let explained = self.explained.take()?;
        (!explained.is_empty()).then(|| explain::to_json(&explained))
    }

    /// What the caller says of where the request goes: heard only where the pool trusts its callers.
    pub(super) fn steering(
        &self,
        request: &Request<'_>,
        told: PlanInput<'_>,
    ) -> Result<Steering, Refusal> {
        if !self.pool.trust_clients {
            return Ok(Steering::default());
        }
        let headers = told
            .headers
            .iter()
            .map(|(name, value)| (name.as_slice(), value.as_slice()));
        Steering::read(
            headers,
            request.body.get("nvext").map(|member| member.value),
        )
    }

    /// The model that is asked for, and the adapter where it is one's name.
    pub(super) fn model_of(&self, name: &str) -> Result<(String, Option<Rc<str>>), Refusal> {
        let base = self.adapters.get(name);
        let adapter = base.is_some().then(|| Rc::from(name));
        let model = base.cloned().flatten().unwrap_or_else(|| name.to_owned());
        self.check_model(&model)?;
        Ok((model, adapter))
    }

    /// What of a request matters to a choice.
    pub(super) fn asked(
        &self,
        request: &Request<'_>,
        steering: &Steering,
        told: PlanInput<'_>,
        adapter: Option<Rc<str>>,
    ) -> Demand {
        let mut prompt = self.prompt(request, steering, told, adapter.as_deref());
        let most = self.pool.prefixes.max_blocks / ONE_PROMPTS_PART;
        prompt.blocks.sequence.truncate(most);
        Demand {
            prompt_tokens: prompt.tokens,
            blocks: Rc::new(prompt.blocks),
            expected_tokens: steering
                .hints
                .expected_tokens
                .or_else(|| request.max_tokens()),
            sequences: request.sequences().written(),
            session: told.session.map(Rc::from),
            adapter,
            subset: told.subset.cloned().map(Rc::new),
            weights: steering.weights.over(self.pool.selection.kv),
            tracking: steering.weights.tracking(),
        }
    }

    /// The prompt's blocks, where any policy looks at them.
    pub(super) fn prompt(
        &self,
        request: &Request<'_>,
        steering: &Steering,
        told: PlanInput<'_>,
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
            cache_salt: told.tenant,
            token_data: steering.token_data.as_deref(),
            block_tokens: self.pool.block_tokens,
            grain: RunLength::of(self.pool.block_tokens),
        };
        prompt::read(request, &identity)
    }

    pub(super) fn check_model(&self, model: &str) -> Result<(), Refusal> {
        if self.is_open() || self.places.places().next().is_none() {
            return Err(Refusal::NoFleet);
        }
        match self.places.of_model(Some(model)).is_empty() {
            true => Err(Refusal::UnknownModel {
                model: model.to_owned(),
            }),
            false => Ok(()),
        }
    }
}
