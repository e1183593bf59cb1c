//! Owns the target of request bodies: parsed, planned by every protocol, edited for each leg.
//!
//! A planned body is still JSON with only the hand-off changed, and no untrusted caller's own hand-off gets through.
#![no_main]

use fuzz::{Callers, Choices, GENERATIONS, check_edited, input, protocols, router};
use libfuzzer_sys::fuzz_target;
use routing::json::says_nothing;
use routing::request::Request;
use routing::route::{Dispatch, Plan};
use routing::transfer::IN_REQUESTS;
use serde_json::value::RawValue;
use std::collections::HashMap;

/// Members that the edits of a decode leg may change.
const DECODE: &[&str] = &[
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disaggregated_params",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "nvext",
];

/// Members that the edits of a one-token leg may change in addition.
const ONE_TOKEN: &[&str] = &[
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "sampling_params",
    "stream",
    "stream_options",
    "rid",
];

fn sent(body: &[u8], dispatch: &Dispatch) -> Option<Vec<u8>> {
    dispatch.edits.as_ref().map(|edits| edits.apply(body))
}

/// The text of a body as Python's JSON parser accepts it, which engines use: UTF-8 or UTF-16, with or without a byte order mark,
/// and with literals such as `NaN` that are no JSON numbers.
fn as_engines_read(body: &[u8]) -> Option<String> {
    let is_wide = body.get(1) == Some(&0) && body.len().is_multiple_of(2);
    let text = match is_wide {
        true => {
            let (pairs, _) = body.as_chunks::<2>();
            String::from_utf16(
                &pairs
                    .iter()
                    .map(|pair| u16::from_le_bytes(*pair))
                    .collect::<Vec<_>>(),
            )
            .ok()?
        }
        false => String::from_utf8(body.to_vec()).ok()?,
    };
    let text = text.trim_start_matches('\u{feff}');
    Some(text.replace("NaN", "0").replace("Infinity", "0"))
}

/// Checks that an engine's parser finds no hand-off field set in an untrusted caller's body.
fn check_not_forged(body: &[u8]) {
    let Some(text) = as_engines_read(body) else {
        return;
    };
    let Ok(members) = serde_json::from_str::<HashMap<String, &RawValue>>(&text) else {
        return;
    };
    for name in IN_REQUESTS {
        if let Some(value) = members.get(name) {
            assert!(says_nothing(value.get()), "{name} got through");
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let generation = choices.one(&GENERATIONS);
    let callers = choices.one(&[Callers::Strangers, Callers::Trusted]);
    let protocol = choices.one(&protocols());
    let policy = choices.one(&["kv", "prefix_hash", "round_robin"]);
    let body = choices.0;
    for generation in GENERATIONS {
        if let Ok(request) = Request::parse(generation, body) {
            let _ = (request.form(), request.max_tokens(), request.prompt_ids());
        }
    }
    let selection = format!(r#","selection":{{"prefill":"{policy}","decode":"{policy}"}}"#);
    let rewrites =
        r#","model_rewrites":[{"model":"a","targets":[{"model":"m"},{"model":"\"","weight":2}]}]"#;
    let mut router = router(protocol, callers, &(selection + rewrites));
    if let Some(renamed) = router.rename(body, &[]) {
        check_edited(body, &renamed.body, &["model"]);
    }
    let plan = router.plan(generation, body, input());
    if callers == Callers::Strangers && plan.is_ok() {
        check_not_forged(body);
    }
    let one_token = [DECODE, ONE_TOKEN].concat();
    match plan {
        Ok(Plan::Forward(dispatch, _)) => {
            if let Some(edited) = sent(body, &dispatch) {
                check_edited(body, &edited, DECODE);
            }
        }
        Ok(Plan::Prefill(phase, _)) => {
            check_edited(body, &phase.body(body), &one_token);
            if let Some(edited) = phase
                .decode_beside(&mut router)
                .and_then(|dispatch| sent(body, &dispatch))
            {
                check_edited(body, &edited, DECODE);
            }
        }
        Ok(Plan::Answer(answer)) => {
            let _: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
        }
        Ok(Plan::Wait(_)) => {}
        Err(refusal) => {
            let _: serde_json::Value = serde_json::from_str(&refusal.to_json()).expect("JSON");
        }
    }
    let _ = router.take_explanation();
    drop(router);
});
