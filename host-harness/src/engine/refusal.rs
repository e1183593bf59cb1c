//! Owns the reasons for which an engine does not serve a request, with the statuses and the error JSON of the simulated engine.

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use super::body::{self, Body};
use super::dialect::Dialect;
use super::fault::InjectedStatus;

/// Why a generation request was refused, or failed.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The engine refuses the request's contents.
    #[error("{0}")]
    BadRequest(String),
    /// The same because of one named parameter.
    #[error("{problem}")]
    BadParameter {
        /// Name of the parameter.
        name: &'static str,
        /// The error.
        problem: String,
    },
    /// The body is no valid request: malformed JSON, or wrong types.
    #[error("{problem}")]
    Invalid {
        /// Place in the body: `body`, or a path after `body.`.
        place: String,
        /// The error there.
        problem: String,
    },
    /// The body exceeds the engine's limit.
    #[error("Request body exceeds {0} bytes")]
    TooLarge(usize),
    /// The model is not the one served.
    #[error("The model `{0}` does not exist.")]
    UnknownModel(String),
    /// A prefill engine got a request that is no prefill leg.
    #[error("prefill engine only runs prefill legs: {0}")]
    NotAPrefillLeg(&'static str),
    /// A decode engine got no hand-off.
    #[error("{0}")]
    MissingHandoff(&'static str),
    /// The hand-off is malformed, or does not fit this request.
    #[error("EngineCore encountered an issue: KV load failed: {0}")]
    WrongHandoff(String),
    /// The hand-off was already pulled.
    #[error("EngineCore encountered an issue: KV load failed: the blocks were already pulled")]
    UsedHandoff,
    /// The hand-off's lease has run out.
    #[error("EngineCore encountered an issue: KV load failed: the lease of the blocks has expired")]
    ExpiredHandoff,
    /// The prefill engine lost the hand-off through a fault.
    #[error("EngineCore encountered an issue: KV load failed: the blocks were lost")]
    LostHandoff,
    /// The prefill engine could not be reached.
    #[error("EngineCore encountered an issue: NIXL handshake failed: {0}")]
    UnreachableHandoff(String),
    /// A leg without a bootstrap room.
    #[error(
        "Invalid request: Disaggregated request received without bootstrap room id. req.rid='{0}'"
    )]
    MissingRoom(String),
    /// A bootstrap room that is invalid, or invalid for this request.
    #[error("Invalid request: bootstrap_room {0}")]
    BadRoom(String),
    /// The bootstrap address is missing, or not the prefill engine's.
    #[error("Invalid request: bootstrap address {0}")]
    WrongBootstrap(String),
    /// The bootstrap room was already used.
    #[error("Invalid request: bootstrap_room {0} was already used")]
    UsedRoom(u64),
    /// The room implies another rank than the requested one.
    #[error(
        "follow_bootstrap_room conflict: dispatched to dp_rank {requested} but bootstrap_room {room} implies dp_rank {implied}"
    )]
    RankConflict {
        /// The requested rank.
        requested: u64,
        /// The bootstrap room.
        room: u64,
        /// The implied rank.
        implied: u64,
    },
    /// A request id of TensorRT-LLM that an earlier context had.
    #[error("disagg_request_id {0} was already used")]
    UsedDisaggId(u64),
    /// An invalid request id of TensorRT-LLM.
    #[error("disagg_request_id {0}")]
    BadDisaggId(String),
    /// An invalid data-parallel rank.
    #[error("Invalid request: data parallel rank {0}")]
    BadRank(String),
    /// The prefill of the room failed, was aborted or lost.
    #[error("{0}")]
    PartnerFailed(String),
    /// The other leg never came.
    #[error("Decode transfer failed for bootstrap_room={0}: timed out in KVPoll.WaitingForInput")]
    PartnerTimeout(u64),
    /// llm-d's sidecar: the named prefill engine cannot be reached.
    #[error("the prefill engine cannot be reached")]
    PrefillGone,
    /// llm-d's sidecar: the prefill engine's error answer.
    #[error("the prefill engine answered {0}")]
    PrefillSaid(StatusCode, Bytes),
    /// Ended by `POST /abort_request`.
    #[error("Abort request")]
    Aborted,
    /// Failed because of a marker in the prompt.
    #[error("failed as the prompt asks")]
    AsMarked,
    /// To end without an answer, because of a marker in the prompt.
    #[error("died as the prompt asks")]
    DiedAsMarked,
    /// Answered with an injected status.
    #[error("failed as ordered")]
    Ordered(Box<InjectedStatus>),
    /// To end with a broken connection, because of a fault.
    #[error("reset as ordered")]
    ResetByFault,
    /// Ended without a token, because of a fault.
    #[error("empty as ordered")]
    EmptiedByFault,
}

