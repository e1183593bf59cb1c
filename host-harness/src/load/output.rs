//! Owns the output of a load's results: a few lines for people, one of JSON for programs.

use std::io::{Result, Write};

use super::{LoadPlan, Measured, Pacing};

/// Prints the results of a load.
///
/// # Errors
/// When standard output has no reader.
pub fn print(plan: &LoadPlan, measured: &Measured, as_json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if as_json {
        return writeln!(out, "{}", serde_json::to_string(measured)?);
    }
    let how = match plan.pacing {
        Pacing::Closed => format!("{} connections, one request each", plan.connections),
        Pacing::Open { rate } => format!("{rate} requests a second"),
    };
    let Measured {
        requests,
        good,
        rps,
        latency_ms: latency,
        ttft_ms: ttft,
        ..
    } = measured;
    writeln!(out, "{how}, bodies of {} bytes", plan.spec.body_bytes)?;
    writeln!(
        out,
        "{good} of {requests} requests answered well, {rps:.1} a second"
    )?;
    let mut line = |what: &str, p: &super::Percentiles| {
        writeln!(
            out,
            "{what:<12} p50 {:>9.3} ms   p90 {:>9.3} ms   p99 {:>9.3} ms",
            p.p50, p.p90, p.p99
        )
    };
    line("first token", ttft)?;
    line("whole answer", latency)
}
