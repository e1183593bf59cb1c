//! llm-d's sidecar on the decode pod, played by the test: a header names its prefill worker, and the rest is unchanged.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, crowd};
use pd_router_e2e::engines::{MODEL, Role, in_turns, static_config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::scripted::ScriptedWorker;
use serde_json::{Value, json};

use crate::client_requests::{CHATS, COMPLETED};
use crate::scripted_pair::as_asked;

const HEADER: &str = "x-prefiller-host-port";

/// A sidecar, and a gateway with these prefill workers.
async fn sidecar(proxy: Proxy, prefills: &[&str], pool: Value) -> (ScriptedWorker, Gateway) {
    let sidecar = ScriptedWorker::start(|got| as_asked(got, "whole")).await;
    let prefill = |address: &&str| json!({"address": address, "role": "prefill", "model": MODEL});
    let mut workers: Vec<Value> = prefills.iter().map(prefill).collect();
    workers.push(sidecar.listed(Role::Decode));
    let pool = with(json!({"protocol": "llmd"}), pool);
    let gateway = Gateway::start(proxy, &static_config(workers, pool), &[]).await;
    (sidecar, gateway)
}

pub async fn the_sidecar_is_told_of_prefill_in_a_header_alone(proxy: Proxy) {
    let (sidecar, gateway) = sidecar(proxy, &["10.0.0.7:8000"], json!({})).await;
    let completed = COMPLETED.iter().map(|(_, request)| request);
    for request in CHATS.iter().chain(completed) {
        // A client's own value of the header is removed.
        let ask = request.ask().header(HEADER, "10.6.6.6:666");
        let ask = ask.header("X-Prefiller-Host-Port", "10.6.6.6:667");
        let reply = gateway.send(ask).await.expect(200);
        assert!(reply.text().contains("whole"), "{reply:?}");
        let got = sidecar.last();
        assert_eq!(got.text(), request.body);
        assert_eq!(got.path, request.path);
        assert_eq!(got.values(HEADER), ["10.0.0.7:8000"]);
    }
    gateway.assert_comes_to_rest().await;
}

pub async fn an_ipv6_prefill_worker_is_in_brackets(proxy: Proxy) {
    let (sidecar, gateway) = sidecar(proxy, &["[fd00::17]:8000"], json!({})).await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        gateway.send(ask).await.expect(200);
        assert_eq!(sidecar.last().values(HEADER), ["[fd00::17]:8000"]);
    }
    gateway.assert_comes_to_rest().await;
}

pub async fn every_prefill_worker_has_its_turn(proxy: Proxy) {
    let prefills = ["10.0.0.7:8000", "10.0.0.8:8000", "10.0.0.9:9000"];
    let (sidecar, gateway) = sidecar(proxy, &prefills, in_turns()).await;
    for reply in crowd(gateway.listen, 4, 6, &Ask::chat("hello")).await {
        reply.expect(200);
    }
    let got = sidecar.requests();
    let named: BTreeSet<&str> = got.iter().flat_map(|got| got.values(HEADER)).collect();
    assert_eq!(named, BTreeSet::from(prefills));
    gateway.assert_comes_to_rest().await;
}

pub async fn without_prefill_the_request_is_as_it_was(proxy: Proxy) {
    let pool = json!({"decode": {"runs_whole_requests": true}});
    let (sidecar, gateway) = sidecar(proxy, &[], pool).await;
    for request in CHATS {
        gateway.send(request.ask()).await.expect(200);
        let got = sidecar.last();
        assert_eq!(got.text(), request.body);
        assert!(got.values(HEADER).is_empty(), "{got:?}");
    }
    gateway.assert_comes_to_rest().await;
}
