//! Owns the target of prefill workers' answers and of what is built from them: the decode leg, the clean-up leg, the client's
//! answer.
#![no_main]

use fuzz::{Callers, Choices, check_edited, input, protocols, router};
use libfuzzer_sys::fuzz_target;
use routing::answer::EventEdit;
use routing::answer::PromptLogprobs;
use routing::answer::usage;
use routing::fleet::WorkerId;
use routing::handoff::mooncake;
use routing::request::Generation;
use routing::route::{AfterPrefill, CallEnd, Client, Plan};

const CHANGED: &[&str] = &[
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disaggregated_params",
    "prompt",
    "prompt_token_ids",
];

const ONE_TOKEN: &[&str] = &["max_tokens", "stream", "stream_options"];

fn check_json(text: &[u8]) {
    let read: Result<serde::de::IgnoredAny, _> = serde_json::from_slice(text);
    read.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)));
}

fn client_body(generation: Generation) -> &'static [u8] {
    match generation {
        Generation::Completions => {
            br#"{"model":"m", "prompt":"p","stream":true,"stream_options":{"include_usage":true},"max_tokens":9 }"#
        }
        _ => br#" {"model":"m","messages":[], "seed":9007199254740993,"kv_transfer_params":null}"#,
    }
}

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let generation = choices.one(&[Generation::Chat, Generation::Completions]);
    let protocol = choices.one(&protocols());
    let client = choices.one(&[Client::Waits, Client::Superseded, Client::Left]);
    let status = choices.one(&[200, 200, 200, 400, 429, 500, 503]);
    let answer = choices.0;

    // Read from an answer alone.
    let _ = (usage::prompt_tokens(answer), usage::cached_tokens(answer));
    let _ = mooncake::engine_ids(answer);
    if let Some(logprobs) = PromptLogprobs::read(answer) {
        let document = r#"{"meta_info":{"input_token_logprobs":[[0.5,1]]}}"#;
        if let Some(edited) = EventEdit::PromptLogprobs(logprobs).apply(document) {
            check_json(edited.as_bytes());
        }
    }
    if let Ok(text) = std::str::from_utf8(answer) {
        for (edit, named) in [
            (EventEdit::CachedTokens(7), "usage"),
            (EventEdit::ModelName("\"n\"".to_owned()), "model"),
        ] {
            if let Some(edited) = edit.apply(text) {
                check_edited(answer, edited.as_bytes(), &[named, "response"]);
            }
        }
    }

    // The legs that follow from the answer.
    let mut router = router(protocol, Callers::Strangers, "");
    let worker = router.fleet().get(WorkerId(1));
    if let Some(life) = worker.map(|worker| worker.incarnation()) {
        router.on_reply(&life, answer);
    }
    let body = client_body(generation);
    let Ok(Plan::Prefill(phase, _)) = router.plan(generation, body, input()) else {
        return;
    };
    let answer = CallEnd::Whole {
        status,
        body: answer,
    };
    match phase.answered(answer, client, &mut router) {
        AfterPrefill::Decode { dispatch, .. } | AfterPrefill::Whole { dispatch, .. } => {
            if let Some(edits) = dispatch.edits {
                check_edited(body, &edits.apply(body), CHANGED);
            }
        }
        AfterPrefill::CleanUp(leg) => {
            let changed = [CHANGED, ONE_TOKEN].concat();
            if let Some(edits) = leg.dispatch.edits {
                check_edited(body, &edits.apply(body), &changed);
            }
        }
        AfterPrefill::Terminal(terminal) | AfterPrefill::TerminalStaged(terminal, _)
            if terminal.content_type == "application/json" =>
        {
            check_json(&terminal.body);
        }
        AfterPrefill::Terminal(terminal) | AfterPrefill::TerminalStaged(terminal, _) => {
            let text = String::from_utf8(terminal.body).expect("UTF-8");
            for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
                assert!(
                    data == "[DONE]" || serde_json::from_str::<serde_json::Value>(data).is_ok()
                );
            }
        }
        AfterPrefill::Again(phase) => check_json(&phase.body(body)),
        _ => {}
    }
});
