//! Owns the length check: which requests surely exceed what their model takes. Prefill, which is asked for one token, would
//! compute the prompt, and decode would refuse it.
//!
//! The number of tokens of a text is unknown: a request is refused only if no prompt could make it fit. Sources: vLLM's and
//! SGLang's checks of a request, which add the prompt's tokens to the allowed output tokens.

use super::Refusal;
use crate::handoff::ProtocolRules;
use crate::request::{Limit, Request};

/// The shortest prompt, in tokens, for one that was not sent as ids.
const SHORTEST: u64 = 1;

/// Checks a request to be split against the most tokens that any pair takes.
pub(super) fn check(
    rules: &ProtocolRules,
    longest: Option<u64>,
    request: &Request<'_>,
) -> Result<(), Refusal> {
    let Some(longest) = longest.filter(|_| rules.refuses_too_long) else {
        return Ok(());
    };
    let prompt = request.known_tokens().unwrap_or(SHORTEST);
    // The engines require room for at least one token.
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
