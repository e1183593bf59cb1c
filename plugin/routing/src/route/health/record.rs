//! Owns what is held against one worker, and until when.

use std::rc::Rc;
use std::time::Duration;

use crate::config;
use crate::fleet::Worker;

/// Dynamo's reconcile interval: by then a discovery source would have said that the worker is gone.
const UNREACHABLE_FOR: Duration = Duration::from_secs(5);

/// Long enough for the next requests to be tried elsewhere first, short enough for one fault to be forgotten.
const FAILED_FOR: Duration = Duration::from_secs(1);

/// Long enough for a queue to move, short enough to be wrong about.
const OVERLOADED_FOR: Duration = Duration::from_secs(1);

/// By then most prompts are read. A trial of which nothing is heard for so long had a client who left.
const TRIAL_LASTS: Duration = Duration::from_secs(30);

/// What is held against a worker at one time, the worst first: the lesser is preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(in crate::route) struct Held {
    /// It is ejected, and its trial is not due, or somebody else's.
    pub(super) is_shut_out: bool,
    is_unreachable: bool,
    has_failed: bool,
    is_overloaded: bool,
}

/// What a failure leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing more.
    Stays,
    /// It is to be ejected, if another one is left.
    Goes,
}

/// What one worker has shown of itself. Times are since 1970; those that are past count no more.
#[derive(Debug)]
pub(super) struct Record {
    worker: Rc<Worker>,
    unreachable_until: Duration,
    failed_until: Duration,
    overloaded_until: Duration,
    /// In a row, while it is not ejected.
    failures: u32,
    /// Whether a peer has worked since the first of these failures, or since it was ejected.
    has_peer_worked: bool,
    ejected: Option<Ejected>,
    /// How often it has been ejected.
    times: u32,
    /// Until when that is remembered, once it is back in.
    remembered_until: Duration,
}

#[derive(Debug)]
struct Ejected {
    until: Duration,
    /// Until when its trial is somebody's.
    trial_until: Option<Duration>,
}

impl Ejected {
    fn is_on_trial(&self, now: Duration) -> bool {
        self.trial_until.is_some_and(|until| until > now)
    }
}

/// Whether what one of them does tells whether the other one could.
pub(super) fn are_peers(one: &Worker, other: &Worker) -> bool {
    one.id != other.id
        && one.role == other.role
        && one.namespace == other.namespace
        && one.serves(other.model.as_deref())
}

impl Record {
    pub(super) fn new(worker: &Rc<Worker>) -> Self {
        Self {
            worker: Rc::clone(worker),
            unreachable_until: Duration::ZERO,
            failed_until: Duration::ZERO,
            overloaded_until: Duration::ZERO,
            failures: 0,
            has_peer_worked: false,
            ejected: None,
            times: 0,
            remembered_until: Duration::ZERO,
        }
    }

    pub(super) fn held(&self, now: Duration) -> Held {
        let is_shut_out = |ejected: &Ejected| ejected.until > now || ejected.is_on_trial(now);
        Held {
            is_shut_out: self.ejected.as_ref().is_some_and(is_shut_out),
            is_unreachable: self.unreachable_until > now,
            has_failed: self.failed_until > now,
            is_overloaded: self.overloaded_until > now,
        }
    }

    pub(super) fn is_ejected(&self) -> bool {
        self.ejected.is_some()
    }

    /// Whether it says nothing any more.
    pub(super) fn is_blank(&self, now: Duration) -> bool {
        self.held(now) == Held::default()
            && self.failures == 0
            && self.ejected.is_none()
            && self.remembered_until <= now
    }

    /// Whoever picks one that is ejected has its trial: when it is due, or where nobody else was left.
    pub(super) fn picked(&mut self, now: Duration) {
        if let Some(ejected) = &mut self.ejected
            && !ejected.is_on_trial(now)
        {
            ejected.trial_until = Some(now.saturating_add(TRIAL_LASTS));
        }
    }

    pub(super) fn overloaded(&mut self, now: Duration) {
        self.overloaded_until = now.saturating_add(OVERLOADED_FOR);
        if let Some(ejected) = &mut self.ejected {
            // Neither good nor bad: let somebody else try.
            ejected.trial_until = None;
        }
    }

    pub(super) fn unreachable(&mut self, now: Duration) {
        self.unreachable_until = now.saturating_add(UNREACHABLE_FOR);
    }

    pub(super) fn broken(&mut self, now: Duration) {
        self.failed_until = now.saturating_add(FAILED_FOR);
    }

    /// It worked. An ejection ends with that if its time is over, or this was its trial; else it was an answer to an older call.
    pub(super) fn answered(&mut self, rules: &config::Health, now: Duration) {
        self.unreachable_until = Duration::ZERO;
        self.failed_until = Duration::ZERO;
        self.overloaded_until = Duration::ZERO;
        self.failures = 0;
        let is_back = |ejected: &Ejected| ejected.until <= now || ejected.is_on_trial(now);
        if self.ejected.as_ref().is_some_and(is_back) {
            self.let_in(rules, now);
        }
    }

    /// It is ejected no more. That it was is remembered for as long as it could have lasted.
    pub(super) fn let_in(&mut self, rules: &config::Health, now: Duration) {
        if self.ejected.take().is_some() {
            let remembered = Duration::from_millis(rules.most_eject_ms);
            self.remembered_until = now.saturating_add(remembered);
        }
    }

    pub(super) fn peer_answered(&mut self, peer: &Worker) {
        self.has_peer_worked = self.has_peer_worked || are_peers(&self.worker, peer);
    }

    /// It failed, in whatever way.
    pub(super) fn failed(&mut self, rules: &config::Health, now: Duration) -> Verdict {
        if let Some(ejected) = &mut self.ejected {
            ejected.trial_until = None;
            if ejected.until > now {
                // Calls from before end one after the other: they make it no worse.
                return Verdict::Stays;
            }
            self.failures = 1;
            return Verdict::Goes;
        }
        if self.failures == 0 {
            self.has_peer_worked = false;
        }
        if self.remembered_until <= now {
            self.times = 0;
        }
        self.failures = self.failures.saturating_add(1);
        let is_enough = rules.eject_after > 0 && self.failures >= rules.eject_after;
        match is_enough && self.has_peer_worked {
            true => Verdict::Goes,
            false => Verdict::Stays,
        }
    }

    /// Ejects it, and says for how long: twice as long as the time before. A trial that failed when no peer worked either
    /// tells nothing new, and the time stays the same.
    pub(super) fn eject(&mut self, rules: &config::Health, now: Duration) -> Duration {
        if self.has_peer_worked {
            self.times = self.times.saturating_add(1);
        }
        let factor = 2u64.saturating_pow(self.times.saturating_sub(1));
        let lasts = rules.eject_ms.saturating_mul(factor);
        let lasts = Duration::from_millis(lasts.min(rules.most_eject_ms));
        self.ejected = Some(Ejected {
            until: now.saturating_add(lasts),
            trial_until: None,
        });
        self.failures = 0;
        self.has_peer_worked = false;
        lasts
    }
}
