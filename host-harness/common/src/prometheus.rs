//! Owns the reader of Prometheus' text format, and the escaping of its labels.

use std::collections::BTreeMap;

/// One line: a name, its labels, a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Metric name.
    pub name: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Value.
    pub value: f64,
}

/// Everything on one metrics page.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    samples: Vec<Sample>,
}

/// A line that is no Prometheus text.
#[derive(Debug, thiserror::Error)]
#[error("not a line of Prometheus text: {0:?}")]
pub struct BadLine(String);

impl Metrics {
    /// Reads a page.
    ///
    /// # Errors
    /// With the first invalid line.
    pub fn read(page: &str) -> Result<Self, BadLine> {
        let lines = page.lines().map(str::trim);
        let samples = lines
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| sample(line).ok_or_else(|| BadLine(line.to_owned())))
            .collect::<Result<_, _>>()?;
        Ok(Self { samples })
    }

    /// Every line.
    pub fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter()
    }

    /// The samples of this name that have all these labels.
    pub fn matching(&self, name: &str, labels: &[(&str, &str)]) -> impl Iterator<Item = &Sample> {
        self.samples().filter(move |sample| {
            let has = |(key, value): &(&str, &str)| {
                sample.labels.get(*key).map(String::as_str) == Some(*value)
            };
            sample.name == name && labels.iter().all(has)
        })
    }

    /// The sum over all labels, or `None` if the metric is not on the page.
    pub fn sum(&self, name: &str) -> Option<f64> {
        self.sum_where(name, &[])
    }

    /// The sum over the samples that have all these labels, or `None` if there is none.
    pub fn sum_where(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut values = self
            .matching(name, labels)
            .map(|sample| sample.value)
            .peekable();
        values.peek()?;
        Some(values.sum())
    }
}

/// A label's value, escaped.
pub fn escaped(value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    value.replace('\n', "\\n")
}

fn sample(line: &str) -> Option<Sample> {
    let name_end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, rest) = line.split_at(name_end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => labels(inside)?,
        None => (BTreeMap::new(), rest),
    };
    // A timestamp may follow the value.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Parses `a="b",c="d"}` and returns the rest as well.
fn labels(mut text: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, rest) = text.split_once("=\"")?;
        let (value, rest) = quoted(rest)?;
        labels.insert(name.trim().to_owned(), value);
        text = rest;
    }
}

/// Reads up to the closing quote and returns the rest as well.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"
# HELP a_total text
# TYPE a_total counter
a_total{reason="x"} 3
a_total{reason="y",worker="a \"b\" {c}, d"} 4 1700000000000
b 1.5
c{} 0
d{le="+Inf"} +Inf
"#;

    #[test]
    fn values_are_found_by_name_and_labels() {
        let metrics = Metrics::read(PAGE).unwrap();
        assert_eq!(metrics.sum("a_total"), Some(7.0));
        assert_eq!(metrics.sum_where("a_total", &[("reason", "x")]), Some(3.0));
        assert_eq!(
            metrics.sum_where("a_total", &[("worker", "a \"b\" {c}, d")]),
            Some(4.0)
        );
        assert_eq!(metrics.sum("b"), Some(1.5));
        assert_eq!(metrics.sum("c"), Some(0.0));
        assert_eq!(metrics.sum("d"), Some(f64::INFINITY));
    }

    #[test]
    fn what_is_not_there_is_not_zero() {
        let metrics = Metrics::read(PAGE).unwrap();
        assert_eq!(metrics.sum("a"), None);
        assert_eq!(metrics.sum_where("a_total", &[("reason", "z")]), None);
    }

    #[test]
    fn a_broken_line_is_named() {
        let error = Metrics::read("b 1\na{b=\"c} 1").unwrap_err();
        assert!(error.to_string().contains("a{b="), "{error}");
    }
}
