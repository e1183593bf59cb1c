//! Owns what is read from the gateway's metrics page.

use std::net::SocketAddr;

use routing::fleet::Role;

use super::http::{Http, HttpError};

/// The filter's own metrics, by a query that Envoy understands; the other host ignores it and has no others.
const PAGE: &str = "/stats/prometheus?filter=pd_router";

/// The gateway's metrics page, as it was once.
#[derive(Debug)]
pub struct Metrics(String);

impl Metrics {
    /// Asks for it.
    ///
    /// # Errors
    /// When the gateway does not answer.
    pub async fn ask(http: &Http, admin: SocketAddr) -> Result<Self, HttpError> {
        http.get(admin, PAGE).await.map(Self)
    }

    /// Charges that are booked now.
    pub fn bookings(&self) -> u64 {
        self.sum("pd_router_prefill_charges", "") + self.sum("pd_router_decode_charges", "")
    }

    /// Streams that are open now.
    pub fn streams(&self) -> u64 {
        self.sum("pd_router_streams", "")
    }

    /// Hand-offs that the filter knows to be lost, since its start.
    pub fn leaked_handoffs(&self) -> u64 {
        self.sum("pd_router_kv_leaked_handoffs_total", "")
    }

    /// Hand-offs of which the filter does not know whether they are lost, since its start.
    pub fn unknown_handoffs(&self) -> u64 {
        self.sum("pd_router_kv_unknown_handoffs_total", "")
    }

    /// Answers that had begun, at the gateway at least, and were broken off, since its start.
    pub fn resets(&self) -> u64 {
        self.sum("pd_router_resets_total", "")
    }

    /// Those of them whose worker had fallen silent, or so it looked.
    pub fn silences(&self) -> u64 {
        self.sum("pd_router_resets_total", "reason=\"silent\"")
    }

    /// Requests that the filter refused with this code, since its start.
    pub fn refused(&self, code: &str) -> u64 {
        self.sum("pd_router_refused_total", &format!("reason=\"{code}\""))
    }

    /// Legs that fetched what clients had left behind, since the start.
    pub fn clean_ups(&self) -> u64 {
        self.sum("pd_router_clean_ups_total", "")
    }

    /// Decode legs that were replaced, since its start.
    pub fn recoveries(&self) -> u64 {
        self.sum("pd_router_recoveries_total", "")
    }

    /// Ejections of workers of this role, since the start.
    pub fn ejections(&self, role: Role) -> u64 {
        let label = format!("role=\"{}\"", role.name());
        self.sum("pd_router_ejections_total", &label)
    }

    /// The sum of a metric over its lines with this label, 0 where there is none.
    fn sum(&self, name: &str, label: &str) -> u64 {
        let value = |line: &str| {
            let rest = line.strip_prefix(name)?;
            let labels = match rest.strip_prefix('{') {
                Some(rest) => rest.rsplit_once('}')?.0,
                None => "",
            };
            let plain = rest.starts_with([' ', '{']) && labels.contains(label);
            let value: f64 = line.rsplit_once(' ')?.1.parse().ok()?;
            // Counts only; one that fell below zero is as wrong as one left over.
            plain.then_some(value.abs() as u64)
        };
        self.0.lines().filter_map(value).sum()
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
        let metrics = Metrics(PAGE.to_owned());
        assert_eq!(metrics.ejections(Role::Prefill), 2);
        assert_eq!(metrics.ejections(Role::Decode), 1);
        assert_eq!(metrics.bookings(), 7);
        assert_eq!(metrics.leaked_handoffs(), 0);
        assert_eq!(metrics.streams(), 0);
    }

    #[test]
    fn a_negative_gauge_is_not_zero() {
        let metrics = Metrics("pd_router_decode_charges{} -1\n".to_owned());
        assert_eq!(metrics.bookings(), 1);
    }
}
