//! Tests of ejection and readmission, with outcomes in any order.

use hashbrown::{HashMap, HashSet};
use proptest::prelude::*;
use std::time::Duration;

use super::*;
use crate::config::Config;
use crate::fleet::Role;
use crate::route::assignment::Assignment;
use crate::route::{Refusal, Router, SelectionRequest};

const EJECT: Duration = Duration::from_secs(5);
const MOST: Duration = Duration::from_secs(60);
const TRIAL: Duration = Duration::from_secs(30);
const START: Duration = Duration::from_secs(1_000);

/// Prefill workers 1 to 4, decode workers 11 to 14.
const ALL: [u64; 8] = [1, 2, 3, 4, 11, 12, 13, 14];

fn role(id: u64) -> Role {
    match id {
        ..=10 => Role::Prefill,
        _ => Role::Decode,
    }
}

fn pool(ids: &[u64]) -> config::Pool {
    let workers: Vec<String> = ids
        .iter()
        .map(|id| {
            let role = role(*id).name();
            format!(r#"{{"role":"{role}","address":"10.0.0.1:{id}","id":{id},"model":"m"}}"#)
        })
        .collect();
    let document = format!(
        r#"{{"pools":[{{"name":"p","protocol":"nixl","selection":{{"prefill":"round_robin","decode":"round_robin"}},
            "health":{{"most_eject_ms":60000}},"discovery":{{"static":{{"workers":[{}]}}}}}}]}}"#,
        workers.join(",")
    );
    let config = Config::parse(document.as_bytes()).unwrap();
    config.pools.into_iter().next().unwrap()
}

/// A router and its clock.
struct Rig {
    router: Router,
    now: Duration,
}

impl Rig {
    fn new(ids: &[u64]) -> Self {
        let mut rig = Self {
            router: Router::new(pool(ids), 1, 7, Duration::ZERO),
            now: START,
        };
        rig.wait(Duration::ZERO);
        rig
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.router.advance(self.now);
    }

    fn record(&mut self, id: u64, outcome: Outcome) -> &mut Self {
        let worker = self.router.fleet().get(WorkerId(id)).cloned();
        if let Some(worker) = worker {
            self.router.record_outcome(&worker.incarnation(), outcome);
        }
        self
    }

    fn record_often(&mut self, id: u64, outcomes: &[Outcome]) -> &mut Self {
        for outcome in outcomes {
            self.record(id, *outcome);
        }
        self
    }

    /// The ejections since the last call: worker id, and seconds.
    fn lasts(&mut self) -> Vec<(u64, u64)> {
        let ejections = self.router.take_ejections();
        let summary = |ejection: Ejection| (ejection.worker.id.0, ejection.lasts.as_secs());
        ejections.into_iter().map(summary).collect()
    }

    fn pick(&mut self) -> (u64, u64) {
        self.picked().unwrap()
    }

    /// The pair that a request gets; an error while all decode workers are full.
    fn picked(&mut self) -> Result<(u64, u64), Refusal> {
        let ask = SelectionRequest {
            model: "m",
            prompt_tokens: 64,
            ..SelectionRequest::default()
        };
        let Assignment {
            prefill, decode, ..
        } = self.router.reserve(&ask, self.now)?;
        Ok((prefill.unwrap().id.0, decode.unwrap().id.0))
    }

    /// The decode workers of a number of requests.
    fn decoders(&mut self, count: usize) -> Vec<u64> {
        (0..count).map(|_| self.pick().1).collect()
    }

    fn is_shut_out(&self, id: u64) -> bool {
        let held = self.router.health.held(WorkerId(id), self.now);
        held.is_shut_out
    }

    fn here(&self, role: Role) -> Vec<u64> {
        self.router
            .fleet()
            .of_role(role)
            .map(|worker| worker.id.0)
            .collect()
    }

    fn adopt(&mut self, ids: &[u64]) {
        let other = Router::new(pool(ids), 1, 7, Duration::ZERO);
        let workers = other.fleet().workers().map(|worker| Worker::clone(worker));
        let version = self.router.fleet().version() + 1;
        self.router.adopt(Fleet::new(version, workers.collect()));
    }
}

