//! Owns llm-d's routing sidecar in front of a vLLM decode engine: a header names the prefill engine, whose leg the sidecar runs
//! itself.
//!
//! Observed behaviour: 502 with an empty body if the prefill engine cannot be reached or breaks off; its status and body
//! unchanged if it answers with an error. Without the header the engine gets the request unchanged.

use bytes::Bytes;
use hyper::Uri;
use hyper::http::request::Parts;
use serde_json::{Map, Value, json};

use crate::engine::pull::Puller;
use crate::engine::refusal::Refusal;

/// Header with the prefill engine, `ip:port`.
const PREFILLER: &str = "x-prefiller-host-port";

/// Token limits of all APIs; each is 1 in a prefill leg.
const LIMITS: [&str; 3] = ["max_tokens", "max_completion_tokens", "max_output_tokens"];

/// Runs the prefill leg of a request that names an engine for it; returns the decode engine's body.
///
/// # Errors
/// [`Refusal::PrefillGone`], [`Refusal::PrefillSaid`], or [`Refusal::BadRequest`] if the request is no JSON.
pub async fn run_prefill(puller: &Puller, head: &Parts, body: Bytes) -> Result<Bytes, Refusal> {
    let Some(prefiller) = head.headers.get(PREFILLER) else {
        return Ok(body);
    };
    let invalid = |error: &dyn std::fmt::Display| Refusal::BadRequest(error.to_string());
    let prefiller = prefiller.to_str().map_err(|error| invalid(&error))?;
    let uri = format!("http://{prefiller}{}", head.uri.path());
    let uri: Uri = uri.parse().map_err(|error| invalid(&error))?;
    let mut request: Map<String, Value> =
        serde_json::from_slice(&body).map_err(|error| invalid(&error))?;
    let answer = puller.post(uri, &prefill_leg(&request)).await;
    let (status, answer) = answer.map_err(|_| Refusal::PrefillGone)?;
    if !status.is_success() {
        return Err(Refusal::PrefillSaid(status, answer));
    }
    let mut answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    request.insert(
        "kv_transfer_params".to_owned(),
        answer["kv_transfer_params"].take(),
    );
    Ok(Value::from(request).to_string().into())
}

fn prefill_leg(request: &Map<String, Value>) -> Value {
    let mut leg = request.clone();
    leg.remove("stream_options");
    leg.insert("stream".to_owned(), json!(false));
    leg.insert(
        "kv_transfer_params".to_owned(),
        json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null}),
    );
    for limit in LIMITS {
        if let Some(limit) = leg.get_mut(limit) {
            *limit = json!(1);
        }
    }
    leg.into()
}
