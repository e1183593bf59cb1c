//! Owns what each leg of a hand-off is sent: two traits, and one file for each engine that implements them.

pub mod aggregated;
pub mod binding;
pub mod direct;
pub mod hosts;
pub mod llmd;
pub mod mooncake;
pub mod nixl;
pub mod one_token;
pub mod protocol;
pub mod rooms;
pub mod sglang;
pub mod staged;
pub mod terminal;
pub mod trtllm;
pub mod unserved;

pub use protocol::{AbortCall, Handoff, HandoffPair, LegOrder, Prefill, Protocol, ProtocolRules};
pub use staged::Staged;

use crate::json::Edits;
use crate::request::Request;
use crate::transfer::{IN_REQUESTS, TransferField};

/// A header of a leg. Set, never added, so that a client's own value does not remain beside it.
pub type HeaderValue = (&'static str, String);

/// Longest hand-off in a prefill answer, in bytes: the ids of a prompt of a million tokens, seven bytes each, and its
/// blocks' ids.
pub const MAX_HANDOFF: usize = 8 * 1024 * 1024;

/// The most bytes of a worker's answer to a call; a worker that sends more has failed. A prefill worker's holds a hand-off, one
/// token, and the prompt's ids or log-probabilities if requested.
pub const MAX_CALL_ANSWER: usize = 32 * 1024 * 1024;

/// Edits that remove an empty hand-off (null or `{}`), for a request that one worker runs; none where the client sent no
/// such field.
pub fn without_handoff_fields(request: &Request<'_>) -> Option<Edits> {
    let mut edits = request.body.edit();
    let mut found = false;
    for name in IN_REQUESTS {
        found |= edits.remove_all(&request.body, name);
    }
    found.then_some(edits)
}

/// The edits of the client's body, with those that remove these members.
fn without(request: &Request<'_>, fields: &[TransferField], mut edits: Edits) -> Edits {
    for field in fields {
        edits.remove_all(&request.body, field.name());
    }
    edits
}

#[cfg(test)]
mod tests;
