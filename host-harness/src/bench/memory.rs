//! Owns the measurement of memory over many distinct prompts: each contender alone, freshly started.

use std::time::Duration;

use super::contender::{Contender, LesserFilter, OwnSetup};
use super::fleet::MODEL;
use super::peers::Peer;
use super::results::MemoryRow;
use super::rounds::{PromptNumbers, megabytes};
use super::running_contender::RunningContender;
use crate::load::{self, LoadPlan, Pacing, RequestSpec};

/// Bytes of a body.
const BODY_BYTES: usize = 16 * 1024;
const CONNECTIONS: usize = 16;
/// Worker threads of the proxies.
pub const THREADS: u16 = 1;
/// Steps of the measurement: memory is read after each tenth of the prompts.
pub const STEPS: u64 = 10;
/// Further steps after the last tenth, over which memory is to stay constant.
const FURTHER_STEPS: u64 = 5;
/// Time limit of one step; most take seconds.
const STEP_LIMIT: Duration = Duration::from_secs(180);

/// The measured contenders.
pub fn contenders() -> Vec<Contender> {
    let mut all = vec![
        Contender::Lesser(LesserFilter::Buffer),
        Contender::Ours(OwnSetup::Direct),
        Contender::Ours(OwnSetup::Nixl),
    ];
    all.extend(Peer::ALL.map(Contender::Peer));
    all
}

/// Number of steps for a contender.
pub fn steps(contender: Contender) -> u64 {
    match contender {
        Contender::Peer(_) => STEPS,
        _ => STEPS + FURTHER_STEPS,
    }
}

/// Why there is no row.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A step took too long.
    #[error("only {sent} of {requested} prompts could be sent within {} s", STEP_LIMIT.as_secs())]
    Slow {
        /// Prompts sent in the step.
        sent: u64,
        /// Prompts to be sent.
        requested: u64,
    },
    /// Too few answers: the memory would be that of an idle process.
    #[error("only {good} of {requested} prompts were answered")]
    Failing {
        /// Prompts answered in the step.
        good: u64,
        /// Prompts sent.
        requested: u64,
    },
}

/// Sends prompts, `prompts` in ten steps and some more after them, and reads memory after each step; then calls `passed`.
///
/// # Errors
/// When prompts cannot be sent, or more than one in a hundred is not answered.
pub async fn measure(
    contender: Contender,
    running: &RunningContender,
    prompts: u64,
    numbers: &mut PromptNumbers,
    passed: impl Fn(),
) -> Result<MemoryRow, MemoryError> {
    let resident = || megabytes(running.usage().resident);
    let step = (prompts / STEPS).max(1);
    let mut points = vec![(0, resident())];
    for number in 1..=steps(contender) {
        send(running, step, numbers).await?;
        points.push((number * step, resident()));
        passed();
    }
    Ok(MemoryRow {
        contender: contender.name(),
        body_bytes: BODY_BYTES,
        threads: THREADS,
        points,
    })
}

async fn send(
    running: &RunningContender,
    requested: u64,
    numbers: &mut PromptNumbers,
) -> Result<(), MemoryError> {
    let plan = LoadPlan {
        to: running.address,
        pacing: Pacing::Closed,
        connections: CONNECTIONS,
        warm_up: Duration::ZERO,
        lasts: STEP_LIMIT,
        spec: RequestSpec {
            model: MODEL.to_owned(),
            body_bytes: BODY_BYTES,
            streamed: false,
            tokens: 1,
            prompts: numbers.prompts(),
        },
    };
    let load::Sent { sent, good } = load::send(&plan, requested).await;
    if sent < requested {
        return Err(MemoryError::Slow { sent, requested });
    }
    match good * 100 < requested * 99 {
        true => Err(MemoryError::Failing { good, requested }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_whose_memory_is_to_stay_as_it_is_are_watched_beyond() {
        assert_eq!(steps(Contender::Ours(OwnSetup::Nixl)), 15);
        assert_eq!(steps(Contender::Peer(Peer::SmgNixl)), 10);
        assert_eq!(contenders().len(), 7);
    }
}
