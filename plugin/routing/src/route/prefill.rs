//! Owns the sequential hand-off: the prefill leg, and what each possible answer to it leads to.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;

use super::{Dispatch, PrefillFailure, Refusal, Router, rank_header};
use crate::fleet::{Target, Worker, WorkerId};
use crate::handoff::HeaderValue;
use crate::handoff::nixl::Handoff;
use crate::json::Edits;
use crate::load::PrefillCharge;

/// A request whose prefill worker is being called. Consumed by the answer; its charge ends with the call.
#[derive(Debug)]
pub struct PrefillPhase {
    pub(super) prefill: Target,
    pub(super) decode: Target,
    pub(super) others: Vec<Target>,
    pub(super) charge: PrefillCharge,
    pub(super) model: String,
    pub(super) prompt_tokens: u64,
    pub(super) tried: Vec<WorkerId>,
    pub(super) prefill_edits: Edits,
    pub(super) decode_edits: Edits,
}

/// How a prefill call ended.
#[derive(Debug, Clone, Copy)]
pub enum PrefillAnswer<'a> {
    /// The proxy would not make the call.
    NotSent,
    /// The connection broke after the answer had begun.
    Broken,
    /// A whole answer, from the worker or, with 503 and 504, from the proxy that could not get one.
    Whole {
        /// Its status.
        status: u16,
        /// Its body.
        body: &'a [u8],
    },
}

impl fmt::Display for PrefillAnswer<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSent => out.write_str("not sent"),
            Self::Broken => out.write_str("broken off"),
            Self::Whole { status, .. } => write!(out, "status {status}"),
        }
    }
}

/// What follows from prefill's answer.
pub enum AfterPrefill {
    /// Decode runs, with this many KV blocks waiting for it.
    Decode {
        /// The decode leg.
        dispatch: Dispatch,
        /// Blocks that the prefill worker holds until decode fetches them.
        blocks: u64,
    },
    /// Another prefill worker is called.
    Again(PrefillPhase),
    /// The worker's answer is the client's, as it came: the request itself was at fault.
    Answer,
    /// The request is refused.
    Refused(Refusal),
}

impl PrefillPhase {
    /// The worker that is called.
    pub fn worker(&self) -> &Rc<Worker> {
        &self.prefill.worker
    }

    /// Where the call goes; none cannot be, since configuration demands an address.
    pub fn destination(&self) -> Option<SocketAddr> {
        self.prefill.worker.address
    }

    /// Headers to be set on the call.
    pub fn headers(&self) -> Vec<HeaderValue> {
        rank_header(&self.prefill)
    }

    /// The call's body, made from the client's.
    pub fn body(&self, client: &[u8]) -> Vec<u8> {
        self.prefill_edits.apply(client)
    }

    /// Takes the answer and says what follows.
    pub fn answered(self, answer: PrefillAnswer<'_>, router: &mut Router) -> AfterPrefill {
        match answer {
            PrefillAnswer::Whole {
                status: 200..=299,
                body,
            } => match Handoff::parse(body) {
                Some(handoff) => self.decode(handoff, router),
                None => self.failed(PrefillFailure::NoHandoff, router),
            },
            PrefillAnswer::Whole {
                status: 400..=499, ..
            } => AfterPrefill::Answer,
            PrefillAnswer::Whole { status, .. } => {
                self.failed(PrefillFailure::Status(status), router)
            }
            PrefillAnswer::Broken => self.failed(PrefillFailure::Broken, router),
            PrefillAnswer::NotSent => self.failed(PrefillFailure::NotSent, router),
        }
    }

    fn decode(mut self, handoff: Handoff, router: &mut Router) -> AfterPrefill {
        let blocks = handoff.blocks();
        handoff.put_into(&mut self.decode_edits);
        AfterPrefill::Decode {
            dispatch: Dispatch {
                destinations: router.addresses(&self.decode, &self.others),
                headers: rank_header(&self.decode),
                edits: Some(self.decode_edits),
            },
            blocks,
        }
    }

    /// Another worker that may hand over to the same decode worker, or the end.
    fn failed(mut self, cause: PrefillFailure, router: &mut Router) -> AfterPrefill {
        self.tried.push(self.prefill.worker.id);
        let allowed = usize::try_from(router.pool.prefill.attempts).unwrap_or(usize::MAX);
        let next = match self.tried.len() < allowed {
            true => router.pick_prefill(Some(&self.model), &self.tried, |worker| {
                worker.pairs_with(&self.decode.worker)
            }),
            false => None,
        };
        let Some(next) = next else {
            return AfterPrefill::Refused(Refusal::PrefillFailed {
                tried: self.tried.len(),
                cause,
            });
        };
        self.charge = router.ledger.charge_prefill(next.key(), self.prompt_tokens);
        self.prefill = next;
        AfterPrefill::Again(self)
    }
}
