//! Owns the HTML page: plots and all figures, in one self-contained file.

use std::fmt::Write;

use super::charts;
use super::contenders::{Palette, meaning};
use super::numbers::thousands;
use super::select::{by_load, unique};
use super::tables::{Table, of_load, of_memory, of_trace};
use crate::bench::results::Results;
use crate::plot::{DrawError, Legend, escaped, head, table};

const STYLE: &str = include_str!("style.css");

/// The page.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn page(results: &Results) -> Result<String, DrawError> {
    let palette = Palette::of(results);
    let legend = legend(results, &palette);
    let mut page = head("pd-router bench", &format!("{STYLE}{}", legend.rules()));
    let _ = writeln!(
        page,
        "<h1>pd-router bench</h1>\n<p>{}.</p>",
        escaped(&in_a_line(results))
    );
    page += "<h2>By contender</h2>\n<div class=\"plots\">\n";
    page += &charts::of_requests(results, &palette)?;
    page += &charts::of_trace(&results.trace, &palette)?;
    page += "</div>\n<section>\n<h2>By load</h2>\n";
    page += &legend.html();
    page += "<div class=\"plots lines\">\n";
    page += &charts::of_lines(results, &palette)?;
    page += "</div>\n</section>\n";
    page += &figures(results);
    page += &contenders(&palette);
    page += &absent(results);
    Ok(page + "</body></html>\n")
}

/// Machine, date, versions and rounds, in one line.
fn in_a_line(results: &Results) -> String {
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

/// A box for each contender that has a line in some plot.
fn legend(results: &Results, palette: &Palette) -> Legend {
    let has_line = |name: &str| {
        results.rows.iter().any(|row| row.contender == name)
            || results.memory.iter().any(|row| row.contender == name)
    };
    let drawn = palette.iter().filter(|(name, _)| has_line(name));
    Legend::new(drawn.map(|(name, color)| (name.to_owned(), color)))
}

fn figures(results: &Results) -> String {
    let mut text = "<h2>All figures</h2>\n<p class=\"note\">Medians, and below them the least and the greatest of the rounds. The best \
                    of each column is marked, among routers whose requests were answered: Envoy alone, and with the filters that \
                    only measure, does less.</p>\n"
        .to_owned();
    for group in by_load(&results.rows) {
        text += &written(&of_load(&group));
    }
    if !results.trace.is_empty() {
        text += &written(&of_trace(&results.trace));
    }
    if !results.memory.is_empty() {
        text += &written(&of_memory(&results.memory));
    }
    text
}

fn written(of: &Table) -> String {
    let head = of.head.iter();
    let head = head.map(|(heading, unit)| (heading.as_str(), unit.as_str()));
    format!("<h3>{}</h3>\n{}", escaped(&of.title), table(head, &of.rows))
}

fn contenders(palette: &Palette) -> String {
    let mut text = "<h2>Contenders</h2>\n<dl>\n".to_owned();
    for (name, _) in palette.iter() {
        if let Some(meaning) = meaning(name) {
            let _ = writeln!(
                text,
                "<dt>{}</dt><dd>{}</dd>",
                escaped(name),
                escaped(meaning)
            );
        }
    }
    text + "</dl>\n"
}

fn absent(results: &Results) -> String {
    if results.absent.is_empty() {
        return String::new();
    }
    let lines = results
        .absent
        .iter()
        .map(|why| format!("<li>{}</li>\n", escaped(why)));
    format!(
        "<h2>Not measured</h2>\n<ul>\n{}</ul>\n",
        lines.collect::<String>()
    )
}
