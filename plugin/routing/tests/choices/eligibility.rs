//! Tests of which workers may be picked, and of the refusal where none may.

use std::collections::HashSet;

use routing::fleet::Role;
use routing::rendezvous::NotServed;
use routing::request::Generation;
use routing::route::{AfterPrefill, Client, Plan, PlanInput, Refusal};
use routing::selection::eligibility::{Filter, Subset};
use serde_json::{Value, json};

use crate::support::*;

fn none(role: Role, filter: Filter) -> Refusal {
    Refusal::NoneEligible { role, filter }
}

/// Compares a refusal, its status and its code.
fn check(refused: Refusal, expected: Refusal) {
    assert_eq!(refused, expected);
    assert_eq!((refused.status(), refused.retry_after_s()), (503, Some(1)));
    if let Refusal::NoneEligible { filter, .. } = &refused {
        assert!(refused.to_json().contains(filter.name()), "{refused}");
    }
}

#[test]
fn nobody_of_a_role_is_said_so() {
    check(
        wish(1, 100).refused(&mut router(&pairs(2, 0), json!({}), 1)),
        Refusal::NotServed(NotServed::NoDecode),
    );
    check(
        wish(1, 100).refused(&mut router(&pairs(0, 2), json!({}), 1)),
        Refusal::NotServed(NotServed::NotActivated),
    );
    let other = wish(1, 100).of_model("other");
    let refused = other.refused(&mut router(&pairs(1, 1), json!({}), 1));
    assert_eq!(refused.status(), 404);
    assert!(refused.to_string().contains("other"), "{refused}");
}

#[test]
fn a_subset_is_kept_to() {
    let mut router = router(&pairs(4, 4), json!({}), 1);
    let all = |wish: &Wish, router: &mut _| -> HashSet<(u64, u64)> {
        let targets = (0..200).map(|_| wish.targets(router));
        targets
            .map(|(prefill, decode)| (prefill.0, decode.0))
            .collect()
    };
    assert_eq!(all(&wish(1, 10), &mut router).len(), 16);
    let two = wish(1, 10).within("10.0.0.2:2,10.0.0.3:3,10.0.0.104:104");
    assert_eq!(all(&two, &mut router), HashSet::from([(2, 104), (3, 104)]));
    // A host alone stands for all its ports; a wrong port matches nothing.
    let hosts = wish(1, 10).within("10.0.0.2, 10.0.0.101, 10.0.0.3:4");
    assert_eq!(all(&hosts, &mut router), HashSet::from([(2, 101)]));
}

#[test]
fn a_subset_that_allows_nobody_is_refused_by_name() {
    for subset in ["", "nonsense", "10.9.9.9:1", "10.0.0.1:9", "10.0.0.101:101"] {
        let mut pairs = router(&pairs(4, 4), json!({}), 1);
        let refused = wish(1, 100).within(subset).refused(&mut pairs);
        check(refused, none(Role::Prefill, Filter::Subset));
        assert!(pairs.total_load().is_idle());
        let mut whole = router(&wholes(2), json!({}), 1);
        let refused = wish(1, 100).within(subset).refused(&mut whole);
        check(refused, none(Role::Aggregated, Filter::Subset));
    }
    let mut pairs = router(&pairs(4, 4), json!({}), 1);
    let refused = wish(1, 100).within("10.0.0.1:1").refused(&mut pairs);
    check(refused, none(Role::Decode, Filter::Subset));
    assert!(pairs.total_load().is_idle());
}

#[test]
fn those_behind_the_one_that_is_picked_are_of_the_subset_too() {
    let subset = "10.0.0.1:1,10.0.0.101:101,10.0.0.102:102";
    let allowed = ["10.0.0.101:101", "10.0.0.102:102"];
    for seed in 0..10 {
        let mut router = router(&pairs(2, 6), json!({}), seed);
        let (phase, _assignment) = wish(1, 100).within(subset).prefill(&mut router);
        let AfterPrefill::Decode { dispatch, .. } =
            phase.answered(GOOD, Client::Waits, &mut router)
        else {
            panic!("no decode");
        };
        for to in &dispatch.destinations {
            assert!(
                allowed.contains(&to.to_string().as_str()),
                "{:?}",
                dispatch.destinations
            );
        }
    }
}

#[test]
fn a_worker_that_is_named_must_be_of_the_subset() {
    let mut router = router(&pairs(2, 2), json!({}), 1);
    let subset = "10.0.0.1:1,10.0.0.101:101,10.0.0.102:102";
    let within = wish(1, 100).prefilled_by(1).within(subset);
    assert_eq!(within.prefiller(&mut router), 1);
    let without = wish(1, 100).prefilled_by(2).within(subset);
    assert!(without.plan(&mut router).is_err());
}

