//! Owns the metrics: their names, and the events that change them. `docs/metrics.md` lists them.

mod metric;
mod pool;

pub use pool::{Ended, PoolTelemetry};

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use routing::fleet::{Condition, Role};
use routing::rendezvous::State;
use routing::route::fate::Fate;
use routing::route::{Fallback, Refusal, Router};
use routing::sharing::Totals;

use metric::Metric;

/// The conditions that a worker can be in.
const CONDITIONS: [Condition; 3] = [Condition::Ready, Condition::Unhealthy, Condition::Draining];

/// The legs of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CalledLeg {
    /// Reads the prompt.
    Prefill,
    /// Generates the answer.
    Decode,
}

/// What this VM counts.
#[derive(Clone, Copy, Default)]
struct OwnCounts {
    /// Open streams.
    streams: u64,
    /// Bytes of request bodies copied out of the proxy and not yet counted in the metrics.
    copied: u64,
}

/// Values that this VM set the gauges to last.
#[derive(Default)]
struct Exported {
    totals: Option<(Totals, usize)>,
    fleets: Option<FleetCounts>,
    /// Segments that were read too late, as counted.
    lapped: u64,
}

/// All metrics that do not belong to one pool.
pub struct Telemetry {
    prefill_calls: Metric,
    prefill_retries: Metric,
    hedges: Metric,
    recoveries: Metric,
    ejected: Metric,
    decode_retries: Metric,
    /// Hand-offs and their blocks, by fate.
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
    own: Cell<OwnCounts>,
    exported: RefCell<Exported>,
}

