//! Owns the measured loads, and the contenders under each. Contenders of one stage share engines and the number of proxy threads,
//! and take turns under each load.

use super::contender::{Contender, Lesser, Ours};
use super::peers::Peer;
use super::results::{Load, Loading};

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

/// All rows that README quotes, and more.
pub fn all() -> Vec<Stage> {
    vec![one_thread(), paced(), two_threads()]
}

/// A few rows of each kind.
pub fn quick() -> Vec<Stage> {
    let mut stages = vec![one_thread(), paced()];
    for stage in &mut stages {
        stage.trials.retain(|trial| {
            let load = &trial.load;
            load.load == Loading::Closed && load.connections == 16 && load.body_bytes <= 4 * KB
        });
    }
    stages
}

fn one_thread() -> Stage {
    let shape = Shape {
        threads: 1,
        gap_ms: 0.0,
    };
    let small = [1, 16, 64].map(|connections| Trial {
        load: shape.closed(KB, connections, Answer::Whole),
        contenders: everybody(),
    });
    let mut trials = small.to_vec();
    trials.push(Trial {
        load: shape.closed(KB, 16, Answer::Stream(EVENTS)),
        contenders: everybody(),
    });
    trials.push(Trial {
        load: shape.open(KB, RATE, Answer::Whole),
        contenders: everybody(),
    });
    trials.extend([4, 16, 220].map(|kilobytes| Trial {
        load: shape.closed(kilobytes * KB, 16, Answer::Whole),
        contenders: readers(),
    }));
    trials.extend([20, 200].map(|connections| Trial {
        load: shape.closed(220 * KB, connections, Answer::Stream(EVENTS)),
        contenders: of_large(),
    }));
    trials.push(Trial {
        load: shape.open(220 * KB, RATE_OF_LARGE, Answer::Stream(EVENTS)),
        contenders: of_large(),
    });
    shape.stage(trials)
}

fn paced() -> Stage {
    let shape = Shape {
        threads: 1,
        gap_ms: PACED_MS,
    };
    let trials = [EVENTS, 1].map(|events| Trial {
        load: shape.closed(KB, 16, Answer::Stream(events)),
        contenders: vec![
            Contender::Lesser(Lesser::Empty),
            Contender::Ours(Ours::Direct),
            Contender::Ours(Ours::Unread),
            Contender::Ours(Ours::Nixl),
        ],
    });
    shape.stage(trials.to_vec())
}

fn two_threads() -> Stage {
    let shape = Shape {
        threads: 2,
        gap_ms: 0.0,
    };
    let loads = [
        shape.closed(KB, 64, Answer::Whole),
        shape.closed(KB, 64, Answer::Stream(EVENTS)),
        shape.closed(220 * KB, 64, Answer::Whole),
    ];
    let trials = loads.map(|load| Trial {
        load,
        contenders: vec![
            Contender::Lesser(Lesser::Empty),
            Contender::Lesser(Lesser::Buffer),
            Contender::Ours(Ours::Direct),
            Contender::Ours(Ours::Nixl),
            Contender::Wasmtime,
        ],
    });
    shape.stage(trials.to_vec())
}

fn everybody() -> Vec<Contender> {
    let mut all = vec![
        Contender::Envoy,
        Contender::Lesser(Lesser::Empty),
        Contender::Lesser(Lesser::Buffer),
        Contender::Ours(Ours::Aggregated),
        Contender::Ours(Ours::Direct),
        Contender::Ours(Ours::Nixl),
        Contender::Ours(Ours::Sglang),
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
        Contender::Lesser(Lesser::Buffer),
        Contender::Lesser(Lesser::Parse),
        Contender::Lesser(Lesser::ParseTwice),
        Contender::Ours(Ours::Aggregated),
        Contender::Ours(Ours::Direct),
        Contender::Ours(Ours::Nixl),
        Contender::Ours(Ours::Sglang),
    ];
    all.extend(Peer::ALL.map(Contender::Behind));
    all
}

fn of_large() -> Vec<Contender> {
    vec![
        Contender::Lesser(Lesser::Buffer),
        Contender::Ours(Ours::Direct),
        Contender::Ours(Ours::Nixl),
        Contender::Behind(Peer::VllmRouter),
    ]
}

/// Form of an answer.
#[derive(Clone, Copy)]
enum Answer {
    Whole,
    Stream(u64),
}

/// Properties shared by the loads of a stage.
#[derive(Clone, Copy)]
struct Shape {
    threads: u16,
    gap_ms: f64,
}

impl Shape {
    fn stage(self, trials: Vec<Trial>) -> Stage {
        Stage {
            threads: self.threads,
            gap_ms: self.gap_ms,
            trials,
        }
    }

    fn closed(self, body_bytes: usize, connections: usize, answer: Answer) -> Load {
        let events = match answer {
            Answer::Whole => None,
            Answer::Stream(events) => Some(events),
        };
        Load {
            load: Loading::Closed,
            rate: None,
            body_bytes,
            connections,
            streamed: events.is_some(),
            chunks: events,
            chunk_ms: events.map(|_| self.gap_ms),
            threads: self.threads,
        }
    }

    fn open(self, body_bytes: usize, rate: f64, answer: Answer) -> Load {
        Load {
            load: Loading::Open,
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
