//! Owns the bodies of a hand-off's legs, by protocol, and what the prefill answer brings for decode.

use std::time::Duration;

use super::binding::Binding;
use super::choice::Pair;
use super::{Refusal, Router};
use crate::answer::{End, Verdict};
use crate::config::{self, Protocol};
use crate::fleet::Target;
use crate::handoff::bootstrap::Bootstrap;
use crate::handoff::mooncake::{self, Transfer};
use crate::handoff::nixl::{self, Handoff};
use crate::handoff::sglang::{self, Shape};
use crate::handoff::trtllm::{self, Context};
use crate::json::Edits;
use crate::request::Request;

/// The edits and ids of the legs.
#[derive(Debug, Clone)]
pub(super) enum Legs {
    /// vLLM's `NixlConnector`.
    Nixl {
        prefill: Edits,
        decode: Edits,
        cleanup: Edits,
    },
    /// vLLM's `MooncakeConnector`.
    Mooncake {
        prefill: Edits,
        decode: Edits,
        cleanup: Edits,
        transfer: Transfer,
    },
    /// TensorRT-LLM.
    Trtllm {
        prefill: Edits,
        decode: trtllm::DecodeLeg,
        cleanup: trtllm::DecodeLeg,
        id: u64,
    },
    /// SGLang.
    Sglang {
        prefill: Edits,
        decode: Edits,
        rooms: Vec<u64>,
        shape: Shape,
        bootstrap: Bootstrap,
        ranks: Ranks,
    },
}

/// The data-parallel ranks of a pair, for workers with more than one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ranks {
    prefill: Option<u32>,
    decode: Option<u32>,
}

/// KV that prefill has computed and a decode worker is to fetch.
#[derive(Debug, Clone)]
pub struct Staged {
    /// KV blocks staged.
    pub(super) blocks: u64,
    /// The hosts to fetch them from, as far as the prefill answer names them.
    pub(super) hosts: Vec<String>,
    /// The decode leg.
    pub(super) decode: Edits,
    /// The clean-up leg, which only fetches.
    pub(super) cleanup: Edits,
    /// When the prefill worker frees the blocks, since 1970, if known: no worker may fetch them after that.
    pub(super) expires: Option<Duration>,
}

impl Staged {
    /// KV blocks staged.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Limits the expiry to `lease` after `now`, when the answer came.
    pub(super) fn leased(mut self, lease: Option<Duration>, now: Duration) -> Self {
        let ends = lease.map(|lease| now.saturating_add(lease));
        self.expires = [self.expires, ends].into_iter().flatten().min();
        self
    }

    pub(super) fn has_expired(&self, now: Duration) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }
}

impl Router {
    /// Prepares the legs for a pair. `binding` is that of its prefill worker, where the protocol needs one.
    pub(super) fn legs(
        &mut self,
        pair: &Pair,
        binding: Option<Binding>,
        request: &Request<'_>,
    ) -> Result<Legs, Refusal> {
        let prefill = &pair.prefill.target;
        match (self.pool.protocol, binding) {
            (Protocol::Sglang, Some(Binding { bootstrap, .. })) => {
                let asked = request.sequences();
                let count = sglang::rooms_needed(asked)?;
                Ok(Legs::Sglang {
                    prefill: sglang::prefill_edits(request),
                    decode: sglang::decode_edits(request),
                    rooms: self.draw_rooms(prefill, count),
                    shape: Shape::of(asked),
                    bootstrap,
                    ranks: Ranks {
                        prefill: prefill.rank,
                        decode: pair.decode.target.rank,
                    },
                })
            }
            (Protocol::Mooncake, Some(binding)) => Ok(Legs::Mooncake {
                prefill: mooncake::prefill_edits(request),
                decode: mooncake::decode_edits(request),
                cleanup: mooncake::cleanup_edits(request),
                transfer: self.transfer(prefill, &binding)?,
            }),
            (Protocol::Trtllm, _) => Ok(Legs::Trtllm {
                prefill: trtllm::prefill_edits(request),
                decode: trtllm::DecodeLeg::new(request),
                cleanup: trtllm::DecodeLeg::cleanup(request),
                id: self.rooms.draw_high(),
            }),
            _ => Ok(Legs::Nixl {
                prefill: nixl::prefill_edits(request),
                decode: nixl::decode_edits(request),
                cleanup: nixl::cleanup_edits(request),
            }),
        }
    }

    /// The same legs for another prefill worker: nothing drawn for the first is used twice. None if the worker lacks a
    /// needed binding.
    pub(super) fn renewed(&mut self, legs: &Legs, prefill: &Target) -> Option<Legs> {
        let binding = self.bindings.get(&prefill.worker.id).cloned();
        let mut renewed = legs.clone();
        match &mut renewed {
            Legs::Nixl { .. } => {}
            Legs::Trtllm { id, .. } => *id = self.rooms.draw_high(),
            Legs::Mooncake { transfer, .. } => {
                *transfer = self.transfer(prefill, &binding?).ok()?;
            }
            Legs::Sglang {
                rooms,
                bootstrap,
                ranks,
                ..
            } => {
                *bootstrap = binding?.bootstrap;
                *rooms = self.draw_rooms(prefill, rooms.len());
                ranks.prefill = prefill.rank;
            }
        }
        Some(renewed)
    }

