//! The contract of the simulated engine: it answers as vLLM does, but where a list says why not.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use pd_router_e2e::client::{Ask, Failure, try_send};
use pd_router_e2e::engines::{Engine, Role};
use pd_router_e2e::vllm::{CONTEXT, Fleet, MODEL};
use serde_json::{Value, json};

use crate::compare::TIMES;
use cases::{Case, Part};
use list::{Difference, LIST};
use shape::{metrics_lines, reply_lines};

mod cases;
mod list;
mod shape;

/// What a prefill leg asks for, as pd-router sends it.
const TO_HAND_OFF: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// Engines of one make.
struct Engines {
    make: &'static str,
    prefill: SocketAddr,
    decode: SocketAddr,
    alone: SocketAddr,
}

impl Engines {
    fn address(&self, role: Role) -> SocketAddr {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
            Role::Aggregated => self.alone,
        }
    }

    /// What is to be seen of the answer, in lines.
    async fn lines(&self, case: &Case) -> BTreeSet<String> {
        let body = match case.part {
            Part::Whole => case.body.clone(),
            Part::Prefill => with_params(&case.body, TO_HAND_OFF),
            Part::Decode { engine_id } => self.decode_body(case, engine_id).await,
        };
        let mut ask = match case.method {
            "GET" => Ask::get(case.path),
            "DELETE" => Ask::delete(case.path),
            _ => Ask::post(case.path, body),
        };
        if let Some(kind) = case.content_type {
            ask = ask.content_type(kind);
        }
        match try_send(self.address(case.role), ask).await {
            Ok(reply) if case.path == "/metrics" => metrics_lines(&reply),
            Ok(reply) => reply_lines(&reply),
            Err(Failure::BreaksOff(_)) => BTreeSet::from(["the answer breaks off".to_owned()]),
            Err(failure) => panic!("{} to {}: {failure}", self.make, case.name),
        }
    }

    /// The body of a decode leg whose prefill has been run.
    async fn decode_body(&self, case: &Case, engine_id: Option<&str>) -> String {
        let mut prefill: Value = serde_json::from_str(&case.body).expect("JSON");
        for limit in ["max_tokens", "max_output_tokens"] {
            if prefill.get(limit).is_some() {
                prefill[limit] = json!(1);
            }
        }
        prefill["stream"] = json!(false);
        let ask = Ask::post(case.path, with_params(&prefill.to_string(), TO_HAND_OFF));
        let reply = try_send(self.prefill, ask).await;
        let reply = reply.unwrap_or_else(|failure| panic!("{}'s prefill: {failure}", self.make));
        let mut params = reply.expect(200).json()["kv_transfer_params"].clone();
        assert!(params.is_object(), "{} hands nothing over", self.make);
        if let Some(id) = engine_id {
            params["remote_engine_id"] = json!(id);
        }
        with_params(&case.body, &params.to_string())
    }
}

fn with_params(body: &str, params: &str) -> String {
    let rest = body.strip_prefix('{').expect("an object");
    format!(r#"{{"kv_transfer_params":{params},{rest}"#)
}

/// The places on the list of what differs, and what differs and is not listed. A busy vLLM puts several tokens into one event:
/// what it does not say each time is no difference.
async fn differing(
    real: &Engines,
    case: &Case,
    ours: &BTreeSet<String>,
) -> (Vec<usize>, Vec<String>) {
    let mut places = Vec::new();
    let mut unlisted = Vec::new();
    for _ in 0..TIMES {
        places.clear();
        unlisted.clear();
        for line in differences(&real.lines(case).await, ours) {
            match listed(case.name, &line) {
                Some(place) => places.push(place),
                None => unlisted.push(format!("{}: {line}", case.name)),
            }
        }
        if unlisted.is_empty() {
            break;
        }
    }
    (places, unlisted)
}

/// Every input to both makes: what differs is on the list, and what is on the list differs.
pub async fn the_simulated_engine_answers_as_vllm_does(fleet: &Fleet) {
    let real = Engines {
        make: "vLLM",
        prefill: fleet.first(Role::Prefill).address,
        decode: fleet.first(Role::Decode).address,
        alone: fleet.alone.address,
    };
    let context = CONTEXT.to_string();
    let options = [
        "--model",
        MODEL,
        "--speedup",
        "50",
        "--max-model-len",
        &context,
    ];
    let prefill = Engine::start(Role::Prefill, &options).await;
    let decode = Engine::start(Role::Decode, &options).await;
    let alone = Engine::start(Role::Aggregated, &options).await;
    let simulated = Engines {
        make: "the simulated engine",
        prefill: prefill.address,
        decode: decode.address,
        alone: alone.address,
    };
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for case in cases::all() {
        let ours = simulated.lines(&case).await;
        let (places, unlisted) = differing(&real, &case, &ours).await;
        seen.extend(places);
        problems.extend(unlisted);
    }
    for (place, entry) in LIST.iter().enumerate() {
        if !seen.contains(&place) {
            let Difference { case, line, why } = entry;
            problems.push(format!(
                "{case}: on the list, and no difference any more: {line} ({why})"
            ));
        }
    }
    assert!(
        problems.is_empty(),
        "the simulated engine (ours) and vLLM (theirs) differ in {}:\n{}",
        problems.len(),
        problems.join("\n")
    );
}

/// What only one of them shows. Where the statuses differ, nothing else is compared: it follows from them.
fn differences(theirs: &BTreeSet<String>, ours: &BTreeSet<String>) -> Vec<String> {
    let status = |lines: &BTreeSet<String>| {
        let is_status = |line: &&String| line.starts_with("status ") || line.starts_with("the ");
        lines.iter().find(is_status).cloned().unwrap_or_default()
    };
    if status(theirs) != status(ours) {
        return vec![format!("theirs {}, ours {}", status(theirs), status(ours))];
    }
    let only = |who, these: &BTreeSet<String>, those: &BTreeSet<String>| {
        let lines = these.difference(those);
        lines
            .map(|line| format!("{who} {line}"))
            .collect::<Vec<_>>()
    };
    [only("theirs", theirs, ours), only("ours", ours, theirs)].concat()
}

/// The place on the list of this difference.
fn listed(case: &str, line: &str) -> Option<usize> {
    let fits = |entry: &Difference| case == entry.case && line == entry.line;
    LIST.iter().position(fits)
}
