//! Owns the report: one self-contained page of HTML with the figures, and plots over time and by worker.

mod plots;
mod series;

use plotters::style::RGBColor;

use super::contender::ALL;
use super::engine::{Model, ServedRequest};
use super::figures::imbalance;
use super::output::{COLUMNS, TableColumn};
use super::row::ReplayRow;
use super::{Comparison, EXPLAINED};
use crate::plot::{
    Axis, Canvas, Cell, DrawError, Legend, Line, Points, Scale, escaped, figure, head, lines,
    table, tint,
};
use plots::bars;
use series::{Intervals, distribution, hits, itl, ttft, wait};

/// One colour per contender, in their order; all distinct, their tints too, since the page hides a line by its colour.
const COLORS: [RGBColor; ALL.len()] = [
    RGBColor(209, 36, 47),
    RGBColor(138, 138, 138),
    RGBColor(176, 141, 87),
    RGBColor(31, 119, 180),
    RGBColor(23, 180, 200),
    RGBColor(128, 90, 213),
    RGBColor(227, 119, 194),
    RGBColor(240, 140, 20),
    RGBColor(44, 150, 60),
];

const STYLE: &str = include_str!("style.css");

/// The HTML page.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn page(comparison: &Comparison<'_>) -> Result<String, DrawError> {
    let rows = &comparison.rows;
    let title = format!("pd-router replay: {}", comparison.trace_name);
    let legend = Legend::new(rows.iter().map(|row| (name(row, rows), color(row, rows))));
    let mut page = head(&title, &format!("{STYLE}{}", legend.rules()));
    page += &format!(
        "<h1>pd-router replay</h1>\n<p>{}.</p>\n",
        escaped(&comparison.in_words())
    );
    page += &figures(rows);
    page += &legend.html();
    page += &note_on_seeds(comparison);
    page += "<div class=\"plots lines\">\n";
    for plot in over_time(comparison) {
        page += &plot.draw(rows)?;
    }
    page += "</div>\n";
    page += &workers(comparison)?;
    page += &explained();
    page += "</body></html>\n";
    Ok(page)
}

fn figures(rows: &[ReplayRow]) -> String {
    let head = COLUMNS.iter().map(|column| (column.heading, column.unit));
    let cells = rows.iter().map(|row| {
        COLUMNS.each_ref().map(|column| Cell {
            best: is_best(row, rows, column),
            ..Cell::of((column.cell)(row))
        })
    });
    let table = table(head, cells);
    match rows.len() {
        0 | 1 => table,
        _ => table + "<p class=\"note\">The best of each column is marked.</p>\n",
    }
}

/// Whether a row has the best figure of a column, compared as displayed.
fn is_best(row: &ReplayRow, rows: &[ReplayRow], column: &TableColumn) -> bool {
    let Some(rank) = column.rank else {
        return false;
    };
    let best = rows
        .iter()
        .min_by(|one, other| rank(one).total_cmp(&rank(other)));
    rows.len() > 1 && best.is_some_and(|best| (column.cell)(best) == (column.cell)(row))
}

/// A row's colour: its contender's, paler with each row of that contender before it.
fn color(row: &ReplayRow, rows: &[ReplayRow]) -> RGBColor {
    let mut known = ALL.iter().zip(COLORS);
    let own = known.find(|(one, _)| **one == row.contender);
    let own = own.map_or(RGBColor(0, 0, 0), |(_, color)| color);
    let before = rows
        .iter()
        .take_while(|other| other.gateways != row.gateways || other.contender != row.contender);
    let paler = before
        .filter(|other| other.contender == row.contender)
        .count();
    tint(own, paler)
}

/// The page's name of a row, distinct among `rows`.
fn name(row: &ReplayRow, rows: &[ReplayRow]) -> String {
    let policy = row.contender.name();
    if rows.iter().all(|other| other.gateways == row.gateways) {
        return policy.to_owned();
    }
    match row.gateways {
        1 => format!("{policy}, 1 gateway"),
        count => format!("{policy}, {count} gateways"),
    }
}

fn note_on_seeds(comparison: &Comparison<'_>) -> String {
    if comparison.seeds.count() == 1 {
        return String::new();
    }
    format!(
        "<p class=\"note\">The table is the mean over all seeds; the plots show seed {}.</p>\n",
        comparison.seeds.first()
    )
}

/// A plot with a line for each policy.
struct Plot<'a> {
    title: String,
    x: Axis,
    y: Axis,
    points: Box<dyn Fn(&ReplayRow) -> Points + 'a>,
}

/// A figure of several requests together.
type Together<'a> = Box<dyn Fn(&[&ServedRequest]) -> f64 + 'a>;

