//! Tests of many requests at one moment, and of equal scores: no worker is preferred.

use routing::route::Router;
use serde_json::json;
use std::time::Duration;

use crate::engine::Engines;
use crate::support::*;

const BLOCKS: [u64; 2] = [16, 512];
const LENGTHS: [u64; 3] = [256, 1_000, 16_000];
const SEEDS: std::ops::Range<u64> = 0..12;

/// How many of the prompts each prefill and each decode worker gets, all at one moment.
fn burst(router: &mut Router, prompts: &[Prompt], ms: u64) -> (Vec<u64>, Vec<u64>) {
    let assignments: Vec<_> = prompts
        .iter()
        .map(|prompt| router.reserve(&prompt.ask(), at(ms)).unwrap())
        .collect();
    (
        counts(assignments.iter().map(prefill_id), 1, 8),
        counts(assignments.iter().map(decode_id), 101, 8),
    )
}

fn at_most(bound: u64, (prefills, decodes): &(Vec<u64>, Vec<u64>), what: &str) {
    let most = prefills.iter().chain(decodes).max().unwrap();
    assert!(*most <= bound, "{what}: {prefills:?} {decodes:?}");
}

fn different(tokens: u64, block: u64) -> Vec<Prompt> {
    (0..64)
        .map(|name| Prompt::new(name, tokens, block))
        .collect()
}

#[test]
fn different_prompts_spread_and_the_same_prompt_nearly_so() {
    for block in BLOCKS {
        let pool = config(&pairs(8, 8), json!({"block_tokens": block})).pools[0].clone();
        for tokens in LENGTHS {
            let same = vec![Prompt::new(1, tokens, block); 64];
            let shared: Vec<Prompt> = (0..64)
                .map(|name| Prompt::branching(tokens / 2, name, tokens, block))
                .collect();
            for seed in SEEDS {
                for (bound, prompts) in
                    [(12, &different(tokens, block)), (16, &same), (16, &shared)]
                {
                    let mut router = Router::new(pool.clone(), seed, 7, Duration::ZERO);
                    let got = burst(&mut router, prompts, 1_000);
                    at_most(bound, &got, &format!("{block} {tokens} {seed}"));
                    assert!(router.total_load().is_idle());
                }
            }
        }
    }
}

#[test]
fn so_they_do_over_workers_that_have_worked_before() {
    for seed in SEEDS {
        for (overhead, lengths) in [(0.0, [4_000; 4]), (0.02, [500, 2_000, 4_000, 8_000])] {
            let mut router = router(&pairs(8, 8), json!({}), seed);
            let mut engines = Engines::new(&[RATE; 8], overhead);
            for name in 0..400u64 {
                let tokens = lengths[usize::try_from(name % 4).unwrap()];
                engines.take(&mut router, &Prompt::new(1_000 + name, tokens, 16).ask());
                engines.pass(0.1);
            }
            engines.idle();
            let ms = u64::try_from((engines.now * 1000.0) as i64).unwrap() + 1_000;
            let got = burst(&mut router, &different(1_000, 16), ms);
            at_most(12, &got, &format!("{seed} {overhead}"));
        }
    }
}

#[test]
fn so_they_do_on_workers_that_run_them_whole_and_on_ranks() {
    for seed in SEEDS {
        for (bound, same) in [(12, false), (16, true)] {
            let prompts = match same {
                true => vec![Prompt::new(1, 1_000, 16); 64],
                false => different(1_000, 16),
            };
            let mut whole = router(&wholes(8), json!({}), seed);
            let assignments: Vec<_> = prompts
                .iter()
                .map(|prompt| whole.reserve(&prompt.ask(), at(1_000)).unwrap())
                .collect();
            let got = counts(assignments.iter().map(decode_id), 201, 8);
            assert!(got.iter().all(|count| *count <= bound), "{got:?}");

            let mut ranks = [0u64; 8];
            let workers = [
                worker_with("prefill", 1, json!({"dp_size": 8})),
                worker("decode", 101),
            ];
            let mut router = router(&workers, json!({}), seed);
            let mut phases = Vec::new();
            for name in 0..64 {
                let name = if same { 1 } else { name };
                let (phase, assignment) = wish(name, 1_000).prefill(&mut router);
                ranks[phase.headers()[0].1.parse::<usize>().unwrap()] += 1;
                phases.push((phase, assignment));
            }
            assert!(ranks.iter().all(|count| *count <= bound), "{ranks:?}");
        }
    }
}

