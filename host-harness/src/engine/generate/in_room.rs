//! Owns the legs of an SGLang request, which run at once and meet in a room of the prefill engine.

use std::net::SocketAddr;
use std::rc::Rc;

use futures_util::future::try_join_all;
use hyper::StatusCode;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::{Events, Job, Outcome, Ready};
use crate::engine::body;
use crate::engine::bootstrap::{self, TakeError, TakeRequest};
use crate::engine::dialect::Dialect;
use crate::engine::dialect::sglang::{self, RoomAddress};
use crate::engine::fault::HandoffFate;
use crate::engine::lease::HandoffPrompt;
use crate::engine::marker::Marker;
use crate::engine::node::EngineContext;
use crate::engine::refusal::Refusal;
use crate::engine::rooms::{RoomPrefill, RoomRefusal};

impl Job {
    /// Computes the prompts and puts the KV of each sequence into its room. The answer, streamed or not, begins after that, so
    /// that a failure is a status.
    pub(super) async fn prefill_in_room(mut self, local: SocketAddr) -> Outcome {
        let room_prefills = match self.enter_rooms(local) {
            Ok(room_prefills) => room_prefills,
            Err(refusal) => return Err((self.flight, refusal)),
        };
        let ready = self.compute_prompt().await;
        if let Some(refusal) = self.poison_to_prefill() {
            return Err((self.flight, refusal));
        }
        if let Some(spoil) = self.faults.spoil() {
            return self.spoil(spoil, (room_prefills, ready));
        }
        self.leave_kv(room_prefills, ready);
        if self.generation.markers.has(Marker::FailPrefillLate) {
            sleep(self.node.config.late).await;
            return Err((self.flight, Refusal::AsMarked));
        }
        self.flight.answered();
        if self.generation.stream {
            let pieces = [
                self.answer.opening(),
                self.answer.token(0),
                self.answer.closing(),
            ];
            return Ok(body::whole_stream(pieces.concat()));
        }
        let content = self.answer.whole(Dialect::Sglang.write(None));
        Ok(body::json(StatusCode::OK, content))
    }

    /// Takes the KV from the rooms, then generates. A stream's headers do not wait for the KV.
    pub(super) async fn decode_in_room(mut self) -> Outcome {
        let (room_addresses, prefill_rank) = match self.find_rooms() {
            Ok(found) => found,
            Err(refusal) => return Err((self.flight, refusal)),
        };
        if self.streams_at_once() {
            return Ok(self.streamed(async move |mut job: Self, events: &Events| {
                match job.take(&room_addresses, prefill_rank).await {
                    Ok(ready) => job.send_tokens(ready, events).await,
                    Err(refusal) => {
                        tracing::debug!(%refusal, "broken off");
                        job.flight.refused(&refusal);
                        events.break_off();
                    }
                }
            }));
        }
        match self.take(&room_addresses, prefill_rank).await {
            Ok(ready) => self.whole(ready).await,
            Err(refusal) => Err((self.flight, refusal)),
        }
    }

    /// Checks a prefill leg and opens its rooms.
    fn enter_rooms(&self, local: SocketAddr) -> Result<Vec<RoomPrefill>, Refusal> {
        let node = &self.node;
        let room_addresses = sglang::room_addresses(&self.generation, &self.id)?;
        let port = node.bootstrap.map_or(0, |bootstrap| bootstrap.port());
        let dp_size = node.config.dp_size;
        let requested = sglang::routed_rank(&self.generation.bootstrap, &self.headers, dp_size)?;
        for room_address in &room_addresses {
            room_address.check_at(SocketAddr::new(local.ip(), port))?;
            room_address.check_rank(requested, dp_size)?;
        }
        let enter = |room_address: &RoomAddress| {
            let room_prefill = node.rooms.enter(&room_address.room.to_string(), &self.id);
            room_prefill.ok_or(Refusal::UsedRoom(room_address.room))
        };
        room_addresses.iter().map(enter).collect()
    }

