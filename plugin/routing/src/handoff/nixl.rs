//! Owns vLLM's `NixlConnector`: prefill first, then decode with the `kv_transfer_params` of prefill's answer.
//!
//! The prefill leg requests one token, unstreamed, and announces that another engine will fetch the blocks. The decode leg
//! is the client's body with that object inserted. Sources: vLLM's NIXL connector and its proxy; the rules on
//! `stream_options` and `min_tokens` are vLLM's request validation.

use std::time::Duration;

use super::protocol::{
    AbortCall, Handoff, HandoffPair, LegOrder, Prefill, Protocol, ProtocolRules,
};
use super::rooms::Rooms;
use super::staged::Staged;
use super::unserved::{self, Unserved};
use super::{MAX_HANDOFF, hosts, one_token, without};
use crate::json::{Edits, Object, count_numbers};
use crate::refusal::Refusal;
use crate::request::{Generation, Request};
use crate::transfer::KV_TRANSFER;

pub(super) const PARAMS: &str = KV_TRANSFER.name();
const BLOCK_IDS: &str = "remote_block_ids";
/// Set where blocks wait to be fetched: without it decode would compute the prompt itself.
const TO_FETCH: &str = "do_remote_prefill";
/// When the prefill worker frees the blocks, in seconds since 1970; null where unknown.
const EXPIRY: &str = "remote_blocks_expiry_time";
/// Where decode fetches the blocks.
const HOST: &str = "remote_host";

/// Parameters of the prefill leg: the engine keeps the blocks for a decode worker that is not known yet.
const PREFILL_PARAMS: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// What vLLM's hand-offs cannot serve, whichever connector moves the blocks.
pub(super) const UNSERVED: &[&Unserved] = &[
    &unserved::PROMPT_LOGPROBS,
    &unserved::ECHOED_LOGPROBS,
    &unserved::BEAM_SEARCH,
    &unserved::BACKGROUND,
    &unserved::PREVIOUS_RESPONSE,
];

/// vLLM's APIs whose requests are split.
pub(super) const APIS: &[Generation] = &[
    Generation::Chat,
    Generation::Completions,
    Generation::Responses,
];

/// vLLM with `NixlConnector`, or LMCache over it.
#[derive(Debug)]
pub struct Nixl;

impl Protocol for Nixl {
    fn rules(&self) -> &'static ProtocolRules {
        &ProtocolRules {
            name: "nixl",
            order: LegOrder::Sequential,
            reaches_workers: true,
            split: APIS,
            split_if_configured: &[],
            has_generate_api: false,
            unserved: UNSERVED,
            refuses_too_long: true,
        }
    }

    fn handoff(
        &self,
        _pair: &HandoffPair<'_>,
        request: &Request<'_>,
        _rooms: &mut Rooms,
    ) -> Result<Box<dyn Handoff>, Refusal> {
        Ok(Box::new(NixlHandoff::of(request)))
    }
}

/// The legs of one request: nothing in them depends on the pair.
#[derive(Debug, Clone)]
struct NixlHandoff {
    /// The prefill leg and the clean-up leg, without `kv_transfer_params`.
    one_token: Edits,
    decode: Edits,
}

impl NixlHandoff {
    fn of(request: &Request<'_>) -> Self {
        Self {
            one_token: cleanup_edits(request),
            decode: decode_edits(request),
        }
    }
}

impl Handoff for NixlHandoff {
    fn prefill(&self) -> Edits {
        let mut edits = self.one_token.clone();
        edits.insert(PARAMS, PREFILL_PARAMS);
        edits
    }

    fn decode_at_once(&self) -> Option<Edits> {
        None
    }

    fn staged(&self, answer: &[u8], _block_tokens: u32) -> Option<Staged> {
        let params = TransferParams::parse(answer)?;
        let (mut decode, mut cleanup) = (self.decode.clone(), self.one_token.clone());
        params.put_into(&mut decode);
        params.put_into(&mut cleanup);
        Some(Staged {
            blocks: params.blocks,
            hosts: params.hosts,
            decode,
            cleanup,
            expires: params.expires,
        })
    }

    fn renewed(&self, _prefill: &Prefill<'_>, _rooms: &mut Rooms) -> Option<Box<dyn Handoff>> {
        Some(Box::new(self.clone()))
    }

    fn abort(&self) -> Option<AbortCall> {
        None
    }
}

/// Edits that make the client's body request one token, unstreamed, for the prefill leg and for the leg that fetches blocks
/// left behind by a client; without the hand-off.
pub fn cleanup_edits(request: &Request<'_>) -> Edits {
    without(request, &[KV_TRANSFER], one_token::edits(request))
}

/// Edits that make the client's body the decode leg's, except for the hand-off, which only prefill's answer contains.
pub fn decode_edits(request: &Request<'_>) -> Edits {
    without(request, &[KV_TRANSFER], request.body.edit())
}

/// The `kv_transfer_params` of a prefill answer, passed on byte for byte, because their fields differ by version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferParams {
    params: String,
    /// KV blocks that the prefill worker holds until they are fetched.
    pub blocks: u64,
    /// When the prefill worker frees the blocks, since 1970; none where unknown.
    expires: Option<Duration>,
    /// The hosts that decode would fetch the blocks from.
    hosts: Vec<String>,
}

