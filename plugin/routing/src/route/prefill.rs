//! Owns the hand-off: the prefill leg, beside or before decode, and what each possible answer to it leads to.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;

use super::ask::{Asked, Case};
use super::choice::{Chosen, Pair};
use super::dispatch::rank_header;
use super::health::Outcome;
use super::{Dispatch, Fallback, Plan, PrefillFailure, Refusal, Router, Seat};
use crate::config::OnPrefillFailure;
use crate::fleet::{Target, TargetKey, Worker, WorkerId};
use crate::handoff::nixl::{self, Handoff};
use crate::handoff::sglang::{self, Bootstrap};
use crate::handoff::terminal::{Form, Terminal};
use crate::handoff::{HeaderValue, handoff_fields_only};
use crate::json::Edits;
use crate::load::PrefillCharge;
use crate::prefill_router::Place;
use crate::rendezvous::NotServed;
use crate::request::{Request, Steering};

/// A request whose prefill worker is being called. Consumed by the answer; its charge ends with the call.
#[derive(Debug)]
pub struct PrefillPhase {
    place: Place,
    steering: Steering,
    form: Form,
    asked: Asked,
    prefill: Chosen,
    decode: Chosen,
    others: Vec<Target>,
    charge: Option<PrefillCharge>,
    tried: Vec<WorkerId>,
    legs: Legs,
}

/// What the legs are sent, by protocol.
#[derive(Debug)]
enum Legs {
    /// Prefill first; its answer completes the decode leg, or the one that cleans up.
    Sequential {
        prefill: Edits,
        decode: Edits,
        cleanup: Edits,
        whole: Option<Edits>,
    },
    /// Both at once, meeting in a room.
    Concurrent {
        prefill: Edits,
        decode: Edits,
        room: u64,
        bootstrap: Bootstrap,
    },
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

/// Whether anybody still waits for the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// The client does.
    Waits,
    /// It has left.
    Left,
}

/// What follows from prefill's answer.
#[allow(
    clippy::large_enum_variant,
    reason = "one a request, moved once or twice: cheaper than a box"
)]
pub enum AfterPrefill {
    /// Decode runs, with this many KV blocks waiting for it.
    Decode {
        /// The decode leg.
        dispatch: Dispatch,
        /// Blocks that the prefill worker holds until decode fetches them.
        blocks: u64,
        /// The decode worker and its rank: another one than before, where that has left.
        target: (Rc<Worker>, TargetKey),
    },
    /// Another prefill worker is called.
    Again(PrefillPhase),
    /// The worker's answer is the client's, as it came: the request itself was at fault.
    Answer,
    /// Generation ended by itself: this is the client's answer.
    Terminal(Terminal),
    /// The decode worker runs the request whole.
    Whole {
        /// The leg.
        dispatch: Dispatch,
        /// Why.
        fallback: Fallback,
    },
    /// Decode is running already, and prefill has done its part.
    Good,
    /// The request is refused, or the answer that has begun is broken off.
    Refused(Refusal),
    /// The client has left, and KV blocks wait for a decode that it would have been: they are fetched and dropped.
    CleanUp(CleanUpLeg),
    /// The client has left, and nobody can fetch the KV blocks that wait for it.
    Leaked {
        /// How many.
        blocks: u64,
    },
    /// The client has left, and nothing remains to be done.
    Nothing,
}

/// The leg that fetches KV blocks which a client has left behind: one token, no stream.
#[derive(Debug)]
pub struct CleanUpLeg {
    /// The leg, with changes of the client's body.
    pub dispatch: Dispatch,
    /// Blocks that leak if this leg fails.
    pub blocks: u64,
}

/// The call that makes a prefill worker drop a request whose client has left.
#[derive(Debug, PartialEq, Eq)]
pub struct AbortLeg {
    /// Where to.
    pub destination: SocketAddr,
    /// Path and query.
    pub path: &'static str,
    /// Its JSON body.
    pub body: String,
}

