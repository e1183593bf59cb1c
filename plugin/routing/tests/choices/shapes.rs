//! Tests of every policy, with every other one in the other role, over fleets of every shape.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::support::*;

fn all() -> impl Iterator<Item = &'static str> {
    PICKING.into_iter().chain(["direct"])
}

/// Fleets of pairs: one and one, more of one role, ranks.
fn fleets() -> Vec<Vec<Value>> {
    vec![
        pairs(1, 1),
        pairs(2, 3),
        pairs(3, 2),
        vec![
            worker_with("prefill", 1, json!({"dp_size": 2})),
            worker_with("decode", 101, json!({"dp_size": 3})),
        ],
    ]
}

#[test]
fn every_policy_serves_pairs_with_every_other() {
    for workers in fleets() {
        for (prefill, decode) in all().flat_map(|p| all().map(move |d| (p, d))) {
            let fields = json!({"selection": {"prefill": prefill, "decode": decode}});
            let mut router = router(&workers, fields, 5);
            let mut open = Vec::new();
            for name in 0..12u64 {
                let mut wish = wish(name, 100);
                wish.session = (name % 3 != 0).then(|| name.to_le_bytes().to_vec());
                if prefill == "direct" {
                    wish = wish.prefilled_by(1);
                }
                if decode == "direct" {
                    wish = wish.decoded_by(101);
                }
                open.push(wish.prefill(&mut router));
            }
            let total = router.total_load();
            assert_eq!((total.prefills, total.decodes), (12, 12));
            drop(open);
            assert!(router.total_load().is_idle());
        }
    }
}

#[test]
fn every_policy_serves_workers_that_run_requests_whole() {
    for workers in [
        wholes(1),
        wholes(3),
        vec![worker_with("aggregated", 201, json!({"dp_size": 2}))],
        // A decode worker that runs whole requests.
        pairs(0, 1),
    ] {
        for name in all() {
            let fields = with(
                policy(name),
                json!({"decode": {"runs_whole_requests": true}}),
            );
            let mut router = router(&workers, fields, 5);
            let mut open = Vec::new();
            for number in 0..12 {
                let mut wish = wish(number, 100);
                if name == "direct" {
                    wish = wish.decoded_by(workers[0]["id"].as_u64().unwrap());
                }
                open.push(wish.forward(&mut router));
            }
            let total = router.total_load();
            assert_eq!((total.prefills, total.decodes), (12, 12), "{name}");
            drop(open);
            assert!(router.total_load().is_idle());
        }
    }
}

#[test]
fn every_policy_reaches_every_rank_of_every_worker() {
    let ranks = json!({"dp_size": 2});
    let workers = [
        worker_with("prefill", 1, ranks.clone()),
        worker("prefill", 2),
        worker_with("decode", 101, ranks),
        worker("decode", 102),
    ];
    for name in PICKING {
        let mut router = router(&workers, policy(name), 5);
        let (mut prefills, mut decodes) = (HashSet::new(), HashSet::new());
        let mut open = Vec::new();
        for number in 0..100 {
            let mut wish = wish(number, 100);
            wish.session = Some(number.to_le_bytes().to_vec());
            let (prefill, decode) = wish.targets(&mut router);
            prefills.insert(prefill);
            decodes.insert(decode);
            open.push(wish.prefill(&mut router));
        }
        assert_eq!(prefills, HashSet::from([(1, 0), (1, 1), (2, 0)]), "{name}");
        assert_eq!(
            decodes,
            HashSet::from([(101, 0), (101, 1), (102, 0)]),
            "{name}"
        );
    }
}

#[test]
fn a_worker_that_runs_whole_is_reserved_alone() {
    let mut router = router(&wholes(1), json!({}), 1);
    let assignment = router
        .reserve(&Prompt::new(1, 100, 16).ask(), at(1_000))
        .unwrap();
    assert!(assignment.prefill.is_none());
    assert_eq!(decode_id(&assignment), 201);
    let load = load(&router, 201);
    assert_eq!((load.prefill_tokens, load.prefills), (100, 1));
    assert_eq!((load.decode_blocks, load.decodes), (7, 1));
}
