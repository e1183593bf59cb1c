//! Owns the findings on memory over many prompts, and on a recorded trace.

use super::{Finding, FindingSpec, Judged, Limit, Verdict, difference};
use crate::bench::report::contenders::name::{DIRECT, NIXL};
use crate::bench::report::memory::{MARK, MemoryGrowth};
use crate::bench::report::numbers::{percent, short, thousands};
use crate::bench::report::select::{KB, MissingFigure, threads};
use crate::bench::results::{MemoryRow, TraceRow};

/// Findings 5.
pub fn memory(rows: &[MemoryRow]) -> Vec<Finding> {
    let mut all = Vec::new();
    for (grown, flat, contender, mode) in [
        ("5a", "5b", DIRECT, "direct mode"),
        ("5c", "5d", NIXL, "NIXL"),
    ] {
        let of: Vec<&MemoryRow> = rows
            .iter()
            .filter(|row| row.contender == contender && row.body_bytes == 16 * KB)
            .collect();
        let mark = thousands(MARK as f64);
        let until = FindingSpec {
            number: grown,
            what: format!("memory that {mark} distinct prompts of 16 KB take, each VM, {mode}"),
            target: "at most 64 MB".to_owned(),
        };
        let after = FindingSpec {
            number: flat,
            what: format!("its growth from there, all VMs, {mode}"),
            target: "flat: at most 0.5 MB for 10,000 prompts".to_owned(),
        };
        let words = |row: &&MemoryRow| threads(row.threads);
        all.extend(until.findings(&of, words, |row| grown_by_mark(row)));
        all.extend(after.findings(&of, words, |row| grown_after(row)));
    }
    all
}

fn grown_by_mark(row: &MemoryRow) -> Judged {
    let growth = MemoryGrowth::of(row);
    let (start, at_mark) = (growth.start?, growth.at_mark?);
    let each = growth.each_vm?;
    let words = format!(
        "{} MB ({} to {} MB, {})",
        short(each),
        short(start),
        short(at_mark),
        threads(row.threads)
    );
    Ok((words, Limit::AtMost(64.0).verdict(each, " MB")?))
}

fn grown_after(row: &MemoryRow) -> Judged {
    let growth = MemoryGrowth::of(row);
    let (prompts, end) = growth.end?;
    let rate = growth.after_mark?;
    let words = format!(
        "{} MB ({} MB at {} prompts)",
        short(rate),
        short(end),
        thousands(prompts as f64)
    );
    Ok((words, Limit::AtMost(0.5).verdict(rate, " MB")?))
}

/// Findings 6.
pub fn trace(rows: &[TraceRow]) -> Vec<Finding> {
    let first_token = FindingSpec {
        number: "6a",
        what: "conversation trace: pd-router's mean TTFT".to_owned(),
        target: "the lowest of all".to_owned(),
    };
    let success = FindingSpec {
        number: "6b",
        what: "conversation trace: pd-router's success rate".to_owned(),
        target: "no lower than any".to_owned(),
    };
    vec![
        first_token.finding(lowest(rows)),
        success.finding(answered(rows)),
    ]
}

/// Whether a row is pd-router as meant to be run, and not a control that shows the worth of its policy.
fn is_ours(row: &TraceRow) -> bool {
    let control = ["round_robin", "least"];
    row.contender.starts_with("pd-router")
        && !control.iter().any(|policy| row.contender.contains(policy))
}

fn absent(why: &str) -> MissingFigure {
    MissingFigure::Absent(why.to_owned())
}

fn quickest<'a>(rows: impl Iterator<Item = &'a TraceRow>) -> Option<&'a TraceRow> {
    rows.filter(|row| row.ttft_mean_ms.is_finite())
        .min_by(|one, other| one.ttft_mean_ms.total_cmp(&other.ttft_mean_ms))
}

/// The pd-router row that counts, and all rows compared with it.
fn sides(rows: &[TraceRow]) -> Result<(&TraceRow, impl Iterator<Item = &TraceRow>), MissingFigure> {
    let ours = quickest(rows.iter().filter(|row| is_ours(row)));
    let ours = ours.ok_or_else(|| absent("pd-router did not play the trace"))?;
    Ok((ours, rows.iter().filter(|row| !is_ours(row))))
}

fn lowest(rows: &[TraceRow]) -> Judged {
    let (ours, others) = sides(rows)?;
    let next = quickest(others).ok_or_else(|| absent("nobody else played the trace"))?;
    let words = format!(
        "{} ms ({}); the best other is {} with {} ms",
        short(ours.ttft_mean_ms),
        ours.contender,
        next.contender,
        short(next.ttft_mean_ms)
    );
    let beyond = ours.ttft_mean_ms - next.ttft_mean_ms;
    let verdict = match beyond {
        ..0.0 => Verdict::Reached,
        _ => Verdict::Missed(format!("by {} ms", difference(beyond))),
    };
    Ok((words, verdict))
}

fn answered(rows: &[TraceRow]) -> Judged {
    let (ours, others) = sides(rows)?;
    let most = others.max_by(|one, other| one.success_rate.total_cmp(&other.success_rate));
    let most = most.ok_or_else(|| absent("nobody else played the trace"))?;
    let words = format!(
        "{} ({}); the best other is {} with {}",
        percent(ours.success_rate),
        ours.contender,
        most.contender,
        percent(most.success_rate)
    );
    let beyond = (most.success_rate - ours.success_rate) * 100.0;
    let verdict = match beyond {
        ..=0.0 => Verdict::Reached,
        _ => Verdict::Missed(format!("by {} points", difference(beyond))),
    };
    Ok((words, verdict))
}
