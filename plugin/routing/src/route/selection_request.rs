//! Owns the parts of a request that matter to a choice.

use std::sync::Arc;

use super::model_workers::ModelWorkers;
use super::trail::SharedTrail;
use super::{PlanInput, Refusal, Router};
use crate::config::{KvWeights, Pool};
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
    pub(super) blocks: Arc<Blocks>,
    pub(super) expected_tokens: Option<u64>,
    pub(super) sequences: u64,
    pub(super) session: Option<Arc<[u8]>>,
    pub(super) adapter: Option<Arc<str>>,
    pub(super) subset: Option<Arc<Subset>>,
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
            blocks: Arc::new(ask.blocks.clone()),
            expected_tokens: ask.expected_tokens,
            sequences: ask.sequences,
            session: ask.session.map(Arc::from),
            adapter: None,
            subset: None,
            weights,
            tracking: Tracking::Prefill,
        }
    }

    /// The demand of a request; `reads`: the data of its prompt that any policy reads.
    pub(super) fn read(
        request: &Request<'_>,
        overrides: &RoutingOverrides,
        input: PlanInput<'_>,
        adapter: Option<Arc<str>>,
        reads: Reads,
        pool: &Pool,
    ) -> Self {
        let prompt = match reads {
            Reads::Nothing => Prompt::unread(request),
            Reads::Blocks | Reads::Overlap => {
                prompt(request, overrides, input, adapter.as_deref(), pool)
            }
        };
        let expected_tokens = overrides.hints.expected_tokens;
        Self {
            prompt_tokens: prompt.tokens,
            blocks: Arc::new(prompt.blocks),
            expected_tokens: expected_tokens.or_else(|| request.max_tokens()),
            sequences: request.sequences().written(),
            session: input.session.map(Arc::from),
            adapter,
            subset: input.subset.cloned().map(Arc::new),
            weights: overrides.weights.over(pool.selection.kv),
            tracking: overrides.weights.tracking(),
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
    pub(super) model_workers: Arc<ModelWorkers>,
    pub(super) overrides: &'a RoutingOverrides,
    pub(super) demand: &'a Demand,
    pub(super) admit: Admit,
    /// Workers that have failed this request already.
    pub(super) excluded: &'a [WorkerId],
    /// The request's trail so far, on a retry.
    pub(super) trail: Option<SharedTrail>,
}

/// The selection context of one request for one model key.
pub(super) fn context<'a>(
    router: &mut Router,
    key: &'a ModelKey,
    overrides: &'a RoutingOverrides,
    demand: &'a Demand,
) -> SelectionContext<'a> {
    let Router {
        workers,
        pool,
        ledger,
        ..
    } = router;
    SelectionContext {
        key,
        model_workers: workers.list(key, pool, ledger),
        overrides,
        demand,
        admit: Admit::WhoIsFree,
        excluded: &[],
        trail: None,
    }
}

/// The caller's routing overrides, read only if the pool trusts its callers.
pub(super) fn overrides(
    request: &Request<'_>,
    input: PlanInput<'_>,
    pool: &Pool,
) -> Result<RoutingOverrides, Refusal> {
    if !pool.trust_clients {
        return Ok(RoutingOverrides::default());
    }
    let headers = input.headers.iter();
    let headers = headers.map(|(name, value)| (name.as_slice(), value.as_slice()));
    let nvext = request.body.get("nvext").map(|member| member.value);
    RoutingOverrides::read(headers, nvext)
}

/// The prompt's length and its blocks, as far as they are recorded.
fn prompt(
    request: &Request<'_>,
    overrides: &RoutingOverrides,
    input: PlanInput<'_>,
    adapter: Option<&str>,
    pool: &Pool,
) -> Prompt {
    let identity = Identity {
        model: &request.model,
        adapter,
        cache_salt: input.tenant,
        token_data: overrides.token_data.as_deref(),
        block_tokens: pool.block_tokens,
        run_length: RunLength::of(pool.block_tokens),
    };
    let mut prompt = prompt::read(request, &identity);
    let most = pool.prefixes.max_blocks / ONE_PROMPTS_PART;
    prompt.blocks.sequence.truncate(most);
    prompt
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
