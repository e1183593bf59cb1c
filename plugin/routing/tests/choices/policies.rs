//! Tests of the policies that do not use costs.

use std::collections::{HashMap, HashSet};

use routing::route::{Assignment, Refusal, Router};
use serde_json::json;

use crate::support::*;

fn reserve(router: &mut Router, prompt: &Prompt) -> Assignment {
    router.reserve(&prompt.ask(), at(1_000)).unwrap()
}

/// The prefill worker of a session, with all workers idle.
fn of_session(router: &mut Router, session: u64) -> u64 {
    let prompt = Prompt::new(session, 100, 16);
    let session = session.to_le_bytes();
    let ask = routing::route::SelectionRequest {
        session: Some(&session),
        ..prompt.ask()
    };
    prefill_id(&router.reserve(&ask, at(1_000)).unwrap())
}

#[test]
fn random_is_uniform_whatever_the_load() {
    let mut router = router(&pairs(8, 8), policy("random"), 1);
    let _busy: Vec<_> = (0..20)
        .map(|name| {
            wish(name, 1_000)
                .prefilled_by(1)
                .decoded_by(101)
                .prefill(&mut router)
        })
        .collect();
    let assignments: Vec<Assignment> = (0..4_000)
        .map(|name| reserve(&mut router, &Prompt::new(name, 100, 16)))
        .collect();
    for counts in [
        counts(assignments.iter().map(prefill_id), 1, 8),
        counts(assignments.iter().map(decode_id), 101, 8),
    ] {
        assert!(unevenness(&counts) < 26.0, "{counts:?}");
    }
    // The two workers are drawn independently: every pair occurs.
    let met: HashSet<_> = assignments
        .iter()
        .map(|s| (prefill_id(s), decode_id(s)))
        .collect();
    assert_eq!(met.len(), 64);
}

#[test]
fn least_loaded_takes_the_fewest_requests_not_the_fewest_tokens() {
    let mut router = router(&pairs(3, 3), policy("least_loaded"), 1);
    let _busy = [
        wish(1, 9_000)
            .prefilled_by(1)
            .decoded_by(101)
            .prefill(&mut router),
        wish(2, 100)
            .prefilled_by(2)
            .decoded_by(102)
            .prefill(&mut router),
        wish(3, 100)
            .prefilled_by(2)
            .decoded_by(102)
            .prefill(&mut router),
    ];
    let assignment = reserve(&mut router, &Prompt::new(9, 100, 16));
    assert_eq!((prefill_id(&assignment), decode_id(&assignment)), (3, 103));
    drop(assignment);
    let _third = [
        wish(4, 100)
            .prefilled_by(3)
            .decoded_by(103)
            .prefill(&mut router),
        wish(5, 100)
            .prefilled_by(3)
            .decoded_by(103)
            .prefill(&mut router),
    ];
    let assignment = reserve(&mut router, &Prompt::new(9, 100, 16));
    assert_eq!((prefill_id(&assignment), decode_id(&assignment)), (1, 101));
}

#[test]
fn power_of_two_never_takes_the_busiest_and_draws_all_others() {
    let mut router = router(&pairs(5, 5), policy("power_of_two"), 1);
    let _busy = wish(1, 100)
        .prefilled_by(2)
        .decoded_by(102)
        .prefill(&mut router);
    let assignments: Vec<(u64, u64)> = (0..2_000)
        .map(|name| reserve(&mut router, &Prompt::new(name, 100, 16)))
        .map(|assignment| (prefill_id(&assignment), decode_id(&assignment)))
        .collect();
    let prefills = counts(assignments.iter().map(|assignment| assignment.0), 1, 5);
    let decodes = counts(assignments.iter().map(|assignment| assignment.1), 101, 5);
    for mut counts in [prefills, decodes] {
        assert_eq!(counts.remove(1), 0);
        assert!(unevenness(&counts) < 18.0, "{counts:?}");
    }
    // Of two workers the idler one is always picked.
    let mut router = self::router(&pairs(2, 1), policy("power_of_two"), 1);
    let _busy = wish(1, 100).prefilled_by(1).prefill(&mut router);
    assert!(
        (0..200).all(|name| prefill_id(&reserve(&mut router, &Prompt::new(name, 100, 16))) == 2)
    );
}

#[test]
fn round_robin_takes_everyone_once_per_turn() {
    let mut router = router(&pairs(5, 3), policy("round_robin"), 1);
    let mut met = HashSet::new();
    for turn in 0..30u64 {
        let assignments: Vec<Assignment> = (0..15)
            .map(|name| reserve(&mut router, &Prompt::new(turn * 100 + name, 100, 16)))
            .collect();
        for of in assignments.chunks(5) {
            assert_eq!(of.iter().map(prefill_id).collect::<HashSet<_>>().len(), 5);
        }
        for of in assignments.chunks(3) {
            assert_eq!(of.iter().map(decode_id).collect::<HashSet<_>>().len(), 3);
        }
        met.extend(assignments.iter().map(|s| (prefill_id(s), decode_id(s))));
    }
    assert_eq!(met.len(), 15);
}

#[test]
fn direct_needs_a_pin_for_each_phase() {
    let mut router = router(&pairs(2, 2), policy("direct"), 1);
    let prompt = Prompt::new(1, 100, 16);
    let refused = router.reserve(&prompt.ask(), at(1_000)).unwrap_err();
    assert!(matches!(refused, Refusal::WorkerIdRequired { .. }));
    assert_eq!(refused.status(), 400);
    assert_eq!(
        wish(1, 100).prefilled_by(1).refused(&mut router).status(),
        400
    );
    let named = wish(1, 100).prefilled_by(2).decoded_by(101);
    let (phase, assignment) = named.prefill(&mut router);
    assert_eq!((phase.worker().id.0, decode_id(&assignment)), (2, 101));
}

