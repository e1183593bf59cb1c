//! Owns one metric of the proxy, and the encoding of labels in its name.
//!
//! Labels are part of a defined name, as `NAME_label=.=value;.;label=.=value;.;`; Envoy's `stats_tags` takes them apart.

use crate::host::{self, MetricKind};

/// Longest value of a label, in bytes: names of workers and models come from outside.
const LONGEST_VALUE: usize = 128;

/// A defined metric; silent if the host would not define it.
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

    /// A metric that only grows.
    pub fn counter(name: &str, labels: &[(&str, &str)]) -> Self {
        Self::define(MetricKind::Counter, &labelled(name, labels))
    }

    /// A metric that goes up and down.
    pub fn gauge(name: &str, labels: &[(&str, &str)]) -> Self {
        Self::define(MetricKind::Gauge, &labelled(name, labels))
    }

    /// A metric whose values are put in Envoy's buckets.
    pub fn histogram(name: &str, labels: &[(&str, &str)]) -> Self {
        Self::define(MetricKind::Histogram, &labelled(name, labels))
    }

    /// Adds to a counter; 0 adds nothing.
    pub fn add(self, count: u64) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        if count > 0 {
            // The host refuses only a wrong id, which a defined metric does not have.
            let _ = self.0.map(|id| host::increment_metric(id, count));
        }
    }

    /// Sets a gauge, or adds a value to a histogram.
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
