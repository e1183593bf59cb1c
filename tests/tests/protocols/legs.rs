//! Golden bytes: both legs of every kind of request, as the engine's protocol has them.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::golden::{Holes, front, holes, number};
use pd_router_e2e::protocols::Protocol;
use serde_json::Value;

use crate::client_requests::{CHATS, COMPLETED, ClientRequest, RESPONDED};
use crate::rig::{Legs, Rig};

const NIXL_PREFILL: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
/// The order of its members is the engine's choice.
const NIXL_DECODE: &str = r#""kv_transfer_params":{‹hand-off›}"#;

const MOONCAKE_PREFILL: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-‹transfer›"}"#;
const MOONCAKE_DECODE: &str = r#""kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":"http://‹bootstrap›","remote_engine_id":"‹engine›","transfer_id":"xfer-‹transfer›"}"#;

const SGLANG: &str = r#""bootstrap_host":"‹host›","bootstrap_port":‹port›,"bootstrap_room":‹room›"#;

const TRTLLM_PREFILL: &str = r#""disaggregated_params":{"request_type":"context_only","disagg_request_id":‹id›,"schedule_style":0}"#;
const TRTLLM_DECODE: &str =
    r#""disaggregated_params":{"ctx_usage":{‹usage›},"request_type":"generation_only",‹rest›}"#;

/// All kinds of request that a sequential engine accepts.
fn all() -> Vec<ClientRequest> {
    let completed = COMPLETED.iter().map(|(_, request)| *request);
    let requests = CHATS.iter().copied().chain(completed);
    requests.chain(RESPONDED.iter().copied()).collect()
}

/// Fails unless both legs match their golden texts; returns the contents of the holes.
fn assert_golden(
    request: &ClientRequest,
    legs: &Legs,
    (prefill, decode): (&str, &str),
) -> (Holes, Holes) {
    let (one, other) = legs.pair();
    for leg in [one, other] {
        assert_eq!(
            (leg.method.as_str(), leg.path.as_str()),
            ("POST", request.path)
        );
    }
    (holes(prefill, one.text()), holes(decode, other.text()))
}

pub async fn nixl_legs_are_golden(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Nixl).await;
    for request in all() {
        let legs = rig.legs_of(request.ask()).await;
        let prefill = request.one_token_with(NIXL_PREFILL);
        let decode = front(request.body, NIXL_DECODE);
        let (_, found) = assert_golden(&request, &legs, (&prefill, &decode));
        let hand_off = format!("{{{}}}", found["hand-off"]);
        let hand_off: Value = serde_json::from_str(&hand_off).unwrap_or_default();
        assert_eq!(hand_off["do_remote_prefill"], true, "{hand_off}");
        assert!(hand_off["remote_block_ids"].is_array(), "{hand_off}");
        let prefills = rig.fixture.engines.prefill.iter();
        let mut hosts = prefills.map(|slot| slot.address.ip().to_string());
        assert!(
            hosts.any(|host| hand_off["remote_host"] == host),
            "{hand_off}"
        );
        request.assert_answered(legs.reply);
    }
    rig.ends().await;
}

pub async fn mooncake_legs_are_golden(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Mooncake).await;
    let mut transfers = BTreeSet::new();
    for request in all() {
        let legs = rig.legs_of(request.ask()).await;
        let prefill = request.one_token_with(MOONCAKE_PREFILL);
        let decode = front(request.body, MOONCAKE_DECODE);
        let (sent, found) = assert_golden(&request, &legs, (&prefill, &decode));
        assert_eq!(sent["transfer"], found["transfer"]);
        let transfer = number(&sent, "transfer");
        assert!(transfers.insert(transfer), "{transfer} is used twice");
        let prefills = &rig.fixture.engines.prefill;
        let servers = prefills.iter().filter_map(|slot| slot.bootstrap);
        let servers: Vec<String> = servers.map(|at| at.to_string()).collect();
        assert!(
            servers.contains(&found["bootstrap"]),
            "{found:?} of {servers:?}"
        );
        assert!(!found["engine"].is_empty(), "{found:?}");
        request.assert_answered(legs.reply);
    }
    rig.ends().await;
}

