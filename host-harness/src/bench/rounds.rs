//! Owns the rounds: contenders take turns under each load, A B C A B C …, so that other work on the machine affects all of them
//! alike; and a row is the median of its rounds.

use std::time::Duration;

use pd_harness_common::usage::Usage;

use super::contender::Contender;
use super::fleet::MODEL;
use super::loads::{Stage, Trial};
use super::results::{Figures, Load, LoopKind, Row};
use super::running_contender::RunningContender;
use crate::load::{self, LoadPlan, Measured, Pacing, Prompts, RequestSpec};

/// How rounds are measured.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    /// Number of rounds.
    pub number: usize,
    /// Time of one measurement.
    pub lasts: Duration,
}

/// Unmeasured time before each measurement, in which connections are made and caches warm up.
pub const WARM_UP: Duration = Duration::from_millis(300);

/// Source of prompt numbers, so that no prompt is sent twice to any contender.
#[derive(Debug, Default)]
pub struct PromptNumbers(u64);

impl PromptNumbers {
    /// More prompts than any one measurement sends.
    const MOST: u64 = 1 << 32;

    /// Numbers for one measurement.
    pub fn prompts(&mut self) -> Prompts {
        self.0 += Self::MOST;
        Prompts::AllDifferent { from: self.0 }
    }
}

/// One running contender.
pub struct Participant {
    /// Its identity.
    pub contender: Contender,
    /// Its processes and address.
    pub running: RunningContender,
}

/// Measures all trials of a stage; calls `passed` after each measurement. Contenders that did not start have no rows.
pub async fn measure(
    stage: &Stage,
    participants: &[Participant],
    rounds: Rounds,
    numbers: &mut PromptNumbers,
    mut passed: impl FnMut(Contender),
) -> Vec<Row> {
    let mut found: Vec<Vec<(Contender, Vec<Figures>)>> = Vec::new();
    for trial in &stage.trials {
        let running = participants.iter().map(|participant| participant.contender);
        let of_trial = running.filter(|contender| trial.contenders.contains(contender));
        found.push(of_trial.map(|contender| (contender, Vec::new())).collect());
    }
    for _ in 0..rounds.number {
        for (trial, found) in stage.trials.iter().zip(&mut found) {
            for participant in participants {
                let Some((_, figures)) = found
                    .iter_mut()
                    .find(|(contender, _)| *contender == participant.contender)
                else {
                    continue;
                };
                figures.push(once(trial, &participant.running, rounds.lasts, numbers).await);
                passed(participant.contender);
            }
        }
    }
    let trials = stage.trials.iter().zip(found);
    trials
        .flat_map(|(trial, found)| {
            let rows = found.into_iter();
            rows.map(|(contender, figures)| row(contender, &trial.load, &figures))
        })
        .collect()
}

async fn once(
    trial: &Trial,
    running: &RunningContender,
    lasts: Duration,
    numbers: &mut PromptNumbers,
) -> Figures {
    let plan = plan(&trial.load, running, lasts, numbers.prompts());
    let (measured, [before, after]) = load::drive(&plan, || running.usage()).await;
    figures(&measured, before, after)
}

fn plan(load: &Load, running: &RunningContender, lasts: Duration, prompts: Prompts) -> LoadPlan {
    LoadPlan {
        to: running.address,
        pacing: match (load.load, load.rate) {
            (LoopKind::Open, Some(rate)) => Pacing::Open { rate },
            _ => Pacing::Closed,
        },
        connections: load.connections,
        warm_up: WARM_UP,
        lasts,
        spec: RequestSpec {
            model: MODEL.to_owned(),
            body_bytes: load.body_bytes,
            streamed: load.streamed,
            tokens: load
                .chunks
                .and_then(|chunks| u32::try_from(chunks).ok())
                .unwrap_or(1),
            prompts,
        },
    }
}

fn figures(measured: &Measured, before: Usage, after: Usage) -> Figures {
    let spent = after.cpu.saturating_sub(before.cpu);
    Figures {
        rps: measured.rps,
        p50_ms: measured.latency_ms.p50,
        p90_ms: measured.latency_ms.p90,
        p99_ms: measured.latency_ms.p99,
        ttft_p50_ms: measured.ttft_ms.p50,
        cpu_us_per_request: spent.as_secs_f64() * 1e6 / measured.requests.max(1) as f64,
        rss_mb: megabytes(after.resident),
        success_rate: measured.success_rate(),
    }
}

/// MB (2^20 bytes).
pub fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn row(contender: Contender, load: &Load, rounds: &[Figures]) -> Row {
    let of = |pick: fn(&[f64]) -> f64| figures_by(rounds, pick);
    Row {
        contender: contender.name(),
        load: load.clone(),
        rounds: rounds.len(),
        median: of(median),
        min: of(|values| values.first().copied().unwrap_or_default()),
        max: of(|values| values.last().copied().unwrap_or_default()),
    }
}

/// Each figure picked separately from its sorted values of all rounds.
fn figures_by(rounds: &[Figures], pick: fn(&[f64]) -> f64) -> Figures {
    let of = |figure: fn(&Figures) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(figure).collect();
        values.sort_unstable_by(f64::total_cmp);
        pick(&values)
    };
    Figures {
        rps: of(|one| one.rps),
        p50_ms: of(|one| one.p50_ms),
        p90_ms: of(|one| one.p90_ms),
        p99_ms: of(|one| one.p99_ms),
        ttft_p50_ms: of(|one| one.ttft_p50_ms),
        cpu_us_per_request: of(|one| one.cpu_us_per_request),
        rss_mb: of(|one| one.rss_mb),
        success_rate: of(|one| one.success_rate),
    }
}

fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        _ if sorted.is_empty() => 0.0,
        0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_the_median_of_each_figure_by_itself() {
        let round = |rps, p50_ms| Figures {
            rps,
            p50_ms,
            ..Figures::default()
        };
        let load = &crate::bench::loads::quick()[0].trials[0].load;
        let row = row(
            Contender::Envoy,
            load,
            &[round(3.0, 1.0), round(1.0, 9.0), round(2.0, 5.0)],
        );
        assert_eq!((row.median.rps, row.median.p50_ms), (2.0, 5.0));
        assert_eq!((row.min.rps, row.max.p50_ms), (1.0, 9.0));
        assert_eq!(median(&[1.0, 2.0]), 1.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn processor_time_is_shared_among_all_requests() {
        let measured = Measured {
            requests: 100,
            good: 50,
            ..Measured::default()
        };
        let used = |micros| Usage {
            cpu: Duration::from_micros(micros),
            resident: 3 << 20,
        };
        let figures = figures(&measured, used(1000), used(6000));
        assert_eq!((figures.cpu_us_per_request, figures.rss_mb), (50.0, 3.0));
        assert_eq!(figures.success_rate, 0.5);
    }
}
