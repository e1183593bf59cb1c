//! Owns the answers that a fault spoils after their KV is there.

use bytes::Bytes;
use hyper::StatusCode;

use super::{Events, Job, Outcome};
use crate::engine::body;
use crate::engine::fault::AnswerFault;
use crate::engine::refusal::Refusal;

impl Job {
    /// Whether a stream's headers go out before its KV is there, where the dialect allows that.
    pub(super) fn streams_at_once(&self) -> bool {
        self.generation.stream
            && self.faults.spoil() != Some(AnswerFault::ResetBeforeHeaders)
            && self.poison_to_decode().is_none()
    }

    /// The spoilt answer. A silent one keeps `held` until its client leaves.
    pub(super) fn spoil(self, spoil: AnswerFault, held: impl Sized + 'static) -> Outcome {
        let stream = self.generation.stream;
        if spoil == AnswerFault::ResetBeforeHeaders {
            return Err((self.flight, Refusal::ResetByFault));
        }
        if spoil == AnswerFault::Empty && !stream {
            self.flight.refused(&Refusal::EmptiedByFault);
            return Ok(body::json(StatusCode::OK, Bytes::new()));
        }
        let feed = self.fed(async move |job: Self, events: &Events| {
            job.spoil_events(spoil, events).await;
            drop(held);
        });
        Ok(match stream {
            true => body::events(feed),
            false => body::unfinished(feed),
        })
    }

    /// The same after the headers have been sent.
    pub(super) async fn spoil_events(self, spoil: AnswerFault, events: &Events) {
        match spoil {
            AnswerFault::Silent => std::future::pending().await,
            AnswerFault::Empty => self.flight.refused(&Refusal::EmptiedByFault),
            AnswerFault::ResetBeforeHeaders | AnswerFault::ResetAfterHeaders => {
                self.flight.refused(&Refusal::ResetByFault);
                events.break_off();
            }
        }
    }
}
