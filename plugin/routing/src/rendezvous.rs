//! Owns the meeting of prefill and decode: the state of one (model, namespace), and how each state serves a request.
//!
//! The state is a pure function of the worker counts ([`WorkerCounts`]), whatever happened before. A waiter that is left
//! behind, or an endpoint that is forgotten after the hand-shake, cannot occur, since there is neither. History is kept for
//! people only, as *deactivated*, which serves requests as *decode waiting* does.
//!
//! A *set* is the workers of one role that share a set name. Two sets of one role are ambiguous, and are not served until
//! one is gone: guessing could pick the wrong one.

use serde::Deserialize;

/// Worker counts of one model in one namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct WorkerCounts {
    /// Sets of prefill workers.
    pub prefill_sets: usize,
    /// Sets of decode workers.
    pub decode_sets: usize,
    /// Prefill workers whose binding is built: only these may be handed a request.
    pub bound_prefills: usize,
    /// Workers that run whole requests: those of role aggregated, and decode workers where the pool allows it.
    pub whole_workers: usize,
}

/// Whether requests of one model in one namespace can be disaggregated, and why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Neither a prefill nor a decode worker.
    Vacant,
    /// Decode workers without a prefill worker, from the beginning.
    DecodeWaiting,
    /// Prefill workers without a decode worker.
    PrefillReady,
    /// Prefill and decode workers, but no prefill worker's binding is built yet.
    Pending,
    /// Prefill and decode have met.
    Active,
    /// Two sets of one role.
    Ambiguous,
    /// Decode workers whose prefill workers have left.
    Deactivated,
}

impl State {
    /// All states, for tables and metrics.
    pub const ALL: [Self; 7] = [
        Self::Vacant,
        Self::DecodeWaiting,
        Self::PrefillReady,
        Self::Pending,
        Self::Active,
        Self::Ambiguous,
        Self::Deactivated,
    ];

    /// The state that the counts give. `was_active` separates *deactivated* from *decode waiting*, for people.
    pub fn of(counts: WorkerCounts, was_active: bool) -> Self {
        match (counts.prefill_sets, counts.decode_sets) {
            (0, 0) => Self::Vacant,
            (prefill, decode) if prefill > 1 || decode > 1 => Self::Ambiguous,
            (0, _) if was_active => Self::Deactivated,
            (0, _) => Self::DecodeWaiting,
            (_, 0) => Self::PrefillReady,
            _ if counts.bound_prefills == 0 => Self::Pending,
            _ => Self::Active,
        }
    }

    /// Name in logs, metrics and documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vacant => "vacant",
            Self::DecodeWaiting => "decode_waiting",
            Self::PrefillReady => "prefill_ready",
            Self::Pending => "pending",
            Self::Active => "active",
            Self::Ambiguous => "ambiguous",
            Self::Deactivated => "deactivated",
        }
    }

    /// How a request is served.
    pub fn decision(self, mode: Mode, rules: Rules) -> ServingDecision {
        match (self, mode) {
            (Self::Active, _) => ServingDecision::Pair,
            // A binding that is still being built is needed to run a request, not to name the workers.
            (Self::Pending, Mode::QueryOnly) => ServingDecision::Pair,
            // Readiness already counts the prefill workers; a decode worker must not get a bare request meanwhile.
            (Self::Pending, _) => ServingDecision::Refused(NotServed::Pending),
            (Self::Ambiguous, _) => ServingDecision::Refused(NotServed::Ambiguous),
            (absent, _) => match rules.on_prefill_absent {
                OnPrefillAbsent::Aggregate if rules.whole_workers => ServingDecision::Whole,
                _ => ServingDecision::Refused(absent.reason()),
            },
        }
    }

    fn reason(self) -> NotServed {
        match self {
            Self::Vacant => NotServed::Vacant,
            Self::PrefillReady => NotServed::NoDecode,
            _ => NotServed::NotActivated,
        }
    }
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// An answer, from workers that the router picks.
    Normal,
    /// An answer, from workers that the request names.
    PreRouted,
    /// Only the names of the workers that would be picked.
    QueryOnly,
}

impl Mode {
    /// All modes, for tables.
    pub const ALL: [Self; 3] = [Self::Normal, Self::PreRouted, Self::QueryOnly];

    /// Name in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::PreRouted => "pre-routed",
            Self::QueryOnly => "query-only",
        }
    }
}

/// Handling of a request while there is no prefill worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum OnPrefillAbsent {
    /// A worker that can runs the request aggregated; where no worker can, the request fails.
    #[default]
    Aggregate,
    /// The request fails with 503.
    Fail,
}

/// What decides besides the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The pool's policy.
    pub on_prefill_absent: OnPrefillAbsent,
    /// Whether any worker runs whole requests.
    pub whole_workers: bool,
}

/// How a request is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServingDecision {
    /// A prefill and a decode worker.
    Pair,
    /// One worker that runs the whole request.
    Whole,
    /// An error: 503, and trying again later may help.
    Refused(NotServed),
}

/// Why a request is not served. Ordered by nearness to being served, nearest first: of several reasons, the first is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum NotServed {
    /// A binding is being built.
    #[error("the prefill workers are being connected")]
    Pending,
    /// Two sets of one role.
    #[error(
        "two sets of workers of one role are registered; it is ambiguous which is meant until one is gone"
    )]
    Ambiguous,
    /// No prefill worker, and no worker that may run the whole request.
    #[error("disaggregation is not activated: no prefill worker is available")]
    NotActivated,
    /// No decode worker.
    #[error("no decode worker is available")]
    NoDecode,
    /// No worker at all.
    #[error("no worker is available")]
    Vacant,
}

impl NotServed {
    /// Code of the reason.
    pub fn code(self) -> &'static str {
        match self {
            Self::Pending => "prefill_pending",
            Self::Ambiguous => "ambiguous_sets",
            Self::NotActivated => "prefill_not_activated",
            Self::NoDecode => "no_decode_worker",
            Self::Vacant => "no_worker",
        }
    }
}
