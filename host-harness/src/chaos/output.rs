//! Owns the output: one line of JSON for programs, a table for people, and the broken rules.

use std::fmt::Write;

use serde::Serialize;

use super::churn::Churned;
use super::judge::{ScenarioFigures, ScenarioVerdict};
use crate::cli::aligned;

/// Result of a scenario in one host.
#[derive(Debug)]
pub struct ScenarioResult {
    /// The scenario.
    pub name: &'static str,
    /// The host that ran the filter.
    pub host: &'static str,
    /// The result.
    pub verdict: ScenarioVerdict,
}

#[derive(Serialize)]
struct Document<'a> {
    scenarios: Vec<Line<'a>>,
}

#[derive(Serialize)]
struct Line<'a> {
    name: &'static str,
    host: &'static str,
    #[serde(flatten)]
    figures: &'a ScenarioFigures,
    broken: &'a [String],
}

impl ScenarioResult {
    /// Whether the result breaks a rule.
    pub fn breaks_a_rule(&self) -> bool {
        !self.verdict.broken.is_empty()
    }
}

/// One line of JSON: a list `scenarios`.
pub fn for_machines(rows: &[ScenarioResult]) -> String {
    let scenarios = rows
        .iter()
        .map(|row| Line {
            name: row.name,
            host: row.host,
            figures: &row.verdict.figures,
            broken: &row.verdict.broken,
        })
        .collect();
    // Strings and numbers only: serialising them cannot fail.
    let line = serde_json::to_string(&Document { scenarios }).unwrap_or_default();
    format!("{line}\n")
}

/// A column of the table: a heading in two lines, and each row's cell.
struct Column {
    heading: [&'static str; 2],
    cell: Cell,
}

/// The source of a column's cells.
enum Cell {
    Text(fn(&ScenarioResult) -> String),
    Count(fn(&ScenarioFigures) -> u64),
}

const fn column(heading: [&'static str; 2], cell: fn(&ScenarioResult) -> String) -> Column {
    let cell = Cell::Text(cell);
    Column { heading, cell }
}

const fn count(heading: [&'static str; 2], count: fn(&ScenarioFigures) -> u64) -> Column {
    let cell = Cell::Count(count);
    Column { heading, cell }
}

const COLUMNS: [Column; 16] = [
    column(["scenario", ""], |row| row.name.to_owned()),
    column(["host", ""], |row| row.host.to_owned()),
    count(["sent", ""], |of| of.sent),
    count(["answered", ""], |of| of.answered),
    count(["engine", "status"], |of| of.engine_status),
    count(["reset", ""], |of| of.reset),
    count(["refused", ""], |of| of.refused),
    count(["failed", ""], |of| of.failed),
    count(["with a", "pair"], |of| of.failed_with_healthy_pair),
    column(["ejected", "after ms"], |row| {
        match row.verdict.figures.ejected_after_ms {
            Some(time) => time.to_string(),
            None => "-".to_owned(),
        }
    }),
    count(["KV", "leaked"], |of| of.kv_leaked),
    count(["", "counted"], |of| of.kv_leaked_counted),
    count(["", "in doubt"], |of| of.kv_unknown),
    count(["bookings", "left"], |of| of.bookings_left),
    count(["clients", "left"], |of| of.left),
    column(["rules", ""], |row| match row.breaks_a_rule() {
        true => "broken".to_owned(),
        false => "kept".to_owned(),
    }),
];

impl Column {
    fn cell(&self, row: &ScenarioResult) -> String {
        match self.cell {
            Cell::Text(text) => text(row),
            Cell::Count(count) => count(&row.verdict.figures).to_string(),
        }
    }
}

/// Text columns, aligned left.
const WORDS: usize = 2;

/// A table with one line per scenario and host, followed by the reasons of failures.
pub fn for_people(rows: &[ScenarioResult]) -> String {
    let headings = [0, 1].map(|line: usize| {
        COLUMNS
            .each_ref()
            .map(|column| column.heading[line].to_owned())
    });
    let cells = rows
        .iter()
        .map(|row| COLUMNS.each_ref().map(|column| column.cell(row)));
    let lines: Vec<_> = headings.into_iter().chain(cells).collect();
    let mut text = format!("\n{}", aligned(&lines, WORDS));
    for row in rows {
        write_churn(&mut text, row);
        write_reasons(&mut text, row);
    }
    text
}

fn write_churn(text: &mut String, row: &ScenarioResult) {
    let Some(Churned {
        joined,
        returned,
        drained,
        removed,
        died,
        removed_worker_requests,
        draining_worker_requests,
    }) = row.verdict.figures.churned
    else {
        return;
    };
    let _ = writeln!(
        text,
        "\n{} in {}: {joined} workers joined, {returned} returned, {drained} drained, {removed} were removed, {died} died; \
         {removed_worker_requests} requests reached removed workers, {draining_worker_requests} draining ones",
        row.name, row.host
    );
}

fn write_reasons(text: &mut String, row: &ScenarioResult) {
    let ScenarioFigures {
        failures,
        engine_statuses,
        ..
    } = &row.verdict.figures;
    if failures.is_empty() && engine_statuses.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n{} in {}:", row.name, row.host);
    for (status, times) in engine_statuses {
        let _ = writeln!(text, "  {times:>5} x an engine's own {status}");
    }
    for (why, times) in failures {
        let _ = writeln!(text, "  {times:>5} x failed: {why}");
    }
}

/// The broken rules, each with its scenarios.
pub fn broken_rules(rows: &[ScenarioResult]) -> String {
    let mut text = String::from("rules are broken:");
    for ScenarioResult {
        name,
        host,
        verdict,
    } in rows
    {
        for words in &verdict.broken {
            let _ = write!(text, "\n  {name} in {host}: {words}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    fn row() -> ScenarioResult {
        ScenarioResult {
            name: "prefill-killed",
            host: "envoy",
            verdict: ScenarioVerdict {
                figures: ScenarioFigures {
                    sent: 3,
                    answered: 2,
                    failed: 1,
                    failed_with_healthy_pair: 1,
                    failures: BTreeMap::from([("503 unreachable".to_owned(), 1)]),
                    ..ScenarioFigures::default()
                },
                broken: vec!["1 failed".to_owned()],
            },
        }
    }

    #[test]
    fn a_program_reads_one_line() {
        let text = for_machines(&[row()]);
        assert_eq!(text.matches('\n').count(), 1);
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        let expected = json!({
            "name": "prefill-killed", "host": "envoy", "sent": 3, "answered": 2, "engine_status": 0, "reset": 0, "refused": 0,
            "failed": 1, "failed_with_healthy_pair": 1, "ejected_after_ms": null, "kv_leaked": 0,
            "kv_leaked_counted": 0, "kv_unknown": 0, "bookings_left": 0, "wrongly_ejected": 0, "poison": 0, "left": 0,
            "peak_bytes": null, "allowed_bytes": null, "engine_statuses": {},
            "failures": {"503 unreachable": 1}, "broken": ["1 failed"],
        });
        assert_eq!(line, json!({"scenarios": [expected]}));
    }

    #[test]
    fn people_read_a_table_and_what_is_broken() {
        let rows = [row()];
        let table = for_people(&rows);
        for part in [
            "scenario",
            "prefill-killed",
            "broken",
            "1 x failed: 503 unreachable",
        ] {
            assert!(table.contains(part), "{part} is missing in {table}");
        }
        assert!(broken_rules(&rows).ends_with("prefill-killed in envoy: 1 failed"));
    }
}
