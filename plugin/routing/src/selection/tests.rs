//! Tests of the policies, and their common fixtures: targets, loads, tasks.

use std::sync::Arc;

use super::*;
use crate::fleet::{Worker, WorkerId};
use crate::prefix::RunLength;

static NO_BLOCKS: Blocks = Blocks {
    scope: 0,
    sequence: Vec::new(),
    run_length: RunLength::Even,
};

/// A prompt of 1,000 tokens without known blocks.
pub const TASK: Task<'static> = Task {
    role: Role::Prefill,
    prompt_tokens: 1000,
    block_tokens: 16,
    blocks: &NO_BLOCKS,
    session: None,
    weights: KvWeights {
        overlap_score_credit: 1.0,
        overlap_score_credit_decay: 0.0,
        prefill_load_scale: 1.0,
        decode_active_request_weight: 0.0,
        router_temperature: 0.0,
    },
    tracking: Tracking::Prefill,
    decode_credit: DecodeCredit::Nothing,
    rate: None,
};

/// Workers of these ids.
pub fn targets(ids: std::ops::Range<u64>) -> Vec<Target> {
    let worker = |id: u64| Worker::new(WorkerId(id), Role::Prefill, None);
    ids.map(|id| Target::whole(&Arc::new(worker(id)))).collect()
}

/// Candidates without load.
pub fn idle(targets: &[Target]) -> Vec<Candidate<'_>> {
    let candidate = |target| Candidate {
        target,
        snapshot: LoadSnapshot::default(),
        overlap: 0,
        factor: 1.0,
    };
    targets.iter().map(candidate).collect()
}

/// A candidate with this overlap and load.
fn candidate(target: &Target, overlap: u32, snapshot: LoadSnapshot) -> Candidate<'_> {
    Candidate {
        target,
        snapshot,
        overlap,
        factor: 1.0,
    }
}

/// A load of queued prefills: tokens, in a number of prompts.
fn queued(tokens: u64, prefills: u32) -> LoadSnapshot {
    LoadSnapshot {
        booked_tokens: tokens,
        queued_tokens: tokens as f64,
        prefills,
        ..LoadSnapshot::default()
    }
}

/// A load of decodes: blocks, in a number of requests.
fn decoding(blocks: f64, decodes: u32) -> LoadSnapshot {
    LoadSnapshot {
        decode_blocks: blocks,
        decode_weight: blocks,
        decodes,
        ..LoadSnapshot::default()
    }
}

const ALL: [PolicyName; 8] = [
    PolicyName::Kv,
    PolicyName::RoundRobin,
    PolicyName::Random,
    PolicyName::PowerOfTwo,
    PolicyName::LeastLoaded,
    PolicyName::PrefixHash,
    PolicyName::Session,
    PolicyName::Direct,
];

mod costs {
    use super::*;
    use crate::selection::cost::{Prices, Terms};

