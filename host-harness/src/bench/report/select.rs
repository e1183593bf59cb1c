//! Owns the selection of rows: by contender, by load, and grouped by load.

use super::numbers::bytes;
use crate::bench::results::{Figures, Load, LoopKind, Row};

/// Bytes per KB, as used in body sizes.
pub const KB: usize = 1024;

/// Share of requests that must be answered well for a row's times to mean anything: refusing is quick.
const ANSWERED: f64 = 0.99;

/// Whether nearly all requests of a row were answered.
pub fn answers(figures: &Figures) -> bool {
    figures.success_rate >= ANSWERED
}

/// Items in order of first appearance, each once.
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

/// Rows whose loads are equal once `alike` has been applied, in the order of each group's first row; only groups whose loads
/// differ before that.
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

/// Whether events come at a fixed pace, not without pauses.
pub fn paced(load: &Load) -> bool {
    load.chunk_ms.is_some_and(|ms| ms > 0.0)
}

/// The load by which contenders are compared first: 1 KB, 16 connections, closed loop, streamed or unstreamed.
pub fn is_usual(load: &Load) -> bool {
    load.load == LoopKind::Closed && load.connections == 16 && load.body_bytes == KB && !paced(load)
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

/// The form of its answers in words.
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

/// The sending of its requests in words.
pub fn connections(load: &Load) -> String {
    match (load.load, load.rate, load.connections) {
        (LoopKind::Open, Some(rate), _) => format!("open loop, {rate} requests/s"),
        (LoopKind::Open, None, _) => "open loop".to_owned(),
        (LoopKind::Closed, _, 1) => "1 connection".to_owned(),
        (LoopKind::Closed, _, count) => format!("{count} connections"),
    }
}

/// A number of threads in words.
pub fn threads(count: u16) -> String {
    match count {
        1 => "1 thread".to_owned(),
        count => format!("{count} threads"),
    }
}
