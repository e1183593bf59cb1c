//! Owns where workers are known from: one file per source, and what of a source's answers is believed.
//!
//! A source says what is to be asked ([`Source::poll`]) and reads the answer ([`Source::heard`]); who asks, and when, is not
//! its business. What it has read is not yet the fleet: [`PolledWorkers`] has a say in that, and [`Staleness`] in how long a fleet
//! outlives a source that has fallen silent.

mod belief;
mod document;
mod dynamo;
mod envoy_clusters;
mod fixed;
mod outside;
mod registration;
mod registry;
mod staleness;

use std::net::SocketAddr;

use crate::config::{Discovery, MAX_RANKS, MAX_WORKERS, Pool, ranks};
use crate::fleet::Worker;

pub use belief::{Believed, PolledWorkers};
pub use document::DocumentError;
pub use dynamo::DynamoError;
pub use envoy_clusters::ClustersError;
pub use fixed::workers as static_workers;
pub use registration::{
    MAX_BODY, Problem, Registration, RegistrationPool, Reply, authorised, office, read_delete,
    read_put,
};
pub use registry::{Change, Entry, Leases, Named, Registry, RegistryError};
pub use staleness::Staleness;

/// Bytes of a source's answer at most; a longer one is not read. Envoy's own tells some kilobytes of each host of each cluster.
pub const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// A source of workers. To be made anew by a VM that begins to poll, and when a fleet has been given up: what it remembers of
/// the last answer must not keep the next one from being read.
pub trait Source {
    /// Its name, as in the configuration.
    fn name(&self) -> &'static str;

    /// What is to be asked next; none: nothing is asked over HTTP.
    fn poll(&self) -> Option<Poll>;

    /// Reads an answer that came whole.
    ///
    /// # Errors
    /// When it says nothing of the workers. What is known stays then.
    fn heard(&mut self, answer: &Answer<'_>) -> Result<Heard, SourceError>;
}

/// What is to be asked, with `GET`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Poll {
    /// The proxy's cluster.
    pub cluster: String,
    /// Members of it, asked one after the other while the first fail; empty: the cluster picks.
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
pub struct Answer<'a> {
    /// Its status.
    pub status: u16,
    /// The header `etag`.
    pub etag: Option<&'a [u8]>,
    /// Its body.
    pub body: &'a [u8],
}

impl Answer<'_> {
    /// That it was read to its end.
    fn check_length(&self) -> Result<(), SourceError> {
        match self.body.len() <= MAX_ANSWER {
            true => Ok(()),
            false => Err(SourceError::TooLong),
        }
    }
}

/// What a good answer says.
#[derive(Debug, Clone, PartialEq)]
pub enum Heard {
    /// These are the workers; and what the operator should know, each thing told once.
    Workers(Vec<Worker>, Vec<String>),
    /// The same as last time.
    Unchanged,
}

/// Why an answer is not believed.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Another status than 200.
    #[error("status {0}")]
    Status(u16),
    /// Not what Dynamo answers.
    #[error(transparent)]
    Dynamo(#[from] DynamoError),
    /// Not a list of workers.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// Not what Envoy answers.
    #[error(transparent)]
    Clusters(#[from] ClustersError),
    /// Longer than [`MAX_ANSWER`].
    #[error("the answer has more than {MAX_ANSWER} bytes")]
    TooLong,
    /// More workers, or ranks of workers, than a pool may have.
    #[error(
        "a pool may have {MAX_WORKERS} workers and {MAX_RANKS} data-parallel ranks at most; these are more"
    )]
    TooMany,
    /// The source asks nothing.
    #[error("nothing was asked")]
    NotAsked,
}

/// As many workers as a pool may have, with as many ranks.
fn bounded(workers: Vec<Worker>) -> Result<Vec<Worker>, SourceError> {
    let ranks = ranks(workers.iter().map(|worker| worker.dp_size));
    match workers.len() <= MAX_WORKERS && ranks <= MAX_RANKS {
        true => Ok(workers),
        false => Err(SourceError::TooMany),
    }
}

/// A pool's source; none where its workers are listed in the configuration.
pub fn source(pool: &Pool) -> Option<Box<dyn Source>> {
    Some(match &pool.discovery {
        Discovery::Static(_) => return None,
        Discovery::Dynamo(poll) => Box::new(dynamo::Dynamo::new(poll, pool)),
        Discovery::Document(poll) => Box::new(document::Document::new(poll, pool)),
        Discovery::EnvoyClusters(poll) => Box::new(envoy_clusters::Clusters::new(poll, pool)),
        Discovery::Registration(_) => Box::new(Registration),
    })
}

#[cfg(test)]
mod tests;