impl Telemetry {
    /// Defines the metrics, so that they start as zeros.
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
            own: Cell::default(),
            exported: RefCell::default(),
        };
        defined.define_words();
        defined
    }

    /// Defines the counters of all label values, so that they start as zeros.
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

    /// Counts an open stream: a request that is not for the filter itself.
    pub fn stream_opened(&self) {
        self.count(|own| own.streams = own.streams.saturating_add(1));
    }

    /// Counts the end of a stream.
    pub fn stream_closed(&self) {
        self.count(|own| own.streams = own.streams.saturating_sub(1));
    }

    /// Open streams of this VM.
    pub fn streams(&self) -> u64 {
        self.own.get().streams
    }

    fn count(&self, change: impl FnOnce(&mut OwnCounts)) {
        let mut own = self.own.get();
        change(&mut own);
        self.own.set(own);
    }

    /// Counts a call to a prefill worker.
    pub fn prefill_called(&self) {
        self.prefill_calls.add(1);
    }

    /// Counts a prefill retry: one worker failed, another one is called.
    pub fn prefill_retried(&self) {
        self.prefill_retries.add(1);
    }

    /// Counts a hedge: a second prefill worker is called while the first is late.
    pub fn hedged(&self) {
        self.hedges.add(1);
    }

    /// Counts a recovery: a decode leg that failed before its client read anything is replaced.
    pub fn recovered(&self) {
        self.recoveries.add(1);
    }

    /// Counts a reset: an answer whose headers have come is broken off, by its worker or by the filter.
    pub fn reset(&self, reason: &'static str) {
        self.count_word("resets_total", "reason", reason);
    }

    /// Counts an ejection: a worker that keeps failing is passed over for a time.
    pub fn ejection(&self, role: Role) {
        self.count_word("ejections_total", "role", role.name());
    }

    /// Counts a decode retry: one worker took no connection, another one answers.
    pub fn decode_retried(&self) {
        self.decode_retries.add(1);
    }

    /// Counts the fate of a hand-off of `blocks` blocks. Called once per hand-off.
    pub fn handed_off(&self, fate: Fate, blocks: u64) {
        self.all_handed_off(fate, 1, blocks);
    }

    /// Counts the fate of several hand-offs with `blocks` blocks together.
    pub fn all_handed_off(&self, fate: Fate, handoffs: u64, blocks: u64) {
        let metrics = Fate::ALL.iter().zip(&self.handed_off);
        for (_, [count, sum]) in metrics.filter(|(known, _)| **known == fate) {
            count.add(handoffs);
            sum.add(blocks);
        }
    }

    /// Counts a refused request.
    pub fn refused(&self, reason: &'static str) {
        self.count_word("refused_total", "reason", reason);
    }

    /// Counts a fallback: a request that the pool would have disaggregated runs aggregated.
    pub fn fell_back(&self, fallback: Fallback) {
        let (name, reason) = fallback_of(fallback);
        self.count_word(name, "reason", reason);
    }

    /// Counts a failed leg of a hand-off, with or without recovery.
    pub fn handoff_failed(&self, leg: CalledLeg) {
        let [prefill, decode] = self.handoff_failures;
        match leg {
            CalledLeg::Prefill => prefill.add(1),
            CalledLeg::Decode => decode.add(1),
        }
    }

    /// Counts a state change of a model key.
    pub fn transition(&self, to: State) {
        self.count_word("transitions_total", "state", to.name());
    }

    /// Counts a clean-up: blocks that a client left behind are being fetched.
    pub fn cleaning_up(&self) {
        self.clean_ups.add(1);
    }

    /// Notes a request body of `bytes` copied out of the proxy.
    pub fn body_copied(&self, bytes: usize) {
        self.count(|own| own.copied = own.copied.saturating_add(bytes as u64));
    }

    /// Counts the bytes of the request bodies copied since the last call.
    pub fn export_copied(&self) {
        self.body_bytes_copied.add(self.own.get().copied);
        self.count(|own| own.copied = 0);
    }

    /// Label values are constants of the program, so the number of metrics is bounded.
    fn count_word(&self, name: &'static str, label: &str, word: &'static str) {
        self.word(name, label, word).add(1);
    }

    fn word(&self, name: &'static str, label: &str, word: &'static str) -> Metric {
        let mut known = self.by_word.borrow_mut();
        let metric = known.entry((name, word));
        *metric.or_insert_with(|| Metric::counter(name, &[(label, word)]))
    }

    /// Counts segments of other VMs' decisions that this VM read too late; `all` is the total so far.
    pub fn lapped(&self, all: u64) {
        let before = std::mem::replace(&mut self.exported.borrow_mut().lapped, all);
        let new = all.saturating_sub(before);
        if new > 0 {
            self.lapped.add(new);
        }
    }

    /// Forgets the values of the gauges: the next calls set all of them.
    pub fn forget_exported(&self) {
        let exported = &mut self.exported.borrow_mut();
        (exported.totals, exported.fleets) = (None, None);
    }

    /// Sets the gauges of work under way in all VMs, and of the number of VMs. Gauges are set, and by the leading VM alone:
    /// additions of a VM that crashed would stay.
    pub fn totals(&self, now: &Totals, vms: usize) {
        let before = self.exported.borrow_mut().totals.replace((*now, vms));
        if before == Some((*now, vms)) {
            return;
        }
        self.streams.record(now.streams);
        self.prefill_charges.record(now.prefills);
        self.decode_charges.record(now.decodes);
        self.waiting.record(now.waiting);
        self.ejected.record(now.ejected);
        self.vms.record(vms as u64);
    }

    /// Sets the gauges of workers, model states and leader, of all pools together. Called by the leading VM.
    pub fn export_counts(&self, now: FleetCounts) {
        let before = self.exported.borrow_mut().fleets.replace(now.clone());
        if before.as_ref() == Some(&now) {
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
    }
}

/// Reasons for breaking off answers that have begun.
const RESETS: [&str; 4] = [
    "broken_off",
    "silent",
    "prefill_failed",
    "prefill_no_handoff",
];

/// Metric and reason label of a fallback.
fn fallback_of(fallback: Fallback) -> (&'static str, &'static str) {
    let name = match fallback {
        Fallback::NotWorthIt => "bypasses_total",
        Fallback::PrefillAbsent | Fallback::PrefillFailed | Fallback::FleetEmpty => {
            "fallbacks_total"
        }
    };
    (name, fallback.name())
}

/// Kind of the leading VM.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Leader {
    /// The main thread's, which serves no requests.
    #[default]
    Main,
    /// A VM that serves requests too.
    Worker,
}

/// Numbers of workers and model keys.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct FleetCounts {
    /// Kind of the leading VM.
    pub leader: Leader,
    /// Workers by role and condition.
    pub workers: [[u64; CONDITIONS.len()]; Role::ALL.len()],
    /// Model keys by state.
    pub places: [u64; State::ALL.len()],
}

impl FleetCounts {
    /// Adds the numbers of a pool.
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
            let here = router
                .model_states()
                .filter(|(_, model)| model.state == state);
            *count = count.saturating_add(here.count() as u64);
        }
    }
}
