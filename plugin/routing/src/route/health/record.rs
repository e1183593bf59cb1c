//! Owns the penalties of one worker, and their expiry.

use std::sync::Arc;
use std::time::Duration;

use crate::config;
use crate::fleet::Worker;

/// Dynamo's reconcile interval: by then a discovery source would have removed a worker that is gone.
const UNREACHABLE_FOR: Duration = Duration::from_secs(5);

/// Long enough for the next requests to be tried elsewhere first, short enough for one fault to be forgotten.
const FAILED_FOR: Duration = Duration::from_secs(1);

/// Long enough for a queue to move; doubled each time that the worker is still full, up to `OVERLOADED_AT_MOST`.
const OVERLOADED_AT_FIRST: Duration = Duration::from_millis(100);
const OVERLOADED_AT_MOST: Duration = Duration::from_secs(1);

/// After this time without overload, the back-off of a worker starts over.
const OVERLOAD_REMEMBERED_FOR: Duration = Duration::from_secs(10);

/// By then most prompts are read. A trial without a result for this long had a client that left.
const TRIAL_LASTS: Duration = Duration::from_secs(30);

/// The penalties of a worker at one time, the worst first: less is preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(in crate::route) struct ActivePenalties {
    /// Ejected, and the trial is not due, or taken by another request.
    pub(super) is_shut_out: bool,
    is_unreachable: bool,
    has_failed: bool,
    is_overloaded: bool,
}

impl ActivePenalties {
    /// Whether the worker has reported overload.
    pub(in crate::route) fn is_overloaded(self) -> bool {
        self.is_overloaded
    }
}

/// The run in which a failure is counted: each ends with a success of its own kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Row {
    /// Calls of the worker: an answer of its own ends the run.
    Calls,
    /// Hand-offs to be fetched from the worker: only a hand-off that was fetched ends the run.
    Handoffs,
}

/// What a failure leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureVerdict {
    /// No ejection.
    Stays,
    /// Ejection, if a peer is left.
    Goes,
}

/// The health record of one worker. Times are since 1970; past ones no longer count.
#[derive(Debug)]
pub(super) struct Record {
    worker: Arc<Worker>,
    unreachable_until: Duration,
    failed_until: Duration,
    overloaded_until: Duration,
    /// Failed calls in a row, while not ejected.
    failures: u32,
    /// Hand-offs of a prefill worker that no worker could fetch, in a row.
    failed_handoffs: u32,
    /// Overloads in a row.
    times_full: u32,
    /// Whether a peer has succeeded since the first of these failures, or since the ejection.
    has_peer_worked: bool,
    ejected: Option<Ejected>,
    /// Number of ejections.
    times: u32,
    /// Until when the ejections are remembered, after readmission.
    remembered_until: Duration,
}

#[derive(Debug)]
struct Ejected {
    until: Duration,
    /// End of the trial that a request holds.
    trial_until: Option<Duration>,
    /// The run that led to the ejection.
    row: Row,
}

impl Ejected {
    fn is_on_trial(&self, now: Duration) -> bool {
        self.trial_until.is_some_and(|until| until > now)
    }
}

/// Whether a success of one of them shows that the other one could succeed.
pub(super) fn are_peers(one: &Worker, other: &Worker) -> bool {
    one.id != other.id
        && one.role == other.role
        && one.namespace == other.namespace
        && one.serves(other.model.as_deref())
}

impl Record {
    pub(super) fn new(worker: &Arc<Worker>) -> Self {
        Self {
            worker: Arc::clone(worker),
            unreachable_until: Duration::ZERO,
            failed_until: Duration::ZERO,
            overloaded_until: Duration::ZERO,
            failures: 0,
            failed_handoffs: 0,
            times_full: 0,
            has_peer_worked: false,
            ejected: None,
            times: 0,
            remembered_until: Duration::ZERO,
        }
    }

    pub(super) fn held(&self, now: Duration) -> ActivePenalties {
        let is_shut_out = |ejected: &Ejected| ejected.until > now || ejected.is_on_trial(now);
        ActivePenalties {
            is_shut_out: self.ejected.as_ref().is_some_and(is_shut_out),
            is_unreachable: self.unreachable_until > now,
            has_failed: self.failed_until > now,
            is_overloaded: self.overloaded_until > now,
        }
    }

    pub(super) fn is_ejected(&self) -> bool {
        self.ejected.is_some()
    }

    /// Whether the record says nothing any more.
    pub(super) fn is_blank(&self, now: Duration) -> bool {
        self.held(now) == ActivePenalties::default()
            && !self.was_full_lately(now)
            && self.failures == 0
            && self.failed_handoffs == 0
            && self.ejected.is_none()
            && self.remembered_until <= now
    }

    /// Begins the trial of an ejected worker that was picked: when the trial is due, or if no other worker was left.
    pub(super) fn picked(&mut self, now: Duration) {
        if let Some(ejected) = &mut self.ejected
            && !ejected.is_on_trial(now)
        {
            ejected.trial_until = Some(now.saturating_add(TRIAL_LASTS));
        }
    }

