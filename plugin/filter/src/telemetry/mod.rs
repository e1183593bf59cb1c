//! Owns the metrics: their names, and how what happens becomes a figure. `docs/metrics.md` lists them.

mod metric;
mod pool;

pub use pool::{Ended, PoolTelemetry};

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use routing::fleet::{Condition, Role};
use routing::handoff::fate::Fate;
use routing::rendezvous::State;
use routing::route::{Fallback, Refusal, Router};
use routing::sharing::Totals;

use metric::Metric;

/// The conditions that a worker can be in, with their names.
const CONDITIONS: [Condition; 3] = [Condition::Ready, Condition::Unhealthy, Condition::Draining];

/// The legs of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// The one that reads the prompt.
    Prefill,
    /// The one that answers.
    Decode,
}

/// All metrics that are not a pool's.
pub struct Telemetry {
    prefill_calls: Metric,
    prefill_retries: Metric,
    hedges: Metric,
    recoveries: Metric,
    ejected: Metric,
    decode_retries: Metric,
    /// Of each fate: hand-offs, and the blocks in them.
    handed_off: [[Metric; 2]; Fate::ALL.len()],
    streams: Metric,
    prefill_charges: Metric,
    decode_charges: Metric,
    waiting: Metric,
    fleet_workers: [[Metric; CONDITIONS.len()]; Role::ALL.len()],
    leader: [Metric; 2],
    handoff_failures: [Metric; 2],
    by_word: RefCell<BTreeMap<(&'static str, &'static str), Metric>>,
    clean_ups: Metric,
    body_bytes_copied: Metric,
    places: [Metric; State::ALL.len()],
    vms: Metric,
    lapped: Metric,
    told_lapped: Cell<u64>,
    /// Streams of this VM that are open.
    open: Cell<u64>,
    /// What the gauges were set to last by this VM.
    told: Cell<Option<(Totals, usize)>>,
    told_of: RefCell<Option<Census>>,
}

impl Telemetry {
    /// Defines the metrics, so that they are there as zeros.
    pub fn new() -> Self {
        let counter = |name: &str| Metric::counter(name, &[]);
        let gauge = |name: &str| Metric::gauge(name, &[]);
        let of_role = |role: Role| {
            CONDITIONS.map(|condition| {
                let labels = [("role", role.name()), ("state", condition.name())];
                Metric::gauge("fleet_workers", &labels)
            })
        };
        let of_state = |state: State| Metric::gauge("places", &[("state", state.name())]);
        let defined = Self {
            prefill_calls: counter("prefill_calls_total"),
            prefill_retries: counter("prefill_retries_total"),
            hedges: counter("hedges_total"),
            recoveries: counter("recoveries_total"),
            ejected: gauge("ejected"),
            decode_retries: counter("decode_retries_total"),
            handed_off: Fate::ALL.map(|fate| {
                ["handoffs", "blocks"]
                    .map(|what| counter(&format!("kv_{}_{what}_total", fate.name())))
            }),
            streams: gauge("streams"),
            prefill_charges: gauge("prefill_charges"),
            decode_charges: gauge("decode_charges"),
            waiting: gauge("queue_requests"),
            fleet_workers: Role::ALL.map(of_role),
            leader: ["main", "worker"].map(|kind| Metric::gauge("leader", &[("kind", kind)])),
            handoff_failures: ["prefill", "decode"]
                .map(|leg| Metric::counter("handoff_failures_total", &[("leg", leg)])),
            by_word: RefCell::default(),
            clean_ups: counter("clean_ups_total"),
            body_bytes_copied: counter("body_bytes_copied_total"),
            places: State::ALL.map(of_state),
            vms: gauge("vms"),
            lapped: counter("decisions_lapped_total"),
            told_lapped: Cell::default(),
            open: Cell::default(),
            told: Cell::default(),
            told_of: RefCell::default(),
        };
        defined.define_words();
        defined
    }

    /// Every word that can be counted is there from the beginning.
    fn define_words(&self) {
        for code in Refusal::CODES {
            self.word("refused_total", "reason", code);
        }
        for fallback in Fallback::ALL {
            let (name, reason) = fallback_of(fallback);
            self.word(name, "reason", reason);
        }
        for reason in RESETS {
            self.word("resets_total", "reason", reason);
        }
        for role in Role::ALL {
            self.word("ejections_total", "role", role.name());
        }
        for state in State::ALL {
            self.word("transitions_total", "state", state.name());
        }
    }

    /// A request came that is not for the filter itself.
    pub fn stream_opened(&self) {
        self.open.set(self.open.get().saturating_add(1));
    }

    /// Its stream ended.
    pub fn stream_closed(&self) {
        self.open.set(self.open.get().saturating_sub(1));
    }

    /// Streams of this VM that are open.
    pub fn streams(&self) -> u64 {
        self.open.get()
    }

    /// A prefill worker is called.
    pub fn prefill_called(&self) {
        self.prefill_calls.add(1);
    }

    /// A prefill worker failed and another one is called.
    pub fn prefill_retried(&self) {
        self.prefill_retries.add(1);
    }

    /// A second prefill worker is called beside a first one that is late.
    pub fn hedged(&self) {
        self.hedges.add(1);
    }

    /// A decode leg that failed before its client read anything is replaced.
    pub fn recovered(&self) {
        self.recoveries.add(1);
    }

    /// An answer that had begun was, or is, broken off.
    pub fn reset(&self, reason: &'static str) {
        self.count_word("resets_total", "reason", reason);
    }

    /// A worker that keeps failing is passed over for a time.
    pub fn ejection(&self, role: Role) {
        self.count_word("ejections_total", "role", role.name());
    }

