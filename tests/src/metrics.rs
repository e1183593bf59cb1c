//! Owns what a test expects of a metrics page.

use std::ops::Deref;

use pd_harness_common::prometheus;

/// Everything on one metrics page.
#[derive(Clone, Debug, Default)]
pub struct Metrics(prometheus::Metrics);

impl Deref for Metrics {
    type Target = prometheus::Metrics;

    fn deref(&self) -> &prometheus::Metrics {
        &self.0
    }
}

impl Metrics {
    /// Parses a page. Fails on an invalid line.
    pub fn parse(page: &str) -> Metrics {
        Metrics(prometheus::Metrics::read(page).unwrap_or_else(|error| panic!("{error}")))
    }

    /// The sum over all labels; fails if the metric is not on the page.
    pub fn expect(&self, name: &str) -> f64 {
        self.sum(name).unwrap_or_else(|| {
            let names = self.samples().map(|sample| sample.name.as_str());
            let ours: Vec<&str> = names.filter(|name| name.contains("pd_router")).collect();
            panic!("the metrics page lacks {name}; of pd-router it has {ours:?}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "lacks pd_router_x; of pd-router it has [\"pd_router_y\"]")]
    fn an_expected_metric_must_be_there() {
        Metrics::parse("pd_router_y 1").expect("pd_router_x");
    }

    #[test]
    #[should_panic(expected = "not a line")]
    fn a_broken_line_fails() {
        Metrics::parse("a{b=\"c} 1");
    }
}
