//! Owns the scenarios, as data.

use std::str::FromStr;

use routing::fleet::Role::{self, Decode, Prefill};

use super::scenario::{
    ClientMix, Demand, EngineAction, EngineId, Fault, FaultTarget, FleetSize, Leaks, PoolSettings,
    Scenario, Step,
};
use crate::engine::Dialect;

const P0: EngineId = EngineId {
    role: Prefill,
    number: 0,
};
const P1: EngineId = EngineId {
    role: Prefill,
    number: 1,
};
const D0: EngineId = EngineId {
    role: Decode,
    number: 0,
};
const D1: EngineId = EngineId {
    role: Decode,
    number: 1,
};

const TWO_AND_TWO: FleetSize = FleetSize {
    prefill: 2,
    decode: 2,
};
const TWO_AND_ONE: FleetSize = FleetSize {
    prefill: 2,
    decode: 1,
};

const fn at(part: f64, action: EngineAction) -> Step {
    Step { at: part, action }
}

/// Start and end of a fault, as shares of a round: long enough to be noticed, with time left to see the recovery.
const FAULTY_AT: f64 = 0.2;
const WELL_AT: f64 = 0.75;

const fn ill(target: FaultTarget, fault: Fault) -> [Step; 2] {
    [
        at(FAULTY_AT, EngineAction::Inject(target, fault)),
        at(WELL_AT, EngineAction::Repair(target)),
    ]
}

const fn dead(id: EngineId) -> [Step; 2] {
    [
        at(FAULTY_AT, EngineAction::Kill(id)),
        at(WELL_AT, EngineAction::Start(id)),
    ]
}

const fn always(status: u16) -> Fault {
    Fault::Status { status, share: 1.0 }
}

/// A fault: the worker refuses requests while it has more than `above`.
const fn full(status: u16, above: u64) -> Fault {
    Fault::Full { status, above }
}

/// A fiftieth of the five seconds for which engines' servers keep an idle connection by default.
const CLOSE_IDLE: Fault = Fault::CloseIdle { ms: 100 };

/// For one worker of a role only: if every worker had this fault, a request would soon meet three of them, more than are tried.
const UNLUCKY: Fault = Fault::ResetKeptAlive { share: 0.5 };

const THREE_IN_TEN_500: Fault = Fault::Status {
    status: 500,
    share: 0.3,
};

/// What a scenario has unless it says otherwise.
const USUAL: Scenario = Scenario {
    name: "",
    what: "",
    size: TWO_AND_TWO,
    mix: ClientMix::Patient,
    script: &[],
    ejects: None,
    leaks: Leaks::Exact,
    spares: &[],
    demand: Demand::Honesty,
    pool: PoolSettings::Plain,
    dialect: None,
};

const BOTH: &[Role] = &[Prefill, Decode];

