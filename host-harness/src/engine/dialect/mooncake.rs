//! Owns vLLM's MooncakeConnector: a transfer id in both legs, which meet at the prefill engine's bootstrap server.

use std::collections::BTreeMap;

use hyper::Uri;
use hyper::header::HeaderMap;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::{asked_rank, vllm};
use crate::engine::refusal::Refusal;
use crate::engine::request::Generation;

/// Path at which a bootstrap server lists the ids of its engine's ranks.
pub const QUERY: &str = "/query";

#[derive(Deserialize)]
struct PrefillParams {
    transfer_id: Option<String>,
}

#[derive(Deserialize)]
struct DecodeParams {
    remote_bootstrap_addr: String,
    remote_engine_id: String,
    transfer_id: String,
}

/// Location of a decode leg's KV.
#[derive(Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Host of the prefill engine's bootstrap server, an IPv6 address without brackets.
    pub host: String,
    /// Port of the bootstrap server.
    pub port: u16,
    /// The id of the rank that runs the prefill.
    pub engine_id: String,
    /// The transfer id, in both legs.
    pub id: String,
}

/// The transfer id of a request to a prefill engine.
///
/// # Errors
/// [`Refusal::NotAPrefillLeg`], or [`Refusal::BadRequest`] if it cannot be parsed.
pub fn transfer_id(generation: &Generation) -> Result<String, Refusal> {
    vllm::check_prefill_leg(generation)?;
    let params = generation.kv_transfer_params.as_deref();
    let id = params.map(read_prefill).transpose()?.flatten();
    match id {
        Some(id) if !id.is_empty() => Ok(id),
        _ => Err(Refusal::NotAPrefillLeg("no transfer_id")),
    }
}

/// The transfer that a request to a decode engine names.
///
/// # Errors
/// [`Refusal::MissingHandoff`], [`Refusal::WrongHandoff`], or [`Refusal::BadRequest`] if it is not an object at all.
pub fn read(generation: &Generation) -> Result<Transfer, Refusal> {
    let params = vllm::pulled_params(generation)?;
    let params: DecodeParams = serde_json::from_str(params.get())
        .map_err(|error| Refusal::WrongHandoff(format!("got invalid KVTransferParams: {error}")))?;
    let address = &params.remote_bootstrap_addr;
    let (host, port) = split(address).ok_or_else(|| {
        Refusal::WrongHandoff(format!(
            "remote_bootstrap_addr {address} is not http://host:port"
        ))
    })?;
    Ok(Transfer {
        host,
        port,
        engine_id: params.remote_engine_id,
        id: params.transfer_id,
    })
}

/// The rank that runs a leg. A prefill leg must name its rank if there are several, since the decode leg names it by its id.
///
/// # Errors
/// [`Refusal::BadRank`].
pub fn prefill_rank(headers: &HeaderMap, dp_size: u32) -> Result<u64, Refusal> {
    match asked_rank(headers, dp_size)? {
        Some(rank) => Ok(rank),
        None if dp_size == 1 => Ok(0),
        None => Err(Refusal::BadRank(format!(
            "is missing, and there are {dp_size}"
        ))),
    }
}

/// The id of one of `dp_size` ranks of the engine `engine_id`.
pub fn rank_id(engine_id: &str, rank: u64, dp_size: u32) -> String {
    match dp_size {
        1 => engine_id.to_owned(),
        _ => format!("{engine_id}_dp{rank}"),
    }
}

/// The JSON answer to [`QUERY`].
pub fn ranks(engine_id: &str, dp_size: u32) -> String {
    let rank = |rank: u32| {
        let id = rank_id(engine_id, rank.into(), dp_size);
        (rank.to_string(), json!({ "engine_id": id }))
    };
    let ranks: BTreeMap<_, _> = (0..dp_size).map(rank).collect();
    json!(ranks).to_string()
}

fn read_prefill(params: &RawValue) -> Result<Option<String>, Refusal> {
    let params: PrefillParams = serde_json::from_str(params.get())
        .map_err(|error| Refusal::BadRequest(format!("Invalid `kv_transfer_params`: {error}")))?;
    Ok(params.transfer_id)
}

/// Host and port of an address in the form `http://host:port`.
pub(super) fn split(address: &str) -> Option<(String, u16)> {
    let uri: Uri = address.parse().ok()?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") {
        return None;
    }
    let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
    Some((host.to_owned(), uri.port_u16()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::Endpoint;

    fn generation(params: &str) -> Generation {
        let body =
            format!(r#"{{"model":"m","prompt":"x","max_tokens":1,"kv_transfer_params":{params}}}"#);
        Generation::parse(Endpoint::Completions, body.as_bytes()).expect("valid")
    }

    #[test]
    fn a_prefill_leg_names_its_transfer() {
        let id = |params: &str| transfer_id(&generation(params)).ok();
        let good = r#"{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-1"}"#;
        assert_eq!(id(good).as_deref(), Some("xfer-1"));
        for bad in [
            r#"{"do_remote_decode":true}"#,
            r#"{"do_remote_decode":true,"transfer_id":""}"#,
            r#"{"do_remote_decode":true,"transfer_id":1}"#,
            r#"{"do_remote_decode":false,"transfer_id":"x"}"#,
            r#"{"do_remote_decode":true,"do_remote_prefill":true,"transfer_id":"x"}"#,
            "null",
        ] {
            assert_eq!(id(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_decode_leg_says_where_its_transfer_is() {
        let at = |address: &str| {
            read(&generation(&format!(
                r#"{{"do_remote_prefill":true,"do_remote_decode":false,"remote_bootstrap_addr":"{address}",
                    "remote_engine_id":"e","transfer_id":"x"}}"#
            )))
        };
        let transfer = at("http://[::1]:8998").expect("valid");
        assert_eq!((transfer.host.as_str(), transfer.port), ("::1", 8998));
        for bad in [
            "127.0.0.1:8998",
            "http://127.0.0.1",
            "https://127.0.0.1:1",
            "",
        ] {
            assert!(matches!(at(bad), Err(Refusal::WrongHandoff(_))), "{bad}");
        }
        let missing = read(&generation(
            r#"{"do_remote_prefill":false,"transfer_id":"x"}"#,
        ));
        assert!(matches!(missing, Err(Refusal::MissingHandoff(_))));
    }

    #[test]
    fn ranks_have_ids_of_their_own() {
        assert_eq!(ranks("e", 1), r#"{"0":{"engine_id":"e"}}"#);
        let two = r#"{"0":{"engine_id":"e_dp0"},"1":{"engine_id":"e_dp1"}}"#;
        assert_eq!(ranks("e", 2), two);
    }
}
