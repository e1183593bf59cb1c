//! Owns the reading of the gateway's metrics page.

use std::net::SocketAddr;

use pd_harness_common::prometheus::Metrics;
use routing::fleet::Role;

use crate::http::{self, HttpError};

/// The filter's own metrics, by a query that Envoy understands; the other host ignores the query, and has no other metrics.
const PAGE: &str = "/stats/prometheus?filter=pd_router";

/// One snapshot of the gateway's metrics page.
#[derive(Debug)]
pub struct MetricsPage(Metrics);

impl MetricsPage {
    /// Fetches the page.
    ///
    /// # Errors
    /// When the gateway does not answer with such a page.
    pub async fn fetch(admin: SocketAddr) -> Result<Self, HttpError> {
        let page = http::get(admin, PAGE).await?;
        let metrics = Metrics::read(&String::from_utf8_lossy(&page));
        let unreadable = |error| HttpError::of_get(admin, PAGE, error);
        Ok(Self(metrics.map_err(unreadable)?))
    }

    /// Charges booked now.
    pub fn bookings(&self) -> u64 {
        self.sum("pd_router_prefill_charges", &[]) + self.sum("pd_router_decode_charges", &[])
    }

    /// Streams open now.
    pub fn streams(&self) -> u64 {
        self.sum("pd_router_streams", &[])
    }

    /// Hand-offs that the filter counts as lost, since its start.
    pub fn leaked_handoffs(&self) -> u64 {
        self.sum("pd_router_kv_leaked_handoffs_total", &[])
    }

    /// Hand-offs whose fate the filter does not know, since its start.
    pub fn unknown_handoffs(&self) -> u64 {
        self.sum("pd_router_kv_unknown_handoffs_total", &[])
    }

    /// Answers broken off after they had begun, at the gateway at least, since its start.
    pub fn resets(&self) -> u64 {
        self.sum("pd_router_resets_total", &[])
    }

    /// Resets among them for which the filter blames a silent worker.
    pub fn silences(&self) -> u64 {
        self.sum("pd_router_resets_total", &[("reason", "silent")])
    }

    /// Requests refused by the filter with this code, since its start.
    pub fn refused(&self, code: &str) -> u64 {
        self.sum("pd_router_refused_total", &[("reason", code)])
    }

    /// Clean-up legs, which fetch the hand-offs that clients left behind, since the start.
    pub fn clean_ups(&self) -> u64 {
        self.sum("pd_router_clean_ups_total", &[])
    }

    /// Decode legs that were replaced, since its start.
    pub fn recoveries(&self) -> u64 {
        self.sum("pd_router_recoveries_total", &[])
    }

    /// Ejections of workers of this role, since the start.
    pub fn ejections(&self, role: Role) -> u64 {
        self.sum("pd_router_ejections_total", &[("role", role.name())])
    }

    /// Sum of a metric over its lines with these labels; 0 if there is none.
    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let samples = self.0.matching(name, labels);
        // Counts only; a negative count is as wrong as one left over.
        samples.map(|sample| sample.value.abs() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# TYPE pd_router_ejections_total counter
pd_router_ejections_total{role="prefill"} 2
pd_router_ejections_total{role="decode"} 1
pd_router_ejections_total_more{role="decode"} 7
# TYPE pd_router_prefill_charges gauge
pd_router_prefill_charges{} 3
pd_router_decode_charges 4
pd_router_kv_leaked_handoffs_total{} 0
"#;

    #[test]
    fn both_hosts_pages_are_read() {
        let metrics = MetricsPage(Metrics::read(PAGE).unwrap());
        assert_eq!(metrics.ejections(Role::Prefill), 2);
        assert_eq!(metrics.ejections(Role::Decode), 1);
        assert_eq!(metrics.bookings(), 7);
        assert_eq!(metrics.leaked_handoffs(), 0);
        assert_eq!(metrics.streams(), 0);
    }

    #[test]
    fn a_negative_gauge_is_not_zero() {
        let metrics = MetricsPage(Metrics::read("pd_router_decode_charges{} -1\n").unwrap());
        assert_eq!(metrics.bookings(), 1);
    }
}
