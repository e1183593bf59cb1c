//! Owns the list of simulated engines: how each recognises a leg, and how it writes and reads a hand-off.

use std::net::SocketAddr;
use std::time::Duration;

use hyper::header::HeaderMap;
use serde::{Deserialize, Serialize};

use super::refusal::Refusal;
use super::request::{Endpoint, Generation};
use super::{EngineConfig, Role};

pub mod llmd;
pub mod mooncake;
pub mod sglang;
pub mod trtllm;
pub mod vllm;

/// An engine's hand-off protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    /// vLLM with its NixlConnector: prefill first, then decode pulls.
    #[default]
    Vllm,
    /// The same, with llm-d's sidecar in front of decode: it runs the prefill leg.
    Llmd,
    /// vLLM with its MooncakeConnector: the legs, in any order, name a transfer at the prefill's bootstrap server.
    Mooncake,
    /// SGLang: both legs at once, which meet in a bootstrap room.
    Sglang,
    /// TensorRT-LLM: context first; the generation leg carries its answer.
    Trtllm,
}

/// Descriptions of the dialects for `--help`.
pub const DIALECTS: &str = r#"Dialects, each strict; a decode engine computes no prompt, and what was issued, pulled, expired, leaked, refused and recomputed is in /__state:
  vllm      prefill leg: kv_transfer_params {do_remote_decode: true}, one token, no stream; its answer has the kv_transfer_params of the decode leg;
            KV that cannot be pulled is a 500, in a stream an error event behind the headers
  llmd      as vllm, with llm-d's sidecar in front of a decode engine: a whole request whose prefill leg it runs at the engine that
            x-prefiller-host-port names; 502 with an empty body where that one is dead, else its own status and body; without the header
            the engine computes the prompt itself
  mooncake  both legs: the same kv_transfer_params.transfer_id, once, in any order; decode leg: remote_bootstrap_addr "http://host:port" and the
            remote_engine_id of the prefill's rank, as GET /query on the bootstrap port tells; with several ranks a prefill leg needs x-data-parallel-rank
  sglang    both legs at once: bootstrap_host, bootstrap_port, bootstrap_room, once; lists of one for each sequence in a batch or where n > 1;
            routed_dp_rank and disagg_prefill_dp_rank must be the room's; serves /generate too (text or input_ids, sampling_params, return_logprob)
  trtllm    prefill leg: disaggregated_params {request_type: "context_only", disagg_request_id: from 2^42, once, schedule_style: 0}, one token,
            no stream; decode leg: choices[0].disaggregated_params of its answer as "generation_only" with ctx_usage, and its prompt_token_ids
            (in completions as the prompt); one sequence; no /v1/responses"#;

/// Header with the rank that is to run a leg.
const RANK_HEADER: &str = "x-data-parallel-rank";

/// The leg that a request is, by its hand-off part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// The KV is to be handed off.
    Prefill,
    /// The request comes with a hand-off.
    Decode,
    /// Neither.
    Whole,
}

/// A hand-off: location and id of a prompt's KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handoff {
    /// Identity of the prefill engine, new at each start.
    pub engine_id: String,
    /// Id of the hand-off at that engine.
    pub request_id: String,
    /// Block numbers, in groups.
    pub block_groups: Vec<Vec<u32>>,
    /// Host of the prefill engine's side channel.
    pub host: String,
    /// Port of the prefill engine's side channel.
    pub port: u16,
    /// Tokens of the KV.
    pub prompt_tokens: u64,
    /// Tokens of these from the prefill engine's prefix cache.
    pub cached_tokens: u64,
}

