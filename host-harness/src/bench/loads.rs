//! Owns the measured loads, and the contenders under each. Contenders of one stage share engines and the number of proxy threads,
//! and take turns under each load.

use super::contender::{Contender, LesserFilter, OwnSetup};
use super::peers::Peer;
use super::results::{Load, LoopKind};

/// Contenders that run side by side, and the loads under which they take turns.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Worker threads of each proxy.
    pub threads: u16,
    /// Milliseconds between two events of a stream.
    pub gap_ms: f64,
    /// Loads, each with its contenders.
    pub trials: Vec<Trial>,
}

/// A load and its contenders.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The load.
    pub load: Load,
    /// The contenders.
    pub contenders: Vec<Contender>,
}

impl Stage {
    /// Keeps only the contenders that `is_kept` accepts; a load without contenders is dropped.
    pub fn keep(&mut self, is_kept: impl Fn(Contender) -> bool) {
        for trial in &mut self.trials {
            trial.contenders.retain(|contender| is_kept(*contender));
        }
        self.trials.retain(|trial| !trial.contenders.is_empty());
    }

    /// Number of measurements in one round.
    pub fn measurements(&self) -> usize {
        self.trials.iter().map(|trial| trial.contenders.len()).sum()
    }

    /// All contenders of the trials, each once.
    pub fn contenders(&self) -> Vec<Contender> {
        let mut all = Vec::new();
        for contender in self.trials.iter().flat_map(|trial| &trial.contenders) {
            if !all.contains(contender) {
                all.push(*contender);
            }
        }
        all
    }
}

const KB: usize = 1024;
/// Events of a stream.
const EVENTS: u64 = 64;
/// Milliseconds between events where the cost of an event is measured: each event is then read separately.
const PACED_MS: f64 = 1.0;
/// Requests per second that all contenders sustain, of 1 KB and of 220 KB.
const RATE: f64 = 200.0;
const RATE_OF_LARGE: f64 = 60.0;

/// All rows that docs/benchmarks.md quotes, and more.
pub fn all() -> Vec<Stage> {
    vec![one_thread(), paced(), two_threads()]
}

/// A few rows of each kind.
pub fn quick() -> Vec<Stage> {
    let mut stages = vec![one_thread(), paced()];
    for stage in &mut stages {
        stage.trials.retain(|trial| {
            let load = &trial.load;
            load.load == LoopKind::Closed && load.connections == 16 && load.body_bytes <= 4 * KB
        });
    }
    stages
}

fn one_thread() -> Stage {
    let settings = StageSettings {
        threads: 1,
        gap_ms: 0.0,
    };
    let small = [1, 16, 64].map(|connections| Trial {
        load: settings.closed(KB, connections, AnswerForm::Unstreamed),
        contenders: all_contenders(),
    });
    let mut trials = small.to_vec();
    trials.push(Trial {
        load: settings.closed(KB, 16, AnswerForm::Stream(EVENTS)),
        contenders: all_contenders(),
    });
    trials.push(Trial {
        load: settings.open(KB, RATE, AnswerForm::Unstreamed),
        contenders: all_contenders(),
    });
    trials.extend([4, 16, 220].map(|kilobytes| Trial {
        load: settings.closed(kilobytes * KB, 16, AnswerForm::Unstreamed),
        contenders: readers(),
    }));
    trials.extend([20, 200].map(|connections| Trial {
        load: settings.closed(220 * KB, connections, AnswerForm::Stream(EVENTS)),
        contenders: of_large(),
    }));
    trials.push(Trial {
        load: settings.open(220 * KB, RATE_OF_LARGE, AnswerForm::Stream(EVENTS)),
        contenders: of_large(),
    });
    settings.stage(trials)
}

fn paced() -> Stage {
    let settings = StageSettings {
        threads: 1,
        gap_ms: PACED_MS,
    };
    let trials = [EVENTS, 1].map(|events| Trial {
        load: settings.closed(KB, 16, AnswerForm::Stream(events)),
        contenders: vec![
            Contender::Lesser(LesserFilter::Empty),
            Contender::Ours(OwnSetup::Direct),
            Contender::Ours(OwnSetup::Unread),
            Contender::Ours(OwnSetup::Nixl),
        ],
    });
    settings.stage(trials.to_vec())
}

