//! Tests of requests without a prefill worker, and after a prefill failure: all policies, in all combinations.

use routing::rendezvous::NotServed;
use routing::route::{AfterPrefill, Client, Fallback, Refusal};
use serde_json::json;

use crate::support::*;

#[test]
fn without_a_prefill_worker_the_policy_answers() {
    for policy in [None, Some("aggregate"), Some("fail")] {
        for enforced in [false, true] {
            for runs_whole in [false, true] {
                for aggregated in [false, true] {
                    let mut workers = vec![worker("decode", 11)];
                    if aggregated {
                        workers.push(worker("aggregated", 21));
                    }
                    let mut fields = json!({"enforce_disagg": enforced, "decode": {"runs_whole_requests": runs_whole}});
                    if let Some(policy) = policy {
                        fields["on_prefill_absent"] = json!(policy);
                    }
                    let mut router = router("nixl", &workers, fields.clone());
                    let may = policy != Some("fail") && !enforced && (runs_whole || aggregated);
                    assert_eq!(router.can_serve_requests("m").is_ok(), may, "{fields}");
                    assert_eq!(router.can_serve_any(), may);
                    let plan = ask(&mut router, json!({}));
                    if !may {
                        assert_eq!(
                            refusal(plan),
                            Refusal::NotServed(NotServed::NotActivated),
                            "{fields}"
                        );
                        continue;
                    }
                    let (dispatch, assignment) = forward(plan);
                    let id = assignment.decode.as_ref().unwrap().id.0;
                    // A decode-only worker is not among the destinations.
                    let ports: Vec<u16> =
                        dispatch.destinations.iter().map(|to| to.port()).collect();
                    assert!(runs_whole || ports == [21], "{ports:?}");
                    let fallback = (id == 11).then_some(Fallback::PrefillAbsent);
                    assert_eq!(assignment.fallback, fallback);
                }
            }
        }
    }
}

/// All lists without repetition.
fn lists() -> Vec<Vec<&'static str>> {
    let steps = ["retry_other", "fail", "decode_only"];
    let mut lists: Vec<Vec<&str>> = vec![vec![]];
    let mut from = 0;
    while from < lists.len() {
        for step in steps {
            if !lists[from].contains(&step) {
                let mut longer = lists[from].clone();
                longer.push(step);
                lists.push(longer);
            }
        }
        from += 1;
    }
    lists
}

/// The outcome of each failure in turn, as specified: the list is tried in order.
fn outcomes(list: &[&str], prefills: usize, attempts: usize) -> Vec<&'static str> {
    let mut outcomes = Vec::new();
    for tried in 1.. {
        let step = list.iter().find(|step| match **step {
            "retry_other" => tried < prefills.min(attempts),
            _ => true,
        });
        match step {
            Some(&"retry_other") => outcomes.push("again"),
            Some(&"decode_only") => {
                outcomes.push("whole");
                break;
            }
            _ => {
                outcomes.push("refused");
                break;
            }
        }
    }
    outcomes
}

#[test]
fn after_a_failed_prefill_the_list_is_gone_through_in_order() {
    assert_eq!(lists().len(), 16);
    for list in lists() {
        for runs_whole in [false, true] {
            for enforced in [false, true] {
                let fields = json!({"on_prefill_failure": list, "enforce_disagg": enforced,
                    "decode": {"runs_whole_requests": runs_whole}, "prefill": {"attempts": 2}});
                let forbidden = list.contains(&"decode_only") && (!runs_whole || enforced);
                let config = configured("nixl", &two_by_two(), fields.clone());
                assert_eq!(config.is_err(), forbidden, "{fields}");
                if let Err(error) = config {
                    assert!(error.to_string().contains("on_prefill_failure"), "{error}");
                    continue;
                }
                for prefills in [1, 2, 3] {
                    let mut workers = vec![worker("decode", 11), worker("decode", 12)];
                    workers.extend((1..=prefills as u64).map(|id| worker("prefill", id)));
                    fails_as_it_should(&workers, &fields, &outcomes(&list, prefills, 2));
                }
            }
        }
    }
}

fn fails_as_it_should(
    workers: &[serde_json::Value],
    fields: &serde_json::Value,
    expected: &[&str],
) {
    let mut router = router("nixl", workers, fields.clone());
    let (mut phase, assignment) = prefill(ask(&mut router, json!({})));
    let decode = assignment.decode.as_ref().unwrap().address.unwrap();
    for (tried, outcome) in expected.iter().enumerate() {
        let after = phase.answered(status(500), Client::Waits, &mut router);
        assert_eq!(word(&after), *outcome, "{workers:?} {fields}");
        match after {
            AfterPrefill::Again(next) => phase = next,
            AfterPrefill::Whole { dispatch, fallback } => {
                assert_eq!(fallback, Fallback::PrefillFailed);
                assert_eq!(dispatch.destinations[0], decode);
                assert!(
                    leg(&dispatch, &body(&json!({})))
                        .get("kv_transfer_params")
                        .is_none()
                );
                break;
            }
            AfterPrefill::Refused(refusal) => {
                assert!(
                    matches!(refusal, Refusal::PrefillFailed { tried: reported_tried, .. } if reported_tried == tried + 1),
                    "{refusal}"
                );
                break;
            }
            _ => panic!("{outcome}"),
        }
    }
    assert_eq!(router.total_load().prefills, 0);
    drop(assignment);
    assert!(router.total_load().is_idle());
}

#[test]
fn nothing_is_tried_for_a_client_that_has_left() {
    let fields = json!({"on_prefill_failure": ["retry_other", "decode_only"], "decode": {"runs_whole_requests": true}});
    let mut router = router("nixl", &two_by_two(), fields);
    let (phase, _assignment) = prefill(ask(&mut router, json!({})));
    let after = phase.answered(status(500), Client::Left, &mut router);
    assert_eq!(word(&after), "nothing");
}
