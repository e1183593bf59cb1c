//! Owns which requests can be split into prefill and decode, by protocol, and why the others cannot.

use super::Refusal;
use crate::config::{Legs, Pool, Protocol, Responses};
use crate::request::{Generation, Part, Request};

/// A part of a request that an engine's hand-off cannot serve: decode would be asked for what only prefill knows or did, and
/// some engines terminate on it.
struct Unserved {
    part: Part,
    protocols: &'static [Protocol],
    name: &'static str,
    problem: &'static str,
}

/// The protocols with vLLM behind them: a decode worker skips the prompt, and with it all data on the prompt.
const VLLM: &[Protocol] = &[Protocol::Nixl, Protocol::Mooncake, Protocol::Llmd];

/// The same, plus those of other engines with the same limit.
const ALL: &[Protocol] = &[
    Protocol::Nixl,
    Protocol::Mooncake,
    Protocol::Llmd,
    Protocol::Sglang,
    Protocol::Trtllm,
];

/// The protocols whose legs this router runs, each with an engine's answer of its own.
const OURS: &[Protocol] = &[
    Protocol::Nixl,
    Protocol::Mooncake,
    Protocol::Sglang,
    Protocol::Trtllm,
];

/// By engine. SGLang ignores `prompt_logprobs`, and merges those of its own `/generate` (`return_logprob`).
const UNSERVED: &[Unserved] = &[
    Unserved {
        part: Part::PromptLogprobs,
        protocols: &[
            Protocol::Nixl,
            Protocol::Mooncake,
            Protocol::Llmd,
            Protocol::Trtllm,
        ],
        name: "prompt_logprobs",
        problem: "the prompt's logprobs cannot be handed over from prefill to decode, and no worker runs whole requests",
    },
    Unserved {
        part: Part::EchoedLogprobs,
        protocols: ALL,
        name: "echo",
        problem: "with logprobs it asks for those of the prompt, which cannot be handed over from prefill to decode, and no worker runs whole requests",
    },
    Unserved {
        part: Part::ContextLogits,
        protocols: &[Protocol::Trtllm],
        name: "return_context_logits",
        problem: "the prompt's logits cannot be handed over from prefill to decode, and no worker runs whole requests",
    },
    Unserved {
        part: Part::BeamSearch,
        protocols: VLLM,
        name: "use_beam_search",
        problem: "beams cannot be handed over from prefill to decode, and no worker runs whole requests",
    },
    Unserved {
        part: Part::Background,
        protocols: OURS,
        name: "background",
        problem: "an answer in the background cannot be handed over from prefill to decode, and no worker runs whole requests",
    },
    Unserved {
        part: Part::PreviousResponse,
        protocols: OURS,
        name: "previous_response_id",
        problem: "an answer that one worker stored cannot be gone on with by two, and no worker runs whole requests",
    },
];

/// The refusal that a request which cannot be split would get; none if it can be.
pub(super) fn obstacle(pool: &Pool, request: &Request<'_>) -> Option<Refusal> {
    let protocol = pool.protocol;
    if protocol.legs() != Legs::Elsewhere && request.max_tokens() == Some(0) {
        return Some(Refusal::Field {
            name: "max_tokens",
            problem: "must be at least 1: there is nothing to decode, and no worker runs whole requests",
        });
    }
    if let Some(unserved) = unserved(protocol, request) {
        return Some(unserved);
    }
    match (protocol.legs(), request.generation) {
        // The body is not touched: the backend that runs the legs decides.
        (Legs::Elsewhere, _) => None,
        (Legs::Concurrent, Generation::Generate) => None,
        (_, Generation::Other | Generation::Generate) => Some(Refusal::NoHandoffForPath),
        (_, Generation::Responses) if protocol == Protocol::Trtllm => {
            Some(Refusal::NoHandoffForPath)
        }
        // Some releases drop the fields of the hand-off on this path.
        (Legs::Concurrent, Generation::Responses) if pool.responses != Responses::Split => {
            Some(Refusal::NoHandoffForPath)
        }
        (Legs::Concurrent, _) => None,
        // The blocks can be fetched only once.
        (Legs::Sequential, _) => request.sequences().check_one().err(),
    }
}

fn unserved(protocol: Protocol, request: &Request<'_>) -> Option<Refusal> {
    let concerns = |row: &&Unserved| row.protocols.contains(&protocol) && request.asks(row.part);
    UNSERVED.iter().find(concerns).map(|row| Refusal::Field {
        name: row.name,
        problem: row.problem,
    })
}