impl TransferParams {
    /// Reads a prefill worker's answer; none without a hand-off (missing, null, not an object, longer than any prompt
    /// needs, or without blocks to fetch).
    pub fn parse(answer: &[u8]) -> Option<Self> {
        let object = Object::parse(answer, &[PARAMS]).ok()?;
        let params = object.get(PARAMS)?.value;
        if params.len() > MAX_HANDOFF {
            return None;
        }
        let wanted = [BLOCK_IDS, TO_FETCH, EXPIRY, HOST];
        let fields = Object::parse(params.as_bytes(), &wanted).ok()?;
        if fields.get(TO_FETCH)?.value != "true" {
            return None;
        }
        // Block ids come as one list, or as a list of groups.
        let blocks = fields.get(BLOCK_IDS).map(|ids| count_numbers(ids.value));
        // Of duplicate members engines take the last: all are checked.
        let hosts = fields.all(HOST).flat_map(|host| hosts::named(host.value));
        Some(Self {
            hosts: hosts.collect(),
            params: params.to_owned(),
            blocks: blocks.unwrap_or_default(),
            expires: fields.get(EXPIRY).and_then(|at| seconds(at.value)),
        })
    }

    /// Adds the hand-off to the decode leg, or to the clean-up leg.
    pub fn put_into(&self, edits: &mut Edits) {
        edits.insert(PARAMS, self.params.as_str());
    }
}

/// A wall-clock time. Some releases count from their own start, which is useless here.
fn seconds(text: &str) -> Option<Duration> {
    const YEAR_2001: Duration = Duration::from_secs(1_000_000_000);
    let seconds = text.parse().ok()?;
    let time = Duration::try_from_secs_f64(seconds).ok()?;
    (time > YEAR_2001).then_some(time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Generation;

    const ASK: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

    fn prefill_leg(generation: Generation, body: &str) -> String {
        let request = Request::parse(generation, body.as_bytes()).unwrap();
        let edits = NixlHandoff::of(&request).prefill();
        String::from_utf8(edits.apply(body.as_bytes())).unwrap()
    }

    #[test]
    fn prefill_leg_golden_bytes() {
        let body = r#"{"model":"m", "stream" : true,"stream_options":{"include_usage":true},
  "messages":[{"role":"user","content":"hi"}],"seed":9007199254740993,"min_tokens":5,"max_tokens":100 }"#;
        let expected = format!(
            r#"{{"kv_transfer_params":{ASK},"model":"m", "stream" : false,"messages":[{{"role":"user","content":"hi"}}],"seed":9007199254740993,"min_tokens":1,"max_tokens":1 }}"#
        );
        assert_eq!(prefill_leg(Generation::Chat, body), expected);
    }

    #[test]
    fn a_limit_is_set_where_the_client_set_none_and_every_spelling_is_capped() {
        assert_eq!(
            prefill_leg(Generation::Completions, r#"{"model":"m","prompt":"p"}"#),
            format!(r#"{{"max_tokens":1,"kv_transfer_params":{ASK},"model":"m","prompt":"p"}}"#)
        );
        assert_eq!(
            prefill_leg(
                Generation::Chat,
                r#"{"model":"m","messages":[],"max_completion_tokens":7}"#
            ),
            format!(
                r#"{{"max_tokens":1,"kv_transfer_params":{ASK},"model":"m","messages":[],"max_completion_tokens":1}}"#
            )
        );
        assert_eq!(
            prefill_leg(Generation::Responses, r#"{"model":"m","input":"p"}"#),
            format!(
                r#"{{"max_output_tokens":1,"kv_transfer_params":{ASK},"model":"m","input":"p"}}"#
            )
        );
        assert_eq!(
            prefill_leg(
                Generation::Chat,
                r#"{"max_tokens":3,"model":"m","messages":[],"max_tokens":null}"#
            ),
            format!(
                r#"{{"kv_transfer_params":{ASK},"max_tokens":1,"model":"m","messages":[],"max_tokens":1}}"#
            )
        );
    }

    #[test]
    fn decode_leg_is_the_clients_body_with_the_handoff_put_in_unchanged() {
        let params = r#"{"do_remote_prefill":true, "remote_block_ids":[[1,2],[3]],"remote_port":5600,"new":1e400,"big":18446744073709551617}"#;
        let answer =
            format!(r#"{{"id":"x","choices":[],"kv_transfer_params":{params},"usage":null}}"#);
        let handoff = TransferParams::parse(answer.as_bytes()).unwrap();
        assert_eq!(handoff.blocks, 3);
        let body = r#" {"model":"m","kv_transfer_params":null,"messages":[], "seed":9007199254740993,"seed":1.0}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        let mut edits = decode_edits(&request);
        handoff.put_into(&mut edits);
        let leg = edits.apply(body.as_bytes());
        assert_eq!(
            String::from_utf8(leg).unwrap(),
            format!(
                r#" {{"kv_transfer_params":{params},"model":"m","messages":[], "seed":9007199254740993,"seed":1.0}}"#
            )
        );
    }

    #[test]
    fn an_answer_without_a_handoff_is_none() {
        for answer in [
            "",
            "{}",
            "[]",
            "not json",
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":"x"}"#,
            r#"{"kv_transfer_params":[1]}"#,
            r#"{"kv_transfer_params":{}}"#,
            r#"{"kv_transfer_params":{"do_remote_prefill":false,"do_remote_decode":true}}"#,
            r#"{"kv_transfer_params":{"do_remote_prefill":"yes"}}"#,
        ] {
            assert_eq!(TransferParams::parse(answer.as_bytes()), None, "{answer}");
        }
        let empty = TransferParams::parse(
            br#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[]}}"#,
        )
        .unwrap();
        assert_eq!(empty.blocks, 0);
    }
}
