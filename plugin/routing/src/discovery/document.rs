//! Owns the document source: a JSON list of workers, polled from an HTTP cluster.
//!
//! The document is `{"workers": [...]}`, a worker being written as in the static source.

use serde::Deserialize;

use super::static_workers;
use crate::config::{ListedWorker, Protocol};
use crate::fleet::Worker;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    workers: Vec<ListedWorker>,
}

/// Why a document is not believed.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Not JSON, a field of the wrong type, or an unknown one.
    #[error("the document of workers cannot be read: {0}")]
    Format(#[from] serde_json::Error),
    /// Well-formed, but it cannot be meant.
    #[error("the document of workers is wrong: {0}")]
    Value(#[from] crate::config::ConfigError),
}

/// The workers that a document lists.
///
/// # Errors
/// When the document cannot be read; an empty list is no error.
pub fn parse(body: &[u8], protocol: Protocol) -> Result<Vec<Worker>, DocumentError> {
    let document: Document = serde_json::from_slice(body)?;
    crate::config::check_workers(&document.workers, protocol, "")?;
    Ok(static_workers(&document.workers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_lists_workers_as_the_configuration_does() {
        let body = br#"{"workers":[{"address":"10.0.0.1:8000","role":"prefill","id":18446744073709551615,"set":"a"}]}"#;
        let workers = parse(body, Protocol::Nixl).unwrap();
        assert_eq!((workers[0].id.0, workers[0].set.as_str()), (u64::MAX, "a"));
        assert_eq!(parse(br#"{"workers":[]}"#, Protocol::Nixl).unwrap(), []);
        for bad in [
            &b""[..],
            b"[]",
            b"{}",
            br#"{"workers":[{"role":"prefill"}]}"#,
            br#"{"workers":[],"x":1}"#,
        ] {
            assert!(parse(bad, Protocol::Nixl).is_err(), "{bad:?}");
        }
    }
}