impl Refusal {
    /// HTTP status of the answer.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::BadRequest(_)
            | Self::BadParameter { .. }
            | Self::Invalid { .. }
            | Self::NotAPrefillLeg(_)
            | Self::MissingRoom(_)
            | Self::BadRoom(_)
            | Self::WrongBootstrap(_)
            | Self::UsedRoom(_)
            | Self::UsedDisaggId(_)
            | Self::BadDisaggId(_)
            | Self::RankConflict { .. }
            | Self::BadRank(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnknownModel(_) => StatusCode::NOT_FOUND,
            Self::MissingHandoff(_)
            | Self::WrongHandoff(_)
            | Self::UsedHandoff
            | Self::ExpiredHandoff
            | Self::LostHandoff
            | Self::UnreachableHandoff(_)
            | Self::PartnerFailed(_)
            | Self::PartnerTimeout(_)
            | Self::Aborted
            | Self::AsMarked
            | Self::DiedAsMarked
            | Self::ResetByFault
            | Self::EmptiedByFault => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Ordered(ordered) => ordered.status,
            Self::PrefillGone => StatusCode::BAD_GATEWAY,
            Self::PrefillSaid(status, _) => *status,
        }
    }

    /// The answer in the engine's error JSON: vLLM's has an `error` object, the others' are flat.
    pub fn response(&self, dialect: Dialect) -> Response<Body> {
        let response = self.written(dialect);
        match self {
            Self::Ordered(ordered) => ordered.response(response),
            Self::PrefillGone => body::json(self.status(), Bytes::new()),
            Self::PrefillSaid(status, answer) => body::json(*status, answer.clone()),
            _ => response,
        }
    }

    fn written(&self, dialect: Dialect) -> Response<Body> {
        let status = self.status();
        let error = match dialect.is_vllm() {
            true => self.vllm_error(""),
            false => json!({
                "object": "error", "message": self.to_string(), "type": self.kind(), "param": null,
                "code": status.as_u16(),
            })
            .to_string(),
        };
        body::json(status, Bytes::from(error))
    }

    /// vLLM's error JSON, with `space` after colons and commas, as in streams. Errors of vLLM's parser have another type than its
    /// own refusals.
    pub fn vllm_error(&self, space: &str) -> String {
        let (kind, param) = match self {
            Self::Invalid { place, .. } => ("Bad Request", Some(place.as_str())),
            Self::BadParameter { name, .. } => (self.kind(), Some(*name)),
            Self::UnknownModel(_) => (self.kind(), Some("model")),
            _ => (self.kind(), None),
        };
        let message = Value::from(self.to_string());
        let (kind, param) = (Value::from(kind), Value::from(param));
        let code = self.status().as_u16();
        format!(
            r#"{{"error":{space}{{"message":{space}{message},{space}"type":{space}{kind},{space}"param":{space}{param},{space}"code":{space}{code}}}}}"#
        )
    }

    fn kind(&self) -> &'static str {
        match self.status() {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::INTERNAL_SERVER_ERROR => "InternalServerError",
            _ => "BadRequestError",
        }
    }
}