/// The plots with a line for each policy.
fn over_time<'a>(comparison: &'a Comparison<'_>) -> Vec<Plot<'a>> {
    let intervals = Intervals::over(comparison.trace.lasts());
    let per = intervals.width_in_words();
    let over_time = |title: &str, unit, scale, value: Together<'a>| Plot {
        title: title.replace("{per}", &per),
        x: Axis {
            end: Some(intervals.end()),
            ..Axis::new("arrival, minutes", Scale::Linear)
        },
        y: Axis::new(unit, scale),
        points: Box::new(move |row| intervals.points(&row.shown.served, &value)),
    };
    let workers = comparison.parameters.workers.prefill;
    let busiest = move |of: &[&ServedRequest]| imbalance(of.iter().copied(), workers);
    let mut plots = vec![
        over_time(
            "TTFT, median of each {per}",
            "seconds",
            Scale::Log,
            Box::new(|of| ttft(of).p50),
        ),
        over_time(
            "TTFT, 99th percentile of each {per}",
            "seconds",
            Scale::Log,
            Box::new(|of| ttft(of).p99),
        ),
        over_time(
            "Wait before prefill begins, mean of each {per}",
            "seconds",
            Scale::Linear,
            Box::new(wait),
        ),
        over_time(
            "Prefix hits in each {per}",
            "% of prompt tokens",
            Scale::Linear,
            Box::new(hits),
        ),
        over_time(
            "Imbalance in each {per}",
            "busiest worker / mean",
            Scale::Linear,
            Box::new(busiest),
        ),
        Plot {
            title: "TTFT, all requests: how many have their first token within a time".to_owned(),
            x: Axis::new("seconds", Scale::Log),
            y: Axis {
                end: Some(100.0),
                ..Axis::new("% of requests", Scale::Linear)
            },
            points: Box::new(|row| distribution(&row.shown.served)),
        },
    ];
    if comparison.parameters.model == Model::Batched {
        plots.push(over_time(
            "ITL, mean of each {per}",
            "milliseconds",
            Scale::Linear,
            Box::new(itl),
        ));
    }
    plots
}

impl Plot<'_> {
    fn draw(&self, rows: &[ReplayRow]) -> Result<String, DrawError> {
        let drawn = lines(
            Canvas::Wide,
            self.x,
            self.y,
            &policy_lines(rows, self.points.as_ref()),
        )?;
        Ok(figure(&self.title, &drawn))
    }
}

/// A line for each row, the first one's above all others.
fn policy_lines(rows: &[ReplayRow], points: &dyn Fn(&ReplayRow) -> Points) -> Vec<Line> {
    let lines = rows.iter().enumerate().rev();
    lines
        .map(|(at, row)| Line {
            color: color(row, rows),
            stroke: if at == 0 { 3 } else { 2 },
            points: points(row),
        })
        .collect()
}

/// A figure of each worker.
struct OfWorkers<'a> {
    title: &'static str,
    value: Together<'a>,
}

/// Small plots side by side for each policy; those of one figure share a scale.
fn workers(comparison: &Comparison<'_>) -> Result<String, DrawError> {
    let figures: [OfWorkers<'_>; 3] = [
        OfWorkers {
            title: "work, millions of prompt tokens computed",
            value: Box::new(|of| {
                of.iter().map(|one| one.computed_tokens as f64).sum::<f64>() / 1e6
            }),
        },
        OfWorkers {
            title: "mean wait before prefill begins, seconds",
            value: Box::new(wait),
        },
        OfWorkers {
            title: "prefix hits, % of prompt tokens",
            value: Box::new(hits),
        },
    ];
    let mut section = "<h2>Each prefill worker</h2>\n<p class=\"note\">A bar for each worker; the line is the mean \
         of the bars. Equal scales down each column.</p>\n<div class=\"bars\">\n"
        .to_owned();
    let by_worker: Vec<(&ReplayRow, Vec<Vec<&ServedRequest>>)> = comparison
        .rows
        .iter()
        .map(|row| {
            (
                row,
                of_each_worker(&row.shown.served, comparison.parameters.workers.prefill),
            )
        })
        .collect();
    let most = figures.each_ref().map(|figure| {
        let all = by_worker.iter().flat_map(|(_, workers)| workers);
        all.map(|of| (figure.value)(of)).fold(0.001, f64::max) * 1.08
    });
    for (row, workers) in &by_worker {
        let name = name(row, &comparison.rows);
        for (of, most) in figures.iter().zip(most) {
            let values: Vec<f64> = workers.iter().map(|served| (of.value)(served)).collect();
            section += &figure(
                &format!("{name}: {}", of.title),
                &bars(&values, most, color(row, &comparison.rows))?,
            );
        }
    }
    Ok(section + "</div>\n")
}

fn of_each_worker(served: &[ServedRequest], workers: usize) -> Vec<Vec<&ServedRequest>> {
    let mut by_worker = vec![Vec::new(); workers];
    for one in served {
        if let Some(of) = by_worker.get_mut(one.worker) {
            of.push(one);
        }
    }
    by_worker
}

fn explained() -> String {
    let paragraphs = EXPLAINED
        .split("\n\n")
        .map(|text| format!("<p>{}</p>\n", escaped(text)));
    format!(
        "<h2>What was simulated</h2>\n{}",
        paragraphs.collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::hex;
    use std::collections::HashSet;

    #[test]
    fn no_two_lines_are_alike() {
        let tints = COLORS
            .iter()
            .flat_map(|color| (0..8).map(|paler| hex(tint(*color, paler))));
        assert_eq!(tints.collect::<HashSet<_>>().len(), COLORS.len() * 8);
        assert!(COLORS.iter().all(|color| tint(*color, 0) == *color));
    }
}
