//! vLLM's NixlConnector: `kv_transfer_params` in the request, the answer and the request again.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::{Handoff, Leg};
use crate::engine::refusal::Refusal;
use crate::engine::request::Generation;

/// The simulated engines' tensor parallelism.
const TP_SIZE: u32 = 1;

const MISSING: &str = "EngineCore encountered an issue: kv_transfer_params with do_remote_prefill are required for decode mode";

#[derive(Deserialize)]
struct Flags {
    do_remote_prefill: Option<bool>,
    do_remote_decode: Option<bool>,
}

/// The hand-off's `kv_transfer_params`, in vLLM's order.
#[derive(Serialize, Deserialize)]
pub struct Params {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    remote_block_ids: Vec<Vec<u32>>,
    remote_engine_id: String,
    remote_request_id: String,
    remote_host: String,
    remote_port: u16,
    tp_size: u32,
}

impl From<Handoff> for Params {
    fn from(handoff: Handoff) -> Self {
        Self {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: handoff.block_groups,
            remote_engine_id: handoff.engine_id,
            remote_request_id: handoff.request_id,
            remote_host: handoff.host,
            remote_port: handoff.port,
            tp_size: TP_SIZE,
        }
    }
}

/// Whether a prefill engine runs this request.
///
/// # Errors
/// [`Refusal::NotAPrefillLeg`] where it would not, [`Refusal::BadRequest`] where it cannot be read.
pub fn check_prefill_leg(generation: &Generation) -> Result<(), Refusal> {
    let Some(params) = &generation.kv_transfer_params else {
        return Err(Refusal::NotAPrefillLeg("no kv_transfer_params"));
    };
    let flags = read_flags(params)?;
    if flags.do_remote_decode != Some(true) {
        return Err(Refusal::NotAPrefillLeg("do_remote_decode is not true"));
    }
    if flags.do_remote_prefill == Some(true) {
        return Err(Refusal::NotAPrefillLeg("do_remote_prefill is true as well"));
    }
    if generation.stream {
        return Err(Refusal::NotAPrefillLeg("stream is true"));
    }
    if generation.completion_tokens() != 1 {
        return Err(Refusal::NotAPrefillLeg("more than one token to generate"));
    }
    Ok(())
}

/// The hand-off that came with a request to a decode engine.
///
/// # Errors
/// [`Refusal::MissingHandoff`], [`Refusal::WrongHandoff`], or [`Refusal::BadRequest`] where it is not an object at all.
pub fn read(generation: &Generation) -> Result<Handoff, Refusal> {
    let params = pulled_params(generation)?;
    let remote: Params = serde_json::from_str(params.get())
        .map_err(|error| Refusal::WrongHandoff(format!("got invalid KVTransferParams: {error}")))?;
    if remote.do_remote_decode {
        return Err(Refusal::WrongHandoff(
            "do_remote_decode is true as well".into(),
        ));
    }
    if remote.tp_size != TP_SIZE {
        return Err(Refusal::WrongHandoff(format!(
            "tp_size {} is not the remote's",
            remote.tp_size
        )));
    }
    Ok(Handoff {
        engine_id: remote.remote_engine_id,
        request_id: remote.remote_request_id,
        block_groups: remote.remote_block_ids,
        host: remote.remote_host,
        port: remote.remote_port,
    })
}

/// The parameters of a request that says it has its prefill behind it.
///
/// # Errors
/// [`Refusal::MissingHandoff`], or [`Refusal::BadRequest`] where they are no object.
pub(super) fn pulled_params(generation: &Generation) -> Result<&RawValue, Refusal> {
    let missing = Refusal::MissingHandoff(MISSING);
    let Some(params) = generation.kv_transfer_params.as_deref() else {
        return Err(missing);
    };
    match read_flags(params)?.do_remote_prefill {
        Some(true) => Ok(params),
        _ => Err(missing),
    }
}

/// Which leg a request asks to be.
pub(super) fn leg(generation: &Generation) -> Leg {
    let params = generation.kv_transfer_params.as_deref();
    match params.map(read_flags) {
        Some(Ok(flags)) if flags.do_remote_decode == Some(true) => Leg::Prefill,
        Some(Ok(flags)) if flags.do_remote_prefill == Some(true) => Leg::Decode,
        _ => Leg::Whole,
    }
}

/// vLLM takes any object here and answers 400 to anything else.
fn read_flags(params: &RawValue) -> Result<Flags, Refusal> {
    let invalid = |error| Refusal::BadRequest(format!("Invalid `kv_transfer_params`: {error}"));
    serde_json::from_str::<Map<String, Value>>(params.get()).map_err(invalid)?;
    serde_json::from_str(params.get()).map_err(invalid)
}