#[test]
fn bodies_are_spread_like_what_was_read_before() {
    for (bound, same) in [(12, false), (16, true)] {
        for tokens in [256, 1_000] {
            let mut router = router(&pairs(8, 8), json!({}), tokens);
            let phases: Vec<_> = (0..64)
                .map(|name| wish(if same { 1 } else { name }, tokens).prefill(&mut router))
                .collect();
            let prefills = phases.iter().map(|(phase, _)| phase.worker().id.0);
            let decodes = phases.iter().map(|(_, assignment)| decode_id(assignment));
            let got = (counts(prefills, 1, 8), counts(decodes, 101, 8));
            at_most(bound, &got, &format!("{tokens} {same}"));
        }
    }
}

#[test]
fn the_policies_that_go_by_load_spread_a_burst_too() {
    for name in [
        "least_loaded",
        "round_robin",
        "power_of_two",
        "session",
        "prefix_hash",
    ] {
        for seed in SEEDS {
            for prompts in [different(1_000, 16), vec![Prompt::new(1, 1_000, 16); 64]] {
                let mut router = router(&pairs(8, 8), policy(name), seed);
                let got = burst(&mut router, &prompts, 1_000);
                at_most(12, &got, &format!("{name} {seed}"));
            }
        }
    }
}

#[test]
fn equal_scores_prefer_no_index_in_fresh_routers() {
    for name in PICKING {
        let pool = config(&pairs(8, 8), policy(name)).pools[0].clone();
        // A prompt shorter than a block has no sequence hash.
        let prompt = Prompt::new(1, 10, 16);
        let (mut prefills, mut decodes) = (vec![0; 8], vec![0; 8]);
        for seed in 0..2_000 {
            let mut router = Router::new(pool.clone(), seed, 7, Duration::ZERO);
            let assignment = router.reserve(&prompt.ask(), at(1_000)).unwrap();
            prefills[usize::try_from(prefill_id(&assignment) - 1).unwrap()] += 1;
            decodes[usize::try_from(decode_id(&assignment) - 101).unwrap()] += 1;
        }
        for counts in [&prefills, &decodes] {
            assert!(unevenness(counts) < 26.0, "{name}: {counts:?}");
        }
    }
}

#[test]
fn equal_scores_prefer_no_index_in_one_router() {
    for name in PICKING {
        let mut router = router(&pairs(8, 8), policy(name), 3);
        let prompt = Prompt::new(1, 10, 16);
        let assignments = (0..4_000).map(|_| router.reserve(&prompt.ask(), at(1_000)).unwrap());
        let (prefills, decodes): (Vec<u64>, Vec<u64>) = assignments
            .map(|assignment| (prefill_id(&assignment), decode_id(&assignment)))
            .unzip();
        for counts in [counts(prefills, 1, 8), counts(decodes, 101, 8)] {
            assert!(unevenness(&counts) < 26.0, "{name}: {counts:?}");
        }
    }
}

#[test]
fn equal_loads_prefer_no_index_either() {
    // All but two workers are busy; the two are equal.
    for name in ["kv", "least_loaded", "prefix_hash", "session"] {
        let pool = config(&pairs(3, 3), policy(name)).pools[0].clone();
        let mut first = 0;
        for seed in 0..1_000 {
            let mut router = Router::new(pool.clone(), seed, 7, Duration::ZERO);
            let busy = wish(1, 10)
                .prefilled_by(2)
                .decoded_by(102)
                .prefill(&mut router);
            let assignment = router
                .reserve(&Prompt::new(2, 10, 16).ask(), at(1_000))
                .unwrap();
            assert_ne!(prefill_id(&assignment), 2, "{name}");
            assert_ne!(decode_id(&assignment), 102, "{name}");
            first += u64::from(prefill_id(&assignment) == 1);
            drop(busy);
        }
        assert!((430..570).contains(&first), "{name}: {first}");
    }
}
