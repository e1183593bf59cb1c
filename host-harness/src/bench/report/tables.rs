//! Owns the contents of the tables, independent of their format.

use super::contenders::Family;
use super::memory::{MARK, MemoryGrowth};
use super::numbers::{bytes, percent, short, thousands};
use super::select::{Group, answers, in_words, unique};
use crate::bench::results::{Figures, MemoryRow, Row, TraceRow};
use crate::plot::Cell;

/// A table.
pub struct Table {
    /// Title.
    pub title: String,
    /// Columns: name and unit; the first is the contender.
    pub head: Vec<(String, String)>,
    /// Rows, as long as the head.
    pub rows: Vec<Vec<Cell>>,
}

/// Which of two figures is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Better {
    Less,
    More,
}

/// A column of a table of `T`.
struct Column<T> {
    heading: &'static str,
    unit: &'static str,
    figure: fn(&T) -> f64,
    written: fn(f64) -> String,
    better: Better,
}

impl<T> Column<T> {
    const fn new(heading: &'static str, unit: &'static str, figure: fn(&T) -> f64) -> Self {
        Self {
            heading,
            unit,
            figure,
            written: short,
            better: Better::Less,
        }
    }

    const fn more_is_better(self) -> Self {
        Self {
            better: Better::More,
            ..self
        }
    }

    const fn written(self, written: fn(f64) -> String) -> Self {
        Self { written, ..self }
    }
}

impl Column<Figures> {
    fn cell(&self, row: &Row) -> Cell {
        let written = |figures: &Figures| (self.written)((self.figure)(figures));
        let range = (written(&row.min), written(&row.max));
        Cell {
            text: written(&row.median),
            range: (range.0 != range.1).then_some(range),
            best: false,
        }
    }
}

const CPU: Column<Figures> = Column::new("CPU", "µs/request", |of| of.cpu_us_per_request);
const P50: Column<Figures> = Column::new("p50", "ms", |of| of.p50_ms);
const P90: Column<Figures> = Column::new("p90", "ms", |of| of.p90_ms);
const P99: Column<Figures> = Column::new("p99", "ms", |of| of.p99_ms);
const TTFT: Column<Figures> = Column::new("TTFT p50", "ms", |of| of.ttft_p50_ms);
const RPS: Column<Figures> = Column::new("throughput", "answers/s", |of: &Figures| of.rps)
    .more_is_better()
    .written(thousands);
const RSS: Column<Figures> =
    Column::new("memory", "MB", |of: &Figures| of.rss_mb).written(thousands);
const SUCCESS: Column<Figures> = Column::new("success", "", |of: &Figures| of.success_rate)
    .more_is_better()
    .written(percent);

/// All measured columns.
const COLUMNS: [Column<Figures>; 8] = [CPU, RPS, P50, P90, P99, TTFT, RSS, SUCCESS];

/// The rows under one load, in all measured columns.
pub fn of_load(group: &Group<'_>) -> Table {
    let cells = group.rows.iter().map(|row| {
        let figures = COLUMNS.iter().map(|column| column.cell(row));
        std::iter::once(Cell::of(&row.contender))
            .chain(figures)
            .collect()
    });
    let mut table = Table {
        title: format!("{}; {}", in_words(group.load), rounds(&group.rows)),
        head: head(COLUMNS.iter().map(|column| (column.heading, column.unit))),
        rows: cells.collect(),
    };
    let rivals: Vec<bool> = group
        .rows
        .iter()
        .map(|row| Family::of(&row.contender) != Family::Control && answers(&row.median))
        .collect();
    for (at, column) in COLUMNS.iter().enumerate() {
        let figures = group.rows.iter().map(|row| (column.figure)(&row.median));
        mark(&mut table, at + 1, &rivals, figures, column.better);
    }
    table
}

fn rounds(rows: &[&Row]) -> String {
    let counts: Vec<String> = unique(rows.iter().map(|row| row.rounds))
        .iter()
        .map(usize::to_string)
        .collect();
    match &counts[..] {
        [one] if one == "1" => "one round".to_owned(),
        _ => format!("medians of {} rounds", counts.join(" or ")),
    }
}

