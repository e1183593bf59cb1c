//! Owns TensorRT-LLM's `disaggregated_params`: context first; the generation leg must repeat its answer exactly.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::{Leg, mooncake};
use crate::engine::refusal::Refusal;
use crate::engine::request::{Endpoint, Generation};

/// Ids below this are assigned by engines themselves.
const LEAST_ID: u64 = 1 << 42;
/// Upper bound of ids, which are signed.
const BEYOND_IDS: u64 = 1 << 63;
/// The only simulated style: context first.
const CONTEXT_FIRST: u64 = 0;
/// Id of the token that comes with the context.
const FIRST_TOKEN: u32 = 29_871;

const CONTEXT_ONLY: &str = "context_only";
const GENERATION_ONLY: &str = "generation_only";

#[derive(Deserialize)]
struct Kind {
    request_type: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContextLeg {
    #[serde(rename = "request_type")]
    _kind: String,
    disagg_request_id: u64,
    schedule_style: Option<u64>,
    #[serde(rename = "conversation_id")]
    _conversation: Option<Value>,
}

/// A context leg's answer, in the engine's order.
#[derive(Clone, Debug, Serialize)]
pub struct DisaggregatedParams {
    request_type: &'static str,
    first_gen_tokens: Vec<u32>,
    ctx_request_id: Option<u64>,
    encoded_opaque_state: Option<String>,
    disagg_request_id: u64,
    ctx_dp_rank: u64,
    ctx_info_endpoint: String,
}

impl DisaggregatedParams {
    /// The hand-off of the request `id` from the engine at `endpoint`.
    pub fn new(id: u64, endpoint: String) -> Self {
        // Beyond a float's precision, and with characters that a JSON writer may escape.
        let internal = rand::random_range(1 << 53..BEYOND_IDS);
        Self {
            request_type: CONTEXT_ONLY,
            first_gen_tokens: vec![FIRST_TOKEN],
            ctx_request_id: Some(internal),
            encoded_opaque_state: Some(format!("{:032x}+/8=", rand::random::<u128>())),
            disagg_request_id: id,
            ctx_dp_rank: 0,
            ctx_info_endpoint: endpoint,
        }
    }

    /// The same for a generation that ended with the context, so that no KV is handed off.
    pub fn ended(self) -> Self {
        Self {
            ctx_request_id: None,
            encoded_opaque_state: None,
            ..self
        }
    }

    /// The members that the generation leg must repeat.
    pub fn seal(&self, usage: &Value) -> Value {
        let mut seal = json!(self);
        seal["request_type"] = json!(GENERATION_ONLY);
        seal["ctx_usage"] = usage.clone();
        seal
    }
}

/// The id of a request to a prefill engine.
///
/// # Errors
/// [`Refusal::NotAPrefillLeg`], [`Refusal::BadDisaggId`], or [`Refusal::BadRequest`] if it cannot be parsed.
pub fn context_id(generation: &Generation) -> Result<u64, Refusal> {
    let Some(params) = generation.disaggregated_params.as_deref() else {
        return Err(Refusal::NotAPrefillLeg("no disaggregated_params"));
    };
    if kind(params)?.as_deref() != Some(CONTEXT_ONLY) {
        return Err(Refusal::NotAPrefillLeg("request_type is not context_only"));
    }
    check_one_sequence(generation)?;
    if generation.stream {
        return Err(Refusal::NotAPrefillLeg("stream is true"));
    }
    if generation.completion_tokens() != 1 {
        return Err(Refusal::NotAPrefillLeg("more than one token to generate"));
    }
    let leg: ContextLeg = serde_json::from_str(params.get()).map_err(invalid)?;
    if leg.schedule_style != Some(CONTEXT_FIRST) {
        return Err(Refusal::NotAPrefillLeg("schedule_style is not 0"));
    }
    let id = leg.disagg_request_id;
    match (LEAST_ID..BEYOND_IDS).contains(&id) {
        true => Ok(id),
        false => Err(Refusal::BadDisaggId(format!(
            "{id} is not from 2^42 to 2^63 - 1"
        ))),
    }
}

/// Location of a generation leg's KV.
#[derive(Debug, PartialEq)]
pub struct Context {
    /// Host of the prefill engine, an IPv6 address without brackets.
    pub host: String,
    /// Port of the prefill engine.
    pub port: u16,
    /// The request's id at the prefill engine.
    pub id: u64,
    /// All members of the leg.
    pub seal: Value,
}

/// The context that a request to a decode engine names.
///
/// # Errors
/// [`Refusal::MissingHandoff`], [`Refusal::WrongHandoff`], or [`Refusal::BadRequest`].
pub fn read(generation: &Generation) -> Result<Context, Refusal> {
    let missing = Refusal::MissingHandoff(
        "disaggregated_params with request_type generation_only are required on a generation server",
    );
    let Some(params) = generation.disaggregated_params.as_deref() else {
        return Err(missing);
    };
    if kind(params)?.as_deref() != Some(GENERATION_ONLY) {
        return Err(missing);
    }
    check_one_sequence(generation)?;
    check_ids(generation)?;
    let seal: Value = serde_json::from_str(params.get()).map_err(invalid)?;
    let wrong = |what: &str| Refusal::WrongHandoff(format!("{what} is not the context server's"));
    let endpoint = seal["ctx_info_endpoint"].as_str();
    let (host, port) = endpoint
        .and_then(mooncake::split)
        .ok_or_else(|| wrong("ctx_info_endpoint"))?;
    let id = seal["disagg_request_id"].as_u64();
    Ok(Context {
        host,
        port,
        id: id.ok_or_else(|| wrong("disagg_request_id"))?,
        seal,
    })
}

/// The leg that a request asks to be.
pub(super) fn leg(generation: &Generation) -> Leg {
    let params = generation.disaggregated_params.as_deref();
    match params.map(kind) {
        Some(Ok(Some(kind))) if kind == CONTEXT_ONLY => Leg::Prefill,
        Some(Ok(Some(kind))) if kind == GENERATION_ONLY => Leg::Decode,
        _ => Leg::Whole,
    }
}

fn check_one_sequence(generation: &Generation) -> Result<(), Refusal> {
    match generation.sequences() {
        1 => Ok(()),
        several => Err(Refusal::BadRequest(format!(
            "Disaggregated serving takes one prompt and one choice, got {several} sequences"
        ))),
    }
}

/// Checks the ids in the leg: they must be present, so that the prompt is not tokenised twice, and must be the prompt's.
fn check_ids(generation: &Generation) -> Result<(), Refusal> {
    let own = generation.ids.as_ref();
    let bad = |what: &str| Refusal::BadRequest(what.to_owned());
    if generation.endpoint == Endpoint::Completions {
        return match own.is_some_and(|own| own.given) {
            true => Ok(()),
            false => Err(bad("`prompt` of a generation leg must be the token ids")),
        };
    }
    let Some(given) = &generation.prompt_token_ids else {
        return Err(bad("`prompt_token_ids` are required in a generation leg"));
    };
    match own.is_some_and(|own| own.ids == *given) {
        true => Ok(()),
        false => Err(Refusal::WrongHandoff(
            "prompt_token_ids are not those of the messages".into(),
        )),
    }
}

fn kind(params: &RawValue) -> Result<Option<String>, Refusal> {
    serde_json::from_str::<Map<String, Value>>(params.get()).map_err(invalid)?;
    let kind: Kind = serde_json::from_str(params.get()).map_err(invalid)?;
    Ok(kind.request_type)
}

fn invalid(error: serde_json::Error) -> Refusal {
    Refusal::BadRequest(format!("Invalid `disaggregated_params`: {error}"))
}
