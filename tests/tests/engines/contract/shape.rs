//! What of an answer the contract compares, in lines: status, content type, shape of JSON, kinds of events, names of metrics.

use std::collections::BTreeSet;

use pd_router_e2e::client::Reply;
use pd_router_e2e::metrics::Metrics;
use serde_json::Value;

/// Members whose values are compared, not only their types: words of a protocol.
const CONSTANTS: [&str; 17] = [
    "code",
    "dcp_size",
    "detail",
    "do_remote_decode",
    "do_remote_prefill",
    "event",
    "finish_reason",
    "object",
    "param",
    "pp_size",
    "reason",
    "role",
    "status",
    "stop_reason",
    "tp_size",
    "transfer_mode",
    "type",
];

/// The figures that pd-router reads (`plugin/routing/src/engine_metrics.rs`).
const READ: [&str; 5] = [
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "process_start_time_seconds",
];

/// The lines of an answer.
pub fn reply_lines(reply: &Reply) -> BTreeSet<String> {
    let mut lines = head(reply);
    let text = reply.text();
    if kind(reply).starts_with("text/event-stream") {
        event_lines(&text, &mut lines);
        return lines;
    }
    match serde_json::from_str(&text) {
        Ok(body) => shape("body", &body, &mut lines),
        Err(_) if text.is_empty() => drop(lines.insert("body empty".to_owned())),
        Err(_) => drop(lines.insert("body not JSON".to_owned())),
    }
    lines
}

/// The lines of a metrics page: names, labels and types of what is read.
pub fn metrics_lines(reply: &Reply) -> BTreeSet<String> {
    let mut lines = head(reply);
    let text = reply.text();
    for sample in Metrics::parse(&text).samples() {
        if READ.contains(&sample.name.as_str()) {
            let names: Vec<&str> = sample.labels.keys().map(String::as_str).collect();
            lines.insert(format!("{}{{{}}}", sample.name, names.join(",")));
        }
    }
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let of_read = types.filter(|line| {
        READ.iter()
            .any(|name| line.starts_with(&format!("{name} ")))
    });
    lines.extend(of_read.map(|line| format!("type of {line}")));
    lines
}

fn head(reply: &Reply) -> BTreeSet<String> {
    let mut lines = BTreeSet::from([format!("status {}", reply.status)]);
    lines.insert(format!("content-type {}", kind(reply)));
    lines.extend(reply.header("allow").map(|allow| format!("allow {allow}")));
    lines
}

fn kind(reply: &Reply) -> &str {
    reply.header("content-type").unwrap_or("none")
}

/// The order of the kinds of events, and the shape of each. Tokens come one or several to an event, as the clock has it.
fn event_lines(text: &str, lines: &mut BTreeSet<String>) {
    let mut order: Vec<String> = Vec::new();
    for event in text.split("\n\n").filter(|event| !event.trim().is_empty()) {
        let field = |name| event.lines().find_map(|line| line.strip_prefix(name));
        let data = field("data: ").unwrap_or_default();
        let kind = match (field("event: "), serde_json::from_str::<Value>(data)) {
            (Some(name), Ok(data)) => {
                shape(name, &data, lines);
                name.to_owned()
            }
            (None, Ok(data)) => {
                let kind = chunk_kind(&data);
                shape(kind, &data, lines);
                kind.to_owned()
            }
            (_, Err(_)) => data.to_owned(),
        };
        if order.last() != Some(&kind) {
            order.push(kind);
        }
    }
    lines.insert(format!("events {}", order.join(", ")));
}

/// What an event without a name is.
fn chunk_kind(data: &Value) -> &'static str {
    let Some(choices) = data["choices"].as_array() else {
        return "error";
    };
    match choices.first() {
        None => "usage",
        Some(choice) if !choice["finish_reason"].is_null() => "finish",
        Some(choice) if choice["delta"]["role"].is_string() => "opening",
        Some(_) => "content",
    }
}

/// A line for each member: its path, and its type or, where it is a word of the protocol, its value.
fn shape(path: &str, value: &Value, lines: &mut BTreeSet<String>) {
    let told = match value {
        Value::Object(members) => {
            for (name, member) in members {
                shape(&format!("{path}.{name}"), member, lines);
            }
            return;
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                shape(&format!("{path}[]"), item, lines);
            }
            return;
        }
        Value::Array(_) => "[]",
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
    };
    let name = path.rsplit('.').next().unwrap_or(path);
    match CONSTANTS.contains(&name) {
        true => lines.insert(format!("{path} = {value}")),
        false => lines.insert(format!("{path}: {told}")),
    };
}
