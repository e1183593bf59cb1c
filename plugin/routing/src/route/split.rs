//! Owns which requests can be split into prefill and decode, by protocol, and why the others cannot.

use super::Refusal;
use crate::config::{Legs, Protocol};
use crate::request::{Generation, Request};

/// What keeps a request from being split, as its caller would be told; none where nothing does.
pub(super) fn obstacle(protocol: Protocol, request: &Request<'_>) -> Option<Refusal> {
    if protocol.legs() != Legs::Elsewhere && request.max_tokens() == Some(0) {
        return Some(Refusal::Field {
            name: "max_tokens",
            problem: "must be at least 1: there is nothing to decode, and no worker runs whole requests",
        });
    }
    match (protocol.legs(), request.generation) {
        // The body is not touched: whoever runs the legs knows.
        (Legs::Elsewhere, _) => None,
        (Legs::Concurrent, Generation::Generate) => None,
        (_, Generation::Other | Generation::Generate) => Some(Refusal::NoHandoffForPath),
        (_, Generation::Responses) if protocol == Protocol::Trtllm => {
            Some(Refusal::NoHandoffForPath)
        }
        (Legs::Concurrent, _) => None,
        // The blocks are gone once they are fetched.
        (Legs::Sequential, _) => request.sequences().check_one().err(),
    }
}
