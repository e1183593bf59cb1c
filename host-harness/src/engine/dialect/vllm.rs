//! Owns vLLM's NixlConnector: `kv_transfer_params` in the request, the answer and the next request.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::{Handoff, Leg};
use crate::engine::refusal::Refusal;
use crate::engine::request::Generation;

/// Size of every kind of parallelism in the simulated engines.
const ONE: u32 = 1;
/// Direction of the KV transfer: decode reads it.
const PULL: &str = "pull";

const MISSING: &str = "EngineCore encountered an issue: kv_transfer_params with do_remote_prefill are required for decode mode";

#[derive(Deserialize)]
struct Flags {
    do_remote_prefill: Option<bool>,
    do_remote_decode: Option<bool>,
}

/// The hand-off's `kv_transfer_params`, in vLLM's order.
#[derive(Serialize, Deserialize)]
pub struct KvTransferParams {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    remote_block_ids: Vec<Vec<u32>>,
    remote_engine_id: String,
    remote_request_id: String,
    remote_host: String,
    remote_port: u16,
    tp_size: u32,
    #[serde(flatten)]
    newer: Option<Newer>,
}

/// Fields that vLLM has added since 0.16.
#[derive(Serialize, Deserialize)]
struct Newer {
    dcp_size: u32,
    pp_size: u32,
    remote_num_tokens: u64,
    remote_blocks_expiry_time: Option<f64>,
    transfer_mode: String,
    remote_prefill_cached_tokens: u64,
}

impl From<Handoff> for KvTransferParams {
    fn from(handoff: Handoff) -> Self {
        Self {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: handoff.block_groups,
            remote_engine_id: handoff.engine_id,
            remote_request_id: handoff.request_id,
            remote_host: handoff.host,
            remote_port: handoff.port,
            tp_size: ONE,
            newer: Some(Newer {
                dcp_size: ONE,
                pp_size: ONE,
                remote_num_tokens: handoff.prompt_tokens,
                remote_blocks_expiry_time: None,
                transfer_mode: PULL.to_owned(),
                remote_prefill_cached_tokens: handoff.cached_tokens,
            }),
        }
    }
}

/// Refuses parameters that are no object, as engines of every role do.
///
/// # Errors
/// [`Refusal::Invalid`].
pub fn check_params(generation: &Generation) -> Result<(), Refusal> {
    match &generation.kv_transfer_params {
        Some(params) => read_flags(params).map(drop),
        None => Ok(()),
    }
}

/// Checks that a prefill engine runs this request.
///
/// # Errors
/// [`Refusal::NotAPrefillLeg`] if it would not, [`Refusal::Invalid`] if it cannot be parsed.
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

/// The hand-off in a request to a decode engine.
///
/// # Errors
/// [`Refusal::MissingHandoff`], [`Refusal::WrongHandoff`], or [`Refusal::Invalid`] if it is not an object at all.
pub fn read(generation: &Generation) -> Result<Handoff, Refusal> {
    let params = pulled_params(generation)?;
    let remote: KvTransferParams = serde_json::from_str(params.get())
        .map_err(|error| Refusal::WrongHandoff(format!("got invalid KVTransferParams: {error}")))?;
    if remote.do_remote_decode {
        return Err(Refusal::WrongHandoff(
            "do_remote_decode is true as well".into(),
        ));
    }
    if remote.tp_size != ONE {
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
        prompt_tokens: remote
            .newer
            .as_ref()
            .map_or(0, |newer| newer.remote_num_tokens),
        cached_tokens: remote
            .newer
            .map_or(0, |newer| newer.remote_prefill_cached_tokens),
    })
}

/// The parameters of a request whose prefill is done, by its own flags.
///
/// # Errors
/// [`Refusal::MissingHandoff`], or [`Refusal::Invalid`] if they are no object.
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

/// The leg that a request asks to be.
pub(super) fn leg(generation: &Generation) -> Leg {
    let params = generation.kv_transfer_params.as_deref();
    match params.map(read_flags) {
        Some(Ok(flags)) if flags.do_remote_decode == Some(true) => Leg::Prefill,
        Some(Ok(flags)) if flags.do_remote_prefill == Some(true) => Leg::Decode,
        _ => Leg::Whole,
    }
}

/// vLLM accepts any object here and answers 400 to anything else.
fn read_flags(params: &RawValue) -> Result<Flags, Refusal> {
    let invalid = |error| Refusal::Invalid {
        place: "body.kv_transfer_params".to_owned(),
        problem: format!("Invalid `kv_transfer_params`: {error}"),
    };
    serde_json::from_str::<Map<String, Value>>(params.get()).map_err(invalid)?;
    serde_json::from_str(params.get()).map_err(invalid)
}