fn head<'a>(columns: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<(String, String)> {
    let contender = std::iter::once(("contender", ""));
    let all = contender.chain(columns);
    all.map(|(heading, unit)| (heading.to_owned(), unit.to_owned()))
        .collect()
}

/// Marks the best cells of a column, compared as displayed.
fn mark(
    table: &mut Table,
    column: usize,
    rivals: &[bool],
    figures: impl Iterator<Item = f64>,
    better: Better,
) {
    let figures: Vec<f64> = figures.collect();
    let among = || (0..figures.len()).filter(|at| rivals[*at] && figures[*at].is_finite());
    let least = |one: &usize, other: &usize| figures[*one].total_cmp(&figures[*other]);
    let best = match better {
        Better::Less => among().min_by(least),
        Better::More => among().max_by(least),
    };
    let Some(best) = best else {
        return;
    };
    let text = table.rows[best][column].text.clone();
    // If all are equal, none is best.
    if among().all(|at| table.rows[at][column].text == text) {
        return;
    }
    for at in among() {
        table.rows[at][column].best = table.rows[at][column].text == text;
    }
}

/// Memory over the number of prompts.
pub fn of_memory(rows: &[MemoryRow]) -> Table {
    let cells = rows.iter().map(|row| {
        let growth = MemoryGrowth::of(row);
        let or_none = |figure: Option<f64>| figure.map_or("–".to_owned(), short);
        let end = growth.end.map_or("–".to_owned(), |(prompts, mb)| {
            format!("{} at {}", short(mb), thousands(prompts as f64))
        });
        let cells = [
            row.contender.clone(),
            bytes(row.body_bytes),
            row.threads.to_string(),
            or_none(growth.start),
            or_none(growth.at_mark),
            end,
            or_none(growth.each_vm),
            or_none(growth.after_mark),
        ];
        cells.map(Cell::of).into()
    });
    let mark = thousands(MARK as f64);
    let (at_mark, to_mark) = (format!("at {mark} prompts"), format!("MB to {mark}"));
    Table {
        title: "Memory of the gateway as prompts go by that are all different".to_owned(),
        head: head(
            [
                ("body", ""),
                ("threads", ""),
                ("at the start", "MB"),
                (at_mark.as_str(), "MB"),
                ("at the end", "MB"),
                ("growth of each VM", to_mark.as_str()),
                ("growth after", "MB/10,000 prompts"),
            ]
            .into_iter(),
        ),
        rows: cells.collect(),
    }
}

const TRACE: [Column<TraceRow>; 7] = [
    Column::new("TTFT mean", "ms", |row| row.ttft_mean_ms),
    Column::new("p50", "ms", |row| row.ttft_p50_ms),
    Column::new("p90", "ms", |row| row.ttft_p90_ms),
    Column::new("p99", "ms", |row| row.ttft_p99_ms),
    Column::new("hit rate", "", |row: &TraceRow| row.hit_rate)
        .more_is_better()
        .written(percent),
    Column::new("imbalance", "busiest / mean", |row| row.imbalance),
    Column::new("success", "", |row: &TraceRow| row.success_rate)
        .more_is_better()
        .written(percent),
];

/// A recorded trace through each contender.
pub fn of_trace(rows: &[TraceRow]) -> Table {
    let cells = rows.iter().map(|row| {
        let figures = TRACE
            .iter()
            .map(|of| Cell::of((of.written)((of.figure)(row))));
        std::iter::once(Cell::of(&row.contender))
            .chain(figures)
            .collect()
    });
    let played = unique(rows.iter().map(|row| (row.requests, row.speedup)));
    let played: Vec<String> = played
        .iter()
        .map(|(count, speedup)| {
            format!(
                "{} requests, {speedup} times as fast as recorded",
                thousands(*count as f64)
            )
        })
        .collect();
    let mut table = Table {
        title: format!(
            "The conversation trace: {}; times are the trace's",
            played.join("; ")
        ),
        head: head(TRACE.iter().map(|of| (of.heading, of.unit))),
        rows: cells.collect(),
    };
    let rivals = vec![true; rows.len()];
    for (at, of) in TRACE.iter().enumerate() {
        mark(
            &mut table,
            at + 1,
            &rivals,
            rows.iter().map(of.figure),
            of.better,
        );
    }
    table
}