use Outcome::{Failed, Good, Overloaded, Unreachable};

#[test]
fn one_that_fails_three_times_in_a_row_is_ejected_while_another_one_works() {
    let mut rig = Rig::new(&ALL);
    rig.record(11, Failed)
        .record(12, Good)
        .record(11, Unreachable);
    rig.record(11, Overloaded);
    assert!(!rig.router.is_ejected(WorkerId(11)));
    rig.record(11, Failed);
    assert!(rig.router.is_ejected(WorkerId(11)));
    assert_eq!(rig.router.ejected(), 1);
    assert_eq!(rig.lasts(), [(11, 5)]);
    assert_eq!(rig.lasts(), []);
    assert!(!rig.decoders(40).contains(&11));
}

#[test]
fn an_answer_in_between_ends_the_row() {
    let mut rig = Rig::new(&ALL);
    for _ in 0..10 {
        rig.record_often(11, &[Failed, Failed, Good])
            .record(12, Good);
    }
    assert_eq!(rig.router.ejected(), 0);
}

#[test]
fn what_all_do_wrong_ejects_nobody_and_half_of_a_role_at_most_are_out() {
    let mut rig = Rig::new(&ALL);
    for _ in 0..20 {
        for id in ALL {
            rig.record(id, Failed);
        }
        // Working prefill workers say nothing about decode workers.
        rig.record(1, Good);
    }
    assert_eq!(rig.here(Role::Decode).len(), 4);
    let ejected = ALL.map(|id| rig.router.is_ejected(WorkerId(id)));
    assert_eq!(
        ejected,
        [false, true, true, false, false, false, false, false]
    );
}

#[test]
fn the_last_one_is_never_ejected_and_a_late_answer_of_one_that_is_out_ejects_nobody() {
    let mut rig = Rig::new(&[1, 11, 12, 13]);
    rig.record(11, Failed)
        .record(12, Good)
        .record_often(11, &[Failed; 2]);
    assert!(rig.router.is_ejected(WorkerId(11)));
    for id in [12, 13] {
        rig.record(id, Failed);
    }
    rig.record(11, Good);
    for id in [12, 13] {
        rig.record_often(id, &[Failed; 9]);
    }
    let ejected = [11, 12, 13].map(|id| rig.router.is_ejected(WorkerId(id)));
    assert_eq!(ejected, [true, false, false]);
    // The remaining workers leave: none is avoided, and the next request to the ejected worker is its trial.
    rig.adopt(&[1, 11]);
    assert_eq!(rig.decoders(3), [11; 3]);
    rig.record(11, Good);
    assert_eq!(rig.router.ejected(), 0);
}

/// sgl-project/sglang#31206: a circuit breaker that had opened never closed again, since the outcomes of its trial requests
/// were not counted.
#[test]
fn half_open_success_closes() {
    let mut rig = Rig::new(&ALL);
    rig.record(11, Failed)
        .record(12, Good)
        .record_often(11, &[Failed; 2]);
    rig.wait(EJECT);
    assert!(rig.router.is_ejected(WorkerId(11)));
    let trials = |picked: Vec<u64>| picked.iter().filter(|id| **id == 11).count();
    assert_eq!(trials(rig.decoders(40)), 1);
    rig.record(11, Good);
    assert_eq!(rig.router.ejected(), 0);
    assert_eq!(trials(rig.decoders(40)), 10);
    // The worker is fully readmitted: one failure is one failure.
    rig.record(11, Failed);
    assert_eq!(rig.router.ejected(), 0);
}

