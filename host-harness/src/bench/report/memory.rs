//! Owns the derivation of memory growth over many prompts.

use crate::bench::results::MemoryRow;

/// Prompts up to which, and from which on, growth is given.
pub const MARK: u64 = 100_000;

/// Memory growth of one contender, as far as measured.
pub struct MemoryGrowth {
    /// MB before the first prompt.
    pub start: Option<f64>,
    /// MB after [`MARK`] prompts.
    pub at_mark: Option<f64>,
    /// The last measurement after that: prompts and MB.
    pub end: Option<(u64, f64)>,
    /// MB per VM from the start to [`MARK`].
    pub each_vm: Option<f64>,
    /// MB per 10,000 prompts from [`MARK`] to the end, all VMs together.
    pub after_mark: Option<f64>,
}

impl MemoryGrowth {
    /// Growth of a row.
    pub fn of(row: &MemoryRow) -> Self {
        let points = &row.points;
        let start = points.first().filter(|(prompts, _)| *prompts == 0);
        let start = start.map(|(_, mb)| *mb);
        let mark = points.iter().find(|(prompts, _)| *prompts >= MARK).copied();
        let last = points.last().copied();
        let end = mark.and_then(|(at, _)| last.filter(|(prompts, _)| *prompts > at));
        let each_vm = start
            .zip(mark)
            .map(|(start, (_, at_mark))| (at_mark - start) / f64::from(row.threads.max(1)));
        let after_mark = mark.zip(end).map(|((from, at_mark), (to, at_end))| {
            (at_end - at_mark) / (to - from) as f64 * 10_000.0
        });
        Self {
            start,
            at_mark: mark.map(|(_, mb)| mb),
            end,
            each_vm,
            after_mark,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grown(threads: u16, points: &[(u64, f64)]) -> MemoryGrowth {
        MemoryGrowth::of(&MemoryRow {
            contender: "any".to_owned(),
            body_bytes: 16 * 1024,
            threads,
            points: points.to_vec(),
        })
    }

    #[test]
    fn growth_is_each_vms_until_the_mark_and_a_rate_from_there() {
        let points = [
            (0, 50.0),
            (50_000, 80.0),
            (100_000, 110.0),
            (150_000, 111.0),
        ];
        let growth = grown(2, &points);
        assert_eq!(growth.each_vm, Some(30.0));
        assert_eq!(growth.after_mark, Some(0.2));
        assert_eq!(growth.end, Some((150_000, 111.0)));
    }

    #[test]
    fn what_was_not_sent_is_not_judged() {
        let short = grown(1, &[(0, 50.0), (20_000, 80.0)]);
        assert_eq!(short.each_vm, None);
        assert_eq!(short.after_mark, None);
        let ended = grown(1, &[(0, 50.0), (100_000, 80.0)]);
        assert_eq!(ended.each_vm, Some(30.0));
        assert_eq!(ended.end, None);
        assert_eq!(grown(1, &[(10, 1.0), (100_000, 2.0)]).each_vm, None);
        assert_eq!(grown(1, &[]).at_mark, None);
    }
}
