//! Owns the two traits behind which each engine stands: its protocol, and the hand-off of one request under it.

use std::fmt;

use super::HeaderValue;
use super::binding::{Binder, Binding};
use super::rooms::Rooms;
use super::staged::Staged;
use super::unserved::Unserved;
use crate::fleet::Target;
use crate::json::Edits;
use crate::refusal::Refusal;
use crate::request::{Generation, Request};

/// Who runs the legs of a hand-off, and in which order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegOrder {
    /// The router calls prefill, and forwards decode after prefill's answer.
    Sequential,
    /// The router calls prefill, and forwards decode at once.
    Concurrent,
    /// The backend runs both legs, on the pair that headers name.
    Backend,
    /// One worker runs the whole request.
    NoHandoff,
}

impl LegOrder {
    /// Whether the router runs the legs itself.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Sequential | Self::Concurrent)
    }
}

/// What is fixed about a protocol.
#[derive(Debug)]
pub struct ProtocolRules {
    /// Name in configuration.
    pub name: &'static str,
    /// Who runs the legs, and in which order.
    pub order: LegOrder,
    /// Whether requests go to the workers themselves, by their addresses, and not to frontends.
    pub reaches_workers: bool,
    /// The APIs whose requests can be split into prefill and decode.
    pub split: &'static [Generation],
    /// The same for APIs that only some releases of the engine can split: configuration says whether the workers can.
    pub split_if_configured: &'static [Generation],
    /// Whether the engine has SGLang's `/generate`. Elsewhere it is an unknown path, whose requests one worker runs.
    pub has_generate_api: bool,
    /// Parts of a request that the hand-off cannot serve.
    pub unserved: &'static [&'static Unserved],
    /// Whether the engine refuses a request whose prompt and limit exceed the model's length, instead of lowering the limit.
    pub refuses_too_long: bool,
}

/// An engine's protocol: what distinguishes its hand-offs from those of the others.
pub trait Protocol: fmt::Debug + Sync {
    /// What is fixed about it.
    fn rules(&self) -> &'static ProtocolRules;

    /// How prefill workers are bound; none where they are called without a binding.
    fn binder(&self) -> Option<&'static dyn Binder> {
        None
    }

    /// The hand-off of one request. Not called where the router runs no legs itself.
    ///
    /// # Errors
    /// [`Refusal`] where the pair or the request allows none, or the protocol has none.
    fn handoff(
        &self,
        _pair: &HandoffPair<'_>,
        _request: &Request<'_>,
        _rooms: &mut Rooms,
    ) -> Result<Box<dyn Handoff>, Refusal> {
        Err(Refusal::Internal)
    }

    /// Headers by which the backend learns of the pair whose legs it runs.
    fn pair_headers(&self, _prefill: &Target, _decode: &Target) -> Vec<HeaderValue> {
        Vec::new()
    }

    /// Headers by which a frontend learns of the one worker for the whole request.
    fn worker_headers(&self, _worker: &Target) -> Vec<HeaderValue> {
        Vec::new()
    }

    /// Edits that remove an untrusted caller's routing overrides, where the backend would follow them.
    fn without_overrides(&self, _request: &Request<'_>) -> Option<Edits> {
        None
    }
}

/// A prefill worker that a request is to be handed over from.
#[derive(Debug, Clone, Copy)]
pub struct Prefill<'a> {
    /// The worker and its rank.
    pub target: &'a Target,
    /// Its binding, if it is bound.
    pub binding: Option<&'a Binding>,
}

/// The picked pair, as far as a hand-off depends on it.
#[derive(Debug, Clone, Copy)]
pub struct HandoffPair<'a> {
    /// The prefill worker.
    pub prefill: Prefill<'a>,
    /// The decode worker's rank, for workers with more than one.
    pub decode_rank: Option<u32>,
}

/// The hand-off of one request between the legs that the router runs. Edits are of the client's body.
pub trait Handoff: fmt::Debug + Send {
    /// Edits that make the prefill leg.
    fn prefill(&self) -> Edits;

    /// Edits that make a decode leg sent at once; none if the prefill answer must come first.
    fn decode_at_once(&self) -> Option<Edits>;

    /// What a good prefill answer stages for decode; none if nothing. `block_tokens`: tokens in a KV block.
    fn staged(&self, answer: &[u8], block_tokens: u32) -> Option<Staged>;

    /// The same hand-off from another prefill worker: no number drawn for the first is used twice. None if the worker lacks
    /// a needed binding.
    fn renewed(&self, prefill: &Prefill<'_>, rooms: &mut Rooms) -> Option<Box<dyn Handoff>>;

    /// The call that aborts the prefill leg; none if the engine has no abort.
    fn abort(&self) -> Option<AbortCall>;
}

/// A call by which a worker aborts a request.
#[derive(Debug, PartialEq, Eq)]
pub struct AbortCall {
    /// Path and query.
    pub path: &'static str,
    /// The JSON body.
    pub body: String,
}
