//! Owns the metrics: their names, and how what happens becomes a figure.
//!
//! Labels are part of a defined name, as `NAME_label=.=value;.;`, and are taken apart by Envoy's `stats_tags`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use routing::fleet::{Fleet, Role};
use routing::load::Load;
use routing::rendezvous::State;

use crate::host::{self, MetricKind};

/// A metric that has been defined; silent where the host would not define it.
#[derive(Clone, Copy)]
struct Metric(Option<u32>);

impl Metric {
    fn define(kind: MetricKind, name: &str) -> Self {
        let defined = host::define_metric(kind, name);
        if let Err(error) = defined {
            log::warn!("metric {name} is not available: {error}");
        }
        Self(defined.ok())
    }

    fn add(self, offset: i64) {
        // A counter refuses nothing but a wrong id, which a defined metric does not have.
        let _ = self.0.map(|id| host::increment_metric(id, offset));
    }

    fn set(self, value: u64) {
        let _ = self.0.map(|id| host::record_metric(id, value));
    }
}

/// All metrics of the plugin.
pub struct Telemetry {
    requests: Metric,
    prefill_calls: Metric,
    prefill_retries: Metric,
    hedges: Metric,
    recoveries: Metric,
    ejected: Metric,
    reported_ejected: Cell<u64>,
    decode_retries: Metric,
    leaked_handoffs: Metric,
    leaked_blocks: Metric,
    streams: Metric,
    prefill_charges: Metric,
    decode_charges: Metric,
    waiting: Metric,
    fleet_workers: [Metric; Role::ALL.len()],
    by_word: RefCell<BTreeMap<String, Metric>>,
    clean_ups: Metric,
    places: [Metric; State::ALL.len()],
    reported: Cell<Load>,
    reported_waiting: Cell<u64>,
}

impl Telemetry {
    /// Defines the metrics, so that they are there as zeros.
    pub fn new() -> Self {
        let counter = |name: &str| Metric::define(MetricKind::Counter, name);
        let gauge = |name: &str| Metric::define(MetricKind::Gauge, name);
        let of_role = |role: Role| {
            gauge(&format!(
                "pd_router_fleet_workers_role=.={};.;",
                role.name()
            ))
        };
        let of_state =
            |state: State| gauge(&format!("pd_router_places_state=.={};.;", state.name()));
        Self {
            requests: counter("pd_router_requests_total"),
            prefill_calls: counter("pd_router_prefill_calls_total"),
            prefill_retries: counter("pd_router_prefill_retries_total"),
            hedges: counter("pd_router_hedges_total"),
            recoveries: counter("pd_router_recoveries_total"),
            ejected: gauge("pd_router_ejected"),
            reported_ejected: Cell::default(),
            decode_retries: counter("pd_router_decode_retries_total"),
            leaked_handoffs: counter("pd_router_kv_leaked_handoffs_total"),
            leaked_blocks: counter("pd_router_kv_leaked_blocks_total"),
            streams: gauge("pd_router_streams"),
            prefill_charges: gauge("pd_router_prefill_charges"),
            decode_charges: gauge("pd_router_decode_charges"),
            waiting: gauge("pd_router_queue_requests"),
            fleet_workers: Role::ALL.map(of_role),
            by_word: RefCell::default(),
            clean_ups: counter("pd_router_clean_ups_total"),
            places: State::ALL.map(of_state),
            reported: Cell::default(),
            reported_waiting: Cell::default(),
        }
    }

    /// A request came that is not for the filter itself.
    pub fn stream_opened(&self) {
        self.requests.add(1);
        self.streams.add(1);
    }

    /// Its stream ended.
    pub fn stream_closed(&self) {
        self.streams.add(-1);
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

    /// How many workers are passed over so by this VM; the gauge is the sum over all VMs.
    pub fn ejected(&self, now: usize) {
        let now = now as u64;
        let before = self.reported_ejected.replace(now);
        if now != before {
            let difference = i64::try_from(now).unwrap_or(i64::MAX);
            self.ejected
                .add(difference - i64::try_from(before).unwrap_or(i64::MAX));
        }
    }

    /// A decode worker took no connection and another one answers.
    pub fn decode_retried(&self) {
        self.decode_retries.add(1);
    }

    /// A prefill worker holds `blocks` KV blocks that no decode worker is known to have fetched.
    pub fn leaked(&self, blocks: u64) {
        self.leaked_handoffs.add(1);
        self.leaked_blocks
            .add(i64::try_from(blocks).unwrap_or(i64::MAX));
    }

    /// A request was refused.
    pub fn refused(&self, reason: &'static str) {
        self.count_word("refused_total", "reason", reason);
    }

    /// A request that the pool would have disaggregated runs whole.
    pub fn fell_back(&self, reason: &'static str) {
        self.count_word("fallbacks_total", "reason", reason);
    }

    /// A place changed its state.
    pub fn transition(&self, to: State) {
        self.count_word("transitions_total", "state", to.name());
    }

    /// Blocks that a client left behind are being fetched.
    pub fn cleaning_up(&self) {
        self.clean_ups.add(1);
    }

    /// Words are the program's own, so the number of metrics is bounded.
    fn count_word(&self, name: &str, label: &str, word: &'static str) {
        let name = format!("pd_router_{name}_{label}=.={word};.;");
        let mut known = self.by_word.borrow_mut();
        let metric = *known
            .entry(name)
            .or_insert_with_key(|name| Metric::define(MetricKind::Counter, name));
        metric.add(1);
    }

    /// How many places are in which state; every VM tells the same.
    pub fn places(&self, states: impl Iterator<Item = State> + Clone) {
        for (state, metric) in State::ALL.into_iter().zip(self.places) {
            metric.set(states.clone().filter(|known| *known == state).count() as u64);
        }
    }

    /// What is booked in this VM now; the gauges are sums over all VMs, so only the difference is told.
    pub fn load(&self, now: Load, waiting: usize) {
        let before = self.reported.replace(now);
        let waited = self.reported_waiting.replace(waiting as u64);
        let tell = |metric: Metric, before: u64, now: u64| {
            let difference =
                i64::try_from(now).unwrap_or(i64::MAX) - i64::try_from(before).unwrap_or(i64::MAX);
            if difference != 0 {
                metric.add(difference);
            }
        };
        tell(self.prefill_charges, before.prefills, now.prefills);
        tell(self.decode_charges, before.decodes, now.decodes);
        tell(self.waiting, waited, waiting as u64);
    }

    /// The fleet that is routed to; every VM tells the same.
    pub fn fleet(&self, fleet: &Fleet) {
        for (role, metric) in Role::ALL.into_iter().zip(self.fleet_workers) {
            metric.set(fleet.of_role(role).count() as u64);
        }
    }
}
