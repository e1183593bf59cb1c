//! Owns the legs of a request to TensorRT-LLM engines: context first, then the generation that repeats the context's answer.

use std::net::SocketAddr;
use std::rc::Rc;

use hyper::StatusCode;
use tokio::time::Instant;

use super::{Job, Outcome, Ready};
use crate::engine::body;
use crate::engine::bootstrap::{self, TakeError, TakeRequest};
use crate::engine::dialect::{HandoffFields, trtllm};
use crate::engine::fault::HandoffFate;
use crate::engine::marker::Marker;
use crate::engine::refusal::Refusal;
use crate::engine::rooms::{RoomPrefill, RoomRefusal};

impl Job {
    /// Computes the prompt and holds its KV for a generation leg that repeats this answer.
    pub(super) async fn prefill_context(mut self, local: SocketAddr) -> Outcome {
        let (id, room_prefill) = match self.enter_context() {
            Ok(entered) => entered,
            Err(refusal) => return Err((self.flight, refusal)),
        };
        let ready = self.compute_prompt().await;
        if let Some(refusal) = self.poison_to_prefill() {
            return Err((self.flight, refusal));
        }
        let ended = self.generation.markers.has(Marker::End);
        if let Some(spoil) = self.faults.spoil() {
            return self.spoil(spoil, (room_prefill, ready));
        }
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        let params = trtllm::DisaggregatedParams::new(id, format!("http://{local}"));
        let of = self.kv_of();
        match self.fate() {
            HandoffFate::HandedOff => {
                room_prefill.hand_over(ready.blocks, of, params.seal(&self.answer.usage()));
            }
            HandoffFate::Lost => room_prefill.lose(ready.blocks, of, &self.node.kv),
            HandoffFate::Dropped => drop((room_prefill, ready)),
        }
        let content = self.answer.whole(HandoffFields {
            disaggregated_params: match self.fate() {
                HandoffFate::Dropped if ended => Some(params.ended()),
                HandoffFate::Dropped => None,
                HandoffFate::HandedOff | HandoffFate::Lost => Some(params),
            },
            prompt_token_ids: self.generation.ids.take().map(|prompt| prompt.ids),
            ..HandoffFields::default()
        });
        self.flight.answered();
        Ok(body::json(StatusCode::OK, content))
    }

    /// Checks a context leg and registers its id, which is valid once.
    fn enter_context(&self) -> Result<(u64, RoomPrefill), Refusal> {
        let id = trtllm::context_id(&self.generation)?;
        let room_prefill = self.node.rooms.enter(&id.to_string(), &self.id);
        Ok((id, room_prefill.ok_or(Refusal::UsedDisaggId(id))?))
    }

    /// Takes the context over. The first token came with it, so that no prompt token is computed here.
    pub(super) async fn take_context(&mut self) -> Result<Ready, Refusal> {
        let node = Rc::clone(&self.node);
        let context = trtllm::read(&self.generation)?;
        let blocks = node.kv.reserve(self.blocks).await;
        let take = TakeRequest {
            room: context.id.to_string(),
            prefill_rank: None,
            seal: context.seal,
        };
        let of = bootstrap::take(&node, &context.host, context.port, &take).await;
        self.check_prompt(of.map_err(explain)?)?;
        Ok(Ready {
            blocks,
            first_token: Instant::now(),
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
            RoomRefusal::WrongSeal => {
                wrong("disaggregated_params are not what the context answered")
            }
            RoomRefusal::Unknown | RoomRefusal::RankConflict => wrong("no such disagg_request_id"),
            RoomRefusal::PrefillFailed => wrong("the context of this disagg_request_id failed"),
        },
        TakeError::TimedOut => Refusal::UnreachableHandoff("timed out".into()),
        TakeError::Unreachable(why) | TakeError::Lost(why) => Refusal::UnreachableHandoff(why),
        TakeError::NoServer(why) => Refusal::WrongHandoff(why),
    }
}