impl Router {
    /// Books a pair, and prepares what its legs are sent.
    pub(super) fn prefill_phase(
        &mut self,
        case: &Case<'_>,
        pair: Pair,
        bootstrap: Option<Bootstrap>,
        request: &Request<'_>,
    ) -> Plan {
        let seat = Seat {
            prefill: Some(Rc::clone(&pair.prefill.target.worker)),
            decode: Some(Rc::clone(&pair.decode.target.worker)),
            decode_charge: Some(self.charge_decode(&pair.decode, case.asked)),
            ..Seat::default()
        };
        let legs = match bootstrap {
            Some(bootstrap) => Legs::Concurrent {
                prefill: sglang::prefill_edits(request),
                decode: sglang::decode_edits(request),
                room: self.rooms.draw(
                    pair.prefill.target.rank.unwrap_or(0),
                    pair.prefill.target.worker.dp_size,
                ),
                bootstrap,
            },
            None => Legs::Sequential {
                prefill: nixl::prefill_edits(request),
                decode: nixl::decode_edits(request),
                cleanup: nixl::cleanup_edits(request),
                whole: handoff_fields_only(request),
            },
        };
        let phase = PrefillPhase {
            place: case.place.clone(),
            steering: case.steering.clone(),
            asked: case.asked.clone(),
            form: request.form(),
            charge: Some(self.charge_prefill(&pair.prefill, case.asked)),
            prefill: pair.prefill,
            decode: pair.decode,
            others: pair.others,
            tried: Vec::new(),
            legs,
        };
        Plan::Prefill(phase, seat)
    }
}

impl Router {
    /// What a prefill worker's answer says of the worker itself. One that cannot be reached is thought to have lost its cache.
    fn heard_of(&mut self, key: TargetKey, answer: PrefillAnswer<'_>) {
        let outcome = match answer {
            PrefillAnswer::NotSent
            | PrefillAnswer::Whole {
                status: 503 | 504, ..
            } => Outcome::Unreachable,
            PrefillAnswer::Whole { status: 429, .. } => Outcome::Overloaded,
            PrefillAnswer::Whole {
                status: 200..=499, ..
            } => Outcome::Good,
            PrefillAnswer::Broken | PrefillAnswer::Whole { .. } => Outcome::Failed,
        };
        self.heard(key.worker, outcome);
    }
}

impl PrefillPhase {
    /// The worker that is called.
    pub fn worker(&self) -> &Rc<Worker> {
        &self.prefill.target.worker
    }

    /// Where the call goes; none cannot be, since configuration demands an address.
    pub fn destination(&self) -> Option<SocketAddr> {
        self.prefill.target.worker.address
    }

    /// Headers to be set on the call.
    pub fn headers(&self) -> Vec<HeaderValue> {
        rank_header(&self.prefill.target)
    }

    /// The call's body, made from the client's.
    pub fn body(&self, client: &[u8]) -> Vec<u8> {
        match &self.legs {
            Legs::Sequential { prefill, .. } => prefill.apply(client),
            Legs::Concurrent {
                prefill,
                room,
                bootstrap,
                ..
            } => {
                let mut edits = prefill.clone();
                edits.insert("rid", format!("\"{}\"", rid(*room)));
                bootstrap.put_into(*room, &mut edits);
                edits.apply(client)
            }
        }
    }

    /// The decode leg of a hand-off that does not wait for prefill's answer: due as soon as the call has been made.
    pub fn decode_beside(&self, router: &mut Router) -> Option<Dispatch> {
        let Legs::Concurrent {
            decode,
            room,
            bootstrap,
            ..
        } = &self.legs
        else {
            return None;
        };
        let mut edits = decode.clone();
        bootstrap.put_into(*room, &mut edits);
        // A room is used once: the same bytes fit no other worker.
        let mut dispatch = router.dispatch_to(&self.decode.target, &[]);
        dispatch.edits = Some(edits);
        Some(dispatch)
    }