    /// A decode worker took no connection and another one answers.
    pub fn decode_retried(&self) {
        self.decode_retries.add(1);
    }

    /// This has become of a hand-off of so many blocks. To be told once of each.
    pub fn handed_off(&self, fate: Fate, blocks: u64) {
        self.all_handed_off(fate, 1, blocks);
    }

    /// The same of several, which have so many blocks together.
    pub fn all_handed_off(&self, fate: Fate, handoffs: u64, blocks: u64) {
        let metrics = Fate::ALL.iter().zip(&self.handed_off);
        for (_, [count, sum]) in metrics.filter(|(known, _)| **known == fate) {
            count.add(handoffs);
            sum.add(blocks);
        }
    }

    /// A request was refused.
    pub fn refused(&self, reason: &'static str) {
        self.count_word("refused_total", "reason", reason);
    }

    /// A request that the pool would have disaggregated runs whole.
    pub fn fell_back(&self, fallback: Fallback) {
        let (name, reason) = fallback_of(fallback);
        self.count_word(name, "reason", reason);
    }

    /// A leg of a hand-off failed, whatever followed.
    pub fn handoff_failed(&self, leg: Leg) {
        let [prefill, decode] = self.handoff_failures;
        match leg {
            Leg::Prefill => prefill.add(1),
            Leg::Decode => decode.add(1),
        }
    }

    /// A place changed its state.
    pub fn transition(&self, to: State) {
        self.count_word("transitions_total", "state", to.name());
    }

    /// Blocks that a client left behind are being fetched.
    pub fn cleaning_up(&self) {
        self.clean_ups.add(1);
    }

    /// Bytes of request bodies were copied out of the proxy.
    pub fn bodies_copied(&self, bytes: u64) {
        self.body_bytes_copied.add(bytes);
    }

    /// Words are the program's own, so the number of metrics is bounded.
    fn count_word(&self, name: &'static str, label: &str, word: &'static str) {
        self.word(name, label, word).add(1);
    }

    fn word(&self, name: &'static str, label: &str, word: &'static str) -> Metric {
        let mut known = self.by_word.borrow_mut();
        let metric = known.entry((name, word));
        *metric.or_insert_with(|| Metric::counter(name, &[(label, word)]))
    }

    /// Segments of other VMs' decisions that this VM came too late for, all in all.
    pub fn lapped(&self, all: u64) {
        let new = all.saturating_sub(self.told_lapped.replace(all));
        if new > 0 {
            self.lapped.add(new);
        }
    }

    /// What the gauges are is not known: they are all set the next time.
    pub fn begin_anew(&self) {
        self.told.set(None);
        self.told_of.replace(None);
    }

    /// What all VMs have under way, and how many VMs there are. Gauges are set, and by the VM that leads alone: what a VM that
    /// crashed had added to them would stay.
    pub fn totals(&self, now: &Totals, vms: usize) {
        if self.told.replace(Some((*now, vms))) == Some((*now, vms)) {
            return;
        }
        self.streams.record(now.streams);
        self.prefill_charges.record(now.prefills);
        self.decode_charges.record(now.decodes);
        self.waiting.record(now.waiting);
        self.ejected.record(now.ejected);
        self.vms.record(vms as u64);
    }

    /// The fleets and the states of the places that are routed to, those of all pools together. Told by the VM that leads.
    pub fn census(&self, now: Census) {
        if self.told_of.borrow().as_ref() == Some(&now) {
            return;
        }
        let workers = self.fleet_workers.as_flattened().iter();
        for (metric, count) in workers.zip(now.workers.as_flattened()) {
            metric.record(*count);
        }
        for (metric, count) in self.places.into_iter().zip(now.places) {
            metric.record(count);
        }
        let [main, worker] = self.leader;
        main.record(u64::from(now.leader == Leader::Main));
        worker.record(u64::from(now.leader == Leader::Worker));
        self.told_of.replace(Some(now));
    }
}

/// Why answers that have begun are broken off.
const RESETS: [&str; 4] = [
    "broken_off",
    "silent",
    "prefill_failed",
    "prefill_no_handoff",
];

/// The metric that a fallback is counted by, and the reason.
fn fallback_of(fallback: Fallback) -> (&'static str, &'static str) {
    let name = match fallback {
        Fallback::NotWorthIt => "bypasses_total",
        Fallback::PrefillAbsent | Fallback::PrefillFailed | Fallback::FleetEmpty => {
            "fallbacks_total"
        }
    };
    (name, fallback.name())
}

/// Which kind of VM leads.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Leader {
    /// The main thread's, which serves nobody.
    #[default]
    Main,
    /// One that serves requests too.
    Worker,
}

/// How many workers and places there are.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Census {
    /// Which kind of VM tells.
    pub leader: Leader,
    /// Of each role, in each condition.
    pub workers: [[u64; CONDITIONS.len()]; Role::ALL.len()],
    /// In each state.
    pub places: [u64; State::ALL.len()],
}

impl Census {
    /// Those of a pool are added.
    pub fn add(&mut self, router: &Router) {
        for (role, counts) in Role::ALL.into_iter().zip(&mut self.workers) {
            for worker in router.fleet().of_role(role) {
                let at = CONDITIONS
                    .iter()
                    .position(|known| *known == worker.condition);
                if let Some(count) = at.and_then(|at| counts.get_mut(at)) {
                    *count = count.saturating_add(1);
                }
            }
        }
        for (state, count) in State::ALL.into_iter().zip(&mut self.places) {
            let here = router.places().filter(|(_, place)| place.state == state);
            *count = count.saturating_add(here.count() as u64);
        }
    }
}
