//! Owns the assignment: what a client's stream occupies while it lasts.

use std::sync::Arc;
use std::time::Duration;

use super::notes::Facts;
use super::recovery::Recovery;
use super::trail::SharedTrail;
use crate::fleet::Worker;
use crate::handoff::{LegOrder, ProtocolRules};
use crate::load::{DecodeCharge, PrefillCharge};
use crate::outcome::Leg;

/// The workers and charges of a client's stream while it lasts. Dropping it frees everything.
#[derive(Debug, Default)]
pub struct Assignment {
    /// The prefill worker, if there is one.
    pub prefill: Option<Arc<Worker>>,
    /// The worker that answers; none for a plain request.
    pub decode: Option<Arc<Worker>>,
    /// Why the request is not disaggregated although the pool is configured for it.
    pub fallback: Option<Fallback>,
    /// What the request is counted under.
    pub facts: Facts,
    /// Only where the router makes no prefill call, as in direct mode: else the charge belongs to the call.
    pub(super) prefill_charge: Option<PrefillCharge>,
    pub(super) decode_charge: Option<DecodeCharge>,
    /// The charge of a request that generates nothing.
    pub(super) errand_charge: Option<DecodeCharge>,
    /// How the request would be retried.
    pub(super) recovery: Option<Recovery>,
    /// The request's trail so far.
    pub(super) trail: Option<SharedTrail>,
}

/// Why a request runs aggregated on a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// There is no prefill worker.
    PrefillAbsent,
    /// Prefill failed.
    PrefillFailed,
    /// A hand-off would cost more than it saves (conditional disaggregation).
    NotWorthIt,
    /// There is no worker, and the proxy's cluster picks a host by itself.
    FleetEmpty,
}

impl Fallback {
    /// All reasons.
    pub const ALL: [Self; 4] = [
        Self::PrefillAbsent,
        Self::PrefillFailed,
        Self::NotWorthIt,
        Self::FleetEmpty,
    ];

    /// The reason in one word, for metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::PrefillAbsent => "prefill_absent",
            Self::PrefillFailed => "prefill_failed",
            Self::NotWorthIt => "conditional",
            Self::FleetEmpty => "fleet_empty",
        }
    }
}

impl Assignment {
    /// Ends the prefill charge at the first token, seen at `now`, since 1970, and records a sample of the worker's prefill rate.
    pub fn first_token(&mut self, now: Duration) {
        if let Some(charge) = self.prefill_charge.take() {
            charge.finish(now);
        }
    }

    /// Renews the decode charge on a new piece of the answer; `tokens`: output tokens so far.
    pub fn generated(&mut self, tokens: u64) {
        if let Some(charge) = &mut self.decode_charge {
            charge.renew(tokens);
        }
    }

    /// Whether an answer without a token counts as no answer.
    pub fn expects_tokens(&self) -> bool {
        self.recovery.is_some()
    }

    /// Whether another worker may replace one that fails before the client has read anything.
    pub fn may_recover(&self) -> bool {
        self.recovery.as_ref().is_some_and(Recovery::is_allowed)
    }

    /// KV blocks staged for a decode leg that is known not to have begun.
    pub fn staged_blocks(&self) -> Option<u64> {
        let staged = self.recovery.as_ref()?.staged.as_ref()?;
        Some(staged.blocks)
    }

    /// The leg that the client waits for, under this protocol.
    pub fn leg(&self, rules: &ProtocolRules) -> Leg {
        match (rules.order, &self.prefill) {
            _ if !rules.reaches_workers => Leg::Frontend,
            (LegOrder::Backend, Some(_)) => Leg::Sidecar,
            (_, Some(_)) => Leg::Decode,
            (_, None) => Leg::Aggregated,
        }
    }

    /// Frees all charges: the stream ended.
    pub fn release(&mut self) {
        self.prefill_charge = None;
        self.decode_charge = None;
        self.errand_charge = None;
    }
}