    /// How the worker can be told to drop the request, where it can: when its client has left.
    pub fn abort_leg(&self) -> Option<AbortLeg> {
        match &self.legs {
            Legs::Sequential { .. } => None,
            Legs::Concurrent { room, .. } => Some(AbortLeg {
                destination: self.destination()?,
                path: "/abort_request",
                body: format!("{{\"rid\":\"{}\"}}", rid(*room)),
            }),
        }
    }

    /// Takes the answer and says what follows. The router must have been told the time.
    pub fn answered(
        self,
        answer: PrefillAnswer<'_>,
        client: Client,
        router: &mut Router,
    ) -> AfterPrefill {
        router.heard_of(self.prefill.key(), answer);
        match answer {
            PrefillAnswer::Whole {
                status: 200..=299,
                body,
            } => self.succeeded(body, client, router),
            PrefillAnswer::Whole {
                status: 400..=499, ..
            } => match client {
                Client::Waits => AfterPrefill::Answer,
                Client::Left => AfterPrefill::Nothing,
            },
            PrefillAnswer::Whole { status, .. } => {
                self.failed(PrefillFailure::Status(status), client, router)
            }
            PrefillAnswer::Broken => self.failed(PrefillFailure::Broken, client, router),
            PrefillAnswer::NotSent => self.failed(PrefillFailure::NotSent, client, router),
        }
    }

    fn succeeded(mut self, body: &[u8], client: Client, router: &mut Router) -> AfterPrefill {
        if let Some(charge) = self.charge.take() {
            charge.finish(router.ledger.now());
        }
        if matches!(self.legs, Legs::Concurrent { .. }) {
            return AfterPrefill::Good;
        }
        let Some(handoff) = Handoff::parse(body) else {
            return match (Terminal::read(body, self.form), client) {
                (Some(terminal), Client::Waits) => AfterPrefill::Terminal(terminal),
                (Some(_), Client::Left) => AfterPrefill::Nothing,
                (None, _) => self.failed(PrefillFailure::NoHandoff, client, router),
            };
        };
        match client {
            Client::Waits => self.decode(handoff, router),
            Client::Left => self.clean_up(handoff, router),
        }
    }

    /// The decode leg, to the worker that was picked if it is still there, else to another one.
    fn decode(mut self, handoff: Handoff, router: &mut Router) -> AfterPrefill {
        if let Err(refusal) = self.revalidate_decode(router) {
            return AfterPrefill::Refused(refusal);
        }
        let blocks = handoff.blocks();
        let mut dispatch = router.dispatch_to(&self.decode.target, &self.others);
        if let Legs::Sequential { decode, .. } = self.legs {
            let mut edits = decode;
            handoff.put_into(&mut edits);
            dispatch.edits = Some(edits);
        }
        AfterPrefill::Decode {
            dispatch,
            blocks,
            target: (Rc::clone(&self.decode.target.worker), self.decode.key()),
        }
    }

    /// Workers may have left since they were picked.
    fn revalidate_decode(&mut self, router: &mut Router) -> Result<(), Refusal> {
        self.others
            .retain(|other| router.fleet.contains(other.worker.id));
        let decode = &self.decode.target.worker;
        let known = router.fleet.get(decode.id);
        if known.is_some_and(|worker| worker.role == decode.role) {
            return Ok(());
        }
        if self.steering.decode_pin().worker.is_some() {
            // It was there when it was named: the caller made no mistake.
            return Err(Refusal::NotServed(NotServed::NoDecode));
        }
        let prefill = Rc::clone(&self.prefill.target.worker);
        let case = router.case_again(&self.place, &self.steering, &self.asked);
        let (decode, others) = router.replace_decode(&case, &prefill)?;
        self.decode = decode;
        self.others = others;
        Ok(())
    }

