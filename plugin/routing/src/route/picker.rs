//! Owns the headers read in place of an endpoint picker: the priority of a request's objective, its flow, and the name of its
//! model.

use xxhash_rust::xxh3::xxh3_64;

use crate::config::Pool;
use crate::request::overrides::{FAIRNESS, MODEL_REWRITE, OBJECTIVE, said};

/// The routing overrides of a trusted caller.
pub(super) type OverrideHeaders<'h> = &'h [(Vec<u8>, Vec<u8>)];

/// The model name given by the gateway in front.
pub(super) fn model<'h>(headers: OverrideHeaders<'h>) -> Option<&'h str> {
    said(headers, &MODEL_REWRITE).and_then(|name| std::str::from_utf8(name).ok())
}

/// The priority of the objective that a request names; 0 without one, or if the pool does not have it.
pub(super) fn objective(headers: OverrideHeaders<'_>, pool: &Pool) -> i32 {
    let name = said(headers, &OBJECTIVE).and_then(|name| std::str::from_utf8(name).ok());
    let known = name.and_then(|name| pool.objectives.get(name));
    known.copied().unwrap_or_default()
}

/// The flow that a request names, as a number; 0 without one.
pub(super) fn flow(headers: OverrideHeaders<'_>) -> u64 {
    said(headers, &FAIRNESS).map_or(0, |flow| xxh3_64(flow).max(1))
}
