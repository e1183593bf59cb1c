//! Owns which requests can be split into prefill and decode, and why the others cannot.

use super::Refusal;
use crate::config::{Pool, Responses};
use crate::handoff::{LegOrder, Protocol, Splits};
use crate::request::Request;

/// The refusal that a request which cannot be split would get; none if it can be.
pub(super) fn obstacle(pool: &Pool, request: &Request<'_>) -> Option<Refusal> {
    let engine = pool.engine();
    if engine.order().is_ours() && request.max_tokens() == Some(0) {
        return Some(Refusal::Field {
            name: "max_tokens",
            problem: "must be at least 1: there is nothing to decode, and no worker runs whole requests",
        });
    }
    if let Some(unserved) = unserved(engine, request) {
        return Some(unserved);
    }
    let splits = match engine.splits(request.generation) {
        Splits::Yes => true,
        Splits::No => false,
        Splits::IfConfigured => pool.responses == Responses::Split,
    };
    match engine.order() {
        _ if !splits => Some(Refusal::NoHandoffForPath),
        // The blocks can be fetched only once.
        LegOrder::Sequential => request.sequences().check_one().err(),
        LegOrder::Concurrent | LegOrder::Backend | LegOrder::NoHandoff => None,
    }
}

fn unserved(engine: &dyn Protocol, request: &Request<'_>) -> Option<Refusal> {
    let mut rows = engine.unserved().iter();
    let row = rows.find(|row| request.asks(row.part))?;
    Some(Refusal::Field {
        name: row.name,
        problem: row.problem,
    })
}
