//! Tests which outcomes break which rules.

use routing::fleet::Role;

use super::*;
use crate::chaos::health::EngineHealth;
use crate::chaos::scenario::{EngineId, FleetSize};

const SIZE: FleetSize = FleetSize {
    prefill: 1,
    decode: 1,
};

fn exchange(start: Instant, from: u64, to: u64, ending: Ending) -> Exchange {
    Exchange {
        sent: start + Duration::from_millis(from),
        ended: start + Duration::from_millis(to),
        ending,
        fit: Fit::Sound,
        conduct: Conduct::Good,
    }
}

fn rules(leaks: Leaks) -> Rules {
    Rules {
        leaks,
        demand: Demand::Honesty,
    }
}

/// Rules broken by these exchanges under this demand while all engines are healthy.
fn broken_while_well(demand: Demand, exchanges: Vec<Exchange>) -> Vec<String> {
    let seen = ClientOutcomes { exchanges, left: 0 };
    let rules = Rules {
        demand,
        ..rules(Leaks::Exact)
    };
    judge(
        &seen,
        &HealthRecord::new(SIZE),
        rules,
        SettledState::default(),
    )
    .broken
}

#[test]
fn where_an_answer_is_due_an_engines_error_or_a_reset_will_not_do() {
    let start = Instant::now();
    for ending in [Ending::EngineStatus(500), Ending::Reset] {
        for (demand, rules_broken) in [(Demand::Honesty, 0), (Demand::Answer, 1)] {
            let mut exchanges = answered(start);
            exchanges.push(exchange(start, 1, 2, ending.clone()));
            let broken = broken_while_well(demand, exchanges);
            assert_eq!(broken.len(), rules_broken, "{demand:?} {broken:?}");
        }
    }
}

#[test]
fn poison_may_fail_and_must() {
    let start = Instant::now();
    for (ending, rules_broken) in [(failed(), 0), (Ending::Reset, 0), (Ending::Answered, 1)] {
        let mut exchanges = answered(start);
        exchanges.push(Exchange {
            fit: Fit::Poison,
            ..exchange(start, 1, 2, ending)
        });
        let broken = broken_while_well(Demand::Answer, exchanges);
        assert_eq!(broken.len(), rules_broken, "{broken:?}");
    }
}

#[test]
fn a_refusal_that_is_due_says_when_to_come_again() {
    let start = Instant::now();
    let mut health = HealthRecord::new(SIZE);
    let id = EngineId {
        role: Role::Prefill,
        number: 0,
    };
    health.record(start, id, EngineHealth::Faulty);
    let full = |why: &str| Ending::Failed(why.to_owned());
    for (ending, rules_broken) in [
        (Ending::EngineStatus(503), 0),
        (full("429 overloaded"), 0),
        (full(&format!("429 overloaded{NO_HINT}")), 1),
        (full("502 unusable_status"), 1),
        (Ending::EngineStatus(500), 1),
        (Ending::Reset, 1),
    ] {
        let mut exchanges = answered(start);
        exchanges.push(exchange(start, 1, 2, ending));
        let seen = ClientOutcomes { exchanges, left: 0 };
        let rules = Rules {
            demand: Demand::AnswerOrLater,
            ..rules(Leaks::Exact)
        };
        let broken = judge(&seen, &health, rules, SettledState::default()).broken;
        assert_eq!(broken.len(), rules_broken, "{broken:?}");
    }
}

#[test]
fn an_ejection_of_one_who_is_well_breaks_a_rule() {
    let seen = ClientOutcomes {
        exchanges: answered(Instant::now()),
        left: 0,
    };
    let aftermath = SettledState {
        wrongly_ejected: 1,
        ..SettledState::default()
    };
    let health = HealthRecord::new(SIZE);
    let verdict = judge(&seen, &health, rules(Leaks::Exact), aftermath);
    assert_eq!(verdict.broken.len(), 1, "{:?}", verdict.broken);
}

fn failed() -> Ending {
    Ending::Failed("503 unreachable".to_owned())
}

fn answered(start: Instant) -> Vec<Exchange> {
    vec![exchange(start, 0, 1, Ending::Answered)]
}

#[test]
fn a_connection_that_breaks_without_an_answer_is_a_reset_only_where_the_gateway_had_one() {
    let start = Instant::now();
    let health = HealthRecord::new(SIZE);
    let unbegun = || exchange(start, 0, 1, Ending::Unbegun("closed".to_owned()));
    let seen = ClientOutcomes {
        exchanges: vec![
            exchange(start, 0, 1, Ending::Answered),
            exchange(start, 0, 1, Ending::Reset),
            unbegun(),
            unbegun(),
        ],
        left: 0,
    };
    let resets_counted = 2;
    let aftermath = SettledState {
        resets_counted,
        ..SettledState::default()
    };
    let figures = judge(&seen, &health, rules(Leaks::AtLeast), aftermath).figures;
    assert_eq!((figures.reset, figures.failed), (2, 1));
    assert_eq!(figures.failed_with_healthy_pair, 1);
}

