//! Owns the plugin's metrics, process-wide by name, and their Prometheus text.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pd_harness_common::prometheus::escaped;

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down, or is set.
    Gauge,
    /// Collects values in Envoy's fixed buckets.
    Histogram,
}

impl MetricKind {
    /// The kind by its number in the ABI.
    pub fn from_abi(number: u32) -> Option<MetricKind> {
        match number {
            0 => Some(MetricKind::Counter),
            1 => Some(MetricKind::Gauge),
            2 => Some(MetricKind::Histogram),
            _ => None,
        }
    }

    fn prometheus(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// Why a metric was not changed.
#[derive(Debug, PartialEq, Eq)]
pub enum MetricError {
    /// No metric has this id.
    NotFound,
    /// The metric's kind does not allow this.
    BadArgument,
}

/// Upper bounds of Envoy's default histogram buckets.
const BUCKETS: [f64; 19] = [
    0.5,
    1.0,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1_000.0,
    2_500.0,
    5_000.0,
    10_000.0,
    30_000.0,
    60_000.0,
    300_000.0,
    600_000.0,
    1_800_000.0,
    3_600_000.0,
];

/// All metrics of the process. They outlive every VM.
#[derive(Default)]
pub struct Metrics(Mutex<Registry>);

#[derive(Default)]
struct Registry {
    ids: HashMap<(MetricKind, Vec<u8>), u32>,
    metrics: Vec<Metric>,
}

struct Metric {
    kind: MetricKind,
    label_set: LabelSet,
    value: u64,
    histogram: Histogram,
}

#[derive(Default)]
struct Histogram {
    buckets: [u64; BUCKETS.len()],
    count: u64,
    sum: u64,
}

impl Metrics {
    /// The id of the metric with this name and kind, created if new.
    pub fn define(&self, kind: MetricKind, name: &[u8]) -> u32 {
        let mut registry = self.lock();
        let registry = &mut *registry;
        let next = u32::try_from(registry.metrics.len() + 1).unwrap_or(u32::MAX);
        let id = *registry.ids.entry((kind, name.to_vec())).or_insert(next);
        if id == next {
            registry.metrics.push(Metric {
                kind,
                label_set: LabelSet::parse(&String::from_utf8_lossy(name)),
                value: 0,
                histogram: Histogram::default(),
            });
        }
        id
    }

    /// Adds to a counter (more than zero only) or to a gauge.
    pub fn increment(&self, id: u32, offset: i64) -> Result<(), MetricError> {
        self.change(id, |metric| match metric.kind {
            MetricKind::Counter if offset > 0 => {
                metric.value = metric.value.wrapping_add_signed(offset);
                Ok(())
            }
            MetricKind::Gauge => {
                metric.value = metric.value.wrapping_add_signed(offset);
                Ok(())
            }
            MetricKind::Counter | MetricKind::Histogram => Err(MetricError::BadArgument),
        })
    }

    /// Sets a gauge, adds to a counter, records a value in a histogram.
    pub fn record(&self, id: u32, value: u64) -> Result<(), MetricError> {
        self.change(id, |metric| {
            match metric.kind {
                MetricKind::Counter => metric.value = metric.value.wrapping_add(value),
                MetricKind::Gauge => metric.value = value,
                MetricKind::Histogram => metric.histogram.record(value),
            }
            Ok(())
        })
    }

    /// The value of a counter or gauge.
    pub fn get(&self, id: u32) -> Result<u64, MetricError> {
        self.change(id, |metric| match metric.kind {
            MetricKind::Counter | MetricKind::Gauge => Ok(metric.value),
            MetricKind::Histogram => Err(MetricError::BadArgument),
        })
    }

    /// All metrics in Prometheus' text format.
    pub fn prometheus(&self) -> String {
        let registry = self.lock();
        let mut families: BTreeMap<(&str, &str), Vec<&Metric>> = BTreeMap::new();
        for metric in &registry.metrics {
            let family = (metric.label_set.name.as_str(), metric.kind.prometheus());
            families.entry(family).or_default().push(metric);
        }
        let mut text = String::new();
        for ((name, kind), metrics) in families {
            let _ = writeln!(text, "# TYPE {name} {kind}");
            for metric in metrics {
                metric.write(&mut text);
            }
        }
        text
    }

    fn change<T>(
        &self,
        id: u32,
        change: impl FnOnce(&mut Metric) -> Result<T, MetricError>,
    ) -> Result<T, MetricError> {
        let mut registry = self.lock();
        let index = (id as usize).wrapping_sub(1);
        let metric = registry.metrics.get_mut(index);
        change(metric.ok_or(MetricError::NotFound)?)
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Metric {
    fn write(&self, text: &mut String) {
        let LabelSet { name, labels } = &self.label_set;
        match self.kind {
            MetricKind::Counter => {
                let _ = writeln!(text, "{name}{{{labels}}} {}", self.value);
            }
            MetricKind::Gauge => {
                // A decrement below zero wraps in Envoy's unsigned gauge; the signed form is readable.
                let _ = writeln!(text, "{name}{{{labels}}} {}", self.value.cast_signed());
            }
            MetricKind::Histogram => self.histogram.write(text, name, labels),
        }
    }
}

impl Histogram {
    #[expect(
        clippy::cast_precision_loss,
        reason = "bucket bounds are far below 2^53"
    )]
    fn record(&mut self, value: u64) {
        self.count += 1;
        self.sum = self.sum.wrapping_add(value);
        for (bound, bucket) in BUCKETS.iter().zip(&mut self.buckets) {
            if value as f64 <= *bound {
                *bucket += 1;
            }
        }
    }

    fn write(&self, text: &mut String, name: &str, labels: &str) {
        let comma = if labels.is_empty() { "" } else { "," };
        for (bound, count) in BUCKETS.iter().zip(&self.buckets) {
            let _ = writeln!(
                text,
                "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {count}"
            );
        }
        let _ = writeln!(
            text,
            "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {}",
            self.count
        );
        let _ = writeln!(text, "{name}_sum{{{labels}}} {}", self.sum);
        let _ = writeln!(text, "{name}_count{{{labels}}} {}", self.count);
    }
}

/// A metric's Prometheus name and labels, parsed from the name that the plugin defined:
/// `NAME_label=.=value;.;label2=.=value2;.;`, the notation for Envoy's tag rules.
#[derive(Debug, PartialEq, Eq)]
struct LabelSet {
    name: String,
    labels: String,
}

impl LabelSet {
    fn parse(defined: &str) -> LabelSet {
        let Some((head, mut rest)) = defined.split_once("=.=") else {
            return LabelSet {
                name: sanitized(defined),
                labels: String::new(),
            };
        };
        let (name, mut label) = head.rsplit_once('_').unwrap_or(("", head));
        let mut labels = Vec::new();
        let tail = loop {
            let (value, after) = rest.split_once(";.;").unwrap_or((rest, ""));
            labels.push(format!("{}=\"{}\"", sanitized(label), escaped(value)));
            match after.split_once("=.=") {
                Some(next) => (label, rest) = next,
                None => break after,
            }
        };
        LabelSet {
            name: sanitized(&format!("{name}{tail}")),
            labels: labels.join(","),
        }
    }
}

fn sanitized(name: &str) -> String {
    name.chars()
        .map(|letter| match letter {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '_' | ':' => letter,
            _ => '_',
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_labels() {
        let parsed = LabelSet::parse("pd_requests_total_worker=.=10.0.0.1:80;.;model=.=a\"b;.;");
        assert_eq!(parsed.name, "pd_requests_total");
        assert_eq!(parsed.labels, r#"worker="10.0.0.1:80",model="a\"b""#);
        assert_eq!(LabelSet::parse("a.b-c").name, "a_b_c");
    }

    #[test]
    fn text_groups_a_family_under_one_type() {
        let metrics = Metrics::default();
        let one = metrics.define(MetricKind::Counter, b"refused_total_reason=.=no_decode;.;");
        let two = metrics.define(MetricKind::Counter, b"refused_total_reason=.=full;.;");
        let gauge = metrics.define(MetricKind::Gauge, b"pd.streams");
        assert_eq!(metrics.define(MetricKind::Gauge, b"pd.streams"), gauge);
        metrics.increment(one, 2).expect("counter");
        metrics.increment(two, 1).expect("counter");
        metrics.increment(gauge, 3).expect("gauge");
        metrics.increment(gauge, -1).expect("gauge");
        assert_eq!(
            metrics.prometheus(),
            "# TYPE pd_streams gauge\npd_streams{} 2\n\
             # TYPE refused_total counter\n\
             refused_total{reason=\"no_decode\"} 2\nrefused_total{reason=\"full\"} 1\n"
        );
    }

    #[test]
    fn kinds_allow_what_envoy_allows() {
        let metrics = Metrics::default();
        let counter = metrics.define(MetricKind::Counter, b"c");
        let histogram = metrics.define(MetricKind::Histogram, b"h");
        assert_eq!(
            metrics.increment(counter, -1),
            Err(MetricError::BadArgument)
        );
        assert_eq!(
            metrics.increment(histogram, 1),
            Err(MetricError::BadArgument)
        );
        assert_eq!(metrics.get(histogram), Err(MetricError::BadArgument));
        assert_eq!(metrics.record(9, 1), Err(MetricError::NotFound));
        metrics.record(histogram, 7).expect("histogram");
        let text = metrics.prometheus();
        assert!(
            text.contains("h_bucket{le=\"5\"} 0\nh_bucket{le=\"10\"} 1\n"),
            "{text}"
        );
        assert!(text.contains("h_sum{} 7\nh_count{} 1\n"), "{text}");
    }
}
