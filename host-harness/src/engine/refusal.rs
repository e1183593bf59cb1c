//! Owns the reasons an engine gives for not serving a request, with vLLM's statuses and error JSON.

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde_json::json;

use super::body::{self, Body};

/// Why a generation request was refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The body is not a valid request.
    #[error("{0}")]
    BadRequest(String),
    /// The body is longer than the engine takes.
    #[error("Request body exceeds {0} bytes")]
    TooLarge(usize),
    /// The model is not the one served.
    #[error("The model `{0}` does not exist.")]
    UnknownModel(String),
    /// A prefill engine got something else than a prefill leg.
    #[error("prefill engine only runs prefill legs: {0}")]
    NotAPrefillLeg(&'static str),
    /// A decode engine got no hand-off.
    #[error(
        "EngineCore encountered an issue: kv_transfer_params with do_remote_prefill are required for decode mode"
    )]
    MissingHandoff,
    /// The hand-off is malformed, or not one that fits this request.
    #[error("EngineCore encountered an issue: KV load failed: {0}")]
    WrongHandoff(String),
    /// The hand-off was pulled before.
    #[error("EngineCore encountered an issue: KV load failed: the blocks were already pulled")]
    UsedHandoff,
    /// The hand-off's lease is over.
    #[error("EngineCore encountered an issue: KV load failed: the lease of the blocks has expired")]
    ExpiredHandoff,
    /// The prefill engine could not be asked.
    #[error("EngineCore encountered an issue: NIXL handshake failed: {0}")]
    UnreachableHandoff(String),
}

impl Refusal {
    /// The HTTP status vLLM answers with.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::BadRequest(_) | Self::NotAPrefillLeg(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnknownModel(_) => StatusCode::NOT_FOUND,
            Self::MissingHandoff
            | Self::WrongHandoff(_)
            | Self::UsedHandoff
            | Self::ExpiredHandoff
            | Self::UnreachableHandoff(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The answer, in vLLM's error JSON.
    pub fn response(&self) -> Response<Body> {
        let status = self.status();
        let kind = match status {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::INTERNAL_SERVER_ERROR => "InternalServerError",
            _ => "BadRequestError",
        };
        let error = json!({"error": {
            "message": self.to_string(), "type": kind, "param": null, "code": status.as_u16(),
        }});
        body::json(status, Bytes::from(error.to_string()))
    }
}
