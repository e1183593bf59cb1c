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
    /// A leg to the host that the cluster's own fallback picks.
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
    /// A leg to a worker, and after it the others to which the same bytes may go if it refuses the connection.
    pub(super) fn dispatch_to(&self, first: &Target, others: &[Target]) -> Dispatch {
        Dispatch {
            destinations: self.addresses(first, others),
            headers: rank_header(first),
            edits: None,
            patience: Patience::default(),
        }
    }

    /// The address of the chosen worker, then those of the others in their order.
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

    /// A leg that a worker answers, with these headers: to the worker itself, or to a frontend.
    pub(super) fn dispatch_through(
        &mut self,
        worker: &Target,
        others: &[Target],
        headers: Vec<HeaderValue>,
    ) -> Dispatch {
        if !self.pool.rules().reaches_workers {
            return self.through_frontends(headers);
        }
        let mut dispatch = self.dispatch_to(worker, others);
        dispatch.headers.extend(headers);
        dispatch
    }

    /// A leg to a frontend, each in turn first, the others after it.
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

    /// Number of destinations that a leg may have. One, if the proxy connects to any address it is given: such a cluster
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
