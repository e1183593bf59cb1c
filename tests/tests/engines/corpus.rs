//! Owns the requests that the engines are asked: every API and option, from a seed.

use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::with;
use pd_router_e2e::vllm::{MODEL, PATIENCE};
use serde_json::{Value, json};

/// A request, by a name that says what is special about it.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub path: &'static str,
    pub body: Value,
}

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
pub const RESPONSES: &str = "/v1/responses";

impl Case {
    fn new(name: &str, path: &'static str, body: Value) -> Case {
        let mut body = body;
        body["model"] = json!(MODEL);
        Case {
            name: name.to_owned(),
            path,
            body,
        }
    }

    pub fn is_streamed(&self) -> bool {
        self.body["stream"] == true
    }

    pub fn ask(&self) -> Ask {
        Ask::post(self.path, self.body.to_string()).within(PATIENCE)
    }
}

/// Makes words by rule, so that each number has a text of its own.
pub fn words(seed: usize, count: usize) -> String {
    let mut state = seed as u64 ^ 0x9e37_79b9_7f4a_7c15;
    let mut word = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let letters = (0..4).map(|place| {
            let letter = (state >> (16 + 8 * place)) % 26;
            char::from(b'a' + letter as u8)
        });
        letters.collect::<String>()
    };
    (0..count).map(|_| word()).collect::<Vec<_>>().join(" ")
}

/// Requests that are to be answered with success, `count` of them, the kinds in turns.
pub fn mixed(count: usize) -> Vec<Case> {
    (0..count)
        .map(|number| KINDS[number % KINDS.len()](number))
        .collect()
}

/// Requests that a pair serves with a hand-off, `count` of them, the kinds in turns.
pub fn handed_over(count: usize) -> Vec<Case> {
    let kind = |number: usize| HANDED_OVER[number % HANDED_OVER.len()];
    (0..count)
        .map(|number| kind(number)(5000 + number))
        .collect()
}

/// One of each kind that a pair serves with a hand-off.
pub fn one_of_each_that_is_handed_over() -> Vec<Case> {
    handed_over(HANDED_OVER.len())
}

const HANDED_OVER: &[fn(usize) -> Case] = &[
    chat,
    completion,
    chat_stream,
    completion_stream,
    token_ids,
    long_prompt,
];

/// One request of each kind.
pub fn one_of_each() -> Vec<Case> {
    mixed(KINDS.len())
}

const KINDS: &[fn(usize) -> Case] = &[
    chat,
    completion,
    chat_stream,
    completion_stream,
    token_ids,
    responses,
    responses_stream,
    log_probabilities,
    chat_log_probabilities,
    echo,
    stop_words,
    seeded,
    json_schema,
    choice_of_words,
    required_tool,
    named_tool,
    tool_history,
    logit_bias,
    content_parts,
    cache_salt,
    long_prompt,
    long_stream,
    least_tokens,
    one_token,
    usage_in_stream,
    ids_in_answer,
];

/// Requests that no hand-off serves: an engine runs them whole.
pub fn whole() -> Vec<Case> {
    let kinds = [prompt_log_probabilities, choices, batch];
    (0..9)
        .map(|number| kinds[number % kinds.len()](number))
        .collect()
}

/// Prompts of 1 to 400 words, most of them short.
fn prompt(number: usize) -> String {
    let lengths = [3, 11, 40, 90, 1, 160, 25, 400];
    words(number, lengths[number / 3 % lengths.len()])
}

fn messages(number: usize) -> Value {
    json!([
        {"role": "system", "content": words(number / 4, 12)},
        {"role": "user", "content": prompt(number)},
    ])
}

fn chat_with(name: &str, number: usize, more: Value) -> Case {
    let base = json!({"messages": messages(number), "max_tokens": 8, "temperature": 0});
    Case::new(name, CHAT, with(base, more))
}

fn completion_with(name: &str, number: usize, more: Value) -> Case {
    let base = json!({"prompt": prompt(number), "max_tokens": 8, "temperature": 0});
    Case::new(name, COMPLETIONS, with(base, more))
}

fn chat(number: usize) -> Case {
    chat_with("chat", number, json!({}))
}

fn completion(number: usize) -> Case {
    completion_with("completion", number, json!({}))
}

fn chat_stream(number: usize) -> Case {
    chat_with(
        "chat, streamed",
        number,
        json!({"stream": true, "max_tokens": 24}),
    )
}

fn completion_stream(number: usize) -> Case {
    let more = json!({"stream": true, "max_tokens": 16});
    completion_with("completion, streamed", number, more)
}

fn token_ids(number: usize) -> Case {
    let ids: Vec<usize> = (0..70 + number % 50)
        .map(|at| 300 + (at * 37 + number) % 3000)
        .collect();
    completion_with("token ids", number, json!({"prompt": ids}))
}

fn responses(number: usize) -> Case {
    let body =
        json!({"input": prompt(number), "max_output_tokens": 8, "temperature": 0, "store": false});
    Case::new("responses", RESPONSES, body)
}

fn responses_stream(number: usize) -> Case {
    let body = json!({
        "input": [{"role": "user", "content": prompt(number)}],
        "instructions": words(number, 5),
        "max_output_tokens": 8,
        "temperature": 0,
        "stream": true,
        "store": false,
    });
    Case::new("responses, streamed", RESPONSES, body)
}

fn log_probabilities(number: usize) -> Case {
    completion_with("logprobs", number, json!({"logprobs": 3}))
}