pub async fn sglang_legs_are_golden(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Sglang).await;
    let mut rooms = BTreeSet::new();
    let completed = COMPLETED.iter().map(|(_, request)| *request).take(2);
    // Requests with a limit, so that the added members form one piece.
    let limited = CHATS.iter().copied().chain(completed);
    for request in limited.filter(|request| request.lacks.is_none()) {
        let legs = rig.legs_of(request.ask()).await;
        let prefill = request.one_token_with(&format!("\"rid\":\"‹rid›\",{SGLANG}"));
        let decode = front(request.body, SGLANG);
        let (one, other) = assert_golden(&request, &legs, (&prefill, &decode));
        for hole in ["host", "port", "room"] {
            assert_eq!(one[hole], other[hole], "both legs meet: {hole}");
        }
        assert!(!one["rid"].is_empty(), "{one:?}");
        let room = number(&one, "room");
        assert!(room <= i64::MAX.unsigned_abs(), "{room}");
        assert!(rooms.insert(room), "{room} is used twice");
        let prefills = &rig.fixture.engines.prefill;
        let servers = prefills.iter().filter_map(|slot| slot.bootstrap);
        let servers: Vec<String> = servers.map(|at| at.to_string()).collect();
        let named = format!("{}:{}", one["host"], one["port"]);
        assert!(servers.contains(&named), "{named} of {servers:?}");
        request.assert_answered(legs.reply);
    }
    rig.ends().await;
}

pub async fn trtllm_legs_are_golden(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Trtllm).await;
    let mut ids = BTreeSet::new();
    let chats = CHATS.iter().map(|request| (None, *request));
    let completed = COMPLETED.iter();
    let completed = completed.map(|(prompt, request)| (Some(*prompt), *request));
    for (prompt, request) in chats.chain(completed) {
        let legs = rig.legs_of(request.ask()).await;
        let prefill = request.one_token_with(TRTLLM_PREFILL);
        let decode = match prompt {
            Some(prompt) => front(&request.body.replace(prompt, "[‹ids›]"), TRTLLM_DECODE),
            None => front(
                request.body,
                &format!("{TRTLLM_DECODE},\"prompt_token_ids\":[‹ids›]"),
            ),
        };
        let (sent, found) = assert_golden(&request, &legs, (&prefill, &decode));
        let id = number(&sent, "id");
        assert!((1 << 62..1 << 63).contains(&id), "{id}");
        assert!(ids.insert(id), "{id} is used twice");
        let own = format!("\"disagg_request_id\":{id}");
        assert!(found["rest"].contains(&own), "{own} in {found:?}");
        for field in ["first_gen_tokens", "ctx_request_id", "encoded_opaque_state"] {
            assert!(found["rest"].contains(field), "{field} in {found:?}");
        }
        assert!(found["usage"].contains("prompt_tokens"), "{found:?}");
        let numbers = found["ids"].split(',').map(|id| id.trim().parse::<u64>());
        assert!(
            numbers.clone().count() > 0 && numbers.clone().all(|id| id.is_ok()),
            "{found:?}"
        );
        request.assert_answered(legs.reply);
    }
    rig.ends().await;
}

pub async fn llmd_legs_are_golden(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Llmd).await;
    let prefills = rig.fixture.engines.prefill.iter();
    let prefills: Vec<String> = prefills.map(|slot| slot.address.to_string()).collect();
    for request in all() {
        let legs = rig.legs_of(request.ask()).await;
        let leg = legs.only();
        assert_eq!(leg.text(), request.body);
        let named = leg.values("x-prefiller-host-port");
        assert!(
            matches!(named.as_slice(), [one] if prefills.iter().any(|prefill| prefill == one)),
            "{named:?} of {prefills:?}"
        );
        request.assert_answered(legs.reply);
    }
    rig.ends().await;
}

pub async fn aggregated_legs_are_golden(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Aggregated).await;
    for request in all() {
        let legs = rig.legs_of(request.ask()).await;
        assert_eq!(legs.only().text(), request.body);
        request.assert_answered(legs.reply);
    }
    // A request without an id gets a new one each time.
    let mut ids = BTreeSet::new();
    for _ in 0..2 {
        let legs = rig.legs_of_bare(CHATS[0].ask()).await;
        let id = legs.only().values("x-request-id").join(",");
        assert!(!id.is_empty() && ids.insert(id.clone()), "{id}");
    }
    rig.ends().await;
}
