//! The engines that can be simulated: what each takes for a leg, and how it writes and reads a hand-off.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::Role;
use super::request::Generation;

pub mod sglang;
pub mod vllm;

/// An engine's hand-off protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    /// vLLM with its NixlConnector: prefill first, then decode pulls.
    #[default]
    Vllm,
    /// SGLang: both legs at once, which meet in a bootstrap room.
    Sglang,
}

/// What the hand-off part of a request makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// Its KV is to be handed off.
    Prefill,
    /// It comes with a hand-off.
    Decode,
    /// Neither.
    Whole,
}

/// A hand-off: where the KV of a prompt waits, and under what name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handoff {
    /// Identity of the prefill engine, new with each start.
    pub engine_id: String,
    /// The hand-off's id there.
    pub request_id: String,
    /// Block numbers, in groups.
    pub block_groups: Vec<Vec<u32>>,
    /// Host of the prefill engine's side channel.
    pub host: String,
    /// Port of the prefill engine's side channel.
    pub port: u16,
}

/// A whole answer's part about the hand-off.
#[derive(Serialize)]
#[serde(untagged)]
pub enum WrittenHandoff {
    /// `kv_transfer_params`; vLLM writes `null` where there are none.
    Vllm(Option<vllm::Params>),
}

impl Handoff {
    /// A hand-off of one block group from the engine that is reached at `address`.
    pub fn new(engine_id: &str, request_id: String, blocks: Vec<u32>, address: SocketAddr) -> Self {
        Self {
            engine_id: engine_id.to_owned(),
            request_id,
            block_groups: vec![blocks],
            host: address.ip().to_canonical().to_string(),
            port: address.port(),
        }
    }
}

impl Dialect {
    /// What a whole answer says about the hand-off; an SGLang engine says nothing.
    pub fn write(self, handoff: Option<Handoff>) -> Option<WrittenHandoff> {
        match self {
            Self::Vllm => Some(WrittenHandoff::Vllm(handoff.map(vllm::Params::from))),
            Self::Sglang => None,
        }
    }

    /// Which leg a request is; SGLang's two look alike, so that there the engine's role decides.
    pub fn leg(self, role: Role, generation: &Generation) -> Leg {
        match (self, role) {
            (Self::Vllm, _) => vllm::leg(generation),
            (Self::Sglang, _) if generation.bootstrap.room.is_none() => Leg::Whole,
            (Self::Sglang, Role::Prefill) => Leg::Prefill,
            (Self::Sglang, Role::Decode) => Leg::Decode,
            (Self::Sglang, Role::Aggregated) => Leg::Whole,
        }
    }
}
