//! Owns which requests are surely longer than their model takes: prefill, which is asked for one token, would compute the prompt, and
//! decode refuse it.
//!
//! Of a text it is not known how many tokens it is: only what no prompt can make fit is refused. Sources: vLLM's and SGLang's checks of
//! a request, which add the prompt's tokens to those that the answer may have.

use super::Refusal;
use crate::config::Protocol;
use crate::request::{Limit, Request};

/// The shortest prompt, in tokens, where it was not sent as ids.
const SHORTEST: u64 = 1;

/// Checks a request that is to be split, against the most tokens that any pair takes.
pub(super) fn check(
    protocol: Protocol,
    longest: Option<u64>,
    request: &Request<'_>,
) -> Result<(), Refusal> {
    let Some(longest) = longest.filter(|_| refuses(protocol)) else {
        return Ok(());
    };
    let prompt = request.known_tokens().unwrap_or(SHORTEST);
    // The engines want room for one token at least.
    let Limit { name, tokens } = request.limit().unwrap_or(Limit {
        name: "prompt",
        tokens: 1,
    });
    let asked = prompt.saturating_add(tokens.max(1));
    match asked > longest {
        false => Ok(()),
        true => Err(Refusal::TooLong {
            field: if prompt >= longest { "prompt" } else { name },
            asked,
            longest,
        }),
    }
}

/// TensorRT-LLM cuts a limit that is too high, Dynamo looks itself.
fn refuses(protocol: Protocol) -> bool {
    matches!(
        protocol,
        Protocol::Nixl | Protocol::Mooncake | Protocol::Sglang | Protocol::Llmd
    )
}
