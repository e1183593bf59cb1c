//! Owns the parts of a request that some engines' hand-offs cannot serve: decode would be asked for what only prefill knows
//! or did, and some engines terminate on it.

use crate::request::Part;

/// A part of a request that a hand-off cannot serve.
#[derive(Debug)]
pub struct Unserved {
    /// The part.
    pub part: Part,
    /// The field that asks for it.
    pub name: &'static str,
    /// Why it is not served.
    pub problem: &'static str,
}

/// A decode worker skips the prompt, and with it all data on the prompt.
pub const PROMPT_LOGPROBS: Unserved = Unserved {
    part: Part::PromptLogprobs,
    name: "prompt_logprobs",
    problem: "the prompt's logprobs cannot be handed over from prefill to decode, and no worker runs whole requests",
};

/// The same for a prompt that is part of the answer.
pub const ECHOED_LOGPROBS: Unserved = Unserved {
    part: Part::EchoedLogprobs,
    name: "echo",
    problem: "with logprobs it asks for those of the prompt, which cannot be handed over from prefill to decode, and no worker runs whole requests",
};

/// The same for logits.
pub const CONTEXT_LOGITS: Unserved = Unserved {
    part: Part::ContextLogits,
    name: "return_context_logits",
    problem: "the prompt's logits cannot be handed over from prefill to decode, and no worker runs whole requests",
};

/// Each beam would have to fetch the blocks.
pub const BEAM_SEARCH: Unserved = Unserved {
    part: Part::BeamSearch,
    name: "use_beam_search",
    problem: "beams cannot be handed over from prefill to decode, and no worker runs whole requests",
};

/// Prefill's answer would be an id.
pub const BACKGROUND: Unserved = Unserved {
    part: Part::Background,
    name: "background",
    problem: "an answer in the background cannot be handed over from prefill to decode, and no worker runs whole requests",
};

/// The earlier answer is stored by one worker.
pub const PREVIOUS_RESPONSE: Unserved = Unserved {
    part: Part::PreviousResponse,
    name: "previous_response_id",
    problem: "an answer that one worker stored cannot be gone on with by two, and no worker runs whole requests",
};