/// All scenarios with a script, in the order in which they are played.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "prefill-killed",
        what: "one of two prefill workers is killed, and comes back",
        script: &dead(P0),
        ejects: Some(Prefill),
        ..USUAL
    },
    Scenario {
        name: "prefill-killed-2p1d",
        what: "the same in front of a single decode worker, which must not be blamed",
        size: TWO_AND_ONE,
        script: &dead(P0),
        ejects: Some(Prefill),
        ..USUAL
    },
    Scenario {
        name: "prefill-hangs",
        what: "one of two prefill workers takes requests and never answers; /health is fine",
        script: &ill(FaultTarget::One(P0), Fault::Hang),
        ejects: Some(Prefill),
        ..USUAL
    },
    Scenario {
        name: "prefill-500s",
        what: "30 % of all prefill answers are 500",
        script: &ill(FaultTarget::All(Prefill), THREE_IN_TEN_500),
        ..USUAL
    },
    Scenario {
        name: "prefill-500s-one-of-two",
        what: "30 % of one prefill worker's answers are 500",
        script: &ill(FaultTarget::One(P0), THREE_IN_TEN_500),
        ..USUAL
    },
    Scenario {
        name: "prefill-empty",
        what: "one of two prefill workers answers 200 with nothing",
        script: &ill(FaultTarget::One(P0), Fault::Empty),
        ejects: Some(Prefill),
        ..USUAL
    },
    Scenario {
        name: "prefill-resets",
        what: "one of two prefill workers breaks the connection without an answer",
        script: &ill(FaultTarget::One(P0), Fault::ResetBeforeHeaders),
        ejects: Some(Prefill),
        ..USUAL
    },
    Scenario {
        name: "handoffs-lost",
        what: "one of two prefill workers hands off what nobody can fetch",
        script: &ill(FaultTarget::One(P0), Fault::LoseHandoff),
        ..USUAL
    },
    Scenario {
        name: "decode-429",
        what: "one of two decode workers is too busy for anything",
        script: &ill(FaultTarget::One(D0), always(429)),
        ..USUAL
    },
    Scenario {
        name: "every-decode-503",
        what: "every decode worker answers 503",
        script: &ill(FaultTarget::All(Decode), always(503)),
        ..USUAL
    },
    Scenario {
        name: "decode-refuses",
        what: "one of two decode workers takes no connection, from the beginning",
        script: &[at(0.0, EngineAction::Kill(D0))],
        ejects: Some(Decode),
        ..USUAL
    },
    Scenario {
        name: "decode-killed",
        what: "one of two decode workers is killed, and comes back",
        script: &dead(D0),
        ejects: Some(Decode),
        leaks: Leaks::AtLeast,
        ..USUAL
    },
    Scenario {
        name: "decode-dies-mid-stream",
        what: "one of two decode workers breaks off after three tokens",
        script: &ill(FaultTarget::One(D0), Fault::DieMidStream { tokens: 3 }),
        ejects: Some(Decode),
        leaks: Leaks::AtLeast,
        ..USUAL
    },
    Scenario {
        name: "decode-resets-before-headers",
        what: "one of two decode workers fetches the blocks, then breaks the connection",
        script: &ill(FaultTarget::One(D0), Fault::ResetBeforeHeaders),
        ejects: Some(Decode),
        leaks: Leaks::AtLeast,
        ..USUAL
    },
    Scenario {
        name: "decode-resets-after-headers",
        what: "one of two decode workers breaks the connection right after its headers",
        script: &ill(FaultTarget::One(D0), Fault::ResetAfterHeaders),
        ejects: Some(Decode),
        leaks: Leaks::AtLeast,
        ..USUAL
    },
    Scenario {
        name: "decode-hangs",
        what: "one of two decode workers takes requests and never answers; /health is fine",
        script: &ill(FaultTarget::One(D0), Fault::Hang),
        ejects: Some(Decode),
        leaks: Leaks::AtLeast,
        ..USUAL
    },
    Scenario {
        name: "decode-silent",
        what: "one of two decode workers sends headers, and then nothing",
        script: &ill(FaultTarget::One(D0), Fault::Silent),
        ejects: Some(Decode),
        leaks: Leaks::AtLeast,
        ..USUAL
    },
    Scenario {
        name: "decode-empty",
        what: "one of two decode workers answers 200 with nothing",
        script: &ill(FaultTarget::One(D0), Fault::Empty),
        ejects: Some(Decode),
        leaks: Leaks::AtLeast,
        ..USUAL
    },
    Scenario {
        name: "rolling-restart",
        what: "every engine is killed and started again, one after the other",
        script: &[
            at(0.10, EngineAction::Kill(P0)),
            at(0.20, EngineAction::Start(P0)),
            at(0.32, EngineAction::Kill(P1)),
            at(0.42, EngineAction::Start(P1)),
            at(0.54, EngineAction::Kill(D0)),
            at(0.64, EngineAction::Start(D0)),
            at(0.76, EngineAction::Kill(D1)),
            at(0.86, EngineAction::Start(D1)),
        ],
        leaks: Leaks::AtLeast,
        ..USUAL
    },
    Scenario {
        name: "client-aborts",
        what: "half of the clients leave: with half a body sent, in prefill, at the headers, in the stream, at its last token",
        mix: ClientMix::WithLeavers,
        leaks: Leaks::AtLeast,
        spares: BOTH,
        demand: Demand::AnswerToGood,
        ..USUAL
    },
    Scenario {
        name: "slow-client",
        what: "a quarter of the clients read slowly, and pause for longer than a worker may be silent",
        mix: ClientMix::WithSlowReaders,
        spares: BOTH,
        demand: Demand::AnswerToGood,
        pool: PoolSettings::Touchy,
        ..USUAL
    },
    Scenario {
        name: "slow-readers",
        what: "two in three clients stop reading for four times as long as a worker may be silent, while its other streams go on",
        mix: ClientMix::SlowReaders,
        spares: BOTH,
        demand: Demand::AnswerToGood,
        pool: PoolSettings::Touchy,
        ..USUAL
    },
    Scenario {
        name: "uploads-trickle",
        what: "200 connections send 12 MiB each and then a byte now and then, at shipped limits: more than may be in flight",
        mix: ClientMix::WithTricklers,
        spares: BOTH,
        demand: Demand::AnswerToGood,
        pool: PoolSettings::Shipped,
        ..USUAL
    },
    Scenario {
        name: "uploads-time-out",
        what: "the same, where a body has a second",
        mix: ClientMix::WithTricklers,
        spares: BOTH,
        demand: Demand::AnswerToGood,
        pool: PoolSettings::HastyBodies,
        ..USUAL
    },
    Scenario {
        name: "big-prompts-refused",
        what: "60 clients send 30 MB each, at shipped limits: more than a body may have",
        mix: ClientMix::WithLongPrompts,
        leaks: Leaks::AtLeast,
        spares: BOTH,
        demand: Demand::AnswerToGood,
        pool: PoolSettings::Shipped,
        ..USUAL
    },
    Scenario {
        name: "big-prefills-left",
        what: "60 clients send 30 MB each, where a body may have 32 MiB, and leave while it is prefilled",
        mix: ClientMix::WithLongPrompts,
        leaks: Leaks::AtLeast,
        spares: BOTH,
        demand: Demand::AnswerToGood,
        pool: PoolSettings::LongBodies,
        ..USUAL
    },
    Scenario {
        name: "slow-engine",
        what: "one prefill worker begins late and one decode worker drips, both within their deadlines",
        script: &[
            at(
                FAULTY_AT,
                EngineAction::Inject(FaultTarget::One(P0), Fault::Delay { ms: 250 }),
            ),
            at(
                FAULTY_AT,
                EngineAction::Inject(FaultTarget::One(D0), Fault::SlowDrip { ms: 20 }),
            ),
            at(WELL_AT, EngineAction::Repair(FaultTarget::One(P0))),
            at(WELL_AT, EngineAction::Repair(FaultTarget::One(D0))),
        ],
        ..USUAL
    },
    Scenario {
        name: "engines-full",
        what: "one worker of each role refuses what it has no room for, with 503 and with 429, and then with the other one",
        script: &[
            at(
                0.1,
                EngineAction::Inject(FaultTarget::One(P0), full(503, 1)),
            ),
            at(
                0.1,
                EngineAction::Inject(FaultTarget::One(D0), full(429, 2)),
            ),
            at(0.5, EngineAction::Repair(FaultTarget::One(P0))),
            at(0.5, EngineAction::Repair(FaultTarget::One(D0))),
            at(
                0.5,
                EngineAction::Inject(FaultTarget::One(P0), full(429, 1)),
            ),
            at(
                0.5,
                EngineAction::Inject(FaultTarget::One(D0), full(503, 2)),
            ),
            at(0.9, EngineAction::Repair(FaultTarget::One(P0))),
            at(0.9, EngineAction::Repair(FaultTarget::One(D0))),
        ],
        spares: BOTH,
        demand: Demand::Answer,
        ..USUAL
    },
    Scenario {
        name: "every-engine-full",
        what: "all workers refuse what they have no room for: who is not answered is told when to come again",
        script: &[
            at(
                FAULTY_AT,
                EngineAction::Inject(FaultTarget::All(Prefill), full(503, 2)),
            ),
            at(
                FAULTY_AT,
                EngineAction::Inject(FaultTarget::All(Decode), full(429, 4)),
            ),
            at(WELL_AT, EngineAction::Repair(FaultTarget::All(Prefill))),
            at(WELL_AT, EngineAction::Repair(FaultTarget::All(Decode))),
        ],
        spares: BOTH,
        demand: Demand::AnswerOrLater,
        ..USUAL
    },
    Scenario {
        name: "metrics-hang-overloaded",
        what: "one worker of each role is full and slow, and its /metrics hangs",
        script: &[
            at(
                0.1,
                EngineAction::Inject(FaultTarget::One(P0), Fault::Delay { ms: 150 }),
            ),
            at(
                0.1,
                EngineAction::Inject(FaultTarget::One(D0), Fault::SlowDrip { ms: 20 }),
            ),
            at(
                0.1,
                EngineAction::Inject(FaultTarget::One(P0), full(503, 1)),
            ),
            at(
                0.1,
                EngineAction::Inject(FaultTarget::One(D0), full(429, 2)),
            ),
            at(
                0.2,
                EngineAction::Inject(FaultTarget::One(P0), Fault::HangMetrics),
            ),
            at(
                0.2,
                EngineAction::Inject(FaultTarget::One(D0), Fault::HangMetrics),
            ),
            at(0.85, EngineAction::Repair(FaultTarget::One(P0))),
            at(0.85, EngineAction::Repair(FaultTarget::One(D0))),
        ],
        spares: BOTH,
        demand: Demand::Answer,
        pool: PoolSettings::AsksMetrics,
        ..USUAL
    },
    Scenario {
        name: "keep-alive-closed",
        what: "all workers close idle connections; then one of each role does so at the very moment at which a request comes",
        script: &[
            at(
                0.0,
                EngineAction::Inject(FaultTarget::All(Prefill), CLOSE_IDLE),
            ),
            at(
                0.0,
                EngineAction::Inject(FaultTarget::All(Decode), CLOSE_IDLE),
            ),
            at(0.45, EngineAction::Repair(FaultTarget::All(Prefill))),
            at(0.45, EngineAction::Repair(FaultTarget::All(Decode))),
            at(0.5, EngineAction::Inject(FaultTarget::One(P0), UNLUCKY)),
            at(0.5, EngineAction::Inject(FaultTarget::One(D0), UNLUCKY)),
            at(0.9, EngineAction::Repair(FaultTarget::One(P0))),
            at(0.9, EngineAction::Repair(FaultTarget::One(D0))),
        ],
        spares: BOTH,
        demand: Demand::Answer,
        ..USUAL
    },
    Scenario {
        name: "sidecar-prefill-dead",
        what: "llm-d's sidecars run prefill, and one of two prefill workers is killed, and comes back",
        script: &dead(P0),
        ejects: Some(Prefill),
        leaks: Leaks::OutOfSight,
        spares: &[Decode],
        demand: Demand::Answer,
        dialect: Some(Dialect::Llmd),
        ..USUAL
    },
    Scenario {
        name: "poison",
        what: "a third of the requests makes every worker that takes them fail, with 500 or without an answer",
        mix: ClientMix::WithPoison,
        leaks: Leaks::AtLeast,
        spares: BOTH,
        demand: Demand::Answer,
        ..USUAL
    },
];