    fn clean_up(mut self, handoff: Handoff, router: &mut Router) -> AfterPrefill {
        let blocks = handoff.blocks();
        // Whoever fetches the blocks will do: nobody reads the answer.
        self.steering.decode.worker = None;
        self.steering.backend = None;
        if self.revalidate_decode(router).is_err() {
            return AfterPrefill::Leaked { blocks };
        }
        let Legs::Sequential { mut cleanup, .. } = self.legs else {
            return AfterPrefill::Nothing;
        };
        handoff.put_into(&mut cleanup);
        let mut dispatch = router.dispatch_to(&self.decode.target, &self.others);
        dispatch.edits = Some(cleanup);
        AfterPrefill::CleanUp(CleanUpLeg { dispatch, blocks })
    }

    /// The pool's policy on failures, step by step.
    fn failed(
        mut self,
        cause: PrefillFailure,
        client: Client,
        router: &mut Router,
    ) -> AfterPrefill {
        if client == Client::Left {
            return AfterPrefill::Nothing;
        }
        self.tried.push(self.prefill.target.worker.id);
        for step in router.pool.on_prefill_failure.clone() {
            match step {
                OnPrefillFailure::RetryOther => match self.next_prefill(cause, router) {
                    Some(next) => return self.again(next, router),
                    None => continue,
                },
                OnPrefillFailure::DecodeOnly => {
                    if let Some(after) = self.run_whole(router) {
                        return after;
                    }
                }
                OnPrefillFailure::Fail => break,
            }
        }
        AfterPrefill::Refused(Refusal::PrefillFailed {
            tried: self.tried.len(),
            cause,
        })
    }

    /// Another worker that may hand over to the same decode worker. None for one who named the worker, and none for a
    /// hand-off whose decode leg is under way: its room is used up.
    fn next_prefill(&self, cause: PrefillFailure, router: &mut Router) -> Option<Chosen> {
        let allowed = usize::try_from(router.pool.prefill.attempts).unwrap_or(usize::MAX);
        let under_way =
            matches!(self.legs, Legs::Concurrent { .. }) && cause != PrefillFailure::NotSent;
        if self.steering.prefill_pin().worker.is_some() || under_way || self.tried.len() >= allowed
        {
            return None;
        }
        let case = router.case_again(&self.place, &self.steering, &self.asked);
        router.choose_next_prefill(&case, &self.tried, &self.decode.target.worker)
    }

    fn again(mut self, next: Chosen, router: &mut Router) -> AfterPrefill {
        self.charge = Some(router.charge_prefill(&next, &self.asked));
        if let Legs::Concurrent {
            room, bootstrap, ..
        } = &mut self.legs
            && let Some(other) = router.bindings.get(&next.target.worker.id)
        {
            *bootstrap = other.clone();
            *room = router
                .rooms
                .draw(next.target.rank.unwrap_or(0), next.target.worker.dp_size);
        }
        self.prefill = next;
        AfterPrefill::Again(self)
    }

    /// Only where the configuration allows it, which demands that decode workers can.
    fn run_whole(&mut self, router: &mut Router) -> Option<AfterPrefill> {
        let Legs::Sequential { whole, .. } = &mut self.legs else {
            return None;
        };
        if !router.pool.decode.runs_whole_requests
            || !router.fleet.contains(self.decode.target.worker.id)
        {
            return None;
        }
        let edits = whole.take();
        self.others
            .retain(|other| router.fleet.contains(other.worker.id));
        let mut dispatch = router.dispatch_to(&self.decode.target, &self.others);
        dispatch.edits = edits;
        Some(AfterPrefill::Whole {
            dispatch,
            fallback: Fallback::PrefillFailed,
        })
    }
}

/// The id by which SGLang is told to drop a request: as unique as its room.
fn rid(room: u64) -> String {
    format!("pd-router-{room}")
}
