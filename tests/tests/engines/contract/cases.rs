//! The inputs of the contract between the simulated engine and vLLM: one table.

use pd_router_e2e::engines::Role;
use pd_router_e2e::vllm::{CONTEXT, MODEL};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// Tokens asked for: enough that they do not all come in one event.
const TOKENS: u64 = 8;

/// What is asked of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The request as it stands.
    Whole,
    /// To hand its KV over.
    Prefill,
    /// To take KV over.
    Decode {
        /// Instead of the id that the prefill engine told.
        engine_id: Option<&'static str>,
    },
}

/// One input.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: &'static str,
    pub role: Role,
    pub part: Part,
    pub method: &'static str,
    pub path: &'static str,
    pub body: String,
    pub content_type: Option<&'static str>,
}

impl Case {
    fn get(name: &'static str, role: Role, path: &'static str) -> Case {
        Case {
            method: "GET",
            ..Case::post(name, role, Part::Whole, path, String::new())
        }
    }

    fn post(name: &'static str, role: Role, part: Part, path: &'static str, body: String) -> Case {
        Case {
            name,
            role,
            part,
            method: "POST",
            path,
            body,
            content_type: None,
        }
    }

    fn alone(name: &'static str, path: &'static str, body: impl ToString) -> Case {
        Case::post(name, Role::Aggregated, Part::Whole, path, body.to_string())
    }
}

fn chat() -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": TOKENS, "temperature": 0})
}

fn completion() -> Value {
    json!({"model": MODEL, "prompt": "hello there, how are you", "max_tokens": TOKENS, "temperature": 0})
}

fn response() -> Value {
    json!({"model": MODEL, "input": "hello there", "max_output_tokens": TOKENS, "temperature": 0})
}

/// The value with these members changed.
fn but(mut value: Value, members: Value) -> Value {
    let members = members.as_object().cloned().unwrap_or_default();
    for (name, member) in members {
        value[name] = member;
    }
    value
}

/// The value without this member.
fn less(mut value: Value, member: &str) -> Value {
    value.as_object_mut().and_then(|value| value.remove(member));
    value
}

/// All inputs.
pub fn all() -> Vec<Case> {
    [
        whole(),
        streamed(),
        legs(),
        own_errors(),
        invalid(),
        strange_legs(),
        surface(),
    ]
    .concat()
}

fn whole() -> Vec<Case> {
    let two = json!({"prompt": ["hello there", "how are you"]});
    vec![
        Case::alone("chat", CHAT, chat()),
        Case::alone("chat: no model", CHAT, less(chat(), "model")),
        Case::alone(
            "chat: parts",
            CHAT,
            but(
                chat(),
                json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
            ),
        ),
        Case::alone("completions", COMPLETIONS, completion()),
        Case::alone(
            "completions: ids",
            COMPLETIONS,
            but(completion(), json!({"prompt": [5, 6, 7]})),
        ),
        Case::alone(
            "completions: two prompts",
            COMPLETIONS,
            but(completion(), two),
        ),
        Case::alone("responses", RESPONSES, response()),
        Case::alone(
            "responses: stream options",
            RESPONSES,
            but(
                response(),
                json!({"stream_options": {"include_usage": true}}),
            ),
        ),
        Case::alone("messages", MESSAGES, chat()),
    ]
}

fn streamed() -> Vec<Case> {
    let stream = json!({"stream": true});
    let usage = json!({"stream": true, "stream_options": {"include_usage": true}});
    vec![
        Case::alone("chat, streamed", CHAT, but(chat(), stream.clone())),
        Case::alone("chat, streamed: usage", CHAT, but(chat(), usage.clone())),
        Case::alone(
            "completions, streamed",
            COMPLETIONS,
            but(completion(), stream.clone()),
        ),
        Case::alone(
            "completions, streamed: usage",
            COMPLETIONS,
            but(completion(), usage),
        ),
        Case::alone("responses, streamed", RESPONSES, but(response(), stream)),
    ]
}