    fn was_full_lately(&self, now: Duration) -> bool {
        self.times_full > 0
            && self
                .overloaded_until
                .saturating_add(OVERLOAD_REMEMBERED_FOR)
                > now
    }

    pub(super) fn overloaded(&mut self, now: Duration) {
        if !self.was_full_lately(now) {
            self.times_full = 0;
        }
        let factor = 2u32.saturating_pow(self.times_full);
        let lasts = OVERLOADED_AT_FIRST.saturating_mul(factor);
        self.overloaded_until = now.saturating_add(lasts.min(OVERLOADED_AT_MOST));
        self.times_full = self.times_full.saturating_add(1);
        self.trial_says_nothing();
    }

    /// The trial was neither good nor bad: another request may try.
    pub(super) fn trial_says_nothing(&mut self) {
        if let Some(ejected) = &mut self.ejected {
            ejected.trial_until = None;
        }
    }

    /// The call could not be made.
    pub(super) fn passed_over(&mut self, now: Duration) {
        self.broken(now);
        self.trial_says_nothing();
    }

    /// Another worker has served what this one failed.
    pub(super) fn peer_served(&mut self) {
        self.has_peer_worked = true;
    }

    /// The worker's KV was fetched.
    pub(super) fn handed_off(&mut self, rules: &config::Health, now: Duration) {
        self.failed_handoffs = 0;
        let is_back = |ejected: &Ejected| ejected.until <= now || ejected.is_on_trial(now);
        if self.ejected.as_ref().is_some_and(is_back) {
            self.let_in(rules, now);
        }
    }

    pub(super) fn unreachable(&mut self, now: Duration) {
        self.unreachable_until = now.saturating_add(UNREACHABLE_FOR);
    }

    pub(super) fn broken(&mut self, now: Duration) {
        self.failed_until = now.saturating_add(FAILED_FOR);
    }

    /// The worker failed together with another one, which is called again sooner: so that each meets a different partner next.
    pub(super) fn suspected(&mut self, now: Duration) {
        self.failed_until = now.saturating_add(FAILED_FOR.saturating_mul(2));
    }

    /// The worker has succeeded. An ejection ends with that if its time is over, or this was its trial; else it was an
    /// answer to an older call.
    pub(super) fn answered(&mut self, rules: &config::Health, now: Duration) {
        self.unreachable_until = Duration::ZERO;
        self.failed_until = Duration::ZERO;
        self.overloaded_until = Duration::ZERO;
        self.failures = 0;
        self.times_full = 0;
        if self.ejected.is_none() && self.failed_handoffs == 0 {
            self.has_peer_worked = false;
        }
        let is_back = |ejected: &Ejected| {
            ejected.row == Row::Calls && (ejected.until <= now || ejected.is_on_trial(now))
        };
        if self.ejected.as_ref().is_some_and(is_back) {
            self.let_in(rules, now);
        }
    }

    /// Ends the ejection. The record of it is kept for the longest time that an ejection lasts.
    pub(super) fn let_in(&mut self, rules: &config::Health, now: Duration) {
        if self.ejected.take().is_some() {
            let remembered = Duration::from_millis(rules.most_eject_ms);
            self.remembered_until = now.saturating_add(remembered);
        }
    }

    pub(super) fn peer_answered(&mut self, peer: &Worker) {
        let has_failed = self.failures > 0 || self.failed_handoffs > 0 || self.ejected.is_some();
        self.has_peer_worked = self.has_peer_worked || has_failed && are_peers(&self.worker, peer);
    }

    /// Counts a failure of any kind.
    pub(super) fn failed(
        &mut self,
        row: Row,
        rules: &config::Health,
        now: Duration,
    ) -> FailureVerdict {
        if let Some(ejected) = &mut self.ejected {
            ejected.trial_until = None;
            if ejected.until > now {
                // Calls from before the ejection end one after the other: they make it no worse.
                return FailureVerdict::Stays;
            }
            self.failures = 1;
            return FailureVerdict::Goes;
        }
        if self.remembered_until <= now {
            self.times = 0;
        }
        let count = match row {
            Row::Calls => &mut self.failures,
            Row::Handoffs => &mut self.failed_handoffs,
        };
        *count = count.saturating_add(1);
        let is_enough = rules.eject_after > 0 && *count >= rules.eject_after;
        match is_enough && self.has_peer_worked {
            true => FailureVerdict::Goes,
            false => FailureVerdict::Stays,
        }
    }

    /// Ejects the worker, and returns for how long: twice as long as the time before. A trial that failed while no peer
    /// worked either is no new evidence, and the time stays the same.
    pub(super) fn eject(&mut self, row: Row, rules: &config::Health, now: Duration) -> Duration {
        if self.has_peer_worked {
            self.times = self.times.saturating_add(1);
        }
        let factor = 2u64.saturating_pow(self.times.saturating_sub(1));
        let lasts = rules.eject_ms.saturating_mul(factor);
        let lasts = Duration::from_millis(lasts.min(rules.most_eject_ms));
        self.ejected = Some(Ejected {
            until: now.saturating_add(lasts),
            trial_until: None,
            row,
        });
        self.failures = 0;
        self.failed_handoffs = 0;
        self.has_peer_worked = false;
        lasts
    }
}
