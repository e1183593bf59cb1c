//! Owns the legs of a request to vLLM engines with a MooncakeConnector, which meet in a transfer of the prefill engine.

use std::rc::Rc;

use hyper::StatusCode;
use serde_json::json;
use tokio::time::Instant;

use super::{Job, Outcome, Ready};
use crate::engine::body;
use crate::engine::bootstrap::{self, TakeError, TakeRequest};
use crate::engine::dialect::{asked_rank, mooncake};
use crate::engine::fault::HandoffFate;
use crate::engine::refusal::Refusal;
use crate::engine::rooms::{RoomPrefill, RoomRefusal};

impl Job {
    /// Computes the prompt and offers its KV under the transfer's id. The answer does not mention it.
    pub(super) async fn prefill_transfer(mut self) -> Outcome {
        let (room_prefill, engine_id) = match self.offer() {
            Ok(offer) => offer,
            Err(refusal) => return Err((self.flight, refusal)),
        };
        let ready = self.compute_prompt().await;
        if let Some(refusal) = self.poison_to_prefill() {
            return Err((self.flight, refusal));
        }
        if let Some(spoil) = self.faults.spoil() {
            return self.spoil(spoil, (room_prefill, ready));
        }
        match self.fate() {
            HandoffFate::HandedOff => {
                room_prefill.hand_over(ready.blocks, self.kv_of(), json!(engine_id))
            }
            HandoffFate::Lost => room_prefill.lose(ready.blocks, self.kv_of(), &self.node.kv),
            HandoffFate::Dropped => drop((room_prefill, ready)),
        }
        let content = self.answer.whole(self.node.config.dialect.write(None));
        self.flight.answered();
        Ok(body::json(StatusCode::OK, content))
    }

    /// Checks a prefill leg and opens its transfer; also returns the id of the rank that runs the leg.
    fn offer(&self) -> Result<(RoomPrefill, String), Refusal> {
        let node = &self.node;
        let dp_size = node.config.dp_size;
        let transfer = mooncake::transfer_id(&self.generation)?;
        let rank = mooncake::prefill_rank(&self.headers, dp_size)?;
        let room_prefill = node.rooms.enter(&transfer, &self.id);
        let room_prefill = room_prefill.ok_or(Refusal::UsedHandoff)?;
        Ok((
            room_prefill,
            mooncake::rank_id(&node.engine_id, rank, dp_size),
        ))
    }

    /// Takes the transfer over; the last prompt token is computed here, with the first output token.
    pub(super) async fn take_transfer(&mut self) -> Result<Ready, Refusal> {
        let node = Rc::clone(&self.node);
        let transfer = mooncake::read(&self.generation)?;
        asked_rank(&self.headers, node.config.dp_size)?;
        // In vLLM each sequence takes the transfer separately, and only the first finds the blocks.
        if self.generation.sequences() > 1 {
            return Err(Refusal::UsedHandoff);
        }
        let blocks = node.kv.reserve(self.blocks).await;
        let take = TakeRequest {
            room: transfer.id,
            prefill_rank: None,
            seal: json!(transfer.engine_id),
        };
        let of = bootstrap::take(&node, &transfer.host, transfer.port, &take).await;
        self.check_prompt(of.map_err(explain)?)?;
        node.tally.computed(1);
        Ok(Ready {
            blocks,
            first_token: Instant::now() + self.pace().tokens(1),
        })
    }
}

fn explain(reason: TakeError) -> Refusal {
    let wrong = |why: &str| Refusal::WrongHandoff(why.to_owned());
    match reason {
        TakeError::Refused(refused) => match refused.refused {
            RoomRefusal::Used => Refusal::UsedHandoff,
            RoomRefusal::Expired => Refusal::ExpiredHandoff,
            RoomRefusal::Lost => Refusal::LostHandoff,
            RoomRefusal::WrongSeal => wrong("remote_engine_id is not that of the prefill"),
            RoomRefusal::Unknown | RoomRefusal::RankConflict => wrong("no such transfer_id"),
            RoomRefusal::PrefillFailed => {
                Refusal::PartnerFailed("KV load failed: the prefill of the transfer failed".into())
            }
        },
        TakeError::TimedOut => wrong("no prefill of this transfer_id came"),
        TakeError::Unreachable(why) => Refusal::UnreachableHandoff(why),
        TakeError::Lost(why) => Refusal::PartnerFailed(format!("KV load failed: {why}")),
        TakeError::NoServer(why) => Refusal::WrongHandoff(why),
    }
}
