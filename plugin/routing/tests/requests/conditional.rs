//! Tests of prompts that stay on a decode worker.

use std::time::Duration;

use routing::request::Generation;
use routing::route::{Fallback, Plan, PlanInput, Refusal, Router};
use serde_json::{Value, json};

use crate::support::{forward, prefill, router, two_by_two, with};

const TURN: &str = "word ";

/// A pool that remembers the caches of its decode workers.
fn pool(conditional: Value, fields: Value) -> Router {
    let fields = with(
        json!({
            "conditional": conditional,
            "decode": {"runs_whole_requests": true},
            "selection": {"prefill": "kv", "decode": "kv"},
            "kv_blocks": 1000,
        }),
        fields,
    );
    router("nixl", &two_by_two(), fields)
}

/// Plans a prompt of this many words, each longer than a token.
fn ask(router: &mut Router, words: usize, nvext: Value) -> Result<Plan, Refusal> {
    let body = json!({"model": "m", "prompt": TURN.repeat(words), "nvext": nvext}).to_string();
    let input = PlanInput {
        now: Duration::from_secs(1),
        ..PlanInput::default()
    };
    router.plan(Generation::Completions, body.as_bytes(), input)
}

#[test]
fn the_first_turn_is_handed_over_and_the_next_stays_where_its_beginning_is() {
    let mut router = pool(json!({}), json!({}));
    let (phase, first) = prefill(ask(&mut router, 400, json!({})));
    let decode = first.decode.as_ref().map(|worker| worker.id);
    drop((phase, first));
    let (dispatch, next) = forward(ask(&mut router, 500, json!({})));
    assert_eq!(next.fallback, Some(Fallback::NotWorthIt));
    assert_eq!(next.decode.as_ref().map(|worker| worker.id), decode);
    assert!(dispatch.edits.is_none());
    // The rest of the prompt is charged there, until its first token.
    let load = router.worker_load(next.decode.as_ref().unwrap());
    assert!(load.prefills == 1 && load.prefill_tokens < 200, "{load:?}");
    drop(next);
    assert!(router.total_load().is_idle());
}

#[test]
fn a_short_prompt_that_is_not_cached_stays_only_by_the_rule_for_short_ones() {
    let mut router = pool(json!({}), json!({}));
    prefill(ask(&mut router, 20, json!({})));
    let mut router = pool(json!({"short_tokens": 100}), json!({}));
    forward(ask(&mut router, 20, json!({})));
    prefill(ask(&mut router, 200, json!({})));
}

#[test]
fn a_large_share_or_many_tokens_left_go_to_prefill() {
    let mut router = pool(json!({"uncached_tokens": 100}), json!({}));
    drop(prefill(ask(&mut router, 400, json!({}))));
    prefill(ask(&mut router, 560, json!({})));
    let mut router = pool(json!({"uncached_share": 0.1}), json!({}));
    drop(prefill(ask(&mut router, 400, json!({}))));
    prefill(ask(&mut router, 500, json!({})));
}

#[test]
fn a_full_decode_worker_keeps_nothing_nor_one_of_unknown_size() {
    for (fraction, blocks) in [(0.01, json!(1000)), (0.9, json!(null))] {
        let mut router = pool(
            json!({"decode_busy_fraction": fraction}),
            json!({"kv_blocks": blocks}),
        );
        drop(prefill(ask(&mut router, 400, json!({}))));
        prefill(ask(&mut router, 410, json!({})));
    }
}

#[test]
fn busy_prefill_workers_leave_it_to_decode() {
    for policy in ["prefill_load", "isl_or_load"] {
        let mut router = pool(
            json!({"policy": policy, "prefill_busy_tokens": 100}),
            json!({}),
        );
        let first = prefill(ask(&mut router, 400, json!({})));
        let second = prefill(ask(&mut router, 401, json!({})));
        let body = json!({"model": "m", "prompt": "other ".repeat(400)}).to_string();
        let plan = router.plan(
            Generation::Completions,
            body.as_bytes(),
            PlanInput::default(),
        );
        forward(plan);
        drop((first, second));
    }
}

#[test]
fn nobody_can_force_it_or_forge_it_and_one_who_names_a_worker_has_decided() {
    let mut router = pool(json!({}), json!({}));
    let forged = json!({"annotations": ["x-bypass-remote-prefill"]});
    drop(prefill(ask(&mut router, 400, forged)));
    prefill(ask(&mut router, 410, json!({"prefill_worker_id": 1})));
}
