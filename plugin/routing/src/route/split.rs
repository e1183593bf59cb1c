//! Owns which requests can be split into prefill and decode, and why the others cannot.

use super::Refusal;
use crate::config::{Pool, Responses};
use crate::handoff::LegOrder;
use crate::request::Request;

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