    /// The terms of the last candidate, whose cost must equal the one computed without terms.
    fn terms(task: &Task<'_>, candidates: &[Candidate<'_>]) -> Terms {
        let prices = Prices::new(task, candidates.iter().copied());
        let last = candidates.last().unwrap();
        let terms = prices.terms(last);
        assert_eq!(terms.cost.to_bits(), prices.cost(last).to_bits());
        terms
    }

    fn cost(task: &Task<'_>, overlap: u32, snapshot: LoadSnapshot) -> f64 {
        let targets = targets(0..1);
        terms(task, &[candidate(&targets[0], overlap, snapshot)]).cost
    }

    #[test]
    fn prefill_costs_what_waits_and_what_is_not_cached() {
        // 1,000 tokens are 62.5 blocks of 16.
        assert_eq!(cost(&TASK, 0, LoadSnapshot::default()), 62.5);
        assert_eq!(cost(&TASK, 60, LoadSnapshot::default()), 2.5);
        assert_eq!(cost(&TASK, 60, queued(1_600, 2)), 102.5);
        // The cost is never negative, and blocks in use do not matter.
        assert_eq!(cost(&TASK, 63, LoadSnapshot::default()), 0.0);
        assert_eq!(cost(&TASK, 0, decoding(500.0, 9)), 62.5);
    }

    #[test]
    fn decode_costs_the_blocks_in_use_and_those_to_come() {
        let task = Task {
            role: Role::Decode,
            ..TASK
        };
        assert_eq!(cost(&task, 0, LoadSnapshot::default()), 63.0);
        assert_eq!(cost(&task, 0, decoding(100.25, 3)), 163.25);
        // Neither queued prompts nor cached blocks change the cost.
        assert_eq!(cost(&task, 60, queued(1_600, 2)), 63.0);
        let counts = Task {
            decode_credit: DecodeCredit::Counts,
            ..task
        };
        assert_eq!(cost(&counts, 60, decoding(100.0, 3)), 103.0);
        assert_eq!(cost(&counts, 99, LoadSnapshot::default()), 0.0);
    }

    #[test]
    fn one_that_runs_it_whole_costs_both() {
        let task = Task {
            role: Role::Aggregated,
            weights: KvWeights {
                prefill_load_scale: 2.0,
                decode_active_request_weight: 10.0,
                ..TASK.weights
            },
            ..TASK
        };
        let snapshot = LoadSnapshot {
            decode_weight: 7.0,
            decodes: 3,
            ..queued(160, 1)
        };
        // 2 · (10 + 62.5 − 60) + 7 + 63 + 10 · 3
        assert_eq!(cost(&task, 60, snapshot), 125.0);
        let untracked = Task {
            tracking: Tracking::DecodeOnly,
            ..task
        };
        assert_eq!(cost(&untracked, 60, snapshot), 100.0);
    }

    #[test]
    fn the_credit_decays_with_what_is_booked_beyond_the_idlest() {
        let targets = targets(0..2);
        let (idle, busy) = (queued(160, 1), queued(1_160, 2));
        let both = [
            candidate(&targets[0], 0, idle),
            candidate(&targets[1], 62, busy),
        ];
        let decaying = |decay| Task {
            weights: KvWeights {
                overlap_score_credit_decay: decay,
                ..TASK.weights
            },
            ..TASK
        };
        // The second candidate has one prompt more booked.
        for (decay, credit) in [(0.0, 62.0), (1.0, 31.0), (3.0, 15.5)] {
            let decayed = terms(&decaying(decay), &both);
            assert_eq!(decayed.credit_blocks, credit);
            assert_eq!(decayed.cost, 72.5 + 62.5 - credit);
        }
        let untracked = Task {
            tracking: Tracking::DecodeOnly,
            ..decaying(3.0)
        };
        assert_eq!(terms(&untracked, &both).credit_blocks, 62.0);
    }

    #[test]
    fn a_slow_workers_wait_and_work_take_longer() {
        let task = Task {
            rate: Some(PrefillRate {
                per_prompt: 0.0,
                per_token: 1.0 / 8_000.0,
            }),
            ..TASK
        };
        let slow = |slowness, tokens| LoadSnapshot {
            slowness,
            ..queued(tokens, 1)
        };
        for slowness in [0.25, 1.0, 2.0] {
            assert_eq!(cost(&task, 0, slow(slowness, 1_600)), 162.5 * slowness);
        }
        let targets = targets(0..1);
        let wait = |task: &Task<'_>, snapshot| {
            terms(task, &[candidate(&targets[0], 0, snapshot)]).estimated_wait_ms
        };
        assert_eq!(wait(&task, slow(2.0, 2_000)), Some(500.0));
        assert_eq!(wait(&task, queued(2_000, 1)), Some(250.0));
        assert_eq!(wait(&TASK, queued(2_000, 1)), None);
    }

    #[test]
    fn nothing_that_can_be_said_makes_a_cost_that_cannot_be_compared() {
        for role in Role::ALL {
            for block_tokens in [0, 1, u32::MAX] {
                let task = Task {
                    role,
                    block_tokens,
                    prompt_tokens: u64::MAX,
                    ..TASK
                };
                let snapshot = LoadSnapshot {
                    decode_weight: 1e18,
                    decodes: u32::MAX,
                    ..queued(u64::MAX, u32::MAX)
                };
                assert!(cost(&task, u32::MAX, snapshot).is_finite());
            }
        }
    }
}

#[test]
fn nobody_is_picked_where_nobody_is() {
    let mut random = Random::with_seed(1);
    for name in ALL {
        assert_eq!(policy(name).peek(&TASK, &[], &mut random), None, "{name:?}");
    }
}

#[test]
fn the_only_one_is_picked_unless_it_must_be_named() {
    let mut random = Random::with_seed(1);
    let one = targets(7..8);
    for name in ALL {
        let mut policy = policy(name);
        let expected = (name != PolicyName::Direct).then_some(0);
        assert_eq!(policy.needs_pin(), expected.is_none());
        assert_eq!(policy.peek(&TASK, &idle(&one), &mut random), expected);
    }
}

#[test]
fn kv_takes_the_least_cost_and_tells_all_of_them() {
    let mut random = Random::with_seed(1);
    let targets = targets(0..4);
    let candidates = [
        candidate(&targets[0], 0, LoadSnapshot::default()),
        candidate(&targets[1], 50, queued(400, 1)),
        candidate(&targets[2], 62, queued(2_000, 1)),
        Candidate {
            factor: 0.5,
            ..candidate(&targets[3], 0, queued(400, 1))
        },
    ];
    let mut kv = policy(PolicyName::Kv);
    assert_eq!(kv.peek(&TASK, &candidates, &mut random), Some(1));
    let terms = kv.terms(&TASK, &candidates).unwrap();
    let costs: Vec<f64> = terms.iter().map(|terms| terms.cost).collect();
    assert_eq!(costs, [62.5, 37.5, 125.5, 43.75]);
    assert!(
        ALL.iter().all(
            |name| *name == PolicyName::Kv || policy(*name).terms(&TASK, &candidates).is_none()
        )
    );
}

