//! Owns the page's plots: their figures and rows.

use super::contenders::Palette;
use super::numbers::{bytes, percent, short};
use super::select::{
    KB, answers, by_all_but, by_load, connections, in_words, is_usual, manner, paced, threads,
    unique,
};
use super::strips::{Strip, strips};
use crate::bench::results::{Figures, Load, LoopKind, MemoryRow, Results, Row, TraceRow};
use crate::plot::{Axis, Canvas, DrawError, Line, Points, Scale, figure, lines};

/// Bars by contender: cost and latency of requests, at the load that all contenders share.
pub fn of_requests(results: &Results, palette: &Palette) -> Result<String, DrawError> {
    let groups = by_load(&results.rows);
    let usual: Vec<_> = groups.iter().filter(|group| is_usual(group.load)).collect();
    let mut plots = String::new();
    for group in &usual {
        let title = format!(
            "CPU, µs a request, and its range over the rounds: {}",
            in_words(group.load)
        );
        let bars = group.rows.iter().map(|row| cpu_strip(row, palette));
        plots += &figure(&title, &strips(&bars.collect::<Vec<_>>())?);
    }
    for group in &usual {
        let title = format!(
            "Latency, ms: p50, p90, p99, the palest: {}",
            in_words(group.load)
        );
        let bars = group.rows.iter().map(|row| latency_strip(row, palette));
        plots += &figure(&title, &strips(&bars.collect::<Vec<_>>())?);
    }
    Ok(plots)
}

fn cpu_strip(row: &Row, palette: &Palette) -> Strip {
    let of = |figures: &Figures| figures.cpu_us_per_request;
    Strip {
        name: row.contender.clone(),
        figures: short(of(&row.median)) + &refusals(row),
        color: palette.color(&row.contender),
        bars: vec![of(&row.median)],
        range: (row.rounds > 1).then(|| (of(&row.min), of(&row.max))),
    }
}

/// A remark beside figures that mean little because many requests were not answered.
fn refusals(row: &Row) -> String {
    match answers(&row.median) {
        true => String::new(),
        false => format!("; only {} answered", percent(row.median.success_rate)),
    }
}

fn latency_strip(row: &Row, palette: &Palette) -> Strip {
    let all = [row.median.p50_ms, row.median.p90_ms, row.median.p99_ms];
    Strip {
        name: row.contender.clone(),
        figures: all.map(short).join(" / ") + &refusals(row),
        color: palette.color(&row.contender),
        bars: all.to_vec(),
        range: None,
    }
}

/// A figure of the trace: title, accessor, format.
type OfTrace = (&'static str, fn(&TraceRow) -> f64, fn(f64) -> String);

const OF_TRACE: [OfTrace; 3] = [
    ("Trace: mean TTFT, ms", |row| row.ttft_mean_ms, short),
    (
        "Trace: prompt tokens found in a cache",
        |row| row.hit_rate,
        percent,
    ),
    ("Trace: requests answered", |row| row.success_rate, percent),
];

/// Bars by contender: a recorded trace.
pub fn of_trace(rows: &[TraceRow], palette: &Palette) -> Result<String, DrawError> {
    if rows.is_empty() {
        return Ok(String::new());
    }
    let mut plots = String::new();
    for (title, of, written) in OF_TRACE {
        let bars = rows.iter().map(|row| Strip {
            name: row.contender.clone(),
            figures: written(of(row)),
            color: palette.color(&row.contender),
            bars: vec![of(row)],
            range: None,
        });
        plots += &figure(title, &strips(&bars.collect::<Vec<_>>())?);
    }
    Ok(plots)
}

/// Lines by contender: bodies, connections, memory.
pub fn of_lines(results: &Results, palette: &Palette) -> Result<String, DrawError> {
    let mut plots = String::new();
    let fast = |load: &Load| load.load == LoopKind::Closed && !paced(load);
    let bodies = by_all_but(&results.rows, |load| load.body_bytes = 0);
    for (load, rows) in bodies.iter().filter(|(load, _)| fast(load)) {
        let title = format!(
            "CPU by body: {}, {}, {}",
            manner(load),
            connections(load),
            threads(load.threads)
        );
        let at = |row: &Row| {
            (
                row.load.body_bytes as f64 / KB as f64,
                row.median.cpu_us_per_request,
            )
        };
        let axes = (
            Axis::new("body, KB", Scale::Log),
            Axis::new("CPU, µs/request", Scale::Log),
        );
        plots += &figure(&title, &dotted(axes, &by_contender(rows, palette, at))?);
    }
    let crowds = by_all_but(&results.rows, |load| load.connections = 0);
    for (load, rows) in crowds.iter().filter(|(load, _)| fast(load)) {
        let title = format!(
            "Throughput by connections: {}, {}, {}",
            bytes(load.body_bytes),
            manner(load),
            threads(load.threads)
        );
        let at = |row: &Row| (row.load.connections as f64, row.median.rps);
        let axes = (
            Axis::new("connections", Scale::Log),
            Axis::new("answers/s", Scale::Linear),
        );
        plots += &figure(&title, &dotted(axes, &by_contender(rows, palette, at))?);
    }
    Ok(plots + &of_memory(&results.memory, palette)?)
}

fn by_contender(rows: &[&Row], palette: &Palette, at: impl Fn(&Row) -> (f64, f64)) -> Vec<Line> {
    let names = unique(rows.iter().map(|row| row.contender.as_str()));
    let of_name = |name: &str| {
        let of = rows.iter().filter(|row| row.contender == name);
        let mut points: Points = of.map(|row| at(row)).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        line(name, points, palette)
    };
    names.into_iter().map(of_name).collect()
}

fn of_memory(rows: &[MemoryRow], palette: &Palette) -> Result<String, DrawError> {
    let mut plots = String::new();
    for (body, count) in unique(rows.iter().map(|row| (row.body_bytes, row.threads))) {
        let of = rows
            .iter()
            .filter(|row| (row.body_bytes, row.threads) == (body, count));
        let lines = of.map(|row| {
            let points = row.points.iter();
            let points = points.map(|(prompts, mb)| (*prompts as f64 / 1000.0, *mb));
            line(&row.contender, points.collect(), palette)
        });
        let title = format!(
            "Memory as prompts of {} go by: {}",
            bytes(body),
            threads(count)
        );
        let axes = (
            Axis::new("prompts, thousands", Scale::Linear),
            Axis::new("MB", Scale::Linear),
        );
        plots += &figure(&title, &dotted(axes, &lines.collect::<Vec<_>>())?);
    }
    Ok(plots)
}

fn line(contender: &str, points: Points, palette: &Palette) -> Line {
    Line {
        color: palette.color(contender),
        stroke: 2,
        points,
    }
}

fn dotted((x, y): (Axis, Axis), of: &[Line]) -> Result<String, DrawError> {
    lines(Canvas::Dotted, x, y, of)
}
