//! Owns one metric of the proxy's, and how its labels are written into its name.
//!
//! Labels are part of a defined name, as `NAME_label=.=value;.;label=.=value;.;`, and are taken apart by Envoy's `stats_tags`.

use crate::host::{self, MetricKind};

/// A label's value in bytes, at most: names of workers and models come from outside.
const LONGEST_VALUE: usize = 128;

/// A metric that has been defined; silent where the host would not define it.
#[derive(Clone, Copy)]
pub struct Metric(Option<u32>);

impl Metric {
    fn define(kind: MetricKind, name: &str) -> Self {
        let defined = host::define_metric(kind, name);
        if let Err(error) = defined {
            log::warn!("metric {name} is not available: {error}");
        }
        Self(defined.ok())
    }

    /// One that only grows.
    pub fn counter(name: &str, labels: &[(&str, &str)]) -> Self {
        Self::define(MetricKind::Counter, &labelled(name, labels))
    }

    /// One that goes up and down.
    pub fn gauge(name: &str, labels: &[(&str, &str)]) -> Self {
        Self::define(MetricKind::Gauge, &labelled(name, labels))
    }

    /// One whose values are put in Envoy's buckets.
    pub fn histogram(name: &str, labels: &[(&str, &str)]) -> Self {
        Self::define(MetricKind::Histogram, &labelled(name, labels))
    }

    /// Adds to a counter; 0 adds nothing.
    pub fn add(self, count: u64) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        if count > 0 {
            // A counter refuses nothing but a wrong id, which a defined metric does not have.
            let _ = self.0.map(|id| host::increment_metric(id, count));
        }
    }

    /// Sets a gauge, or takes a value into a histogram.
    pub fn record(self, value: u64) {
        let _ = self.0.map(|id| host::record_metric(id, value));
    }
}

fn labelled(name: &str, labels: &[(&str, &str)]) -> String {
    let mut out = format!("pd_router_{name}");
    if !labels.is_empty() {
        out.push('_');
    }
    for (label, value) in labels {
        out.push_str(label);
        out.push_str("=.=");
        let kept = value.chars().take(LONGEST_VALUE);
        out.extend(kept.map(|c| if is_plain(c) { c } else { '_' }));
        out.push_str(";.;");
    }
    out
}

/// Whether a character can neither end a label nor be changed by the proxy.
fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-._/@:".contains(c)
}
