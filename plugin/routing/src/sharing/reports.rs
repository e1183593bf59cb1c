//! Owns the engines' figures as bytes: the leading VM polls them, and writes them to the shared store for all.
//!
//! ```text
//! reports = "pdr2" · written u64 · count u32 · report …
//! report  = worker u64 · at u64 · started u64 · waiting u32 · running u32 · kv use u32 · kv blocks u32 · block tokens u32
//! ```
//!
//! Times are in milliseconds of the writer's clock. Another VM's clock may differ, so the time of writing is included. The
//! greatest number stands for an unknown figure.

use std::time::Duration;

use super::bytes::{Input, put_count, put_u32, put_u64};
use crate::fleet::WorkerId;
use crate::route::Report;

const MAGIC: u32 = u32::from_le_bytes(*b"pdr2");
const HEAD_BYTES: usize = 16;
const REPORT_BYTES: usize = 44;

/// The used part of a cache is written in millionths.
const PARTS: f32 = 1_000_000.0;

/// Encodes reports, written at the time `at` of the writer's clock.
pub fn encode_reports<'r>(at: Duration, reports: impl Iterator<Item = &'r Report>) -> Vec<u8> {
    let mut count: usize = 0;
    let mut written = Vec::new();
    for report in reports {
        put(&mut written, report);
        count = count.saturating_add(1);
    }
    let mut out = Vec::with_capacity(written.len().saturating_add(HEAD_BYTES));
    put_u32(&mut out, MAGIC);
    put_u64(&mut out, millis(at));
    put_count(&mut out, count);
    out.extend_from_slice(&written);
    out
}

/// The decoded reports, and the time of writing by the writer's clock; none where the bytes are something else.
pub fn decode_reports(bytes: &[u8]) -> Option<(Duration, Vec<Report>)> {
    let mut input = Input(bytes);
    if input.u32()? != MAGIC {
        return None;
    }
    let at = Duration::from_millis(input.u64()?);
    let count = input.count(REPORT_BYTES)?;
    let reports = (0..count).map_while(|_| take(&mut input));
    Some((at, reports.collect()))
}

fn put(out: &mut Vec<u8>, report: &Report) {
    put_u64(out, report.worker.0);
    put_u64(out, millis(report.at));
    put_u64(out, report.started.map_or(u64::MAX, millis));
    let kv_use = report
        .kv_use
        .map(|share| (share.clamp(0.0, 1.0) * PARTS) as u32);
    let figures = [
        report.waiting,
        report.running,
        kv_use,
        report.kv_blocks,
        report.block_tokens,
    ];
    for figure in figures {
        put_u32(out, figure.unwrap_or(u32::MAX));
    }
}

fn take(input: &mut Input<'_>) -> Option<Report> {
    let known = |number: u32| (number != u32::MAX).then_some(number);
    let worker = WorkerId(input.u64()?);
    let at = Duration::from_millis(input.u64()?);
    let started = input.u64()?;
    Some(Report {
        worker,
        at,
        started: (started != u64::MAX).then(|| Duration::from_millis(started)),
        waiting: known(input.u32()?),
        running: known(input.u32()?),
        kv_use: known(input.u32()?).map(|parts| parts as f32 / PARTS),
        kv_blocks: known(input.u32()?),
        block_tokens: known(input.u32()?),
    })
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn report(worker: u64, figure: Option<u32>) -> Report {
        Report {
            worker: WorkerId(worker),
            at: Duration::from_millis(1_700_000_000_123),
            started: figure.map(|_| Duration::from_millis(7)),
            waiting: figure,
            running: None,
            kv_use: figure.map(|_| 0.25),
            kv_blocks: Some(1000),
            block_tokens: figure,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let all = [report(1, None), report(u64::MAX, Some(3))];
        let at = Duration::from_millis(1_700_000_000_456);
        let bytes = encode_reports(at, all.iter());
        assert_eq!(bytes.len(), HEAD_BYTES + 2 * REPORT_BYTES);
        assert_eq!(decode_reports(&bytes), Some((at, all.to_vec())));
    }

    proptest! {
        #[test]
        fn other_bytes_are_no_reports_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_reports(&bytes);
            let mut claimed = MAGIC.to_le_bytes().to_vec();
            claimed.extend(bytes);
            let _ = decode_reports(&claimed);
        }
    }
}
