//! Owns which requests can be split into prefill and decode, and why the others cannot.
//!
//! A request that surely exceeds what its model takes is refused: prefill, which is asked for one token, would compute the
//! prompt, and decode would refuse it. The number of tokens of a text is unknown, so only what no prompt could make fit
//! counts. Sources: vLLM's and SGLang's checks of a request, which add the prompt's tokens to the allowed output tokens.

use super::Refusal;
use crate::config::{Pool, Responses};
use crate::handoff::{LegOrder, ProtocolRules};
use crate::request::{Limit, Request};

/// The shortest prompt, in tokens, for one that was not sent as ids.
const SHORTEST: u64 = 1;

/// The refusal that a request which cannot be split would get; none if it can be.
pub(super) fn obstacle(pool: &Pool, request: &Request<'_>) -> Option<Refusal> {
    let rules = pool.rules();
    if rules.order.is_ours() && request.max_tokens() == Some(0) {
        return Some(Refusal::Field {
            name: "max_tokens",
            problem: "must be at least 1: there is nothing to decode, and no worker runs whole requests",
        });
    }
    let mut unserved = rules.unserved.iter();
    if let Some(row) = unserved.find(|row| request.asks(row.part)) {
        return Some(Refusal::Field {
            name: row.name,
            problem: row.problem,
        });
    }
    let (api, responses) = (&request.generation, pool.responses);
    let is_split = rules.split.contains(api)
        || responses == Responses::Split && rules.split_if_configured.contains(api);
    match rules.order {
        _ if !is_split => Some(Refusal::NoHandoffForPath),
        // The blocks can be fetched only once.
        LegOrder::Sequential => request.sequences().check_one().err(),
        LegOrder::Concurrent | LegOrder::Backend | LegOrder::NoHandoff => None,
    }
}

/// Checks a request to be split against the most tokens that any pair takes.
pub(super) fn check_length(
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
