//! Owns which requests can be split into prefill and decode, by protocol, and why the others cannot.

use super::Refusal;
use crate::config::{Legs, Pool, Protocol, Responses};
use crate::request::{Generation, Part, Request};

/// What a hand-off of an engine's cannot serve: decode would be asked for what prefill alone knows or did, and some engines end
/// on it.
struct Unserved {
    part: Part,
    protocols: &'static [Protocol],
    name: &'static str,
    problem: &'static str,
}

/// The protocols with vLLM behind them: a decode worker skips the prompt, and with it whatever is said of it.
const VLLM: &[Protocol] = &[Protocol::Nixl, Protocol::Mooncake, Protocol::Llmd];

/// The same with those of other engines of which that is true.
const ALL: &[Protocol] = &[
    Protocol::Nixl,
    Protocol::Mooncake,
    Protocol::Llmd,
    Protocol::Sglang,
    Protocol::Trtllm,
];

/// The protocols whose legs are run here, each of them an engine's answer of its own.
const OURS: &[Protocol] = &[
    Protocol::Nixl,
    Protocol::Mooncake,
    Protocol::Sglang,
    Protocol::Trtllm,
];

/// By engine. SGLang takes no notice of `prompt_logprobs`, and merges those of its own `/generate` (`return_logprob`).
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

/// What keeps a request from being split, as its caller would be told; none where nothing does.
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
        // The body is not touched: whoever runs the legs knows.
        (Legs::Elsewhere, _) => None,
        (Legs::Concurrent, Generation::Generate) => None,
        (_, Generation::Other | Generation::Generate) => Some(Refusal::NoHandoffForPath),
        (_, Generation::Responses) if protocol == Protocol::Trtllm => {
            Some(Refusal::NoHandoffForPath)
        }
        // Some releases drop the fields of the hand-off there.
        (Legs::Concurrent, Generation::Responses) if pool.responses != Responses::Split => {
            Some(Refusal::NoHandoffForPath)
        }
        (Legs::Concurrent, _) => None,
        // The blocks are gone once they are fetched.
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
