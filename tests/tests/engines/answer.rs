//! Owns what two answers to the same request are compared by: all but ids, times and what an engine had in its cache.

use std::collections::BTreeMap;

use pd_router_e2e::client::{Failure, Reply};
use pd_router_e2e::sse;
use serde_json::{Map, Value, json};

/// What differs from one answer to the next of the same engine.
const MASKED: &[&str] = &[
    "id",
    "created",
    "created_at",
    "completed_at",
    "request_id",
    "response_id",
    "item_id",
    "call_id",
    "system_fingerprint",
    "cached_tokens",
    "created_cache_tokens",
    "cache_write_tokens",
    "cache_read_input_tokens",
    "cached_tokens_per_turn",
    "input_cached_tokens",
    "kv_transfer_params",
];

/// An answer without what is masked.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub status: u16,
    pub content_type: String,
    pub body: Value,
}

impl Answer {
    /// A stream's deltas are put together: how many tokens are in one event is a matter of time.
    pub fn of(reply: &Reply) -> Answer {
        let content_type = reply.header("content-type").unwrap_or_default().to_owned();
        let body = if content_type.starts_with("text/event-stream") {
            stream(&reply.text())
        } else {
            let body = serde_json::from_slice(&reply.body);
            mask(body.unwrap_or_else(|_| Value::String(reply.text().into_owned())))
        };
        Answer {
            status: reply.status,
            content_type,
            body,
        }
    }

    /// What came of a request that got no answer, or none to its end.
    pub fn none(failure: &Failure) -> Answer {
        Answer {
            status: 0,
            content_type: String::new(),
            body: Value::String(failure.to_string()),
        }
    }

    /// Tokens that the engine says it generated.
    pub fn tokens(&self) -> u64 {
        let usage = &self.body["usage"];
        let told = usage["completion_tokens"].as_u64();
        told.or_else(|| usage["output_tokens"].as_u64())
            .unwrap_or_default()
    }
}

fn mask(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let kept = members.into_iter().filter(|(name, _)| !is_masked(name));
            Value::Object(kept.map(|(name, value)| (name, mask(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(mask).collect()),
        other => other,
    }
}

fn is_masked(name: &str) -> bool {
    MASKED.contains(&name)
}

fn stream(text: &str) -> Value {
    let data = sse::data(text);
    let is_done = data.last().is_some_and(|last| last == "[DONE]");
    let events = data.iter().filter(|data| *data != "[DONE]");
    let events: Vec<Value> = events
        .map(|data| mask(serde_json::from_str(data).unwrap_or_else(|_| json!(data))))
        .collect();
    let mut whole = if events.iter().any(|event| event.get("choices").is_some()) {
        of_choices(&events)
    } else {
        of_named_events(&events)
    };
    whole["done"] = json!(is_done);
    whole
}

/// A stream of chat or completions: what each choice came to.
fn of_choices(events: &[Value]) -> Value {
    let mut choices: BTreeMap<u64, Value> = BTreeMap::new();
    let mut rest = Map::new();
    for event in events {
        for choice in event["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().unwrap_or_default();
            let whole = choices.entry(index).or_insert_with(|| json!({}));
            add(whole, choice);
        }
        let members = event.as_object().into_iter().flatten();
        for (name, value) in members.filter(|(name, _)| *name != "choices") {
            rest.insert(name.clone(), value.clone());
        }
    }
    rest.insert("choices".to_owned(), choices.into_values().collect());
    Value::Object(rest)
}

/// Adds a delta: text to text, list to list, member by member. Numbers and the like are replaced.
fn add(whole: &mut Value, delta: &Value) {
    match (whole, delta) {
        (Value::Object(whole), Value::Object(delta)) => {
            for (name, value) in delta {
                if is_kind(name) {
                    whole.insert(name.clone(), value.clone());
                } else {
                    add(whole.entry(name.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (Value::String(whole), Value::String(delta)) => whole.push_str(delta),
        (Value::Array(whole), Value::Array(delta)) => {
            delta.iter().for_each(|item| add_item(whole, item));
        }
        (_, Value::Null) => {}
        // One event may have two deltas of the same item.
        (whole @ Value::Null, Value::Array(_)) => {
            *whole = json!([]);
            add(whole, delta);
        }
        (whole, delta) => *whole = delta.clone(),
    }
}

/// Adds to the item with the same index, where items have one, as tool calls do.
fn add_item(whole: &mut Vec<Value>, delta: &Value) {
    let index = delta.get("index");
    let same = whole
        .iter_mut()
        .find(|item| index.is_some() && item.get("index") == index);
    match same {
        Some(item) => add(item, delta),
        None => whole.push(delta.clone()),
    }
}

/// Text that says what something is, and is repeated, not continued.
fn is_kind(name: &str) -> bool {
    matches!(name, "role" | "type" | "object" | "finish_reason")
}

/// A stream of events with a type each, as of responses: the types in order, none twice in a row, and what the last ones hold.
fn of_named_events(events: &[Value]) -> Value {
    let mut types: Vec<&Value> = events.iter().map(|event| &event["type"]).collect();
    types.dedup();
    let last = events.last().cloned().unwrap_or_default();
    let response = last.get("response").cloned().unwrap_or(last);
    let usage = response["usage"].clone();
    json!({"types": types, "response": response, "usage": usage})
}
