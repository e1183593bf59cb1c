//! The engines that can be simulated: what each takes for a prefill leg, and how it writes and reads a hand-off.

use std::net::SocketAddr;

use serde::Serialize;

use super::refusal::Refusal;
use super::request::Generation;

mod vllm;

/// An engine's hand-off protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    /// vLLM with its NixlConnector: prefill first, then decode pulls.
    #[default]
    Vllm,
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

/// A hand-off as a prefill engine answers it.
#[derive(Serialize)]
#[serde(untagged)]
pub enum WrittenHandoff {
    /// `kv_transfer_params`.
    Vllm(vllm::Params),
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
    /// Whether a prefill engine runs this request.
    ///
    /// # Errors
    /// [`Refusal::NotAPrefillLeg`] where it would not, [`Refusal::BadRequest`] where it cannot be read.
    pub fn check_prefill_leg(self, generation: &Generation) -> Result<(), Refusal> {
        match self {
            Self::Vllm => vllm::check_prefill_leg(generation),
        }
    }

    /// The hand-off as a prefill engine answers it.
    pub fn write(self, handoff: Handoff) -> WrittenHandoff {
        match self {
            Self::Vllm => WrittenHandoff::Vllm(vllm::Params::from(handoff)),
        }
    }

    /// The hand-off that came with a request to a decode engine.
    ///
    /// # Errors
    /// [`Refusal::MissingHandoff`], [`Refusal::WrongHandoff`], or [`Refusal::BadRequest`] where it is not an object at all.
    pub fn read(self, generation: &Generation) -> Result<Handoff, Refusal> {
        match self {
            Self::Vllm => vllm::read(generation),
        }
    }
}