fn chat_log_probabilities(number: usize) -> Case {
    let more = json!({"logprobs": true, "top_logprobs": 2});
    chat_with("logprobs of chat", number, more)
}

fn echo(number: usize) -> Case {
    completion_with("echo", number, json!({"echo": true}))
}

fn prompt_log_probabilities(number: usize) -> Case {
    completion_with(
        "prompt_logprobs",
        number,
        json!({"prompt_logprobs": 1, "prompt": words(number, 20)}),
    )
}

fn stop_words(number: usize) -> Case {
    let more = json!({"stop": ["e", "a", "o"], "max_tokens": 40});
    completion_with("stop words", number, more)
}

fn seeded(number: usize) -> Case {
    let more = json!({"seed": number, "temperature": 0.7, "top_p": 0.9});
    chat_with("a seed", number, more)
}

fn choices(number: usize) -> Case {
    let more = json!({"n": 2, "seed": number, "temperature": 0.5});
    chat_with("n = 2", number, more)
}

fn batch(number: usize) -> Case {
    let prompts = [prompt(number), words(number + 1, 7), words(number + 2, 30)];
    completion_with("a batch", number, json!({"prompt": prompts}))
}

fn json_schema(number: usize) -> Case {
    let schema = json!({
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y", "z"]}},
        "required": ["a", "b"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "ab", "schema": schema, "strict": true}});
    let more = json!({"response_format": format, "max_tokens": 40});
    chat_with("a JSON schema", number, more)
}

fn choice_of_words(number: usize) -> Case {
    let more = json!({"structured_outputs": {"choice": ["yes", "no", "perhaps"]}});
    chat_with("a choice of words", number, more)
}

fn tools() -> Value {
    let unit = json!({"type": "string", "enum": ["c", "f"]});
    let parameters = json!({
        "type": "object",
        "properties": {"unit": unit},
        "required": ["unit"],
        "additionalProperties": false,
    });
    json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}])
}

fn required_tool(number: usize) -> Case {
    let more = json!({"tools": tools(), "tool_choice": "required", "max_tokens": 60});
    chat_with("a tool, required", number, more)
}

fn named_tool(number: usize) -> Case {
    let choice = json!({"type": "function", "function": {"name": "weather"}});
    let more = json!({"tools": tools(), "tool_choice": choice, "max_tokens": 60, "stream": true});
    chat_with("a tool by name, streamed", number, more)
}

fn tool_history(number: usize) -> Case {
    let call = json!({"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"unit\": \"c\"}"}});
    let history = json!([
        {"role": "user", "content": prompt(number)},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]);
    chat_with(
        "after a tool call",
        number,
        json!({"messages": history, "tools": tools()}),
    )
}

fn logit_bias(number: usize) -> Case {
    completion_with(
        "logit_bias",
        number,
        json!({"logit_bias": {"600": 6.0, "700": -100.0}}),
    )
}

fn content_parts(number: usize) -> Case {
    let parts = json!([
        {"type": "text", "text": words(number, 9)},
        {"type": "text", "text": words(number + 5, 9)},
    ]);
    chat_with(
        "content in parts",
        number,
        json!({"messages": [{"role": "user", "content": parts}]}),
    )
}

fn cache_salt(number: usize) -> Case {
    chat_with(
        "cache_salt",
        number,
        json!({"cache_salt": format!("salt-{number}")}),
    )
}

fn long_prompt(number: usize) -> Case {
    completion_with(
        "a long prompt",
        number,
        json!({"prompt": words(number, 1200)}),
    )
}

fn long_stream(number: usize) -> Case {
    let body = json!({"messages": [{"role": "user", "content": words(number, 700)}], "stream": true, "max_tokens": 64});
    chat_with("a long prompt, streamed", number, body)
}

fn least_tokens(number: usize) -> Case {
    completion_with(
        "min_tokens",
        number,
        json!({"min_tokens": 6, "max_tokens": 12}),
    )
}

fn one_token(number: usize) -> Case {
    completion_with("max_tokens = 1", number, json!({"max_tokens": 1}))
}

fn usage_in_stream(number: usize) -> Case {
    let options = json!({"include_usage": true, "continuous_usage_stats": false});
    chat_with(
        "usage in the stream",
        number,
        json!({"stream": true, "stream_options": options}),
    )
}

fn ids_in_answer(number: usize) -> Case {
    completion_with(
        "return_token_ids",
        number,
        json!({"return_token_ids": true}),
    )
}

/// Requests that an engine refuses, and the gateway passes its words on.
pub fn refused_by_the_engine() -> Vec<Case> {
    vec![
        chat_with("temperature = -1", 1, json!({"temperature": -1})),
        chat_with("top_p = 2", 2, json!({"top_p": 2})),
        chat_with(
            "a role that is none",
            3,
            json!({"messages": [{"role": 7, "content": "x"}]}),
        ),
        completion_with("logprobs = 1000", 4, json!({"logprobs": 1000})),
        chat_with(
            "top_logprobs without logprobs",
            5,
            json!({"top_logprobs": 2}),
        ),
        completion_with(
            "a token that is none",
            6,
            json!({"prompt": [1, 2, 9_999_999]}),
        ),
        completion_with(
            "a prompt beyond the context",
            7,
            json!({"prompt": words(7, 4200)}),
        ),
        chat_with(
            "a schema that is none",
            8,
            json!({"structured_outputs": {"json": {"type": "nonsense"}}}),
        ),
        chat_with(
            "a tool choice without tools",
            9,
            json!({"tool_choice": "required"}),
        ),
    ]
}
