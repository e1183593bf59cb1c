//! Owns the legs of an SGLang request, which run at once and meet in a room of the prefill engine.

use std::net::SocketAddr;
use std::rc::Rc;

use futures_util::future::try_join_all;
use hyper::StatusCode;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::{Events, Job, Outcome, Ready};
use crate::engine::bootstrap::{self, NotTaken, Take};
use crate::engine::dialect::Dialect;
use crate::engine::dialect::sglang::{self, Meeting};
use crate::engine::fault::Fate;
use crate::engine::lease::KvOf;
use crate::engine::marker::Marker;
use crate::engine::node::Node;
use crate::engine::refusal::Refusal;
use crate::engine::rooms::{RoomRefusal, Tenant};
use crate::engine::{body, pull};

impl Job {
    /// Computes the prompts and puts the KV of each sequence into its room. The answer, streamed or not, begins after that, so
    /// that a failure is a status.
    pub(super) async fn prefill_in_room(mut self, local: SocketAddr) -> Outcome {
        let tenants = match self.enter_rooms(local) {
            Ok(tenants) => tenants,
            Err(refusal) => return Err((self.flight, refusal)),
        };
        let ready = self.compute_prompt().await;
        if let Some(refusal) = self.poison_to_prefill() {
            return Err((self.flight, refusal));
        }
        if let Some(spoil) = self.faults.spoil() {
            return self.spoil(spoil, (tenants, ready));
        }
        self.leave_kv(tenants, ready);
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
        let (meetings, prefill_rank) = match self.find_rooms() {
            Ok(found) => found,
            Err(refusal) => return Err((self.flight, refusal)),
        };
        if self.streams_at_once() {
            return Ok(self.streamed(async move |mut job: Self, events: &Events| {
                match job.take(&meetings, prefill_rank).await {
                    Ok(ready) => job.send_tokens(ready, events).await,
                    Err(refusal) => {
                        tracing::debug!(%refusal, "broken off");
                        job.flight.refused(&refusal);
                        events.break_off();
                    }
                }
            }));
        }
        match self.take(&meetings, prefill_rank).await {
            Ok(ready) => self.whole(ready).await,
            Err(refusal) => Err((self.flight, refusal)),
        }
    }

    /// Checks a prefill leg and opens its rooms.
    fn enter_rooms(&self, local: SocketAddr) -> Result<Vec<Tenant>, Refusal> {
        let node = &self.node;
        let meetings = sglang::meetings(&self.generation, &self.id)?;
        let port = node.bootstrap.map_or(0, |bootstrap| bootstrap.port());
        let dp_size = node.config.dp_size;
        let asked = sglang::routed_rank(&self.generation.bootstrap, &self.headers, dp_size)?;
        for meeting in &meetings {
            meeting.check_at(SocketAddr::new(local.ip(), port))?;
            meeting.check_rank(asked, dp_size)?;
        }
        let enter = |meeting: &Meeting| {
            let tenant = node.rooms.enter(&meeting.room.to_string(), &self.id);
            tenant.ok_or(Refusal::UsedRoom(meeting.room))
        };
        meetings.iter().map(enter).collect()
    }

    /// Puts the KV of each sequence into its room, unless a fault prevents it.
    fn leave_kv(&self, tenants: Vec<Tenant>, mut ready: Ready) {
        let block_tokens = u64::from(self.node.config.block_tokens);
        for (tenant, of) in tenants.into_iter().zip(self.generation.kv_of_each()) {
            let count = of.prompt_tokens.div_ceil(block_tokens);
            let blocks = ready.blocks.split(u32::try_from(count).unwrap_or(u32::MAX));
            match self.faults.fate() {
                Fate::HandedOff => tenant.hand_over(blocks, of, Value::Null),
                Fate::Lost => tenant.lose(blocks, of, &self.node.kv),
                Fate::Dropped => drop((tenant, blocks)),
            }
        }
    }

    /// Checks a decode leg; returns the meeting points of its KV and the prefill's rank as named in the leg.
    fn find_rooms(&self) -> Result<(Vec<Meeting>, Option<u64>), Refusal> {
        let node = &self.node;
        let bootstrap = &self.generation.bootstrap;
        let meetings = sglang::meetings(&self.generation, &self.id)?;
        sglang::routed_rank(bootstrap, &self.headers, node.config.dp_size)?;
        let prefill_rank = sglang::prefill_rank(bootstrap)?;
        for meeting in &meetings {
            if !node.rooms.note_decode(&meeting.room.to_string()) {
                return Err(Refusal::UsedRoom(meeting.room));
            }
        }
        Ok((meetings, prefill_rank))
    }

    /// Waits for the KV of all sequences. The first tokens come with it, so that no prompt token is computed here.
    async fn take(
        &mut self,
        meetings: &[Meeting],
        prefill_rank: Option<u64>,
    ) -> Result<Ready, Refusal> {
        let node = Rc::clone(&self.node);
        let blocks = node.kv.reserve(self.blocks).await;
        let takes = meetings
            .iter()
            .zip(self.generation.kv_of_each())
            .map(|(meeting, of)| take_one(&node, meeting, prefill_rank, of));
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
    node: &Node,
    meeting: &Meeting,
    prefill_rank: Option<u64>,
    expected: KvOf,
) -> Result<(), Refusal> {
    let uri = pull::address(&meeting.host, meeting.port, bootstrap::PATH)
        .map_err(|error| Refusal::WrongBootstrap(format!("has no host: {error}")))?;
    let take = Take {
        room: meeting.room.to_string(),
        prefill_rank,
        seal: Value::Null,
    };
    let patience = node.config.partner_timeout;
    let of = bootstrap::take(&node.puller, uri, &take, patience).await;
    match of.map_err(|reason| explain(meeting, prefill_rank, reason))? == expected {
        true => Ok(()),
        false => Err(Refusal::WrongHandoff("the KV is of another prompt".into())),
    }
}

fn explain(meeting: &Meeting, prefill_rank: Option<u64>, reason: NotTaken) -> Refusal {
    let room = meeting.room;
    let failed = |why: &str| {
        Refusal::PartnerFailed(format!(
            "Decode transfer failed for bootstrap_room={room}: {why}"
        ))
    };
    match reason {
        NotTaken::Refused(refused) => match refused.refused {
            RoomRefusal::Used => Refusal::UsedRoom(room),
            RoomRefusal::Expired => Refusal::ExpiredHandoff,
            RoomRefusal::Lost => Refusal::LostHandoff,
            RoomRefusal::PrefillFailed | RoomRefusal::Unknown | RoomRefusal::WrongSeal => {
                failed("the prefill failed")
            }
            RoomRefusal::RankConflict => Refusal::RankConflict {
                asked: prefill_rank.unwrap_or_default(),
                room,
                implied: meeting.rank(refused.dp_size),
            },
        },
        NotTaken::TimedOut => Refusal::PartnerTimeout(room),
        NotTaken::Unreachable(why) => Refusal::UnreachableHandoff(why),
        NotTaken::Lost(why) => failed(&why),
        NotTaken::NoServer(why) => Refusal::WrongBootstrap(why),
    }
}
