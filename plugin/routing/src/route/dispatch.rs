//! Owns where a leg goes: an ordered list of destinations, for the proxy to walk when connections are refused.

use std::net::SocketAddr;
use std::time::Duration;

use super::Router;
use crate::config::Destinations;
use crate::fleet::Target;
use crate::handoff::HeaderValue;
use crate::json::Edits;

/// A leg that the proxy forwards.
#[derive(Debug)]
pub struct Dispatch {
    /// Where to, in order: the next one only if a connection could not be made, so that the same bytes fit. None: where the
    /// cluster's own fallback says.
    pub destinations: Vec<SocketAddr>,
    /// Headers to be set.
    pub headers: Vec<HeaderValue>,
    /// Changes of the client's body; none: as it is.
    pub edits: Option<Edits>,
    /// How long the answer may take.
    pub patience: Patience,
}

/// How long an answer may take before its worker is taken for one that hangs. None: as long as it likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Patience {
    /// Until its first token or, where it comes in one piece, until it comes.
    pub first: Option<Duration>,
    /// Between two of its pieces.
    pub silence: Option<Duration>,
    /// Until it has come to its end, where it was asked for in one piece.
    pub total: Option<Duration>,
    /// Until it has come to its end, where it is waited for in one piece, however it was asked for.
    pub whole: Option<Duration>,
}

impl Dispatch {
    /// To whomever the cluster's own fallback picks.
    pub(super) fn anywhere() -> Self {
        Self {
            destinations: Vec::new(),
            headers: Vec::new(),
            edits: None,
            patience: Patience::default(),
        }
    }
}

impl Router {
    /// To a worker, and behind it the others to whom the same bytes may go if it refuses the connection.
    pub(super) fn dispatch_to(&self, first: &Target, others: &[Target]) -> Dispatch {
        Dispatch {
            destinations: self.addresses(first, others),
            headers: rank_header(first),
            edits: None,
            patience: Patience::default(),
        }
    }

    /// The chosen one, then the others in their order.
    fn addresses(&self, first: &Target, others: &[Target]) -> Vec<SocketAddr> {
        let rest = others.iter().filter_map(|other| other.worker.address);
        first
            .worker
            .address
            .into_iter()
            .chain(rest)
            .take(self.decode_attempts())
            .collect()
    }

    /// To a frontend, each in turn first, the others behind it.
    pub(super) fn through_frontends(&mut self, headers: Vec<HeaderValue>) -> Dispatch {
        let frontends = &self.pool.frontends;
        let first = self
            .next_frontend
            .checked_rem(frontends.len())
            .unwrap_or_default();
        let turned = frontends.iter().cycle().skip(first);
        let destinations = turned
            .take(frontends.len().min(self.decode_attempts()))
            .copied()
            .collect();
        self.next_frontend = self.next_frontend.wrapping_add(1);
        Dispatch {
            destinations,
            headers,
            edits: None,
            patience: Patience::default(),
        }
    }

    /// How many destinations a leg may have. One, where the proxy connects to whatever address it is given: such a cluster
    /// takes no list.
    pub(super) fn decode_attempts(&self) -> usize {
        if self.pool.destinations != Destinations::Members {
            return 1;
        }
        usize::try_from(self.pool.decode.attempts).unwrap_or(usize::MAX)
    }
}

/// The header by which vLLM and SGLang take a data-parallel rank.
pub(super) fn rank_header(target: &Target) -> Vec<HeaderValue> {
    let rank = target
        .rank
        .map(|rank| ("x-data-parallel-rank", rank.to_string()));
    rank.into_iter().collect()
}
