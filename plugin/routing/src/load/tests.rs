use super::*;
use crate::fleet::WorkerId;
use proptest::prelude::*;

const PATIENCE: Duration = Duration::from_secs(300);

fn key(worker: u64) -> TargetKey {
    TargetKey {
        worker: WorkerId(worker),
        rank: 0,
    }
}

fn answer(prompt_tokens: u64) -> BookedAnswer {
    BookedAnswer {
        prompt_tokens,
        block_tokens: 16,
        expected_tokens: None,
        sequences: 1,
    }
}

#[test]
fn a_charge_is_released_once_however_it_ends() {
    let mut ledger = Ledger::default();
    let prefill = ledger.charge_prefill(key(1), 100);
    let decode = ledger.charge_decode(key(2), answer(7 * 16));
    assert_eq!(ledger.load(key(1)).prefill_tokens, 100);
    assert_eq!(ledger.load(key(2)).decode_blocks, 7);
    drop(prefill);
    let decode = decode.moved_to(key(3), &mut ledger);
    assert!(ledger.load(key(2)).is_idle());
    assert_eq!(ledger.load(key(3)).decodes, 1);
    assert_eq!(ledger.total().decodes, 1);
    drop(decode);
    assert!(ledger.total().is_idle());
}

#[test]
fn a_worker_that_left_is_forgotten_when_its_last_charge_ends() {
    let mut ledger = Ledger::default();
    let charge = ledger.charge_decode(key(1), answer(1));
    ledger.keep(&Fleet::default());
    assert_eq!(ledger.load(key(1)).decodes, 1);
    drop(charge);
    ledger.keep(&Fleet::default());
    assert!(ledger.slots.is_empty());
    assert_eq!(ledger.slot(key(2)), 0);
}

#[test]
fn an_answer_grows_by_blocks_and_shrinks_towards_its_expected_end() {
    let mut ledger = Ledger::default();
    let mut open = ledger.charge_decode(key(1), answer(32));
    open.renew(16);
    assert_eq!(ledger.load(key(1)).decode_blocks, 3);
    drop(open);
    let mut bounded = ledger.charge_decode(
        key(1),
        BookedAnswer {
            expected_tokens: Some(64),
            ..answer(160)
        },
    );
    let written = |generated: u64| {
        bounded.renew(generated);
        let load = ledger.load(key(1));
        (load.decode_blocks, load.decode_weight)
    };
    let occupied = [0, 16, 32, 48, 64, 96].map(written);
    assert_eq!(
        occupied,
        [(10, 10), (11, 11), (12, 11), (13, 11), (14, 10), (16, 12)]
    );
    assert_eq!(ledger.load(key(1)).decodes, 1);
    drop(bounded);
    assert!(ledger.total().is_idle());
}

#[test]
fn a_lease_lasts_while_chunks_come_and_counts_again_when_they_come_again() {
    let mut ledger = Ledger::default();
    let at = |s: u64| Duration::from_secs(s);
    ledger.advance(at(1000), PATIENCE);
    let mut stream = ledger.charge_decode(key(1), answer(16));
    let mut silent = ledger.charge_decode(key(1), answer(16));
    let prompt = ledger.charge_prefill(key(2), 50);
    for s in (1010..1700).step_by(10) {
        ledger.advance(at(s), PATIENCE);
        stream.renew(s - 1000);
    }
    assert_eq!(ledger.load(key(1)).decodes, 1);
    assert!(ledger.load(key(2)).is_idle());
    silent.renew(1);
    assert_eq!(ledger.load(key(1)).decodes, 2);
    prompt.finish(at(1700));
    drop((stream, silent));
    assert!(ledger.total().is_idle());
}

#[test]
fn one_that_comes_to_life_again_is_not_counted_on_another_worker() {
    let mut ledger = Ledger::default();
    ledger.advance(Duration::from_secs(1000), PATIENCE);
    let mut silent = ledger.charge_decode(key(1), answer(16));
    ledger.advance(Duration::from_secs(2000), PATIENCE);
    ledger.keep(&Fleet::default());
    assert_eq!(ledger.slot(key(2)), 0);
    silent.renew(100);
    assert!(ledger.load(key(2)).is_idle());
    drop(silent);
    assert!(ledger.total().is_idle());
}

#[test]
fn a_late_end_touches_nobody_who_came_after() {
    let mut ledger = Ledger::default();
    ledger.advance(Duration::from_secs(1000), PATIENCE);
    let late = ledger.charge_prefill(key(1), 10);
    ledger.advance(Duration::from_secs(2000), PATIENCE);
    ledger.keep(&Fleet::default());
    let other = ledger.charge_prefill(key(2), 20);
    drop(late);
    assert_eq!(ledger.load(key(2)).prefill_tokens, 20);
    drop(other);
    assert!(ledger.total().is_idle());
}

#[test]
fn a_worker_is_slow_against_the_pace_of_all() {
    let mut ledger = Ledger::default();
    let slots = [ledger.slot(key(1)), ledger.slot(key(2))];
    assert_eq!(ledger.rate(slots.into_iter()), None);
    for _ in 0..10 {
        for (worker, tokens) in [(1, 8000), (2, 1000)] {
            let end = ledger.now() + Duration::from_secs(1);
            ledger.charge_prefill(key(worker), tokens).finish(end);
        }
    }
    let rate = ledger.rate(slots.into_iter());
    assert!(ledger.slowness(slots[0], rate) <= 1.0);
    assert!(ledger.slowness(slots[1], rate) >= 1.0);
    let snapshots = ledger.snapshots(rate);
    assert_eq!(snapshots.of(slots[0], 2.0).slowness, 2.0);
    assert_eq!(snapshots.of(77, 1.0), LoadSnapshot::default());
}

