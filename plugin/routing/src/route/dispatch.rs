//! Owns where a leg goes: an ordered list of destinations, for the proxy to walk when connections are refused.

use std::net::SocketAddr;
use std::time::Duration;

use super::chooser::Chooser;
use crate::config::{Destinations, Pool};
use crate::fleet::Target;
use crate::handoff::HeaderValue;
use crate::json::Edits;

/// A leg that the proxy forwards.
#[derive(Debug, Default)]
pub struct Dispatch {
    /// Destinations in order: the next one only if no connection could be made, so that the same bytes fit. Empty: the
    /// cluster's own fallback decides.
    pub destinations: Vec<SocketAddr>,
    /// Headers to set.
    pub headers: Vec<HeaderValue>,
    /// Edits of the client's body; none: unchanged.
    pub edits: Option<Edits>,
    /// Deadlines of the answer.
    pub patience: Patience,
}

/// Deadlines of an answer, after which its worker counts as hung. None: unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Patience {
    /// Until the first token or, if the answer comes unstreamed, until it arrives.
    pub first: Option<Duration>,
    /// Between two pieces of the answer.
    pub silence: Option<Duration>,
    /// Until the answer is complete, if it was requested unstreamed.
    pub total: Option<Duration>,
    /// Until the answer is complete, if it is awaited unstreamed, however it was requested.
    pub whole: Option<Duration>,
}

impl Dispatch {
    /// A leg to a worker, and after it the others to which the same bytes may go if it refuses the connection.
    pub(super) fn to(first: &Target, others: &[Target], pool: &Pool) -> Self {
        let rest = others.iter().filter_map(|other| other.worker.address);
        let destinations = first.worker.address.into_iter().chain(rest);
        Self {
            destinations: destinations.take(attempts(pool)).collect(),
            headers: rank_header(first),
            ..Self::default()
        }
    }

    /// A leg to a frontend, each in turn first, the others after it.
    pub(super) fn to_frontends(pool: &Pool, chooser: &mut Chooser) -> Self {
        let frontends = &pool.frontends;
        let first = chooser.next_frontend(frontends.len());
        let turned = frontends.iter().cycle().skip(first);
        let count = frontends.len().min(attempts(pool));
        Self {
            destinations: turned.take(count).copied().collect(),
            ..Self::default()
        }
    }
}

/// Number of destinations that a leg may have. One, if the proxy connects to any address it is given: such a cluster takes
/// no list.
pub(super) fn attempts(pool: &Pool) -> usize {
    if pool.destinations != Destinations::Members {
        return 1;
    }
    usize::try_from(pool.decode.attempts).unwrap_or(usize::MAX)
}

/// The header by which vLLM and SGLang take a data-parallel rank.
pub(super) fn rank_header(target: &Target) -> Vec<HeaderValue> {
    let rank = target
        .rank
        .map(|rank| ("x-data-parallel-rank", rank.to_string()));
    rank.into_iter().collect()
}