    /// Puts the KV of each sequence into its room, unless a fault prevents it.
    fn leave_kv(&self, room_prefills: Vec<RoomPrefill>, mut ready: Ready) {
        let block_tokens = u64::from(self.node.config.block_tokens);
        for (room_prefill, of) in room_prefills.into_iter().zip(self.generation.kv_of_each()) {
            let count = of.prompt_tokens.div_ceil(block_tokens);
            let blocks = ready.blocks.split(u32::try_from(count).unwrap_or(u32::MAX));
            match self.faults.fate() {
                HandoffFate::HandedOff => room_prefill.hand_over(blocks, of, Value::Null),
                HandoffFate::Lost => room_prefill.lose(blocks, of, &self.node.kv),
                HandoffFate::Dropped => drop((room_prefill, blocks)),
            }
        }
    }

    /// Checks a decode leg; returns the meeting points of its KV and the prefill's rank as named in the leg.
    fn find_rooms(&self) -> Result<(Vec<RoomAddress>, Option<u64>), Refusal> {
        let node = &self.node;
        let bootstrap = &self.generation.bootstrap;
        let room_addresses = sglang::room_addresses(&self.generation, &self.id)?;
        sglang::routed_rank(bootstrap, &self.headers, node.config.dp_size)?;
        let prefill_rank = sglang::prefill_rank(bootstrap)?;
        for room_address in &room_addresses {
            if !node.rooms.note_decode(&room_address.room.to_string()) {
                return Err(Refusal::UsedRoom(room_address.room));
            }
        }
        Ok((room_addresses, prefill_rank))
    }

    /// Waits for the KV of all sequences. The first tokens come with it, so that no prompt token is computed here.
    async fn take(
        &mut self,
        room_addresses: &[RoomAddress],
        prefill_rank: Option<u64>,
    ) -> Result<Ready, Refusal> {
        let node = Rc::clone(&self.node);
        let blocks = node.kv.reserve(self.blocks).await;
        let takes = room_addresses
            .iter()
            .zip(self.generation.kv_of_each())
            .map(|(room_address, of)| take_one(&node, room_address, prefill_rank, of));
        try_join_all(takes).await?;
        self.flight.run();
        Ok(Ready {
            blocks,
            first_token: Instant::now(),
        })
    }
}

/// Takes the KV of one sequence, which must match `expected`.
async fn take_one(
    node: &EngineContext,
    room_address: &RoomAddress,
    prefill_rank: Option<u64>,
    expected: HandoffPrompt,
) -> Result<(), Refusal> {
    let take = TakeRequest {
        room: room_address.room.to_string(),
        prefill_rank,
        seal: Value::Null,
    };
    let of = bootstrap::take(node, &room_address.host, room_address.port, &take).await;
    match of.map_err(|reason| explain(room_address, prefill_rank, reason))? == expected {
        true => Ok(()),
        false => Err(Refusal::WrongHandoff("the KV is of another prompt".into())),
    }
}

fn explain(room_address: &RoomAddress, prefill_rank: Option<u64>, reason: TakeError) -> Refusal {
    let room = room_address.room;
    let failed = |why: &str| {
        Refusal::PartnerFailed(format!(
            "Decode transfer failed for bootstrap_room={room}: {why}"
        ))
    };
    match reason {
        TakeError::Refused(refused) => match refused.refused {
            RoomRefusal::Used => Refusal::UsedRoom(room),
            RoomRefusal::Expired => Refusal::ExpiredHandoff,
            RoomRefusal::Lost => Refusal::LostHandoff,
            RoomRefusal::PrefillFailed | RoomRefusal::Unknown | RoomRefusal::WrongSeal => {
                failed("the prefill failed")
            }
            RoomRefusal::RankConflict => Refusal::RankConflict {
                requested: prefill_rank.unwrap_or_default(),
                room,
                implied: room_address.rank(refused.dp_size),
            },
        },
        TakeError::TimedOut => Refusal::PartnerTimeout(room),
        TakeError::Unreachable(why) => Refusal::UnreachableHandoff(why),
        TakeError::Lost(why) => failed(&why),
        TakeError::NoServer(why) => Refusal::WrongBootstrap(why),
    }
}