#[test]
fn a_trial_that_fails_ejects_for_longer_up_to_the_bound() {
    let mut rig = Rig::new(&ALL);
    rig.record(11, Failed)
        .record(12, Good)
        .record_often(11, &[Failed; 2]);
    for expected in [5, 10, 20, 40, 60, 60] {
        assert_eq!(rig.lasts(), [(11, expected)]);
        // Calls from before the ejection end late.
        rig.record_often(11, &[Failed; 5]).record(12, Good);
        assert_eq!(rig.lasts(), []);
        rig.wait(Duration::from_secs(expected) - Duration::from_millis(1));
        assert!(!rig.decoders(10).contains(&11));
        rig.wait(Duration::from_millis(1));
        assert!(rig.decoders(8).contains(&11));
        rig.record(11, Failed);
    }
    rig.wait(MOST);
    rig.record(11, Good);
    // The ejection is remembered for a while …
    rig.wait(MOST - Duration::from_millis(1));
    rig.lasts();
    rig.record(11, Failed)
        .record(12, Good)
        .record_often(11, &[Failed; 2]);
    assert_eq!(rig.lasts(), [(11, 60)]);
    rig.wait(MOST);
    rig.record(11, Good);
    // … and no longer.
    rig.wait(MOST);
    assert!(rig.router.health.has_no_records());
    rig.record(11, Failed)
        .record(12, Good)
        .record_often(11, &[Failed; 2]);
    assert_eq!(rig.lasts(), [(11, 5)]);
}

#[test]
fn a_trial_that_fails_while_nobody_works_tells_nothing_new() {
    let mut rig = Rig::new(&ALL);
    rig.record(11, Failed)
        .record(12, Good)
        .record_often(11, &[Failed; 2]);
    for _ in 0..3 {
        assert_eq!(rig.lasts(), [(11, 5)]);
        rig.wait(EJECT);
        rig.record(12, Failed).record(11, Failed);
    }
}

#[test]
fn a_trial_of_which_nothing_is_heard_is_free_again_and_so_is_one_that_was_told_to_wait() {
    let mut rig = Rig::new(&ALL);
    rig.record(11, Failed)
        .record(12, Good)
        .record_often(11, &[Failed; 2]);
    rig.wait(EJECT);
    let trials = |rig: &mut Rig| rig.decoders(20).iter().filter(|id| **id == 11).count();
    assert_eq!(trials(&mut rig), 1);
    rig.wait(TRIAL - Duration::from_millis(1));
    assert_eq!(trials(&mut rig), 0);
    rig.wait(Duration::from_millis(1));
    assert_eq!(trials(&mut rig), 1);
    rig.record(11, Overloaded);
    assert_eq!(trials(&mut rig), 0);
    rig.wait(Duration::from_secs(1));
    assert_eq!(trials(&mut rig), 1);
}

#[test]
fn one_that_leaves_takes_its_record_along() {
    let mut rig = Rig::new(&ALL);
    rig.record(11, Failed)
        .record(12, Good)
        .record_often(11, &[Failed; 2]);
    rig.adopt(&[1, 12, 13]);
    assert_eq!(rig.router.ejected(), 0);
    // A later answer belongs to no known worker.
    rig.record_often(11, &[Failed, Unreachable, Good]);
    rig.adopt(&ALL);
    assert!(rig.router.health.has_no_records());
    assert!(rig.decoders(20).contains(&11));
}