#[test]
fn routers_that_never_talk_agree_on_a_prompts_worker() {
    let workers = pairs(8, 8);
    let turned: Vec<_> = workers.iter().rev().cloned().collect();
    for name in ["prefix_hash", "session"] {
        let mut one = router(&workers, policy(name), 1);
        let mut other = router(&turned, policy(name), 99);
        // The second router has seen other prompts before.
        for number in 500..520 {
            drop(wish(number, 4_000).prefill(&mut other));
        }
        let mut used = HashSet::new();
        for number in 0..200u64 {
            let mut wish = wish(number, 4_000);
            wish.session = Some(number.to_le_bytes().to_vec());
            let (p, d) = wish.targets(&mut one);
            assert_eq!(wish.targets(&mut other), (p, d), "{name}");
            // The next turn of the conversation goes there too.
            let mut later = self::wish(number, 6_000);
            later.session = wish.session;
            assert_eq!(later.targets(&mut other), (p, d), "{name}");
            used.insert(p.0);
        }
        assert_eq!(used.len(), 8, "{name}");
    }
}

#[test]
fn shares_are_even_by_prompts_and_by_sessions() {
    for name in ["prefix_hash", "session"] {
        let mut router = router(&pairs(8, 1), policy(name), 1);
        let picked = (0..4_000u64).map(|number| of_session(&mut router, number));
        let counts = counts(picked, 1, 8);
        // Shares of 256 points on a ring vary by about a sixteenth.
        assert!(
            counts.iter().all(|count| (380..620).contains(count)),
            "{name}: {counts:?}"
        );
    }
}

#[test]
fn a_burst_of_one_prompt_keeps_to_the_bound() {
    for size in [2u64, 3, 8, 13] {
        for burst in [1u64, 7, 64, 200] {
            let mut router = router(&pairs(size, 1), policy("prefix_hash"), 1);
            let prompt = Prompt::new(1, 4_000, 16);
            let assignments: Vec<Assignment> =
                (0..burst).map(|_| reserve(&mut router, &prompt)).collect();
            let counts = counts(assignments.iter().map(prefill_id), 1, size);
            let bound = 1.25 * burst as f64 / size as f64 + 1.0;
            assert!(
                counts.iter().all(|count| *count as f64 <= bound),
                "{size} {burst}: {counts:?}"
            );
            // Ended requests no longer count: the prompt returns to its own worker.
            let home = prefill_id(&assignments[0]);
            drop(assignments);
            assert_eq!(prefill_id(&reserve(&mut router, &prompt)), home);
        }
    }
}

#[test]
fn a_worker_that_leaves_moves_only_its_share() {
    let all = pairs(8, 1);
    let rest: Vec<_> = all.iter().filter(|w| w["id"] != 3).cloned().collect();
    for name in ["prefix_hash", "session"] {
        let mut router = router(&all, policy(name), 1);
        let placed = |router: &mut Router| -> HashMap<u64, u64> {
            (0..1_000)
                .map(|number| (number, of_session(router, number)))
                .collect()
        };
        let before = placed(&mut router);
        adopt(&mut router, &rest);
        let after = placed(&mut router);
        let mut heirs = HashSet::new();
        for (number, worker) in &before {
            match worker {
                3 => {
                    heirs.insert(after[number]);
                }
                _ => assert_eq!(after[number], *worker, "{name}"),
            }
        }
        // Its share goes to all other workers, not to one.
        assert_eq!(heirs.len(), 7, "{name}");
        adopt(&mut router, &all);
        assert_eq!(placed(&mut router), before, "{name}");
        // A router without that history agrees.
        let mut fresh = self::router(&rest, policy(name), 77);
        assert_eq!(placed(&mut fresh), after, "{name}");
    }
}

#[test]
fn a_session_sticks_under_load_and_without_one_load_decides() {
    for seed in 0..10 {
        let mut router = router(&pairs(8, 8), policy("session"), seed);
        let mut open = Vec::new();
        let mut seen = HashSet::new();
        for number in 0..40 {
            let mut wish = wish(number, 100);
            wish.session = Some(b"one".to_vec());
            let (phase, assignment) = wish.prefill(&mut router);
            seen.insert((phase.worker().id.0, decode_id(&assignment)));
            open.push((phase, assignment));
        }
        assert_eq!(seen.len(), 1);
        let busy = *seen.iter().next().unwrap();
        for session in [None, Some(Vec::new())] {
            let mut wish = wish(99, 100);
            wish.session = session;
            for _ in 0..20 {
                let (prefill, decode) = wish.targets(&mut router);
                assert!(prefill.0 != busy.0 && decode.0 != busy.1);
            }
        }
    }
}

#[test]
fn what_shares_a_beginning_shares_a_worker_and_tenants_share_nothing() {
    let mut router = router(&pairs(8, 1), policy("prefix_hash"), 1);
    let mut moved = 0;
    for number in 0..40 {
        let own = wish(number, 4_000).prefiller(&mut router);
        let salted = wish(number, 4_000).saying(json!({"cache_salt": "other"}));
        moved += u64::from(salted.prefiller(&mut router) != own);
    }
    assert!(moved > 25, "{moved}");
}