/// Name of the one scenario without a script; `all` does not include it.
const CHURN: &str = "churn";

/// The selected scenarios.
#[derive(Clone, Copy, Debug)]
pub enum ScenarioChoice {
    /// One scenario.
    One(&'static Scenario),
    /// All scenarios except churn.
    All,
    /// Churn: workers join and leave.
    Churn,
}

impl ScenarioChoice {
    /// The selected scenarios that have a script.
    pub fn scenarios(self) -> Vec<&'static Scenario> {
        match self {
            Self::One(scenario) => vec![scenario],
            Self::All => SCENARIOS.iter().collect(),
            Self::Churn => Vec::new(),
        }
    }
}

impl FromStr for ScenarioChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "all" => return Ok(Self::All),
            CHURN => return Ok(Self::Churn),
            _ => {}
        }
        let found = SCENARIOS.iter().find(|scenario| scenario.name == name);
        let names: Vec<_> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
        found.map(Self::One).ok_or_else(|| {
            format!(
                "there is no such scenario; there are all, {CHURN}, {}",
                names.join(", ")
            )
        })
    }
}

/// The list of scenarios for `--help`.
pub fn in_words() -> String {
    let widest = SCENARIOS.iter().map(|scenario| scenario.name.len()).max();
    let width = widest.unwrap_or_default();
    let lines = SCENARIOS.iter().map(|scenario| {
        let Scenario { name, what, .. } = scenario;
        format!("\n  {name:width$}  {what}")
    });
    let churn = "workers join, drain, leave, die and return at random; not among all; see --source";
    let lines = lines.collect::<String>();
    format!("Scenarios:{lines}\n  {CHURN:width$}  {churn}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_is_found_by_its_name_and_an_unknown_name_lists_all() {
        for scenario in SCENARIOS {
            let Ok(ScenarioChoice::One(found)) = scenario.name.parse() else {
                panic!("{} is not found", scenario.name);
            };
            assert_eq!(found.name, scenario.name);
        }
        let refusal = "no-such".parse::<ScenarioChoice>().unwrap_err();
        for scenario in SCENARIOS {
            assert!(refusal.contains(scenario.name), "{refusal}");
            assert!(in_words().contains(scenario.what));
        }
    }

    #[test]
    fn every_script_is_in_order_and_within_its_fleet() {
        for Scenario {
            name, size, script, ..
        } in SCENARIOS
        {
            assert!(script.is_sorted_by(|one, next| one.at <= next.at), "{name}");
            assert!(script.iter().all(|step| (0.0..1.0).contains(&step.at)));
            for step in *script {
                let id = match step.action {
                    EngineAction::Kill(id) | EngineAction::Start(id) => id,
                    EngineAction::Inject(FaultTarget::One(id), _)
                    | EngineAction::Repair(FaultTarget::One(id)) => id,
                    EngineAction::Inject(FaultTarget::All(_), _)
                    | EngineAction::Repair(FaultTarget::All(_)) => continue,
                };
                let ids = match id.role {
                    Prefill => size.prefill,
                    _ => size.decode,
                };
                assert!(id.number < ids, "{name}: there is no {id}");
            }
        }
    }
}