/// An open charge, and the worker it counts for.
enum Charge {
    Prefill(PrefillCharge, u64),
    Decode(DecodeCharge),
}

/// A retry books before the failed booking ends; a crash drops all charges of one worker.
#[derive(Debug, Clone, Copy)]
enum Step {
    Prompt(u64, u64),
    Answer(u64, u64),
    Token(usize),
    Write(usize, u64),
    End(usize),
    Retry(usize, u64),
    Crash(u64),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u64..6, 0u64..100_000).prop_map(|(w, t)| Step::Prompt(w, t)),
        4 => (0u64..6, 0u64..100_000).prop_map(|(w, t)| Step::Answer(w, t)),
        4 => any::<usize>().prop_map(Step::Token),
        4 => (any::<usize>(), 0u64..5000).prop_map(|(i, n)| Step::Write(i, n)),
        3 => any::<usize>().prop_map(Step::End),
        2 => (any::<usize>(), 0u64..6).prop_map(|(i, w)| Step::Retry(i, w)),
        1 => (0u64..6).prop_map(Step::Crash),
        2 => (0u64..200_000).prop_map(Step::Wait),
    ]
}

fn worker_of(charge: &Charge) -> u64 {
    match charge {
        Charge::Prefill(_, worker) => *worker,
        Charge::Decode(charge) => charge.target().worker.0,
    }
}

/// Applies one step to the open charges.
fn take(step: Step, ledger: &mut Ledger, open: &mut Vec<Charge>) {
    let at =
        |index: usize, open: &Vec<Charge>| (!open.is_empty()).then(|| index % open.len().max(1));
    match step {
        Step::Prompt(worker, tokens) => {
            open.push(Charge::Prefill(
                ledger.charge_prefill(key(worker), tokens),
                worker,
            ));
        }
        Step::Answer(worker, tokens) => {
            let answer = BookedAnswer {
                expected_tokens: (tokens % 3 == 0).then_some(tokens / 2),
                sequences: tokens % 5,
                ..answer(tokens)
            };
            open.push(Charge::Decode(ledger.charge_decode(key(worker), answer)));
        }
        Step::Token(index) => {
            let Some(index) = at(index, open) else { return };
            if let Charge::Prefill(charge, _) = open.swap_remove(index) {
                charge.finish(ledger.now() + Duration::from_millis(3));
            }
        }
        Step::Write(index, tokens) => {
            if let Some(Charge::Decode(charge)) = at(index, open).map(|index| &mut open[index]) {
                charge.renew(tokens);
            }
        }
        Step::End(index) => {
            if let Some(index) = at(index, open) {
                open.swap_remove(index);
            }
        }
        Step::Retry(index, worker) => {
            let Some(index) = at(index, open) else { return };
            let again = match open.swap_remove(index) {
                Charge::Prefill(failed, _) => {
                    let again = ledger.charge_prefill(key(worker), 77);
                    drop(failed);
                    Charge::Prefill(again, worker)
                }
                Charge::Decode(charge) => Charge::Decode(charge.moved_to(key(worker), ledger)),
            };
            open.push(again);
        }
        Step::Crash(worker) => {
            open.retain(|charge| worker_of(charge) != worker);
            ledger.keep(&Fleet::default());
        }
        Step::Wait(ms) => ledger.advance(ledger.now() + Duration::from_millis(ms), PATIENCE),
    }
}

/// Checks that the totals match the workers' loads and do not exceed the open charges.
fn check(ledger: &Ledger, open: &[Charge]) -> Result<(), TestCaseError> {
    let loads = (0..6).map(|worker| ledger.load(key(worker)));
    let sum = loads.fold(Load::default(), Load::plus);
    let total = ledger.total();
    prop_assert_eq!(
        (sum.prefill_tokens, sum.prefills, sum.decodes),
        (total.prefill_tokens, total.prefills, total.decodes)
    );
    prop_assert_eq!(sum.decode_blocks, total.decode_blocks);
    prop_assert!(
        sum.decode_weight >= total.decode_weight && sum.decode_weight <= total.decode_weight + 6
    );
    prop_assert!(total.decode_weight <= total.decode_blocks);
    let prefills = open
        .iter()
        .filter(|charge| matches!(charge, Charge::Prefill(..)))
        .count() as u64;
    prop_assert!(total.prefills <= prefills);
    prop_assert!(total.decodes <= open.len() as u64 - prefills);
    let mut mine = [0; 6];
    for charge in open {
        mine[worker_of(charge) as usize] += 1;
    }
    for (worker, mine) in mine.into_iter().enumerate() {
        let load = ledger.load(key(worker as u64));
        prop_assert!(load.prefills + load.decodes <= mine);
    }
    Ok(())
}

proptest! {
    // Two hundred times five thousand: a million bookings, ends, retries and crashes.
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 2000, ..ProptestConfig::default() })]
    #[test]
    fn a_million_steps_leave_nothing_behind(steps in proptest::collection::vec(step(), 5000)) {
        let mut ledger = Ledger::default();
        let mut open = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            take(step, &mut ledger, &mut open);
            if number % 16 == 0 {
                check(&ledger, &open)?;
            }
        }
        open.clear();
        prop_assert!(ledger.total().is_idle());
        prop_assert!((0..6).all(|worker| ledger.load(key(worker)).is_idle()));
    }
}
