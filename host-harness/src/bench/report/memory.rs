//! Owns the derivation of memory growth over many prompts.

use super::numbers::thousands;
use super::select::MissingFigure;
use crate::bench::results::MemoryRow;

/// Prompts after which memory is judged, and after which it is to stay constant.
pub const MARK: u64 = 100_000;

/// Memory growth of one contender, as far as measured.
pub struct MemoryGrowth {
    /// MB before the first prompt.
    pub start: Result<f64, MissingFigure>,
    /// MB after [`MARK`] prompts.
    pub at_mark: Result<f64, MissingFigure>,
    /// The last measurement after that: prompts and MB.
    pub end: Result<(u64, f64), MissingFigure>,
    /// MB per VM from the start to [`MARK`].
    pub each_vm: Result<f64, MissingFigure>,
    /// MB per 10,000 prompts from [`MARK`] to the end, all VMs together.
    pub after_mark: Result<f64, MissingFigure>,
}

impl MemoryGrowth {
    /// Growth of a row.
    pub fn of(row: &MemoryRow) -> Self {
        let (start, mark, end) = (start(row), mark(row), end(row));
        let each_vm = start.clone().and_then(|start| {
            let (_, at_mark) = mark.clone()?;
            Ok((at_mark - start) / f64::from(row.threads.max(1)))
        });
        let after_mark = end.clone().and_then(|(prompts, end)| {
            let (at, mb) = mark.clone()?;
            Ok((end - mb) / (prompts - at) as f64 * 10_000.0)
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

fn start(row: &MemoryRow) -> Result<f64, MissingFigure> {
    let first = row.points.first().filter(|(prompts, _)| *prompts == 0);
    first
        .map(|(_, mb)| *mb)
        .ok_or_else(|| MissingFigure::Absent("memory at the start was not read".to_owned()))
}

fn mark(row: &MemoryRow) -> Result<(u64, f64), MissingFigure> {
    let mark = row.points.iter().find(|(prompts, _)| *prompts >= MARK);
    mark.copied().ok_or_else(|| {
        let sent = row.points.last().map_or(0, |(prompts, _)| *prompts);
        MissingFigure::Absent(format!(
            "no more than {} prompts were sent",
            thousands(sent as f64)
        ))
    })
}

fn end(row: &MemoryRow) -> Result<(u64, f64), MissingFigure> {
    let (at, _) = mark(row)?;
    let last = row.points.last().copied();
    last.filter(|(prompts, _)| *prompts > at).ok_or_else(|| {
        MissingFigure::Absent(format!(
            "nothing was sent after {} prompts",
            thousands(at as f64)
        ))
    })
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
        assert_eq!(growth.each_vm, Ok(30.0));
        assert_eq!(growth.after_mark, Ok(0.2));
        assert_eq!(growth.end, Ok((150_000, 111.0)));
    }

    #[test]
    fn what_was_not_sent_is_not_judged() {
        let short = grown(1, &[(0, 50.0), (20_000, 80.0)]);
        assert_eq!(
            short.each_vm,
            Err(MissingFigure::Absent(
                "no more than 20,000 prompts were sent".to_owned()
            ))
        );
        assert!(short.after_mark.is_err());
        let ended = grown(1, &[(0, 50.0), (100_000, 80.0)]);
        assert_eq!(ended.each_vm, Ok(30.0));
        assert_eq!(
            ended.end,
            Err(MissingFigure::Absent(
                "nothing was sent after 100,000 prompts".to_owned()
            ))
        );
        assert!(grown(1, &[(10, 1.0), (100_000, 2.0)]).each_vm.is_err());
        assert!(grown(1, &[]).at_mark.is_err());
    }
}
