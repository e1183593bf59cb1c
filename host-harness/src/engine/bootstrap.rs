//! Owns both ends of the side channel over which a decode engine takes a room's KV (`POST /__room/take`).

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::body::{self, Body};
use super::dialect::Dialect;
use super::lease::HandoffPrompt;
use super::node::EngineContext;
use super::pull::{self, NoAnswer};
use super::rooms::RoomRefusal;

/// Path of the request for a room's KV.
pub const PATH: &str = "/__room/take";

/// A decode engine's request.
#[derive(Serialize, Deserialize)]
pub struct TakeRequest {
    /// The room.
    pub room: String,
    /// SGLang: the prefill's rank, as named in the decode leg.
    pub prefill_rank: Option<u64>,
    /// Proof that the decode belongs to this KV; `null` in SGLang.
    pub seal: Value,
}

/// A prefill engine's refusal.
#[derive(Debug, Serialize, Deserialize)]
pub struct TakeRefusal {
    /// The reason.
    pub refused: RoomRefusal,
    /// Number of ranks.
    pub dp_size: u32,
}

/// Why a decode got no KV.
#[derive(Debug)]
pub enum TakeError {
    /// The prefill engine refused.
    Refused(TakeRefusal),
    /// The prefill engine could not be connected to.
    Unreachable(String),
    /// The answer was lost, or cannot be parsed.
    Lost(String),
    /// No answer in time.
    TimedOut,
    /// The server does not exist.
    NoServer(String),
}

/// The decode engine's end: waits for the KV where the legs meet and takes it.
///
/// # Errors
/// When there is no KV.
pub async fn take(
    node: &EngineContext,
    host: &str,
    port: u16,
    question: &TakeRequest,
) -> Result<HandoffPrompt, TakeError> {
    let uri = pull::address(host, port, PATH)
        .map_err(|error| TakeError::NoServer(format!("has no host: {error}")))?;
    let asking = node.puller.post(uri, question);
    let answer = tokio::time::timeout(node.config.partner_timeout, asking).await;
    let (status, content) = match answer {
        Err(_) => return Err(TakeError::TimedOut),
        Ok(Ok(answer)) => answer,
        Ok(Err(NoAnswer::Unreachable(why))) => return Err(TakeError::Unreachable(why)),
        Ok(Err(error)) => return Err(lost(&error)),
    };
    match status {
        StatusCode::OK => serde_json::from_slice(&content).map_err(|error| lost(&error)),
        StatusCode::CONFLICT => match serde_json::from_slice::<TakeRefusal>(&content) {
            Ok(refused) => Err(TakeError::Refused(refused)),
            Err(error) => Err(lost(&error)),
        },
        _ => Err(TakeError::NoServer(format!(
            "is no bootstrap server: {status}"
        ))),
    }
}

fn lost(why: &dyn std::fmt::Display) -> TakeError {
    TakeError::Lost(why.to_string())
}

/// The prefill engine's end: waits for the room's prefill, except in TensorRT-LLM, where the decode comes after it. Dropped, as
/// when the decode leaves, it no longer waits.
pub async fn answer(node: &EngineContext, content: &[u8]) -> Response<Body> {
    let Ok(take) = serde_json::from_slice::<TakeRequest>(content) else {
        return body::json(StatusCode::BAD_REQUEST, Bytes::from_static(b"{}"));
    };
    let dp_size = node.config.dp_size;
    let (rooms, kv) = (&node.rooms, &node.kv);
    let taken = match node.config.dialect {
        _ if contradicts(&take, dp_size) => Err(RoomRefusal::RankConflict),
        Dialect::Trtllm => rooms.take_now(&take.room, &take.seal, kv),
        _ => rooms.take(&take.room, &take.seal, kv).await,
    };
    match taken {
        Ok(of) => body::serialized(StatusCode::OK, &of),
        Err(refused) => body::serialized(StatusCode::CONFLICT, &TakeRefusal { refused, dp_size }),
    }
}

/// Whether the prefill's rank in the decode leg differs from the rank of the room.
fn contradicts(take: &TakeRequest, dp_size: u32) -> bool {
    let Some(rank) = take.prefill_rank else {
        return false;
    };
    let room: Option<u64> = take.room.parse().ok();
    room.is_none_or(|room| room % u64::from(dp_size) != rank)
}
