//! Tests of `pd-harness check`.

mod explained;
mod fields;
mod trapped;

use routing::config::Config;
use serde_json::{Value, json};

/// A valid pool with this source of workers, and with as many compatible fields as possible.
fn sound(source: &str) -> Value {
    let discovery = match source {
        "static" => {
            json!({"workers": [{"address": "10.0.0.1:80", "role": "decode", "topology": {}}]})
        }
        "document" => json!({"cluster": "c", "addresses": ["10.0.0.1:80"]}),
        "envoy_clusters" => json!({"members": {"a": {"role": "decode", "topology": {}}}}),
        "registration" => json!({"token": "secret"}),
        "dynamo" => json!({"models": {"dynamo": "m"}}),
        other => panic!("no source {other}"),
    };
    let mut pool = json!({
        "name": "p",
        "protocol": "nixl",
        "discovery": {source: discovery},
        "decode": {"runs_whole_requests": true},
        "admission": {"prefill": {"tokens": 1}, "queue": {}},
        "conditional": {},
        "model_rewrites": [{"targets": [{"model": "m"}]}],
    });
    match source {
        "dynamo" => {
            pool["protocol"] = json!("direct");
            pool["frontends"] = json!(["10.0.0.1:80"]);
        }
        _ => pool["engine_metrics"] = json!({}),
    }
    json!({"pools": [pool]})
}

const SOURCES: [&str; 5] = [
    "static",
    "document",
    "envoy_clusters",
    "registration",
    "dynamo",
];

fn parse(document: &Value) -> Result<Config, String> {
    Config::parse(document.to_string().as_bytes()).map_err(|error| error.to_string())
}
