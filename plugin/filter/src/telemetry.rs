//! Owns the metrics: their names, and how what happens becomes a figure.
//!
//! Labels are part of a defined name, as `NAME_label=.=value;.;`, and are taken apart by Envoy's `stats_tags`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use routing::fleet::Role;
use routing::rendezvous::State;
use routing::route::Router;
use routing::sharing::Totals;

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
            vms: gauge("pd_router_vms"),
            lapped: counter("pd_router_decisions_lapped_total"),
            told_lapped: Cell::default(),
            open: Cell::default(),
            told: Cell::default(),
            told_of: RefCell::default(),
        }
    }

    /// A request came that is not for the filter itself.
    pub fn stream_opened(&self) {
        self.requests.add(1);
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

    /// Segments of other VMs' decisions that this VM came too late for, all in all.
    pub fn lapped(&self, all: u64) {
        let new = all.saturating_sub(self.told_lapped.replace(all));
        if new > 0 {
            self.lapped.add(i64::try_from(new).unwrap_or(i64::MAX));
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
        self.streams.set(now.streams);
        self.prefill_charges.set(now.prefills);
        self.decode_charges.set(now.decodes);
        self.waiting.set(now.waiting);
        self.ejected.set(now.ejected);
        self.vms.set(vms as u64);
    }

    /// The fleets and the states of the places that are routed to, those of all pools together. Told by the VM that leads.
    pub fn census(&self, now: Census) {
        if self.told_of.borrow().as_ref() == Some(&now) {
            return;
        }
        for (metric, count) in self.fleet_workers.into_iter().zip(now.workers) {
            metric.set(count);
        }
        for (metric, count) in self.places.into_iter().zip(now.places) {
            metric.set(count);
        }
        self.told_of.replace(Some(now));
    }
}

/// How many workers and places there are.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Census {
    /// Of each role.
    pub workers: [u64; Role::ALL.len()],
    /// In each state.
    pub places: [u64; State::ALL.len()],
}

impl Census {
    /// Those of a pool are added.
    pub fn add(&mut self, router: &Router) {
        for (role, count) in Role::ALL.into_iter().zip(&mut self.workers) {
            *count = count.saturating_add(router.fleet().of_role(role).count() as u64);
        }
        for (state, count) in State::ALL.into_iter().zip(&mut self.places) {
            let here = router.places().filter(|(_, place)| place.state == state);
            *count = count.saturating_add(here.count() as u64);
        }
    }
}
