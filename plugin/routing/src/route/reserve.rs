//! Owns the charges of a choice: of a pair, or of an aggregated worker.

use std::rc::Rc;
use std::time::Duration;

use super::choice::{Chosen, Pair, Whole};
use super::selection_request::{Demand, SelectionRequest};
use super::{Assignment, Refusal, Router};
use crate::fleet::Target;
use crate::load::{BookedAnswer, DecodeCharge, PrefillCharge};
use crate::rendezvous::ServingDecision;
use crate::request::RoutingOverrides;

impl Router {
    /// Selects the workers for a parsed request and books them, in one step: a pair, or an aggregated worker. `now` is the
    /// time since 1970; virtual time is possible. Dropping the assignment frees everything.
    ///
    /// # Errors
    /// The refusal that the request would get.
    pub fn reserve(
        &mut self,
        ask: &SelectionRequest<'_>,
        now: Duration,
    ) -> Result<Assignment, Refusal> {
        self.advance(now);
        let overrides = RoutingOverrides::default();
        let (model, adapter) = self.model_of(ask.model)?;
        let (key, decision) = self.choose_model_key(Some(&model), &overrides, None)?;
        let demand = Demand {
            adapter,
            ..Demand::of(ask, self.pool.selection.kv)
        };
        let context = self.context(&key, &overrides, &demand);
        match decision {
            ServingDecision::Refused(reason) => Err(Refusal::NotServed(reason)),
            ServingDecision::Pair => {
                let pair = self.admitted_pair(&context)?;
                Ok(self.assign_pair(pair, &demand))
            }
            ServingDecision::Whole => {
                let whole = self.pick_whole(&context)?;
                Ok(self.assign_whole(whole, &demand))
            }
        }
    }

    pub(super) fn assign_pair(&mut self, pair: Pair, demand: &Demand) -> Assignment {
        Assignment {
            prefill_charge: Some(self.charge_prefill(&pair.prefill, demand)),
            decode_charge: Some(self.charge_decode(&pair.decode, demand)),
            prefill: Some(pair.prefill.target.worker),
            decode: Some(pair.decode.target.worker),
            ..Assignment::default()
        }
    }

    /// An aggregated worker has the prompt to read too.
    pub(super) fn assign_whole(&mut self, whole: Whole, demand: &Demand) -> Assignment {
        Assignment {
            prefill_charge: Some(self.charge_prefill(&whole.decode, demand)),
            decode_charge: Some(self.charge_decode(&whole.decode, demand)),
            decode: Some(Rc::clone(&whole.decode.target.worker)),
            ..Assignment::default()
        }
    }

    /// Prompt tokens that the worker must compute: all but those it has cached.
    pub(super) fn uncached_tokens(&self, chosen: &Chosen, demand: &Demand) -> u64 {
        let cached = u64::from(chosen.overlap).saturating_mul(u64::from(self.pool.block_tokens));
        demand.prompt_tokens.saturating_sub(cached)
    }

    /// Books the prompt tokens that must be computed, at least one.
    pub(super) fn charge_prefill(&mut self, chosen: &Chosen, demand: &Demand) -> PrefillCharge {
        let tokens = self.uncached_tokens(chosen, demand).max(1);
        self.ledger.charge_prefill(chosen.key(), tokens)
    }

    pub(super) fn charge_decode(&mut self, chosen: &Chosen, demand: &Demand) -> DecodeCharge {
        let answer = demand.answer(self.pool.block_tokens);
        self.ledger.charge_decode(chosen.key(), answer)
    }

    /// Books a request that generates nothing: a small charge, so that many of them do not meet on one worker.
    pub(super) fn charge_errand(&mut self, target: &Target) -> DecodeCharge {
        let answer = BookedAnswer {
            prompt_tokens: 1,
            block_tokens: self.pool.block_tokens,
            expected_tokens: None,
            sequences: 1,
        };
        self.ledger.charge_decode(target.key(), answer)
    }
}
