//! Owns the tables of docs/benchmarks.md, in Markdown.

use super::contenders::name::{BUFFER, DIRECT, NIXL, PARSE, PARSE_TWICE};
use super::numbers::thousands;
use super::select::{by_all_but, by_load, is_usual, unique};
use super::tables::{BRIEF, Table, of_bodies, of_load, of_memory, of_trace};
use crate::bench::results::{LoopKind, Results};

/// Contenders whose CPU is shown by body size.
const BY_BODY: [&str; 5] = [BUFFER, PARSE, PARSE_TWICE, DIRECT, NIXL];

/// The complete document.
pub fn document(results: &Results) -> String {
    let mut parts = vec![measured_on(results)];
    parts.extend(tables(results).iter().map(written));
    if !results.absent.is_empty() {
        let lines = results
            .absent
            .iter()
            .map(|why| format!("- {}\n", plain(why)));
        parts.push(format!("Not measured:\n\n{}", lines.collect::<String>()));
    }
    parts.join("\n")
}

/// Machine, date, versions and rounds, in one line.
pub fn in_a_line(results: &Results) -> String {
    let machine = &results.machine;
    let versions: Vec<String> = results
        .versions
        .iter()
        .map(|(name, version)| format!("{name} {version}"))
        .collect();
    let counts = unique(results.rows.iter().map(|row| row.rounds));
    let rounds = match (counts.iter().min(), counts.iter().max()) {
        (Some(1), Some(1)) => format!("one round of {} s", results.round_s),
        (Some(least), Some(most)) if least == most => {
            format!("medians of {least} rounds of {} s", results.round_s)
        }
        (Some(least), Some(most)) => {
            format!(
                "medians of {least} to {most} rounds of {} s",
                results.round_s
            )
        }
        _ => "no rounds".to_owned(),
    };
    format!(
        "{}, {} cores, {} MB, Linux {}; {}; {}; {rounds}",
        machine.cpu,
        machine.cores,
        thousands(machine.memory_mb as f64),
        machine.kernel,
        results.date,
        versions.join(", ")
    )
}

fn measured_on(results: &Results) -> String {
    format!("{}.\n", plain(&in_a_line(results)))
}

fn tables(results: &Results) -> Vec<Table> {
    let groups = by_load(&results.rows);
    let usual = groups.iter().filter(|group| is_usual(group.load));
    let mut tables: Vec<Table> = usual.map(|group| of_load(group, &BRIEF)).collect();
    let bodies = by_all_but(&results.rows, |load| load.body_bytes = 0);
    for (load, rows) in &bodies {
        let plain = load.load == LoopKind::Closed && load.connections == 16 && !load.streamed;
        if plain {
            tables.push(of_bodies(load, rows, |name| BY_BODY.contains(&name)));
        }
    }
    if !results.trace.is_empty() {
        tables.push(of_trace(&results.trace));
    }
    if !results.memory.is_empty() {
        tables.push(of_memory(&results.memory));
    }
    tables
}

fn written(table: &Table) -> String {
    let head = table
        .head
        .iter()
        .map(|(heading, unit)| match unit.as_str() {
            "" => plain(heading),
            unit => plain(&format!("{heading}, {unit}")),
        });
    let mut text = format!("{}:\n\n{}", plain(&table.title), line(head));
    text += &format!("|---|{}\n", "--:|".repeat(table.head.len() - 1));
    for row in &table.rows {
        let cells = row.iter().map(|cell| match cell.best {
            true => format!("**{}**", plain(&cell.in_line())),
            false => plain(&cell.in_line()),
        });
        text += &line(cells);
    }
    text
}

fn line(cells: impl Iterator<Item = String>) -> String {
    let cells: Vec<String> = cells.collect();
    format!("| {} |\n", cells.join(" | "))
}

/// Text escaped for a table cell.
fn plain(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('|', "\\|");
    let text = text.replace('<', "&lt;").replace('*', "\\*");
    text.replace(['\n', '\r'], " ")
}
