//! Owns how rows are found: by contender, by load, and those that ran under one load.

use super::numbers::{bytes, percent};
use crate::bench::results::{Figures, Load, Loading, Row};

/// Bytes of a KB, as bodies are named.
pub const KB: usize = 1024;

/// The part of all requests that must be answered well for a row's times to mean anything: refusing is quick.
const ANSWERED: f64 = 0.99;

/// Whether a row's requests were answered, all but a few.
pub fn answers(figures: &Figures) -> bool {
    figures.success_rate >= ANSWERED
}

/// Why something cannot be judged, in words.
#[derive(Debug, Clone, PartialEq)]
pub enum Lack {
    /// Nobody measured it.
    Absent(String),
    /// It was measured, and the figures mean nothing.
    Unfit(String),
}

impl Lack {
    /// The words.
    pub fn words(self) -> String {
        match self {
            Self::Absent(words) | Self::Unfit(words) => words,
        }
    }

    /// The same with more words.
    pub fn and(self, more: &str) -> Self {
        match self {
            Self::Absent(words) => Self::Absent(format!("{words}{more}")),
            Self::Unfit(words) => Self::Unfit(format!("{words}{more}")),
        }
    }
}

/// The median of a contender under a load.
///
/// # Errors
/// When there is none to judge by.
pub fn median<'a>(rows: &'a [Row], contender: &str, load: &Load) -> Result<&'a Figures, Lack> {
    let mut of = rows.iter().filter(|row| row.contender == contender);
    let absent = || Lack::Absent(format!("{contender} was not measured under this load"));
    let row = of.find(|row| row.load == *load).ok_or_else(absent)?;
    if answers(&row.median) {
        return Ok(&row.median);
    }
    let answered = percent(row.median.success_rate);
    Err(Lack::Unfit(format!(
        "{contender} answered only {answered} of its requests"
    )))
}

/// The loads that a contender ran under and that are wanted, in their order.
pub fn loads<'a>(
    rows: &'a [Row],
    contender: &str,
    wanted: impl Fn(&Load) -> bool,
) -> Vec<&'a Load> {
    let of = rows.iter().filter(|row| row.contender == contender);
    unique(of.map(|row| &row.load).filter(|load| wanted(load)))
}

/// Things in their order, each once.
pub fn unique<T: PartialEq>(of: impl Iterator<Item = T>) -> Vec<T> {
    let mut each = Vec::new();
    for one in of {
        if !each.contains(&one) {
            each.push(one);
        }
    }
    each
}

/// All rows under one load.
pub struct Group<'a> {
    /// The load.
    pub load: &'a Load,
    /// Its rows, in their order.
    pub rows: Vec<&'a Row>,
}

/// Rows by load, in the order of each load's first row.
pub fn by_load(rows: &[Row]) -> Vec<Group<'_>> {
    let loads = unique(rows.iter().map(|row| &row.load));
    let group = |load| Group {
        load,
        rows: rows.iter().filter(|row| row.load == *load).collect(),
    };
    loads.into_iter().map(group).collect()
}

/// Rows whose loads are equal but for what `alike` makes equal, in the order of each one's first row, and only where they differ in it.
pub fn by_all_but(rows: &[Row], alike: impl Fn(&mut Load)) -> Vec<(Load, Vec<&Row>)> {
    let rest = |load: &Load| {
        let mut rest = load.clone();
        alike(&mut rest);
        rest
    };
    let rests = unique(rows.iter().map(|row| rest(&row.load)));
    let with_rows = rests.into_iter().map(|of| {
        let rows = rows.iter().filter(|row| rest(&row.load) == of);
        (of.clone(), rows.collect::<Vec<_>>())
    });
    with_rows
        .filter(|(_, rows)| unique(rows.iter().map(|row| &row.load)).len() > 1)
        .collect()
}

/// Whether events come at a pace, not as fast as they can be written.
pub fn paced(load: &Load) -> bool {
    load.chunk_ms.is_some_and(|ms| ms > 0.0)
}

/// The load by which contenders are compared first: 1 KB, 16 connections, as fast as it goes, streamed or whole.
pub fn is_usual(load: &Load) -> bool {
    load.load == Loading::Closed && load.connections == 16 && load.body_bytes == KB && !paced(load)
}

/// A load in words.
pub fn in_words(load: &Load) -> String {
    format!(
        "{}, {}, {}, {}",
        bytes(load.body_bytes),
        manner(load),
        connections(load),
        threads(load.threads)
    )
}

/// How its answers come, in words.
pub fn manner(load: &Load) -> String {
    let pace = match load.chunk_ms {
        Some(ms) if paced(load) => format!(", one every {ms} ms"),
        _ => String::new(),
    };
    match (load.streamed, load.chunks) {
        (false, _) => "whole".to_owned(),
        (true, None) => format!("streamed{pace}"),
        (true, Some(1)) => "streamed in 1 event".to_owned(),
        (true, Some(chunks)) => format!("streamed in {chunks} events{pace}"),
    }
}

/// How requests come, in words.
pub fn connections(load: &Load) -> String {
    match (load.load, load.rate, load.connections) {
        (Loading::Open, Some(rate), _) => format!("open loop, {rate} requests/s"),
        (Loading::Open, None, _) => "open loop".to_owned(),
        (Loading::Closed, _, 1) => "1 connection".to_owned(),
        (Loading::Closed, _, count) => format!("{count} connections"),
    }
}

/// A number of threads in words.
pub fn threads(count: u16) -> String {
    match count {
        1 => "1 thread".to_owned(),
        count => format!("{count} threads"),
    }
}
