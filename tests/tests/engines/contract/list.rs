//! Where the simulated engine differs from vLLM on purpose, and why.

/// One difference.
#[derive(Debug)]
pub struct Difference {
    /// Name of the case that shows it.
    pub case: &'static str,
    /// What differs.
    pub line: &'static str,
    /// Why it may.
    pub why: &'static str,
}

/// A router's mistake is to show as an error: vLLM computes what it is sent, and the mistake costs time and no more.
const STRICT: &str = "a mistake of the router's must not pass as a slow answer";

/// All that may differ.
pub const LIST: &[Difference] = &[
    Difference {
        case: "strange: decode without a hand-off",
        line: "theirs status 200, ours status 500",
        why: STRICT,
    },
    Difference {
        case: "strange: whole request to prefill",
        line: "theirs status 200, ours status 400",
        why: STRICT,
    },
    Difference {
        case: "strange: prefill of many tokens",
        line: "theirs status 200, ours status 400",
        why: STRICT,
    },
    Difference {
        case: "strange: prefill, streamed",
        line: "theirs status 200, ours status 400",
        why: "vLLM streams such an answer without the hand-off, and holds the KV until its lease ends",
    },
    Difference {
        case: "messages",
        line: "theirs status 200, ours status 404",
        why: "not simulated: pd-router has one worker run that API whole",
    },
    Difference {
        case: "invalid: max_tokens is a number in text",
        line: "theirs status 200, ours status 400",
        why: "vLLM's parser takes numbers in text; pd-router refuses them before any engine sees them",
    },
    Difference {
        case: "invalid: max_tokens has a point",
        line: "theirs status 200, ours status 400",
        why: "vLLM's parser takes whole numbers in any form; the simulated engine's takes the usual one",
    },
    Difference {
        case: "invalid: content type",
        line: "theirs status 400, ours status 200",
        why: "suites send bodies of any type through, to see what of them arrives",
    },
];