#[test]
fn a_subset_in_one_namespace_is_served_there() {
    let other = json!({"namespace": "other"});
    let workers = [
        worker("prefill", 1),
        worker("decode", 101),
        worker_with("prefill", 2, other.clone()),
        worker_with("decode", 102, other),
    ];
    for seed in 0..20 {
        let mut router = router(&workers, json!({}), seed);
        let wish = wish(1, 100).within("10.0.0.2:2,10.0.0.102:102");
        let (phase, assignment) = wish.prefill(&mut router);
        assert_eq!((phase.worker().id.0, decode_id(&assignment)), (2, 102));
    }
}

#[test]
fn of_the_pairs_that_topology_allows_one_within_the_subset_is_found() {
    let rack = |name: &str| {
        json!({"topology": {"domains": {"rack": name}, "kv_transfer_domain": "rack",
            "kv_transfer_enforcement": "required"}})
    };
    let workers = [
        worker_with("prefill", 1, rack("r1")),
        worker_with("decode", 101, rack("r1")),
        worker_with("prefill", 2, rack("r2")),
        worker_with("decode", 102, rack("r2")),
    ];
    for seed in 0..20 {
        let mut router = router(&workers, json!({}), seed);
        let wish = wish(1, 100).within("10.0.0.1:1,10.0.0.2:2,10.0.0.102:102");
        let (phase, assignment) = wish.prefill(&mut router);
        assert_eq!((phase.worker().id.0, decode_id(&assignment)), (2, 102));
    }
}

#[test]
fn a_body_that_cannot_be_read_stays_within_the_subset() {
    let subset = Subset::parse("10.0.0.2:202");
    for seed in 0..20 {
        let mut router = router(&wholes(4), json!({}), seed);
        let input = PlanInput {
            now: at(1_000),
            subset: Some(&subset),
            ..PlanInput::default()
        };
        let Ok(Plan::Forward(dispatch, assignment)) =
            router.plan(Generation::Chat, b"\x1f\x8b", input)
        else {
            panic!("not forwarded");
        };
        assert_eq!(decode_id(&assignment), 202);
        assert_eq!(dispatch.destinations.len(), 1);
    }
}

#[test]
fn a_retry_stays_within_the_subset() {
    let mut router = router(&pairs(4, 1), json!({}), 1);
    let wish = wish(1, 100).within("10.0.0.2,10.0.0.4,10.0.0.101");
    let (phase, _assignment) = wish.prefill(&mut router);
    let first = phase.worker().id.0;
    let next = again(phase.answered(status(500), Client::Waits, &mut router));
    assert_eq!(first + next.worker().id.0, 6);
    let after = next.answered(status(500), Client::Waits, &mut router);
    assert!(matches!(after, AfterPrefill::Refused(_)));
}

#[test]
fn a_rank_that_nobody_has_is_refused_and_one_that_some_have_goes_there() {
    let workers = [
        worker_with("prefill", 1, json!({"dp_size": 2})),
        worker_with("prefill", 2, json!({"dp_size": 4})),
        worker_with("decode", 101, json!({"dp_size": 4})),
        worker("decode", 102),
    ];
    let mut router = router(&workers, json!({}), 1);
    for _ in 0..40 {
        let third = wish(1, 100).saying(json!({"dp_rank": 3}));
        assert_eq!(third.targets(&mut router), ((2, 3), (101, 3)));
        let apart = wish(1, 100).saying(json!({"dp_rank": 0, "prefill_dp_rank": 2}));
        let (prefill, decode) = apart.targets(&mut router);
        assert_eq!((prefill, decode.1), ((2, 2), 0));
    }
    for (nvext, role, rank) in [
        (json!({"dp_rank": 4}), Role::Prefill, 4),
        (json!({"dp_rank": 4, "prefill_dp_rank": 0}), Role::Decode, 4),
        (json!({"prefill_dp_rank": 9}), Role::Prefill, 9),
    ] {
        let refused = wish(1, 100).saying(nvext).refused(&mut router);
        assert_eq!(refused, Refusal::RankOutOfRange { role, rank });
        assert_eq!(
            (refused.status(), refused.code()),
            (400, "dp_rank_out_of_range")
        );
    }
    assert!(router.total_load().is_idle());
}