#[derive(Debug, Clone)]
enum Step {
    Hear(usize, Outcome),
    /// The same outcome, several times.
    HearOften(usize, Outcome),
    Pick,
    Wait(u64),
    /// The fleet is those workers whose bit is set.
    Adopt(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let outcome = || {
        prop_oneof![
            4 => Just(Failed), 2 => Just(Unreachable), 2 => Just(Good), 1 => Just(Overloaded),
        ]
    };
    let step = prop_oneof![
        8 => (0..ALL.len(), outcome()).prop_map(|(at, outcome)| Step::Hear(at, outcome)),
        6 => (0..ALL.len(), outcome()).prop_map(|(at, outcome)| Step::HearOften(at, outcome)),
        8 => Just(Step::Pick),
        4 => (1..20_000u64).prop_map(Step::Wait),
        1 => any::<u8>().prop_map(Step::Adopt),
    ];
    prop::collection::vec(step, 1..200)
}

/// Invariants under any steps.
#[derive(Default)]
struct Watch {
    /// The start of each trial without a result.
    trials: HashMap<u64, Duration>,
    /// Duration of each worker's last ejection.
    lasts: HashMap<u64, Duration>,
}

impl Watch {
    /// A worker is always picked: one of those with the least penalties, and an ejected one only for its trial.
    fn pick(&mut self, rig: &mut Rig) -> Result<(), TestCaseError> {
        let roles = [Role::Prefill, Role::Decode];
        let before = roles.map(|role| {
            let here = rig.here(role);
            let held = |id: &u64| (*id, rig.router.health.held(WorkerId(*id), rig.now));
            here.iter().map(held).collect::<HashMap<_, _>>()
        });
        if before.iter().any(|here| here.is_empty()) {
            return Ok(());
        }
        let out: HashSet<u64> = ALL
            .into_iter()
            .filter(|id| rig.router.is_ejected(WorkerId(*id)))
            .collect();
        let (prefill, decode) = match rig.picked() {
            Ok(pair) => pair,
            Err(refusal) => {
                prop_assert_eq!(refusal, Refusal::Overloaded { role: Role::Decode });
                let best = before[1].values().min();
                prop_assert!(best.is_some_and(|held| held.is_overloaded()));
                return Ok(());
            }
        };
        for (picked, here) in [prefill, decode].into_iter().zip(&before) {
            prop_assert_eq!(here.get(&picked), here.values().min());
            let are_all_out = here.keys().all(|id| out.contains(id));
            if !out.contains(&picked) || are_all_out {
                continue;
            }
            if let Some(began) = self.trials.insert(picked, rig.now) {
                let is_free = rig.now >= began + TRIAL;
                prop_assert!(is_free, "a second trial of {picked}");
            }
            prop_assert!(rig.is_shut_out(picked));
        }
        Ok(())
    }

    fn check_outcome(&mut self, id: u64, rig: &mut Rig) -> Result<(), TestCaseError> {
        self.trials.remove(&id);
        for Ejection { worker, lasts } in rig.router.take_ejections() {
            prop_assert_eq!(worker.id.0, id);
            let others = rig.here(role(id));
            let is_left = |other: &u64| !rig.router.is_ejected(WorkerId(*other));
            prop_assert!(others.iter().any(is_left), "nobody is left");
            prop_assert!((EJECT..=MOST).contains(&lasts));
            if let Some(before) = self.lasts.insert(id, lasts) {
                let grows = [before, MOST.min(before * 2), EJECT];
                prop_assert!(grows.contains(&lasts), "{before:?}, then {lasts:?}");
            } else {
                prop_assert_eq!(lasts, EJECT);
            }
        }
        Ok(())
    }

    fn adopt(&mut self, mask: u8, rig: &mut Rig) {
        let is_there = |(at, id): (usize, &u64)| ((mask >> at) & 1 == 1).then_some(*id);
        let ids: Vec<u64> = ALL.iter().enumerate().filter_map(is_there).collect();
        rig.adopt(&ids);
        self.trials.retain(|id, _| ids.contains(id));
        self.lasts.retain(|id, _| ids.contains(id));
    }

    fn step(&mut self, step: Step, rig: &mut Rig) -> Result<(), TestCaseError> {
        match step {
            Step::Hear(at, outcome) => {
                rig.record(ALL[at], outcome);
                self.check_outcome(ALL[at], rig)
            }
            Step::HearOften(at, outcome) => {
                for _ in 0..3 {
                    rig.record(ALL[at], outcome);
                    self.check_outcome(ALL[at], rig)?;
                }
                Ok(())
            }
            Step::Pick => self.pick(rig),
            Step::Wait(ms) => {
                rig.wait(Duration::from_millis(ms));
                Ok(())
            }
            Step::Adopt(mask) => {
                self.adopt(mask, rig);
                Ok(())
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn whatever_is_heard_somebody_is_left_and_all_is_forgotten_in_time(steps in steps()) {
        let mut rig = Rig::new(&ALL);
        let mut watch = Watch::default();
        for step in steps {
            watch.step(step, &mut rig)?;
            let fleet = rig.router.fleet();
            prop_assert!(rig.router.health.records.keys().all(|id| fleet.contains(*id)));
        }
        rig.wait(MOST);
        for id in ALL {
            rig.record(id, Good);
        }
        prop_assert_eq!(rig.router.ejected(), 0);
        prop_assert!(rig.router.health.is_clear(rig.now));
        rig.wait(MOST);
        prop_assert!(rig.router.health.has_no_records());
    }
}
