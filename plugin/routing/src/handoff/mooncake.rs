//! Owns vLLM's `MooncakeConnector`: the legs find each other by a transfer's number and the prefill engine's id.
//!
//! Prefill runs first, then decode, though the engines would take either order: while prefill may still fail, no decode is
//! at risk. Prefill's answer has nothing about the transfer; a worker's engine ids, one for each rank, are read from its
//! bootstrap server and are new with each start. Source: vLLM's Mooncake connector and its proxy.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde::Deserialize;

use super::binding::{
    Binder, Binding, BindingQuery, Bootstrap, EngineIds, Learned, QueriedCluster,
};
use super::nixl::{self, PARAMS};
use super::protocol::{
    AbortCall, Handoff, HandoffPair, LegOrder, Prefill, Protocol, ProtocolRules,
};
use super::rooms::Rooms;
use super::staged::Staged;
use crate::answer::{End, Verdict, usage};
use crate::json::{Edits, quoted};
use crate::refusal::Refusal;
use crate::rendezvous::NotServed;
use crate::request::Request;

pub use super::nixl::{cleanup_edits, decode_edits};

/// vLLM with `MooncakeConnector`.
#[derive(Debug)]
pub struct Mooncake;

impl Protocol for Mooncake {
    fn rules(&self) -> &'static ProtocolRules {
        &ProtocolRules {
            name: "mooncake",
            order: LegOrder::Sequential,
            reaches_workers: true,
            split: nixl::APIS,
            split_if_configured: &[],
            has_generate_api: false,
            unserved: nixl::UNSERVED,
            refuses_too_long: true,
        }
    }

    fn binder(&self) -> Option<&'static dyn Binder> {
        Some(&Self)
    }

    fn handoff(
        &self,
        pair: &HandoffPair<'_>,
        request: &Request<'_>,
        rooms: &mut Rooms,
    ) -> Result<Box<dyn Handoff>, Refusal> {
        let transfer = Transfer::draw(&pair.prefill, rooms);
        Ok(Box::new(MooncakeHandoff {
            one_token: cleanup_edits(request),
            decode: decode_edits(request),
            transfer: transfer.ok_or(Refusal::NotServed(NotServed::Pending))?,
        }))
    }
}

impl Binder for Mooncake {
    fn learned(&self) -> Learned {
        Learned::EngineIds
    }

    fn cluster(&self) -> QueriedCluster {
        QueriedCluster::Bootstrap
    }

    fn query(&self, worker: SocketAddr, port: Option<u16>) -> Option<BindingQuery> {
        Some(BindingQuery {
            destination: SocketAddr::new(worker.ip(), port?),
            path: "/query",
        })
    }

    fn read(&self, worker: SocketAddr, port: Option<u16>, answer: &[u8]) -> Option<Binding> {
        Some(Binding {
            bootstrap: Bootstrap::beside(worker, port?),
            engines: engine_ids(answer)?,
        })
    }

    fn renewal(&self) -> Duration {
        Duration::from_millis(500)
    }
}

/// Reads a bootstrap server's answer; none where the answer has no engine.
pub fn engine_ids(answer: &[u8]) -> Option<EngineIds> {
    #[derive(Deserialize)]
    struct Entry {
        engine_id: String,
    }
    let entries: BTreeMap<u32, Entry> = serde_json::from_slice(answer).ok()?;
    let named = entries
        .into_iter()
        .filter(|(_, entry)| !entry.engine_id.is_empty());
    let ids: EngineIds = named.map(|(rank, entry)| (rank, entry.engine_id)).collect();
    (!ids.is_empty()).then_some(ids)
}

/// The legs of one request, and the transfer in which they meet.
#[derive(Debug, Clone)]
struct MooncakeHandoff {
    /// The prefill leg and the clean-up leg, without the transfer.
    one_token: Edits,
    decode: Edits,
    transfer: Transfer,
}

impl Handoff for MooncakeHandoff {
    fn prefill(&self) -> Edits {
        let mut edits = self.one_token.clone();
        self.transfer.put_into_prefill(&mut edits);
        edits
    }

    fn decode_at_once(&self) -> Option<Edits> {
        None
    }

    /// The answer says nothing about the transfer: only an answer that ended at the limit leaves something to decode. It
    /// names no host either: decode gets the server known from the fleet.
    fn staged(&self, answer: &[u8], block_tokens: u32) -> Option<Staged> {
        if Verdict::of_prefill(answer) != Verdict::Ended(End::Limit) {
            return None;
        }
        let (mut decode, mut cleanup) = (self.decode.clone(), self.one_token.clone());
        self.transfer.put_into_decode(&mut decode);
        self.transfer.put_into_decode(&mut cleanup);
        Some(Staged {
            blocks: blocks(answer, block_tokens),
            hosts: Vec::new(),
            decode,
            cleanup,
            expires: None,
        })
    }

    fn renewed(&self, prefill: &Prefill<'_>, rooms: &mut Rooms) -> Option<Box<dyn Handoff>> {
        Some(Box::new(Self {
            transfer: Transfer::draw(prefill, rooms)?,
            ..self.clone()
        }))
    }

    fn abort(&self) -> Option<AbortCall> {
        None
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
    /// A new transfer from this worker. None if the worker is not bound, or has fewer engines than the fleet gives it ranks.
    fn draw(prefill: &Prefill<'_>, rooms: &mut Rooms) -> Option<Self> {
        let binding = prefill.binding?;
        let engine_id = binding.engines.get(&prefill.target.rank.unwrap_or(0))?;
        Some(Self {
            number: rooms.draw_any(),
            bootstrap: binding.bootstrap.clone(),
            engine_id: engine_id.clone(),
        })
    }

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
    use crate::request::Generation;

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
            leg(cleanup_edits(&request), Transfer::put_into_prefill),
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
        let mut edits = cleanup_edits(&request);
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
        let ids = engine_ids(
            br#"{"0":{"engine_id":"a_dp0","worker_addr":{"0":{"0":"tcp://x"}}},"1":{"engine_id":"a_dp1"}}"#,
        )
        .unwrap();
        assert_eq!(
            ids,
            EngineIds::from([(0, "a_dp0".to_owned()), (1, "a_dp1".to_owned())])
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
            assert_eq!(engine_ids(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn blocks_are_told_by_the_prompts_tokens() {
        let answer = br#"{"usage":{"prompt_tokens":33},"kv_transfer_params":null}"#;
        assert_eq!(blocks(answer, 16), 3);
        assert_eq!(blocks(b"{}", 16), 0);
    }
}