#[test]
fn taints_that_nobody_has_are_named() {
    let must = json!({"routing_constraints": {"required_taints": ["gold"]}});
    let gold = json!({"topology": {"taints": ["gold"]}});
    let mut some = router(
        &[
            worker("prefill", 1),
            worker("decode", 101),
            worker_with("decode", 102, gold.clone()),
        ],
        json!({}),
        1,
    );
    assert!((0..50).all(|_| wish(1, 100).saying(must.clone()).decoder(&mut some) == 102));
    let mut some = router(
        &[
            worker("aggregated", 201),
            worker_with("aggregated", 202, gold),
        ],
        json!({}),
        1,
    );
    assert!((0..50).all(|_| wish(1, 100).saying(must.clone()).decoder(&mut some) == 202));

    for workers in [pairs(2, 2), wholes(2)] {
        let mut router = router(&workers, json!({}), 1);
        let refused = wish(1, 100).saying(must.clone()).refused(&mut router);
        assert_eq!(refused.status(), 503);
        let is_named = matches!(
            &refused,
            Refusal::Topology { .. }
                | Refusal::NoneEligible {
                    filter: Filter::Taints,
                    ..
                }
        );
        assert!(is_named, "{refused}");
    }
}

/// Three prefill and three decode workers; the second of each has the adapter.
fn adapted(role_of: [&str; 2]) -> Vec<Value> {
    let has = json!({"adapters": ["poet"]});
    let [prefill, decode] = role_of;
    vec![
        worker(prefill, 1),
        worker_with(prefill, 2, has.clone()),
        worker(prefill, 3),
        worker(decode, 101),
        worker_with(decode, 102, has),
        worker(decode, 103),
    ]
}

#[test]
fn an_adapter_is_served_by_its_base_models_workers_that_have_it() {
    for name in PICKING {
        let mut router = router(&adapted(["prefill", "decode"]), policy(name), 1);
        for number in 0..20 {
            let (prefill, decode) = wish(number, 100).of_model("poet").targets(&mut router);
            assert_eq!((prefill.0, decode.0), (2, 102), "{name}");
        }
        // Every worker serves the base model.
        let base: HashSet<u64> = (0..60u64)
            .map(|number| {
                let mut wish = wish(number, 100);
                wish.session = Some(number.to_le_bytes().to_vec());
                wish.prefill(&mut router).0.worker().id.0
            })
            .collect();
        assert_eq!(base.len(), 3, "{name}");
    }
    let mut whole = router(&adapted(["aggregated", "aggregated"]), json!({}), 1);
    let picked: HashSet<u64> = (0..50)
        .map(|_| wish(1, 10).of_model("poet").decoder(&mut whole))
        .collect();
    assert_eq!(picked, HashSet::from([2, 102]));
}

#[test]
fn one_who_is_named_need_not_have_the_adapter() {
    let mut router = router(&adapted(["prefill", "decode"]), json!({}), 1);
    let named = wish(1, 100)
        .of_model("poet")
        .prefilled_by(3)
        .decoded_by(101);
    let (prefill, decode) = named.targets(&mut router);
    assert_eq!((prefill.0, decode.0), (3, 101));
}

#[test]
fn where_nobody_of_a_role_has_the_adapter_all_serve_it() {
    let workers = [
        worker_with("prefill", 1, json!({"adapters": ["poet"]})),
        worker("prefill", 2),
        worker("decode", 101),
        worker("decode", 102),
    ];
    let mut router = router(&workers, json!({}), 1);
    let targets: HashSet<(u64, u64)> = (0..60)
        .map(|_| wish(1, 10).of_model("poet").targets(&mut router))
        .map(|(prefill, decode)| (prefill.0, decode.0))
        .collect();
    assert_eq!(targets, HashSet::from([(1, 101), (1, 102)]));
    let unknown = wish(1, 10).of_model("painter").refused(&mut router);
    assert_eq!(unknown.status(), 404);
}

#[test]
fn an_adapters_blocks_are_not_its_models() {
    // The same token ids computed with an adapter are another cache.
    let has = json!({"adapters": ["poet"]});
    let workers: Vec<Value> = (1..=8)
        .map(|id| worker_with("prefill", id, has.clone()))
        .chain([worker("decode", 101)])
        .collect();
    let mut router = router(&workers, json!({}), 1);
    wish(1, 1_000).prefilled_by(3).served(&mut router);
    assert_eq!(wish(1, 1_000).at(9_000).prefiller(&mut router), 3);
    let picked = wish(1, 1_000)
        .at(9_000)
        .of_model("poet")
        .prefillers(&mut router, 400, 8);
    assert!(unevenness(&picked) < 26.0, "{picked:?}");
}

#[test]
fn a_dead_worker_is_passed_over_even_where_it_alone_has_the_adapter() {
    let mut router = router(&adapted(["prefill", "decode"]), json!({}), 1);
    let (phase, _assignment) = wish(9, 100).prefilled_by(2).prefill(&mut router);
    drop(phase.answered(UNREACHED, Client::Waits, &mut router));
    let picked = wish(1, 10)
        .of_model("poet")
        .at(2_000)
        .prefillers(&mut router, 100, 3);
    assert_eq!(picked[1], 0);
}
