//! Owns both ends of the side channel over which a decode engine pulls blocks from a prefill engine (`POST /__kv/pull`).

use std::fmt::Display;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::http::uri::{Authority, Scheme};
use hyper::{Request, Response, StatusCode, Uri};
use serde::{Deserialize, Serialize};

use super::body::{self, Body};
use super::dialect::Handoff;
use super::kv::Kv;
use super::lease::{HandoffPrompt, PullRefusal};
use super::refusal::Refusal;
use crate::http::{Client, keeping_client};

/// Path of pulls.
pub const PATH: &str = "/__kv/pull";
/// Time after which a silent prefill engine counts as gone.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest accepted answer, in bytes.
const LONGEST_ANSWER: usize = 64 * 1024;

#[derive(Serialize, Deserialize)]
struct Pull {
    remote_engine_id: String,
    remote_request_id: String,
    remote_block_ids: Vec<Vec<u32>>,
}

#[derive(Serialize, Deserialize)]
struct Refused {
    refused: PullRefusal,
}

/// Why the other end gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// The connection failed.
    #[error("cannot connect: {0}")]
    Unreachable(String),
    /// The connection broke before the answer.
    #[error("connection lost: {0}")]
    Lost(String),
    /// The request could not be built.
    #[error("{0}")]
    Unasked(String),
}

/// The decode engine's end.
pub struct Puller(Client);

impl Puller {
    /// A puller that keeps connections between pulls.
    pub fn new() -> Self {
        Self(keeping_client())
    }

    /// Pulls the blocks of a hand-off; returns the identity of their prompt.
    ///
    /// # Errors
    /// A [`Refusal`] because of the hand-off.
    pub async fn pull(&self, handoff: Handoff) -> Result<HandoffPrompt, Refusal> {
        let uri = address(&handoff.host, handoff.port, PATH).map_err(wrong)?;
        match tokio::time::timeout(PATIENCE, self.ask(uri, handoff)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Refusal::UnreachableHandoff("timed out".into())),
        }
    }

    async fn ask(&self, uri: Uri, handoff: Handoff) -> Result<HandoffPrompt, Refusal> {
        let pull = Pull {
            remote_engine_id: handoff.engine_id,
            remote_request_id: handoff.request_id,
            remote_block_ids: handoff.block_groups,
        };
        let (status, content) = match self.post(uri, &pull).await {
            Ok(answer) => answer,
            Err(NoAnswer::Unasked(error)) => return Err(wrong(error)),
            Err(error) => return Err(Refusal::UnreachableHandoff(error.to_string())),
        };
        match status {
            StatusCode::OK => serde_json::from_slice(&content).map_err(wrong),
            StatusCode::CONFLICT => {
                let refused: Refused = serde_json::from_slice(&content).map_err(wrong)?;
                Err(match refused.refused {
                    PullRefusal::Used => Refusal::UsedHandoff,
                    PullRefusal::Expired => Refusal::ExpiredHandoff,
                    PullRefusal::Lost => Refusal::LostHandoff,
                    other => Refusal::WrongHandoff(other.to_string()),
                })
            }
            _ => Err(Refusal::WrongHandoff(format!("remote answered {status}"))),
        }
    }

    /// Posts JSON and reads the answer.
    ///
    /// # Errors
    /// When no answer comes.
    pub async fn post(
        &self,
        uri: Uri,
        question: &impl Serialize,
    ) -> Result<(StatusCode, Bytes), NoAnswer> {
        let unasked = |error: &dyn Display| NoAnswer::Unasked(error.to_string());
        let content = serde_json::to_vec(question).map_err(|error| unasked(&error))?;
        let request = Request::post(uri)
            .header("content-type", "application/json")
            .body(Full::from(content))
            .map_err(|error| unasked(&error))?;
        let answer = self.0.request(request).await.map_err(|error| {
            let words = error.to_string();
            match error.is_connect() {
                true => NoAnswer::Unreachable(words),
                false => NoAnswer::Lost(words),
            }
        })?;
        let status = answer.status();
        let content = Limited::new(answer.into_body(), LONGEST_ANSWER).collect();
        match content.await {
            Ok(content) => Ok((status, content.to_bytes())),
            Err(error) => Err(NoAnswer::Lost(error.to_string())),
        }
    }
}

/// The prefill engine's end: consumes the hand-off named in `content`.
pub fn answer(engine_id: &str, kv: &Kv, content: &[u8]) -> Response<Body> {
    let Ok(pull) = serde_json::from_slice::<Pull>(content) else {
        return body::json(StatusCode::BAD_REQUEST, Bytes::from_static(b"{}"));
    };
    match consume(engine_id, kv, &pull) {
        Ok(of) => body::serialized(StatusCode::OK, &of),
        Err(refused) => body::serialized(StatusCode::CONFLICT, &Refused { refused }),
    }
}

fn consume(engine_id: &str, kv: &Kv, pull: &Pull) -> Result<HandoffPrompt, PullRefusal> {
    if pull.remote_engine_id != engine_id {
        return Err(PullRefusal::WrongEngine);
    }
    kv.consume(&pull.remote_request_id, &pull.remote_block_ids)
}

/// The URI of `path` at a host, an IPv6 address without brackets.
///
/// # Errors
/// When the host is invalid.
pub fn address(host: &str, port: u16, path: &'static str) -> Result<Uri, hyper::http::Error> {
    let authority = match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    };
    Uri::builder()
        .scheme(Scheme::HTTP)
        .authority(Authority::try_from(authority)?)
        .path_and_query(path)
        .build()
}

fn wrong(error: impl Display) -> Refusal {
    Refusal::WrongHandoff(error.to_string())
}
