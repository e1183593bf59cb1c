//! Owns vLLM's `MooncakeConnector`: the legs find each other by a transfer's number and the prefill engine's id.
//!
//! Prefill runs first, then decode, though the engines would take either order: while prefill may still fail, no decode is
//! at risk. Prefill's answer has nothing about the transfer; a worker's engine ids, one for each rank, are read from its
//! bootstrap server and are new with each start. Source: vLLM's Mooncake connector and its proxy.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::bootstrap::Bootstrap;
use super::nixl::PARAMS;
use super::usage;
use crate::json::{Edits, quoted};

pub use super::nixl::{cleanup_edits, decode_edits};

/// Edits that make the client's body the prefill leg's, except for the transfer.
pub use super::nixl::cleanup_edits as prefill_edits;

/// Path of the engine ids on a bootstrap server.
pub const QUERY: &str = "/query";

/// A prefill worker's engine ids, by rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineIds(BTreeMap<u32, String>);

impl EngineIds {
    /// Reads a bootstrap server's answer; none where the answer has no engine.
    pub fn parse(answer: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Entry {
            engine_id: String,
        }
        let entries: BTreeMap<u32, Entry> = serde_json::from_slice(answer).ok()?;
        let named = entries
            .into_iter()
            .filter(|(_, entry)| !entry.engine_id.is_empty());
        let ids: BTreeMap<u32, String> =
            named.map(|(rank, entry)| (rank, entry.engine_id)).collect();
        (!ids.is_empty()).then_some(Self(ids))
    }

    /// Whether these may be the engines of `earlier`: each of those is still there.
    pub fn continue_those(&self, earlier: &Self) -> bool {
        let mut before = earlier.0.iter();
        before.all(|(rank, id)| self.0.get(rank) == Some(id))
    }

    /// The engine of a rank.
    pub fn of(&self, rank: u32) -> Option<&str> {
        self.0.get(&rank).map(String::as_str)
    }
}

/// One hand-off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// Transfer number, used once.
    pub number: u64,
    /// The prefill worker's bootstrap server.
    pub bootstrap: Bootstrap,
    /// Id of the prefill engine.
    pub engine_id: String,
}

impl Transfer {
    /// Adds the transfer to the prefill leg.
    pub fn put_into_prefill(&self, edits: &mut Edits) {
        let params = format!(
            r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-{}"}}"#,
            self.number
        );
        edits.insert(PARAMS, params);
    }

    /// Adds the transfer to the decode leg, or to the clean-up leg.
    pub fn put_into_decode(&self, edits: &mut Edits) {
        let params = format!(
            r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":"http://{}","remote_engine_id":{},"transfer_id":"xfer-{}"}}"#,
            self.bootstrap,
            quoted(&self.engine_id),
            self.number
        );
        edits.insert(PARAMS, params);
    }
}

/// KV blocks that the prefill worker holds until they are fetched. Its answer has no block ids, so the prompt's tokens are
/// counted.
pub fn blocks(answer: &[u8], block_tokens: u32) -> u64 {
    usage::prompt_blocks(answer, block_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Generation, Request};

    #[test]
    fn both_legs_and_the_clean_up_golden_bytes() {
        let body = r#"{"model":"m", "messages":[],"stream":true,"kv_transfer_params":{},"max_tokens":9,"seed":9007199254740993}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        let transfer = Transfer {
            number: u64::MAX,
            bootstrap: Bootstrap::beside("10.0.0.1:8000".parse().unwrap(), 8998),
            engine_id: "a\"b".to_owned(),
        };
        let leg = |mut edits: Edits, put: fn(&Transfer, &mut Edits)| {
            put(&transfer, &mut edits);
            String::from_utf8(edits.apply(body.as_bytes())).unwrap()
        };
        let one =
            r#""model":"m", "messages":[],"stream":false,"max_tokens":1,"seed":9007199254740993"#;
        let pulls = r#""kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":"http://10.0.0.1:8998","remote_engine_id":"a\"b","transfer_id":"xfer-18446744073709551615"}"#;
        assert_eq!(
            leg(prefill_edits(&request), Transfer::put_into_prefill),
            format!(
                r#"{{"kv_transfer_params":{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-18446744073709551615"}},{one}}}"#
            )
        );
        assert_eq!(
            leg(decode_edits(&request), Transfer::put_into_decode),
            format!(
                r#"{{{pulls},"model":"m", "messages":[],"stream":true,"max_tokens":9,"seed":9007199254740993}}"#
            )
        );
        assert_eq!(
            leg(cleanup_edits(&request), Transfer::put_into_decode),
            format!("{{{pulls},{one}}}")
        );
    }

    #[test]
    fn the_limit_comes_before_the_transfer() {
        let body = r#"{"model":"m","prompt":"p"}"#;
        let request = Request::parse(Generation::Completions, body.as_bytes()).unwrap();
        let transfer = Transfer {
            number: 7,
            bootstrap: Bootstrap::beside("[fd00::1]:8000".parse().unwrap(), 1),
            engine_id: "e".to_owned(),
        };
        let mut edits = prefill_edits(&request);
        transfer.put_into_prefill(&mut edits);
        let leg = String::from_utf8(edits.apply(body.as_bytes())).unwrap();
        assert!(
            leg.starts_with(r#"{"max_tokens":1,"kv_transfer_params":{"do_remote"#),
            "{leg}"
        );
        let mut edits = decode_edits(&request);
        transfer.put_into_decode(&mut edits);
        let leg = String::from_utf8(edits.apply(body.as_bytes())).unwrap();
        assert!(
            leg.contains(r#""remote_bootstrap_addr":"http://[fd00::1]:1","#),
            "{leg}"
        );
    }

    #[test]
    fn engine_ids_are_known_by_rank() {
        let ids = EngineIds::parse(
            br#"{"0":{"engine_id":"a_dp0","worker_addr":{"0":{"0":"tcp://x"}}},"1":{"engine_id":"a_dp1"}}"#,
        )
        .unwrap();
        assert_eq!(
            (ids.of(0), ids.of(1), ids.of(2)),
            (Some("a_dp0"), Some("a_dp1"), None)
        );
        for bad in [
            "",
            "{}",
            "[]",
            "null",
            r#"{"0":{}}"#,
            r#"{"0":"a"}"#,
            r#"{"x":{"engine_id":"a"}}"#,
            r#"{"0":{"engine_id":""}}"#,
            r#"{"0":{"engine_id":7}}"#,
        ] {
            assert_eq!(EngineIds::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn blocks_are_told_by_the_prompts_tokens() {
        let answer = br#"{"usage":{"prompt_tokens":33},"kv_transfer_params":null}"#;
        assert_eq!(blocks(answer, 16), 3);
        assert_eq!(blocks(b"{}", 16), 0);
    }
}
