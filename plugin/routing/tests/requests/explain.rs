//! Tests of the explanation of a choice, term by term.

use routing::request::Generation;
use routing::route::{Explain, PlanInput, Router};
use serde_json::{Value, json};

use crate::support::{body, prefill, router, two_by_two, with};

fn explained(router: &mut Router, explain: Explain) -> Option<Value> {
    let input = PlanInput {
        explain,
        ..PlanInput::default()
    };
    let plan = router.plan(Generation::Chat, &body(&json!({})), input);
    drop(prefill(plan));
    let explanation = router.take_explanation()?;
    assert!(explanation.is_ascii() && !explanation.contains('\n'));
    Some(serde_json::from_str(&explanation).unwrap())
}

#[test]
fn both_choices_are_told_with_terms_that_add_up() {
    let kv = json!({"selection": {"prefill": "kv", "decode": "kv"}});
    let mut router = router("nixl", &two_by_two(), kv);
    let explanation = explained(&mut router, Explain::ForCaller).unwrap();
    let roles: Vec<&str> = explanation
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| choice["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["prefill", "decode"]);
    for choice in explanation.as_array().unwrap() {
        assert_eq!(choice["policy"], "kv");
        let candidates = choice["candidates"].as_array().unwrap();
        assert_eq!(candidates.len(), 2);
        assert_eq!(candidates[0]["picked"], true);
        let cost = |at: usize| candidates[at]["terms"]["cost"].as_f64().unwrap();
        assert!(cost(0) <= cost(1));
        for candidate in candidates {
            let term = |name: &str| candidate["terms"][name].as_f64().unwrap();
            assert_eq!(
                term("cost"),
                (term("prefill") + term("decode")) * term("factor")
            );
        }
    }
    assert_eq!(router.take_explanation(), None);
}

#[test]
fn it_is_told_to_a_trusted_caller_and_to_the_log_only() {
    let fields = json!({"selection": {"prefill": "round_robin"}});
    let mut trusting = router("nixl", &two_by_two(), fields.clone());
    assert_eq!(explained(&mut trusting, Explain::No), None);
    assert!(explained(&mut trusting, Explain::ForLog).is_some());
    let explanation = explained(&mut trusting, Explain::ForCaller).unwrap();
    assert!(explanation[0]["candidates"][0].get("terms").is_none());
    let wary = with(fields, json!({"trust_clients": false}));
    let mut wary = router("nixl", &two_by_two(), wary);
    assert_eq!(explained(&mut wary, Explain::ForCaller), None);
    assert!(explained(&mut wary, Explain::ForLog).is_some());
}

#[test]
fn names_that_no_header_could_carry_are_escaped() {
    let mut workers = two_by_two();
    workers[0]["name"] = json!("prefill \u{e9}\u{1f600}");
    let mut router = router("nixl", &workers, json!({}));
    let explanation = explained(&mut router, Explain::ForCaller).unwrap();
    let names = explanation[0]["candidates"].as_array().unwrap();
    assert!(
        names
            .iter()
            .any(|candidate| candidate["worker"] == "prefill \u{e9}\u{1f600}")
    );
}