fn legs() -> Vec<Case> {
    let one = |name, path, limit: &str, body| {
        let body = but(body, json!({limit: 1, "stream": false}));
        Case::post(name, Role::Prefill, Part::Prefill, path, body.to_string())
    };
    let right = Part::Decode { engine_id: None };
    let wrong = Part::Decode {
        engine_id: Some("00000000-0000-4000-8000-000000000000"),
    };
    let decode = |name, part, path, body: Value, stream: bool| {
        let body = but(body, json!({"stream": stream}));
        Case::post(name, Role::Decode, part, path, body.to_string())
    };
    vec![
        one("prefill: chat", CHAT, "max_tokens", chat()),
        one(
            "prefill: completions",
            COMPLETIONS,
            "max_tokens",
            completion(),
        ),
        one(
            "prefill: responses",
            RESPONSES,
            "max_output_tokens",
            response(),
        ),
        decode("decode: chat", right, CHAT, chat(), false),
        decode("decode: chat, streamed", right, CHAT, chat(), true),
        decode(
            "decode: completions",
            right,
            COMPLETIONS,
            completion(),
            false,
        ),
        decode(
            "decode: completions, streamed",
            right,
            COMPLETIONS,
            completion(),
            true,
        ),
        decode("decode: responses", right, RESPONSES, response(), false),
        decode(
            "decode: responses, streamed",
            right,
            RESPONSES,
            response(),
            true,
        ),
        decode("wrong engine: chat", wrong, CHAT, chat(), false),
        decode("wrong engine: chat, streamed", wrong, CHAT, chat(), true),
        decode(
            "wrong engine: completions",
            wrong,
            COMPLETIONS,
            completion(),
            false,
        ),
        decode(
            "wrong engine: completions, streamed",
            wrong,
            COMPLETIONS,
            completion(),
            true,
        ),
        decode(
            "wrong engine: responses",
            wrong,
            RESPONSES,
            response(),
            false,
        ),
        decode(
            "wrong engine: responses, streamed",
            wrong,
            RESPONSES,
            response(),
            true,
        ),
    ]
}

/// What vLLM itself refuses.
fn own_errors() -> Vec<Case> {
    let beyond = CONTEXT + 1;
    let long: Vec<u64> = vec![5; CONTEXT as usize + 1];
    let case = |name, body| Case::alone(name, CHAT, but(chat(), body));
    vec![
        case("refused: model", json!({"model": "another"})),
        case(
            "refused: max_tokens beyond the context",
            json!({"max_tokens": beyond}),
        ),
        case("refused: max_tokens negative", json!({"max_tokens": -1})),
        case("refused: max_tokens zero", json!({"max_tokens": 0})),
        case("refused: no message", json!({"messages": []})),
        case("refused: n zero", json!({"n": 0})),
        case("refused: min_tokens negative", json!({"min_tokens": -1})),
        case(
            "refused: min_tokens above max_tokens",
            json!({"min_tokens": TOKENS + 1}),
        ),
        case(
            "refused: stream options without a stream",
            json!({"stream_options": {"include_usage": true}}),
        ),
        Case::alone(
            "refused: completions, model",
            COMPLETIONS,
            but(completion(), json!({"model": "another"})),
        ),
        Case::alone(
            "refused: completions, long prompt",
            COMPLETIONS,
            but(completion(), json!({"prompt": long})),
        ),
        Case::alone(
            "refused: completions, no prompt",
            COMPLETIONS,
            less(completion(), "prompt"),
        ),
        Case::alone(
            "refused: completions, empty prompt",
            COMPLETIONS,
            but(completion(), json!({"prompt": ""})),
        ),
        Case::alone(
            "refused: completions, empty list",
            COMPLETIONS,
            but(completion(), json!({"prompt": []})),
        ),
        Case::alone(
            "refused: responses, beyond the context",
            RESPONSES,
            but(response(), json!({"max_output_tokens": beyond})),
        ),
        Case::alone(
            "refused: responses, negative",
            RESPONSES,
            but(response(), json!({"max_output_tokens": -1})),
        ),
        Case::alone(
            "refused: responses, empty list",
            RESPONSES,
            but(response(), json!({"input": []})),
        ),
    ]
}

