//! The bootstrap server over which an SGLang decode engine takes a room's KV (`POST /__room/take`), both ends.

use std::time::Duration;

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};

use super::body::{self, Body};
use super::dialect::sglang::Meeting;
use super::lease::KvOf;
use super::node::Node;
use super::pull::{self, NoAnswer, Puller};
use super::refusal::Refusal;
use super::rooms::RoomRefusal;

/// Where rooms are asked for.
pub const PATH: &str = "/__room/take";

#[derive(Serialize, Deserialize)]
struct Take {
    room: u64,
    /// The rank that the decode was told has the prefill.
    prefill_rank: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct Refused {
    refused: RoomRefusal,
    dp_size: u32,
}

/// A decode engine's end: waits for the KV where the legs meet and takes it.
///
/// # Errors
/// A [`Refusal`] about the room.
pub async fn take(
    puller: &Puller,
    meeting: &Meeting,
    prefill_rank: Option<u64>,
    patience: Duration,
) -> Result<KvOf, Refusal> {
    let wrong = |why: String| Refusal::WrongBootstrap(why);
    let uri = pull::address(&meeting.host, meeting.port, PATH)
        .map_err(|error| wrong(format!("has no host: {error}")))?;
    let room = meeting.room;
    let question = Take { room, prefill_rank };
    let answer = tokio::time::timeout(patience, puller.post(uri, &question)).await;
    let (status, content) = match answer {
        Err(_) => return Err(Refusal::PartnerTimeout(room)),
        Ok(Ok(answer)) => answer,
        Ok(Err(NoAnswer::Unreachable(why))) => return Err(Refusal::UnreachableHandoff(why)),
        Ok(Err(error)) => return Err(failed(room, &error)),
    };
    match status {
        StatusCode::OK => serde_json::from_slice(&content).map_err(|error| failed(room, &error)),
        StatusCode::CONFLICT => match serde_json::from_slice::<Refused>(&content) {
            Ok(refused) => Err(explain(meeting, prefill_rank, &refused)),
            Err(error) => Err(failed(room, &error)),
        },
        _ => Err(wrong(format!("is no bootstrap server: {status}"))),
    }
}

fn explain(meeting: &Meeting, prefill_rank: Option<u64>, refused: &Refused) -> Refusal {
    let room = meeting.room;
    match refused.refused {
        RoomRefusal::Used => Refusal::UsedRoom(room),
        RoomRefusal::PrefillFailed => failed(room, &"the prefill failed"),
        RoomRefusal::Expired => Refusal::ExpiredHandoff,
        RoomRefusal::Lost => Refusal::LostHandoff,
        RoomRefusal::RankConflict => Refusal::RankConflict {
            asked: prefill_rank.unwrap_or_default(),
            room,
            implied: meeting.rank(refused.dp_size),
        },
    }
}

fn failed(room: u64, why: &dyn std::fmt::Display) -> Refusal {
    Refusal::PartnerFailed {
        room,
        why: why.to_string(),
    }
}

/// A prefill engine's end: waits for the room's prefill. Dropped, as when the decode leaves, it no longer waits.
pub async fn answer(node: &Node, content: &[u8]) -> Response<Body> {
    let Ok(take) = serde_json::from_slice::<Take>(content) else {
        return body::json(StatusCode::BAD_REQUEST, Bytes::from_static(b"{}"));
    };
    let dp_size = node.config.dp_size;
    let implied = take.room % u64::from(dp_size);
    let taken = match take.prefill_rank {
        Some(rank) if rank != implied => Err(RoomRefusal::RankConflict),
        _ => node.rooms.take(take.room, &node.kv).await,
    };
    match taken {
        Ok(of) => reply(StatusCode::OK, &of),
        Err(refused) => reply(StatusCode::CONFLICT, &Refused { refused, dp_size }),
    }
}

fn reply(status: StatusCode, content: &impl Serialize) -> Response<Body> {
    let content = serde_json::to_vec(content).unwrap_or_default();
    body::json(status, content.into())
}