    fn draw_rooms(&mut self, prefill: &Target, count: usize) -> Vec<u64> {
        let rank = prefill.rank.unwrap_or(0);
        let rooms = std::iter::repeat_with(|| self.rooms.draw(rank, prefill.worker.dp_size));
        rooms.take(count).collect()
    }

    fn transfer(&mut self, prefill: &Target, binding: &Binding) -> Result<Transfer, Refusal> {
        let rank = prefill.rank.unwrap_or(0);
        let engine = binding.engines.as_ref().and_then(|known| known.of(rank));
        // The binding has fewer ranks than the fleet gives the worker.
        let engine = engine.ok_or(Refusal::NotServed(crate::rendezvous::NotServed::Pending))?;
        Ok(Transfer {
            number: self.rooms.draw_any(),
            bootstrap: binding.bootstrap.clone(),
            engine_id: engine.to_owned(),
        })
    }
}

impl Legs {
    /// The order in which the legs run.
    pub(super) fn order(&self) -> config::Legs {
        match self {
            Self::Sglang { .. } => config::Legs::Concurrent,
            Self::Nixl { .. } | Self::Mooncake { .. } | Self::Trtllm { .. } => {
                config::Legs::Sequential
            }
        }
    }

    /// Edits that turn the client's body into the prefill leg's.
    pub(super) fn prefill(&self) -> Edits {
        match self {
            Self::Nixl { prefill, .. } => prefill.clone(),
            Self::Mooncake {
                prefill, transfer, ..
            } => {
                let mut edits = prefill.clone();
                transfer.put_into_prefill(&mut edits);
                edits
            }
            Self::Trtllm { prefill, id, .. } => {
                let mut edits = prefill.clone();
                let (name, value) = trtllm::context_only(*id);
                edits.insert(name, value);
                edits
            }
            Self::Sglang {
                prefill,
                rooms,
                shape,
                bootstrap,
                ranks,
                ..
            } => {
                let mut edits = prefill.clone();
                edits.insert("rid", format!("\"{}\"", rid(rooms)));
                bootstrap.put_into(rooms, *shape, &mut edits);
                sglang::put_prefill_rank(ranks.prefill, &mut edits);
                edits
            }
        }
    }

    /// Edits that turn the client's body into that of a decode leg sent at once; none if the prefill answer must come first.
    pub(super) fn decode_at_once(&self) -> Option<Edits> {
        let Self::Sglang {
            decode,
            rooms,
            shape,
            bootstrap,
            ranks,
            ..
        } = self
        else {
            return None;
        };
        let mut edits = decode.clone();
        bootstrap.put_into(rooms, *shape, &mut edits);
        sglang::put_decode_ranks(ranks.prefill, ranks.decode, &mut edits);
        Some(edits)
    }

    /// What a good prefill answer stages for decode; none if nothing.
    pub(super) fn staged(&self, answer: &[u8], block_tokens: u32) -> Option<Staged> {
        match self.clone() {
            Self::Nixl {
                mut decode,
                mut cleanup,
                ..
            } => {
                let handoff = Handoff::parse(answer)?;
                let (blocks, expires) = (handoff.blocks(), handoff.expires());
                let hosts = handoff.hosts().to_vec();
                handoff.clone().put_into(&mut decode);
                handoff.put_into(&mut cleanup);
                Some(Staged {
                    blocks,
                    hosts,
                    decode,
                    cleanup,
                    expires,
                })
            }
            Self::Mooncake {
                mut decode,
                mut cleanup,
                transfer,
                ..
            } => {
                // The answer says nothing about the transfer: only an answer that ended at the limit leaves something to decode.
                if Verdict::of_prefill(answer) != Verdict::Ended(End::Limit) {
                    return None;
                }
                transfer.put_into_decode(&mut decode);
                transfer.put_into_decode(&mut cleanup);
                Some(Staged {
                    blocks: mooncake::blocks(answer, block_tokens),
                    // The answer names none: decode gets the server known from the fleet.
                    hosts: Vec::new(),
                    decode,
                    cleanup,
                    expires: None,
                })
            }
            Self::Trtllm {
                decode, cleanup, ..
            } => {
                if Verdict::of_prefill(answer) == Verdict::Ended(End::Itself) {
                    return None;
                }
                let context = Context::parse(answer).ok()?;
                Some(Staged {
                    blocks: context.blocks(block_tokens),
                    hosts: context.hosts().to_vec(),
                    decode: decode.edits(&context),
                    cleanup: cleanup.edits(&context),
                    expires: None,
                })
            }
            Self::Sglang { .. } => None,
        }
    }

    /// The id by which a worker can abort the request, if the engine supports it.
    pub(super) fn abort_id(&self) -> Option<String> {
        match self {
            Self::Sglang { rooms, .. } => Some(rid(rooms)),
            Self::Nixl { .. } | Self::Mooncake { .. } | Self::Trtllm { .. } => None,
        }
    }
}

/// The id by which SGLang aborts a request: as unique as its first room.
fn rid(rooms: &[u64]) -> String {
    let room = rooms.first().copied().unwrap_or_default();
    format!("pd-router-{room}")
}
