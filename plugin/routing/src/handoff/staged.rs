//! Owns what a prefill answer stages: KV that a decode worker is to fetch, and until when it can.

use std::time::Duration;

use crate::json::Edits;

/// KV that prefill has computed and a decode worker is to fetch.
#[derive(Debug, Clone)]
pub struct Staged {
    /// KV blocks staged.
    pub blocks: u64,
    /// The hosts to fetch them from, as far as the prefill answer names them.
    pub hosts: Vec<String>,
    /// Edits of the client's body that make the decode leg.
    pub decode: Edits,
    /// Edits that make the clean-up leg, which only fetches.
    pub cleanup: Edits,
    /// When the prefill worker frees the blocks, since 1970, if known: no worker may fetch them after that.
    pub expires: Option<Duration>,
}

impl Staged {
    /// Limits the expiry to `lease` after `now`, when the answer came.
    pub fn leased(mut self, lease: Option<Duration>, now: Duration) -> Self {
        let ends = lease.map(|lease| now.saturating_add(lease));
        self.expires = [self.expires, ends].into_iter().flatten().min();
        self
    }

    /// Whether the blocks may be freed at `now`, since 1970.
    pub fn has_expired(&self, now: Duration) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }
}