#[test]
fn requests_are_counted_by_what_the_role_does() {
    let targets = targets(0..2);
    let mut random = Random::with_seed(1);
    // The first reads more prompts, the second writes more answers.
    let reading = LoadSnapshot {
        prefills: 3,
        decodes: 1,
        ..LoadSnapshot::default()
    };
    let writing = LoadSnapshot {
        prefills: 1,
        decodes: 2,
        ..LoadSnapshot::default()
    };
    let both = [
        candidate(&targets[0], 0, reading),
        candidate(&targets[1], 0, writing),
    ];
    for (role, expected) in [(Role::Prefill, 1), (Role::Decode, 0), (Role::Aggregated, 1)] {
        let task = Task { role, ..TASK };
        for name in [PolicyName::LeastLoaded, PolicyName::PowerOfTwo] {
            for _ in 0..20 {
                let picked = policy(name).peek(&task, &both, &mut random);
                assert_eq!(picked, Some(expected), "{name:?} {role:?}");
            }
        }
    }
}

#[test]
fn power_of_two_draws_two_that_differ() {
    let targets = targets(0..3);
    let mut random = Random::with_seed(1);
    let loads = [queued(1, 0), queued(1, 1), queued(1, 2)];
    let candidates: Vec<Candidate<'_>> = targets
        .iter()
        .zip(loads)
        .map(|(target, load)| candidate(target, 0, load))
        .collect();
    let mut counts = [0; 3];
    for _ in 0..3_000 {
        let picked = policy(PolicyName::PowerOfTwo).peek(&TASK, &candidates, &mut random);
        counts[picked.unwrap()] += 1;
    }
    // Two of the three pairs contain the first candidate; the second one wins the third pair.
    assert_eq!(counts[2], 0);
    assert!((1_900..2_100).contains(&counts[0]), "{counts:?}");
}

/// A prompt with hashes made from `name`, long enough to have a beginning.
fn blocks(name: u64) -> Blocks {
    Blocks {
        scope: 1,
        sequence: (0..300).map(|index| name * 1_000 + index).collect(),
        run_length: RunLength::Even,
    }
}

#[test]
fn the_beginning_decides_and_ranks_stand_apart() {
    let mut random = Random::with_seed(1);
    let mut worker = Worker::clone(&targets(1..2)[0].worker);
    worker.dp_size = 8;
    let ranks: Vec<Target> = Arc::new(worker).targets().collect();
    let mut used = std::collections::HashSet::new();
    let mut one = policy(PolicyName::PrefixHash);
    for name in 0..100 {
        let blocks = blocks(name);
        let task = Task {
            blocks: &blocks,
            ..TASK
        };
        let picked = one.peek(&task, &idle(&ranks), &mut random);
        // Neither tokens after the first 2,048 nor earlier picks matter.
        let mut longer = blocks.clone();
        longer.sequence.truncate(128);
        let task = Task {
            blocks: &longer,
            ..TASK
        };
        let mut other = policy(PolicyName::PrefixHash);
        assert_eq!(other.peek(&task, &idle(&ranks), &mut random), picked);
        used.insert(picked);
        // Another scope is another prompt; a session does not matter.
        let task = Task {
            session: Some(b"one"),
            ..task
        };
        assert_eq!(one.peek(&task, &idle(&ranks), &mut random), picked);
    }
    assert_eq!(used.len(), 8);
}

#[test]
fn one_who_is_not_eligible_now_hands_its_prompts_to_the_next_for_as_long() {
    let mut random = Random::with_seed(1);
    let all = targets(0..8);
    for name in [PolicyName::PrefixHash, PolicyName::Session] {
        let mut policy = policy(name);
        for number in 0..200u64 {
            let (blocks, session) = (blocks(number), number.to_le_bytes());
            let task = Task {
                blocks: &blocks,
                session: Some(&session),
                ..TASK
            };
            let mut pick = |targets: &[Target]| {
                let index = policy.peek(&task, &idle(targets), &mut random).unwrap();
                targets[index].key()
            };
            let home = pick(&all);
            let but = |gone: TargetKey| -> Vec<Target> {
                all.iter().filter(|t| t.key() != gone).cloned().collect()
            };
            let next = pick(&but(home));
            assert_ne!(next, home);
            let other = all
                .iter()
                .map(Target::key)
                .find(|k| *k != home && *k != next);
            assert_eq!(pick(&but(other.unwrap())), home);
            assert_eq!(pick(&all), home);
        }
    }
}