/// What is no request.
fn invalid() -> Vec<Case> {
    let case = |name, body| Case::alone(name, CHAT, but(chat(), body));
    vec![
        Case::alone("invalid: empty", CHAT, ""),
        Case::alone("invalid: no JSON", CHAT, r#"{"model":"#),
        Case::alone("invalid: no object", CHAT, "[]"),
        Case::alone("invalid: no messages", CHAT, less(chat(), "messages")),
        case("invalid: messages are text", json!({"messages": ""})),
        case(
            "invalid: max_tokens is text",
            json!({"max_tokens": "three"}),
        ),
        case(
            "invalid: max_tokens has a fraction",
            json!({"max_tokens": 2.5}),
        ),
        case(
            "invalid: max_tokens is a number in text",
            json!({"max_tokens": "3"}),
        ),
        case(
            "invalid: max_tokens has a point",
            json!({"max_tokens": 3.0}),
        ),
        case("invalid: stream is text", json!({"stream": "perhaps"})),
        case(
            "invalid: kv_transfer_params is text",
            json!({"kv_transfer_params": "x"}),
        ),
        Case::alone("invalid: completions, empty", COMPLETIONS, ""),
        Case::alone(
            "invalid: completions, prompt is a number",
            COMPLETIONS,
            but(completion(), json!({"prompt": 7})),
        ),
        Case::alone(
            "invalid: responses, no input",
            RESPONSES,
            less(response(), "input"),
        ),
        Case::alone(
            "invalid: responses, input is a number",
            RESPONSES,
            but(response(), json!({"input": 7})),
        ),
        Case {
            content_type: Some("text/plain"),
            ..Case::alone("invalid: content type", CHAT, chat())
        },
    ]
}

/// What a router must not send: vLLM takes it and computes what it must not.
fn strange_legs() -> Vec<Case> {
    let stream = json!({"stream": true, "max_tokens": 1});
    let case = |name, role, part, body: Value| Case::post(name, role, part, CHAT, body.to_string());
    vec![
        case(
            "strange: decode without a hand-off",
            Role::Decode,
            Part::Whole,
            chat(),
        ),
        case(
            "strange: whole request to prefill",
            Role::Prefill,
            Part::Whole,
            chat(),
        ),
        case(
            "strange: prefill of many tokens",
            Role::Prefill,
            Part::Prefill,
            chat(),
        ),
        case(
            "strange: prefill, streamed",
            Role::Prefill,
            Part::Prefill,
            but(chat(), stream),
        ),
    ]
}

fn surface() -> Vec<Case> {
    let roles = [Role::Prefill, Role::Decode, Role::Aggregated];
    let pages = [
        ("models", "/v1/models"),
        ("health", "/health"),
        ("version", "/version"),
        ("metrics", "/metrics"),
    ];
    let mut cases: Vec<Case> = roles
        .into_iter()
        .flat_map(|role| pages.map(|(name, path)| Case::get(name, role, path)))
        .collect();
    cases.extend([
        Case::get("method: GET chat", Role::Aggregated, CHAT),
        Case::get("method: GET completions", Role::Aggregated, COMPLETIONS),
        Case::get("method: GET responses", Role::Aggregated, RESPONSES),
        Case {
            method: "DELETE",
            ..Case::alone("method: DELETE chat", CHAT, "")
        },
        Case::alone("method: POST models", "/v1/models", "{}"),
        Case::alone("method: POST health", "/health", ""),
        Case::alone("method: POST version", "/version", ""),
        Case::get("path: GET", Role::Aggregated, "/v1/nothing"),
        Case::alone("path: POST", "/v1/nothing", "{}"),
        Case::alone(
            "tokenize",
            "/tokenize",
            json!({"model": MODEL, "prompt": "hello"}),
        ),
    ]);
    cases
}
