//! Tests of measured prefill rates: slower workers get less, equal workers get the same.

use serde_json::json;

use crate::engine::Engines;
use crate::support::*;

/// How many of 64 different prompts at one moment each of eight idle workers gets.
fn burst(router: &mut routing::route::Router, seconds: f64) -> Vec<u64> {
    let now = at((seconds * 1000.0) as u64);
    let assignments: Vec<_> = (0..64)
        .map(|name| Prompt::new(90_000 + name, 1_000, 16))
        .map(|prompt| router.reserve(&prompt.ask(), now).unwrap())
        .collect();
    counts(assignments.iter().map(prefill_id), 1, 8)
}

#[test]
fn a_slow_worker_gets_less() {
    for seed in 0..6 {
        let mut router = router(&pairs(4, 1), json!({}), seed);
        let mut engines = Engines::new(&[RATE, RATE, RATE / 4.0, RATE], 0.0);
        for name in 0..60 {
            engines.take(&mut router, &Prompt::new(name, 4_000, 16).ask());
            engines.pass(0.25);
        }
        engines.taken.fill(0);
        engines.waits.clear();
        for name in 60..460 {
            engines.take(&mut router, &Prompt::new(name, 4_000, 16).ask());
            engines.pass(0.22);
        }
        let taken = &engines.taken;
        let slow = taken[2];
        let is_less = |(index, count): (usize, &u64)| index == 2 || *count > 2 * slow;
        assert!(taken.iter().enumerate().all(is_less), "{taken:?}");
        // No preference among the others.
        let others = [taken[0], taken[1], taken[3]];
        assert!(unevenness(&others) < 14.0, "{taken:?}");
        let mean = engines.waits.iter().sum::<f64>() / engines.waits.len() as f64;
        assert!(mean < 1.5, "{mean}");
    }
}

#[test]
fn equal_workers_share_alike_whatever_lengths_they_met() {
    // Each prompt takes 20 ms on top of its tokens, so that short ones have a lower rate: equally on every worker.
    for seed in 0..6u64 {
        let mut router = router(&pairs(8, 8), json!({}), seed);
        let mut engines = Engines::new(&[RATE; 8], 0.02);
        let mut drawn = seed;
        for name in 0..600 {
            drawn = drawn
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let tokens = [500, 2_000, 4_000, 8_000][usize::try_from(drawn >> 62).unwrap()];
            engines.take(&mut router, &Prompt::new(1_000 + name, tokens, 16).ask());
            engines.pass(0.25);
        }
        let taken = engines.taken.clone();
        engines.idle();
        let got = burst(&mut router, engines.now + 1.0);
        assert!(got.iter().all(|count| *count <= 12), "{seed}: {got:?}");
        // 75 each on average.
        assert!(taken.iter().all(|count| *count >= 40), "{seed}: {taken:?}");
    }
}

#[test]
fn so_they_do_where_short_prompts_and_long_ones_mix() {
    for seed in 0..6u64 {
        let mut router = router(&pairs(8, 8), json!({}), seed);
        let mut engines = Engines::new(&[RATE; 8], 0.05);
        let mut drawn = seed;
        for name in 0..600 {
            drawn = drawn
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let tokens = [100, 200, 400, 16_000][usize::try_from(drawn >> 62).unwrap()];
            engines.take(&mut router, &Prompt::new(1_000 + name, tokens, 16).ask());
            engines.pass(0.25);
        }
        engines.idle();
        let got = burst(&mut router, engines.now + 1.0);
        assert!(got.iter().all(|count| *count <= 12), "{seed}: {got:?}");
    }
}

#[test]
fn one_slow_start_is_not_held_against_a_worker_for_ever() {
    for seed in 0..6 {
        let mut router = router(&pairs(4, 1), json!({}), seed);
        // The third worker's first prompt takes ten seconds, all others half a second.
        let mut now = 1_000;
        for id in 1..=4 {
            let (phase, assignment) = wish(id, 4_000)
                .prefilled_by(id)
                .at(now)
                .prefill(&mut router);
            now += if id == 3 { 10_000 } else { 500 };
            router.advance(at(now));
            drop(phase.answered(GOOD, routing::route::Client::Waits, &mut router));
            drop(assignment);
        }
        let mut engines = Engines::new(&[RATE; 4], 0.0);
        engines.now = now as f64 / 1000.0;
        for name in 0..400 {
            engines.take(&mut router, &Prompt::new(name, 4_000, 16).ask());
            engines.pass(2.0);
        }
        // A hundred each on average.
        assert!(engines.taken[2] >= 60, "{seed}: {:?}", engines.taken);
    }
}

#[test]
fn found_even_equal_idle_workers_share_what_comes_one_after_the_other() {
    for seed in 0..12u64 {
        for (roles, first) in [(pairs(2, 2), 1), (wholes(2), 201)] {
            let mut router = router(&roles, json!({}), seed);
            let mut noise = fastrand::Rng::with_seed(seed);
            let mut now = 1_000.0;
            let mut picked = Vec::new();
            for name in 0..64 {
                let prompt = Prompt::new(name, 40, 16);
                let ask = prompt.ask();
                let mut assignment = router.reserve(&ask, at(now as u64)).unwrap();
                let chosen = assignment.prefill.as_ref().or(assignment.decode.as_ref());
                let id = chosen.unwrap().id.0;
                // Some milliseconds with noise; the first prompt, and one in twenty, takes ten times as long.
                let is_odd = !picked.contains(&id) || noise.u8(0..20) == 0;
                now += (2.0 + 4.0 * noise.f64()) * if is_odd { 10.0 } else { 1.0 };
                assignment.first_token(at(now as u64));
                drop(assignment);
                now += 30.0;
                picked.push(id);
            }
            let counts = counts(picked, first, 2);
            assert!(
                counts.iter().all(|count| *count >= 18),
                "{seed}: {counts:?}"
            );
        }
    }
}

#[test]
fn a_wait_is_as_long_as_its_worker_is_slow() {
    // The first worker reads 8,000 tokens a second, the second 2,000.
    let mut router = router(&pairs(2, 1), json!({}), 1);
    let mut engines = Engines::new(&[RATE, RATE / 4.0], 0.0);
    for name in 0..60 {
        engines.take(&mut router, &Prompt::new(name, 4_000, 16).ask());
        engines.pass(0.4);
    }
    engines.idle();
    let ms = (engines.now * 1000.0) as u64 + 1_000;
    // The quicker worker is sooner where nothing waits, and where one more prompt waits on it.
    for (first, second, expected) in [
        (0, 0, 1),
        (4_000, 0, 1),
        (8_000, 2_000, 1),
        (24_000, 0, 2),
        (40_000, 2_000, 2),
    ] {
        let busy: Vec<_> = [(1, first), (2, second)]
            .into_iter()
            .filter(|(_, tokens)| *tokens > 0)
            .map(|(id, tokens)| {
                let wish = wish(900 + id, tokens).at(ms);
                wish.prefilled_by(id).prefill(&mut router)
            })
            .collect();
        let picked = wish(999, 4_000).at(ms).prefiller(&mut router);
        assert_eq!(picked, expected, "{first} {second}");
        drop(busy);
    }
}
