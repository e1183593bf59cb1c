//! Owns the sources of workers: one file per source, and which of a source's answers are accepted.
//!
//! A source names its next request ([`Source::poll`]) and reads the answer ([`Source::read_answer`]); sending and timing are
//! the caller's. The workers read are not yet the fleet: [`PolledWorkers`] decides which answers count, and [`Staleness`] how
//! long a fleet outlives a silent source.

mod document;
mod dynamo;
mod envoy_clusters;
mod fixed;
mod outside;
mod polled;
mod registration;
mod registry;
mod staleness;

use std::net::SocketAddr;

use crate::config::{ConfigError, Discovery, MAX_RANKS, MAX_WORKERS, Pool, ranks};
use crate::fleet::Worker;

pub use fixed::workers as static_workers;
pub use polled::{Believed, PolledWorkers};
pub use registration::{
    MAX_BODY, Problem, Registration, RegistrationPool, Reply, authorised, read_delete, read_put,
    registration_pool,
};
pub use registry::{Entry, Leases, Named, Registry, RegistryChange, RegistryError};
pub use staleness::Staleness;

/// Longest answer of a source, in bytes; a longer one is not read. Envoy's own answer has some kilobytes per host of each
/// cluster.
pub const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// A source of workers. A VM that begins to poll creates a new one, and so does a pool whose fleet has expired: memory of
/// the last answer must not keep the next one from being read.
pub trait Source {
    /// The next request; none: nothing is polled over HTTP.
    fn poll(&self) -> Option<Poll>;

    /// Reads a complete answer.
    ///
    /// # Errors
    /// When the answer holds no workers. The workers known before stay then.
    fn read_answer(&mut self, answer: &PollAnswer<'_>) -> Result<SourceUpdate, SourceError>;
}

/// A `GET` request to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Poll {
    /// The proxy's cluster.
    pub cluster: String,
    /// Members of the cluster, tried in order while earlier ones fail; empty: the cluster picks.
    pub destinations: Vec<SocketAddr>,
    /// Path and query.
    pub path: String,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
    /// Milliseconds between polls.
    pub interval_ms: u64,
    /// Milliseconds after which a poll has failed.
    pub timeout_ms: u64,
}

/// An answer to a poll.
#[derive(Debug, Clone, Copy)]
pub struct PollAnswer<'a> {
    /// HTTP status.
    pub status: u16,
    /// The header `etag`.
    pub etag: Option<&'a [u8]>,
    /// Response body.
    pub body: &'a [u8],
}

impl PollAnswer<'_> {
    /// Checks that the answer was read to its end.
    fn check_length(&self) -> Result<(), SourceError> {
        match self.body.len() <= MAX_ANSWER {
            true => Ok(()),
            false => Err(SourceError::TooLong),
        }
    }
}

/// Contents of a good answer.
#[derive(Debug, Clone, PartialEq)]
pub enum SourceUpdate {
    /// The workers, and messages for the operator, each given once.
    Workers(Vec<Worker>, Vec<String>),
    /// Unchanged since the last answer.
    Unchanged,
}

/// Why an answer is rejected.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Another status than 200.
    #[error("status {0}")]
    Status(u16),
    /// Not JSON, or without a list of instances.
    #[error("the frontend's /health is not what Dynamo answers: {0}")]
    Dynamo(serde_json::Error),
    /// Not JSON, a field of the wrong type, or an unknown one.
    #[error("the document of workers cannot be read: {0}")]
    Document(serde_json::Error),
    /// A well-formed document, but invalid.
    #[error("the document of workers is wrong: {0}")]
    Listed(#[from] ConfigError),
    /// Not JSON, or not of Envoy's shape.
    #[error("this is not what Envoy answers at /clusters?format=json: {0}")]
    Clusters(serde_json::Error),
    /// Envoy's answer, without any of the configured clusters.
    #[error("Envoy has none of the clusters that discovery.envoy_clusters.members names")]
    NoneKnown,
    /// Longer than [`MAX_ANSWER`].
    #[error("the answer has more than {MAX_ANSWER} bytes")]
    TooLong,
    /// More workers, or ranks of workers, than a pool may have.
    #[error(
        "a pool may have {MAX_WORKERS} workers and {MAX_RANKS} data-parallel ranks at most; these are more"
    )]
    TooMany,
    /// The source polls nothing.
    #[error("nothing was asked")]
    NotAsked,
}

/// The workers, if a pool may have as many, with as many ranks.
fn bounded(workers: Vec<Worker>) -> Result<Vec<Worker>, SourceError> {
    let ranks = ranks(workers.iter().map(|worker| worker.dp_size));
    match workers.len() <= MAX_WORKERS && ranks <= MAX_RANKS {
        true => Ok(workers),
        false => Err(SourceError::TooMany),
    }
}

/// A pool's source; none where the configuration lists its workers.
pub fn source(pool: &Pool) -> Option<Box<dyn Source>> {
    Some(match &pool.discovery {
        Discovery::Static(_) => return None,
        Discovery::Dynamo(poll) => Box::new(dynamo::Dynamo::new(poll, pool)),
        Discovery::Document(poll) => Box::new(document::Document::new(poll, pool)),
        Discovery::EnvoyClusters(poll) => Box::new(envoy_clusters::ClusterPoll::new(poll, pool)),
        Discovery::Registration(_) => Box::new(Registration),
    })
}

#[cfg(test)]
mod tests;