fn two_threads() -> Stage {
    let settings = StageSettings {
        threads: 2,
        gap_ms: 0.0,
    };
    let loads = [
        settings.closed(KB, 64, AnswerForm::Unstreamed),
        settings.closed(KB, 64, AnswerForm::Stream(EVENTS)),
        settings.closed(220 * KB, 64, AnswerForm::Unstreamed),
    ];
    let trials = loads.map(|load| Trial {
        load,
        contenders: vec![
            Contender::Lesser(LesserFilter::Empty),
            Contender::Lesser(LesserFilter::Buffer),
            Contender::Ours(OwnSetup::Direct),
            Contender::Ours(OwnSetup::Nixl),
            Contender::Wasmtime,
        ],
    });
    settings.stage(trials.to_vec())
}

fn all_contenders() -> Vec<Contender> {
    let mut all = vec![
        Contender::Envoy,
        Contender::Lesser(LesserFilter::Empty),
        Contender::Lesser(LesserFilter::Buffer),
        Contender::Ours(OwnSetup::Aggregated),
        Contender::Ours(OwnSetup::Direct),
        Contender::Ours(OwnSetup::Nixl),
        Contender::Ours(OwnSetup::Sglang),
        Contender::Wasmtime,
    ];
    all.extend(Peer::ALL.map(Contender::Peer));
    all.extend(Peer::ALL.map(Contender::Behind));
    all
}

/// Contenders whose cost depends on the body.
fn readers() -> Vec<Contender> {
    let mut all = vec![
        Contender::Envoy,
        Contender::Lesser(LesserFilter::Buffer),
        Contender::Lesser(LesserFilter::Parse),
        Contender::Lesser(LesserFilter::ParseTwice),
        Contender::Ours(OwnSetup::Aggregated),
        Contender::Ours(OwnSetup::Direct),
        Contender::Ours(OwnSetup::Nixl),
        Contender::Ours(OwnSetup::Sglang),
    ];
    all.extend(Peer::ALL.map(Contender::Behind));
    all
}

fn of_large() -> Vec<Contender> {
    vec![
        Contender::Lesser(LesserFilter::Buffer),
        Contender::Ours(OwnSetup::Direct),
        Contender::Ours(OwnSetup::Nixl),
        Contender::Behind(Peer::VllmRouter),
    ]
}

/// Form of an answer.
#[derive(Clone, Copy)]
enum AnswerForm {
    Unstreamed,
    Stream(u64),
}

/// Properties shared by the loads of a stage.
#[derive(Clone, Copy)]
struct StageSettings {
    threads: u16,
    gap_ms: f64,
}

impl StageSettings {
    fn stage(self, trials: Vec<Trial>) -> Stage {
        Stage {
            threads: self.threads,
            gap_ms: self.gap_ms,
            trials,
        }
    }

    fn closed(self, body_bytes: usize, connections: usize, answer: AnswerForm) -> Load {
        let events = match answer {
            AnswerForm::Unstreamed => None,
            AnswerForm::Stream(events) => Some(events),
        };
        Load {
            load: LoopKind::Closed,
            rate: None,
            body_bytes,
            connections,
            streamed: events.is_some(),
            chunks: events,
            chunk_ms: events.map(|_| self.gap_ms),
            threads: self.threads,
        }
    }

    fn open(self, body_bytes: usize, rate: f64, answer: AnswerForm) -> Load {
        Load {
            load: LoopKind::Open,
            rate: Some(rate),
            ..self.closed(body_bytes, 64, answer)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_load_stands_twice_and_nobody_twice_under_one() {
        for stage in all().iter().chain(&quick()) {
            for (number, trial) in stage.trials.iter().enumerate() {
                assert!(
                    stage.trials[number + 1..]
                        .iter()
                        .all(|other| other.load != trial.load)
                );
                let mut names: Vec<String> =
                    trial.contenders.iter().map(|one| one.name()).collect();
                names.sort();
                let all = names.len();
                names.dedup();
                assert_eq!(names.len(), all);
            }
        }
        assert!(quick().iter().all(|stage| !stage.trials.is_empty()));
    }
}