#[test]
fn each_request_is_counted_once() {
    let start = Instant::now();
    let mut health = HealthRecord::new(SIZE);
    let id = EngineId {
        role: Role::Decode,
        number: 0,
    };
    health.record(start + Duration::from_millis(100), id, EngineHealth::Faulty);
    let seen = ClientOutcomes {
        exchanges: vec![
            exchange(start, 0, 10, Ending::Answered),
            exchange(start, 0, 20, Ending::EngineStatus(429)),
            exchange(start, 0, 30, Ending::Reset),
            exchange(start, 0, 40, failed()),
            exchange(start, 90, 110, failed()),
            exchange(start, 150, 160, failed()),
        ],
        left: 2,
    };
    let aftermath = SettledState {
        ejected_after: Some(Duration::from_micros(1500)),
        ..SettledState::default()
    };
    let verdict = judge(&seen, &health, rules(Leaks::Exact), aftermath);
    let figures = ScenarioFigures {
        sent: 6,
        answered: 1,
        engine_status: 1,
        reset: 1,
        failed: 3,
        failed_with_healthy_pair: 1,
        ejected_after_ms: Some(1),
        left: 2,
        engine_statuses: BTreeMap::from([(429, 1)]),
        failures: BTreeMap::from([("503 unreachable".to_owned(), 3)]),
        ..ScenarioFigures::default()
    };
    assert_eq!(verdict.figures, figures);
    assert_eq!(verdict.broken.len(), 1, "{:?}", verdict.broken);
}

#[test]
fn a_deceit_breaks_a_rule_even_where_nobody_is_well() {
    let start = Instant::now();
    let mut health = HealthRecord::new(SIZE);
    let id = EngineId {
        role: Role::Prefill,
        number: 0,
    };
    health.record(start, id, EngineHealth::Faulty);
    let mut exchanges = answered(start);
    let deceived = Ending::Deceived("[DONE] after an error event".to_owned());
    exchanges.push(exchange(start, 1, 2, deceived));
    let seen = ClientOutcomes { exchanges, left: 0 };
    let verdict = judge(&seen, &health, rules(Leaks::Exact), SettledState::default());
    assert_eq!(
        (
            verdict.figures.failed,
            verdict.figures.failed_with_healthy_pair
        ),
        (1, 0)
    );
    assert_eq!(verdict.broken.len(), 1);
    assert!(verdict.broken[0].contains("[DONE]"), "{:?}", verdict.broken);
}

#[test]
fn found_b18_known_leaks_are_real_and_real_ones_known_or_in_doubt() {
    let start = Instant::now();
    let broken = |leaks, kv_leaked, (kv_leaked_counted, kv_unknown)| {
        let seen = ClientOutcomes {
            exchanges: answered(start),
            left: 0,
        };
        let aftermath = SettledState {
            kv_leaked,
            kv_leaked_counted,
            kv_unknown,
            ..SettledState::default()
        };
        !judge(&seen, &HealthRecord::new(SIZE), rules(leaks), aftermath)
            .broken
            .is_empty()
    };
    assert!(!broken(Leaks::OutOfSight, 3, (0, 0)));
    assert!(broken(Leaks::OutOfSight, 0, (1, 0)));
    for leaks in [Leaks::Exact, Leaks::AtLeast] {
        for right in [(3, 0), (0, 3), (2, 1)] {
            assert!(!broken(leaks, 3, right), "{right:?}");
        }
        for wrong in [(4, 0), (2, 0), (0, 2), (4, 9)] {
            assert!(broken(leaks, 3, wrong), "{wrong:?}");
        }
    }
    assert!(broken(Leaks::Exact, 3, (3, 1)) && broken(Leaks::Exact, 3, (0, 4)));
    assert!(!broken(Leaks::AtLeast, 3, (3, 1)) && !broken(Leaks::AtLeast, 0, (0, 68)));
}

#[test]
fn whoever_behaves_well_is_answered_where_that_is_demanded() {
    let start = Instant::now();
    let broken = |conduct, ending, demand| {
        let mut exchanges = answered(start);
        exchanges.push(Exchange {
            conduct,
            ..exchange(start, 0, 1, ending)
        });
        broken_while_well(demand, exchanges).len()
    };
    let (good, bad) = (Conduct::Good, Conduct::Bad);
    for ending in [
        Ending::Reset,
        Ending::Refused(503),
        Ending::EngineStatus(429),
    ] {
        assert_eq!(broken(good, ending.clone(), Demand::Honesty), 0);
        assert_eq!(broken(bad, ending.clone(), Demand::AnswerToGood), 0);
        assert_eq!(broken(good, ending, Demand::AnswerToGood), 1);
    }
    assert_eq!(broken(good, Ending::Answered, Demand::AnswerToGood), 0);
}

#[test]
fn found_b9_a_gateway_holds_no_more_than_its_budgets_allow() {
    let broken = |held| {
        let seen = ClientOutcomes {
            exchanges: answered(Instant::now()),
            left: 0,
        };
        let allowed = 1000;
        let aftermath = SettledState {
            peak: Some(Peak { held, allowed }),
            ..SettledState::default()
        };
        let rules = rules(Leaks::Exact);
        let verdict = judge(&seen, &HealthRecord::new(SIZE), rules, aftermath);
        verdict.broken.len()
    };
    assert_eq!((broken(1000), broken(1001)), (0, 1));
}

#[test]
fn bookings_left_and_nothing_answered_break_rules() {
    let start = Instant::now();
    let aftermath = SettledState {
        bookings_left: 1,
        ..SettledState::default()
    };
    let seen = ClientOutcomes {
        exchanges: answered(start),
        left: 0,
    };
    let health = HealthRecord::new(SIZE);
    assert_eq!(
        judge(&seen, &health, rules(Leaks::Exact), aftermath)
            .broken
            .len(),
        1
    );
    let unfelt = SettledState {
        effect: FaultEffect::Unfelt,
        ..SettledState::default()
    };
    assert_eq!(
        judge(&seen, &health, rules(Leaks::Exact), unfelt)
            .broken
            .len(),
        1
    );
    let nothing = judge(
        &ClientOutcomes::default(),
        &health,
        rules(Leaks::Exact),
        SettledState::default(),
    );
    assert_eq!(nothing.broken.len(), 1);
}
