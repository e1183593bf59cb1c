//! Owns the reasons an engine gives for not serving a request, with the statuses and the error JSON of the engine simulated.

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use super::body::{self, Body};
use super::dialect::Dialect;
use super::fault::OrderedStatus;

/// Why a generation request was refused, or failed.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The engine refuses what the request asks for.
    #[error("{0}")]
    BadRequest(String),
    /// The same, of one parameter that it names.
    #[error("{problem}")]
    BadParameter {
        /// Its name.
        name: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The body is no request: JSON that cannot be read, or of other types.
    #[error("{problem}")]
    Invalid {
        /// Where in the body: `body`, or what follows it after a dot.
        place: String,
        /// What is wrong there.
        problem: String,
    },
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
    #[error("{0}")]
    MissingHandoff(&'static str),
    /// The hand-off is malformed, or not one that fits this request.
    #[error("EngineCore encountered an issue: KV load failed: {0}")]
    WrongHandoff(String),
    /// The hand-off was pulled before.
    #[error("EngineCore encountered an issue: KV load failed: the blocks were already pulled")]
    UsedHandoff,
    /// The hand-off's lease is over.
    #[error("EngineCore encountered an issue: KV load failed: the lease of the blocks has expired")]
    ExpiredHandoff,
    /// The prefill engine lost the hand-off, as it was ordered to.
    #[error("EngineCore encountered an issue: KV load failed: the blocks were lost")]
    LostHandoff,
    /// The prefill engine could not be asked.
    #[error("EngineCore encountered an issue: NIXL handshake failed: {0}")]
    UnreachableHandoff(String),
    /// A leg without a bootstrap room.
    #[error(
        "Invalid request: Disaggregated request received without bootstrap room id. req.rid='{0}'"
    )]
    MissingRoom(String),
    /// A bootstrap room that cannot be one, or not for this request.
    #[error("Invalid request: bootstrap_room {0}")]
    BadRoom(String),
    /// The bootstrap address is missing, or not that of the prefill engine.
    #[error("Invalid request: bootstrap address {0}")]
    WrongBootstrap(String),
    /// The bootstrap room was used before.
    #[error("Invalid request: bootstrap_room {0} was already used")]
    UsedRoom(u64),
    /// The room stands for another rank than the one asked for.
    #[error(
        "follow_bootstrap_room conflict: dispatched to dp_rank {asked} but bootstrap_room {room} implies dp_rank {implied}"
    )]
    RankConflict {
        /// The rank asked for.
        asked: u64,
        /// The bootstrap room.
        room: u64,
        /// The rank it stands for.
        implied: u64,
    },
    /// A request id of TensorRT-LLM that another context had before.
    #[error("disagg_request_id {0} was already used")]
    UsedDisaggId(u64),
    /// A request id of TensorRT-LLM that cannot be one.
    #[error("disagg_request_id {0}")]
    BadDisaggId(String),
    /// A data-parallel rank that cannot be one here.
    #[error("Invalid request: data parallel rank {0}")]
    BadRank(String),
    /// The prefill of the room failed, was aborted or lost.
    #[error("{0}")]
    PartnerFailed(String),
    /// The other leg never came.
    #[error("Decode transfer failed for bootstrap_room={0}: timed out in KVPoll.WaitingForInput")]
    PartnerTimeout(u64),
    /// llm-d's sidecar: the prefill engine that was named cannot be reached.
    #[error("the prefill engine cannot be reached")]
    PrefillGone,
    /// llm-d's sidecar: what that one answered, which is an error.
    #[error("the prefill engine answered {0}")]
    PrefillSaid(StatusCode, Bytes),
    /// Ended by `POST /abort_request`.
    #[error("Abort request")]
    Aborted,
    /// Failed because the prompt asked for it.
    #[error("failed as the prompt asks")]
    AsMarked,
    /// To end without an answer, because the prompt asked for it.
    #[error("died as the prompt asks")]
    DiedAsMarked,
    /// Answered with a status that a fault ordered.
    #[error("failed as ordered")]
    Ordered(Box<OrderedStatus>),
    /// To end with a broken connection, as a fault ordered.
    #[error("reset as ordered")]
    ResetByFault,
    /// Ended without a token, as a fault ordered.
    #[error("empty as ordered")]
    EmptiedByFault,
}

impl Refusal {
    /// The HTTP status the engine answers with.
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

    /// The answer, in the engine's error JSON: vLLM's has an `error` object, the others' are flat.
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

    /// vLLM's error JSON, with its `space` after colons and commas, which streams have. What its parser refuses has another
    /// type than what it refuses itself.
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
