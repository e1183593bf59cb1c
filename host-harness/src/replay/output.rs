//! Owns the output: one line of JSON for programs, a table for people.

use std::fmt::Write;

use serde_json::{Value, json};

use super::Comparison;
use super::contender::PolicyChoice;
use super::engine::Model;
use super::figures::PolicyFigures;
use super::row::ReplayRow;
use crate::cli::aligned;

/// One line of JSON: the figures of one policy with one number of gateways, or `policies` with those of each.
pub fn for_machines(comparison: &Comparison<'_>, choice: &PolicyChoice) -> String {
    let mut rows: Vec<Value> = comparison
        .rows
        .iter()
        .map(|row| row_json(row, comparison))
        .collect();
    let document = match (choice, comparison.gateways) {
        (PolicyChoice::One(_), [_]) => rows.pop().unwrap_or_default(),
        _ => json!({ "policies": rows }),
    };
    format!("{document}\n")
}

fn row_json(row: &ReplayRow, comparison: &Comparison<'_>) -> Value {
    let mut value = figures_json(&row.figures);
    value["policy"] = json!(row.contender.name());
    value["gateways"] = json!(row.gateways);
    value["parameters"] = parameters_json(comparison);
    match &row.runs[..] {
        [(seed, _)] => value["seed"] = json!(seed),
        runs => {
            value["seeds"] = runs.iter().map(|(seed, _)| *seed).collect();
            value["runs"] = runs
                .iter()
                .map(|(seed, figures)| run_json(*seed, figures))
                .collect();
        }
    }
    if let Some(refusal) = &row.shown.refusal {
        value["refusal"] = json!(refusal);
    }
    value
}

fn run_json(seed: u64, figures: &PolicyFigures) -> Value {
    let mut value = figures_json(figures);
    value["seed"] = json!(seed);
    value
}

fn figures_json(figures: &PolicyFigures) -> Value {
    let mut value = json!(figures);
    // A mean of counts may be fractional; a single count is an integer.
    value["requests"] = whole(figures.requests);
    value["refused"] = whole(figures.refused);
    value
}

fn whole(count: f64) -> Value {
    if count.fract() == 0.0 {
        json!(count as u64)
    } else {
        json!(count)
    }
}

fn parameters_json(comparison: &Comparison<'_>) -> Value {
    let parameters = comparison.parameters;
    json!({
        "trace": comparison.trace_name,
        "trace_block_tokens": comparison.trace.own_block_tokens,
        "model": parameters.model.name(),
        "prefill": parameters.workers.prefill,
        "decode": parameters.workers.decode,
        "kv_blocks": parameters.kv_blocks,
        "block_tokens": parameters.block_tokens,
        "prefill_rate": parameters.prefill_rate,
        "token_ms": match parameters.model {
            Model::Fcfs => json!(parameters.token_ms),
            Model::Batched => Value::Null,
        },
        "metrics_interval_ms": parameters.metrics_interval.map_or(0, |interval| interval.as_millis() as u64),
    })
}

/// A column of the table: a heading in two lines, and each row's cell.
pub struct TableColumn {
    /// Quantity.
    pub heading: &'static str,
    /// Subject or unit.
    pub unit: &'static str,
    /// Text of a row's cell.
    pub cell: fn(&ReplayRow) -> String,
    /// The figure by which rows are compared, smaller is better; `None` where no value is better.
    pub rank: Option<fn(&ReplayRow) -> f64>,
}

const fn column(
    heading: &'static str,
    unit: &'static str,
    cell: fn(&ReplayRow) -> String,
) -> TableColumn {
    TableColumn {
        heading,
        unit,
        cell,
        rank: None,
    }
}

impl TableColumn {
    const fn ranked(self, rank: fn(&ReplayRow) -> f64) -> Self {
        Self {
            rank: Some(rank),
            ..self
        }
    }
}

/// The table's columns.
pub const COLUMNS: [TableColumn; 13] = [
    column("policy", "", |row| row.contender.name().to_owned()),
    column("gateways", "", |row| row.gateways.to_string()),
    column("TTFT", "mean s", |row| seconds(row.figures.ttft_ms.mean))
        .ranked(|row| row.figures.ttft_ms.mean),
    column("TTFT", "p50 s", |row| seconds(row.figures.ttft_ms.p50))
        .ranked(|row| row.figures.ttft_ms.p50),
    column("TTFT", "p90 s", |row| seconds(row.figures.ttft_ms.p90))
        .ranked(|row| row.figures.ttft_ms.p90),
    column("TTFT", "p99 s", |row| seconds(row.figures.ttft_ms.p99))
        .ranked(|row| row.figures.ttft_ms.p99),
    column("wait", "mean s", |row| seconds(row.figures.wait_ms.mean))
        .ranked(|row| row.figures.wait_ms.mean),
    column("prefix hits", "% of tokens", |row| {
        format!("{:.1}", row.figures.prefix_hit_rate * 100.0)
    })
    .ranked(|row| -row.figures.prefix_hit_rate),
    column("imbalance", "busiest/mean", |row| {
        format!("{:.2}", row.figures.imbalance)
    })
    .ranked(|row| row.figures.imbalance),
    column("ITL", "p50 ms", |row| {
        format!("{:.1}", row.figures.itl_ms.p50)
    }),
    column("ITL", "p99 ms", |row| {
        format!("{:.1}", row.figures.itl_ms.p99)
    }),
    column("refused", "requests", |row| {
        format!("{:.0}", row.figures.refused)
    }),
    column("decisions", "per second", |row| {
        format!("{:.0}", row.figures.decisions_per_second)
    }),
];

fn seconds(ms: f64) -> String {
    format!("{:.2}", ms / 1000.0)
}

/// Description of the runs, and a table with one row per policy and number of gateways.
pub fn for_people(comparison: &Comparison<'_>) -> String {
    let headings = [
        COLUMNS.each_ref().map(|column| column.heading.to_owned()),
        COLUMNS.each_ref().map(|column| column.unit.to_owned()),
    ];
    let rows = comparison.rows.iter();
    let rows = rows.map(|row| COLUMNS.each_ref().map(|column| (column.cell)(row)));
    let lines: Vec<_> = headings.into_iter().chain(rows).collect();
    let mut text = format!("\n{}\n\n{}", comparison.in_words(), aligned(&lines, 1));
    for row in &comparison.rows {
        if let Some(refusal) = &row.shown.refusal {
            let _ = writeln!(
                text,
                "\n{}: the first request was refused with: {refusal}",
                row.contender.name()
            );
        }
    }
    text
}