/// The hand-off part of an unstreamed answer.
#[derive(Default, Serialize)]
pub struct HandoffFields {
    /// vLLM's, which is `null` without a hand-off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<Option<vllm::KvTransferParams>>,
    /// TensorRT-LLM's, which is in the choice.
    #[serde(skip)]
    pub disaggregated_params: Option<trtllm::DisaggregatedParams>,
    /// TensorRT-LLM's token ids of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

impl Handoff {
    /// A hand-off of one block group from the engine at `address`.
    pub fn new(engine_id: &str, request_id: String, blocks: Vec<u32>, address: SocketAddr) -> Self {
        Self {
            engine_id: engine_id.to_owned(),
            request_id,
            block_groups: vec![blocks],
            host: address.ip().to_canonical().to_string(),
            port: address.port(),
            prompt_tokens: 0,
            cached_tokens: 0,
        }
    }
}

impl Dialect {
    /// The hand-off part of an unstreamed answer; empty for SGLang.
    pub fn write(self, handoff: Option<Handoff>) -> HandoffFields {
        let kv_transfer_params = match self {
            Self::Vllm | Self::Llmd => Some(handoff.map(vllm::KvTransferParams::from)),
            Self::Mooncake => Some(None),
            Self::Sglang | Self::Trtllm => None,
        };
        HandoffFields {
            kv_transfer_params,
            ..HandoffFields::default()
        }
    }

    /// The leg of a request; SGLang's two look alike, so that there the engine's role decides.
    pub fn leg(self, role: Role, generation: &Generation) -> Leg {
        match (self, role) {
            (Self::Vllm | Self::Llmd | Self::Mooncake, _) => vllm::leg(generation),
            (Self::Trtllm, _) => trtllm::leg(generation),
            (Self::Sglang, _) if generation.bootstrap.room.is_none() => Leg::Whole,
            (Self::Sglang, Role::Prefill) => Leg::Prefill,
            (Self::Sglang, Role::Decode) => Leg::Decode,
            (Self::Sglang, Role::Aggregated) => Leg::Whole,
        }
    }

    /// Whether the engine has this path.
    pub fn serves(self, endpoint: Endpoint) -> bool {
        match endpoint {
            Endpoint::Chat | Endpoint::Completions => true,
            Endpoint::Responses => self != Self::Trtllm,
            Endpoint::Generate => self == Self::Sglang,
        }
    }

    /// Whether the engine is vLLM, with any connector.
    pub fn is_vllm(self) -> bool {
        matches!(self, Self::Vllm | Self::Llmd | Self::Mooncake)
    }

    /// Whether a prefill engine has a bootstrap server.
    pub fn has_bootstrap(self) -> bool {
        matches!(self, Self::Mooncake | Self::Sglang)
    }

    /// Whether each sequence of a request has its own KV, not one shared by all sequences of a prompt.
    pub fn hands_over_sequences(self) -> bool {
        self == Self::Sglang
    }

    /// Time for which handed-off KV is held.
    pub fn lease(self, config: &EngineConfig) -> Duration {
        match self {
            Self::Sglang => config.partner_timeout,
            Self::Vllm | Self::Llmd | Self::Mooncake | Self::Trtllm => config.lease,
        }
    }

    /// Prompt tokens that a decode engine does not compute: vLLM's computes the last one.
    pub fn tokens_taken_over(self, prompt_tokens: u64) -> u64 {
        match self {
            Self::Vllm | Self::Llmd | Self::Mooncake => prompt_tokens.saturating_sub(1),
            Self::Sglang | Self::Trtllm => prompt_tokens,
        }
    }
}

/// The rank, below `dp_size`, that a header requests for a leg.
///
/// # Errors
/// [`Refusal::BadRank`] if the engine has no such rank.
pub fn asked_rank(headers: &HeaderMap, dp_size: u32) -> Result<Option<u64>, Refusal> {
    below(header_rank(headers)?, dp_size)
}

fn header_rank(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let rank = headers.get(RANK_HEADER);
    rank.map(|rank| read_rank(rank.to_str().unwrap_or_default()))
        .transpose()
}

fn below(rank: Option<u64>, dp_size: u32) -> Result<Option<u64>, Refusal> {
    match rank {
        Some(rank) if rank >= u64::from(dp_size) => Err(Refusal::BadRank(format!(
            "{rank} is not below dp_size {dp_size}"
        ))),
        _ => Ok(rank),
    }
}

fn read_rank(text: &str) -> Result<u64, Refusal> {
    text.parse()
        .map_err(|_| Refusal::BadRank(format!("{text} is not a number from 0")))
}
