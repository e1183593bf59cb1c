//! Tests of which pairs may exchange KV: required, preferred, the request's own constraints, and unknown ones.

use std::collections::HashSet;

use routing::route::{AfterPrefill, Client, Router};
use serde_json::{Value, json};

use crate::support::*;

/// A worker in a rack, and how far its KV may travel.
fn racked(role: &str, id: u64, rack: &str, rule: Value) -> Value {
    let topology = with(json!({"domains": {"rack": rack}}), rule);
    worker_with(role, id, json!({"topology": topology}))
}

fn required() -> Value {
    json!({"kv_transfer_domain": "rack", "kv_transfer_enforcement": "required"})
}

fn preferred() -> Value {
    json!({"kv_transfer_domain": "rack", "kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 1.0})
}

/// Prefill 1 and decode 11 in one rack, prefill 2 and decode 12 in the other.
fn racks(rule: impl Fn() -> Value) -> Router {
    let workers = [
        racked("prefill", 1, "r1", rule()),
        racked("prefill", 2, "r2", rule()),
        racked("decode", 11, "r1", json!({})),
        racked("decode", 12, "r2", json!({})),
    ];
    router("nixl", &workers, json!({}))
}

fn pairs(router: &mut Router, nvext: &Value) -> HashSet<(u64, u64)> {
    (0..20).map(|_| pair(ask(router, nvext.clone()))).collect()
}

#[test]
fn a_required_domain_is_never_left() {
    let mut router = racks(required);
    assert_eq!(
        pairs(&mut router, &json!({})),
        HashSet::from([(1, 11), (2, 12)])
    );
    // A named worker decides for the other.
    for (named, other) in [
        (json!({"decode_worker_id": 12}), (2, 12)),
        (json!({"decode_worker_id": 11}), (1, 11)),
        (json!({"prefill_worker_id": 2}), (2, 12)),
    ] {
        assert_eq!(
            pairs(&mut router, &named),
            HashSet::from([other]),
            "{named}"
        );
    }
    let crossed = json!({"prefill_worker_id": 1, "decode_worker_id": 12});
    assert_eq!(
        refusal(ask(&mut router, crossed)).code(),
        "invalid_worker_id"
    );
    // A prefill worker without a partner is not picked; where none has a partner, the request is refused.
    leave(&mut router, &[11]);
    assert_eq!(pairs(&mut router, &json!({})), HashSet::from([(2, 12)]));
    leave(&mut router, &[2]);
    let refused = refusal(ask(&mut router, json!({})));
    assert_eq!((refused.status(), refused.code()), (503, "topology"));
    assert!(router.total_load().is_idle());
}

#[test]
fn a_failed_prefill_is_tried_only_where_it_may_hand_over_to_the_same_decode_worker() {
    let mut router = racks(required);
    for _ in 0..10 {
        let (phase, _assignment) = prefill(ask(&mut router, json!({})));
        let after = phase.answered(status(500), Client::Waits, &mut router);
        assert_eq!(word(&after), "refused");
    }
}

#[test]
fn a_decode_worker_that_left_is_replaced_only_within_the_domain() {
    let mut router = racks(required);
    let (phase, _assignment) = prefill(ask(&mut router, json!({"prefill_worker_id": 1})));
    leave(&mut router, &[11]);
    let AfterPrefill::Refused(refused) = phase.answered(GOOD, Client::Waits, &mut router) else {
        panic!("not refused");
    };
    assert_eq!(refused.status(), 503);
}

#[test]
fn a_preferred_domain_is_left_where_nobody_is_in_it() {
    let mut router = racks(preferred);
    assert_eq!(
        pairs(&mut router, &json!({})),
        HashSet::from([(1, 11), (2, 12)])
    );
    // Others are alternative destinations after the preferred one.
    let (phase, _assignment) = prefill(ask(&mut router, json!({"prefill_worker_id": 1})));
    let AfterPrefill::Decode { dispatch, .. } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    let ports: Vec<u16> = dispatch.destinations.iter().map(|to| to.port()).collect();
    assert_eq!(ports, [11, 12]);
    leave(&mut router, &[11]);
    assert_eq!(
        pairs(&mut router, &json!({})),
        HashSet::from([(1, 12), (2, 12)])
    );
}

#[test]
fn a_requests_own_constraints_count_beside() {
    let taint = |rack: &str| format!("dynamo.topology/rack={rack}");
    let mut router = racks(|| json!({}));
    let must = |rack| json!({"routing_constraints": {"required_taints": [taint(rack)]}});
    let should = |rack| json!({"routing_constraints": {"preferred_taints": {taint(rack): 1.0}}});
    for nvext in [must("r2"), should("r2")] {
        let decodes: HashSet<u64> = pairs(&mut router, &nvext)
            .iter()
            .map(|pair| pair.1)
            .collect();
        assert_eq!(decodes, HashSet::from([12]), "{nvext}");
    }
    // Both together: only the pair that satisfies both; a preference that no worker meets is no obstacle.
    let mut router = racks(required);
    assert_eq!(pairs(&mut router, &must("r2")), HashSet::from([(2, 12)]));
    assert_eq!(
        pairs(&mut router, &should("r3")),
        HashSet::from([(1, 11), (2, 12)])
    );
    let refused = refusal(ask(&mut router, must("r3")));
    assert_eq!((refused.status(), refused.code()), (503, "topology"));
}

#[test]
fn what_cannot_be_derived_fails_closed() {
    let incomplete = json!({"kv_transfer_domain": "rack"});
    let weightless = json!({"kv_transfer_domain": "rack", "kv_transfer_enforcement": "preferred"});
    let placeless = json!({"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"});
    for rule in [incomplete, weightless, placeless] {
        let workers = [
            racked("prefill", 1, "r1", rule.clone()),
            racked("decode", 11, "r1", json!({})),
        ];
        let mut router = router("nixl", &workers, json!({}));
        let refused = refusal(ask(&mut router, json!({})));
        assert_eq!(
            (refused.status(), refused.code()),
            (503, "topology"),
            "{rule}"
        );
        assert!(refused.to_string().contains("127.0.0.1:1"), "{refused}");
    }
    // One prefill worker has no topology while another must stay within its domain.
    let workers = [
        worker("prefill", 1),
        racked("prefill", 2, "r1", required()),
        racked("decode", 11, "r1", json!({})),
    ];
    let mut router = router("nixl", &workers, json!({}));
    assert_eq!(pairs(&mut router, &json!({})), HashSet::from([(2, 11)]));
    leave(&mut router, &[2]);
    // Without any requirement there is no constraint.
    assert_eq!(pairs(&mut router, &json!({})), HashSet::from([(1, 11)]));
}

#[test]
fn direct_mode_keeps_to_topology_too() {
    let workers = [
        racked("prefill", 1, "r1", required()),
        racked("decode", 11, "r1", json!({})),
        racked("decode", 12, "r2", json!({})),
    ];
    let mut router = router("direct", &workers, json!({}));
    for _ in 0..10 {
        let (_, assignment) = forward(ask(&mut router, json!({})));
        assert_eq!(assignment.decode.as_ref().unwrap().id.0, 11);
    }
}
