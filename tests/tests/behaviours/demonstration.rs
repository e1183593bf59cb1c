//! What `make run` starts: a gateway with a simulated fleet; and how a gateway ends.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, crowd};
use pd_router_e2e::engines::state_of;
use pd_router_e2e::gateway::{Gateway, SimulatedEngine};
use pd_router_e2e::wait::{GENEROUS, eventually, within_tries};
use tokio::net::TcpStream;

pub async fn a_simulated_fleet_answers_without_a_configuration(proxy: Proxy) {
    let gateway = Gateway::simulated(proxy, "2x2").await;
    let of_role = |role: &str| -> Vec<SimulatedEngine> {
        let engines = gateway.engines.iter().filter(|engine| engine.role == role);
        engines.cloned().collect()
    };
    let (prefill, decode) = (of_role("prefill"), of_role("decode"));
    assert_eq!(
        (prefill.len(), decode.len()),
        (2, 2),
        "{:?}",
        gateway.engines
    );

    gateway.send(Ask::get("/v1/models")).await.expect(200);
    gateway
        .send(Ask::get("/pd-router/status"))
        .await
        .expect(200);
    let streamed = gateway.send(Ask::chat_stream("hello")).await.expect(200);
    assert!(!streamed.events().is_empty());
    // The demonstration names the two workers in every answer. Of idle ones one is drawn.
    let mut pairs = BTreeSet::new();
    within_tries("all pairs are used", async |_| {
        let replies = crowd(gateway.listen, 4, 6, &Ask::chat("hello")).await;
        pairs.extend(replies.into_iter().map(|reply| reply.expect(200).pair()));
        match pairs.len() {
            4 => Ok(()),
            _ => Err(format!("{pairs:?}")),
        }
    })
    .await;
    for engine in decode {
        let state = state_of(engine.address).await;
        assert!(state.answered > 0 && state.refused() == 0, "{state:?}");
    }
}

pub async fn the_gateway_ends_when_its_stdin_closes(proxy: Proxy) {
    let mut gateway = Gateway::simulated(proxy, "1x1").await;
    gateway.process().close_stdin();
    assert_ends(&mut gateway).await;
}

pub async fn nothing_is_left_of_a_gateway_that_was_killed(proxy: Proxy) {
    let mut gateway = Gateway::simulated(proxy, "1x1").await;
    gateway.process().kill();
    assert_ends(&mut gateway).await;
}

async fn assert_ends(gateway: &mut Gateway) {
    let (listen, admin) = (gateway.listen, gateway.admin);
    let engines: Vec<SocketAddr> = gateway
        .engines
        .iter()
        .map(|engine| engine.address)
        .collect();
    eventually("the port is closed", GENEROUS, || async {
        for address in [listen, admin].into_iter().chain(engines.iter().copied()) {
            if TcpStream::connect(address).await.is_ok() {
                return Err(format!("{address} still takes connections"));
            }
        }
        Ok(())
    })
    .await;
    let ended = gateway.process().end_status().await;
    assert!(ended.is_some(), "it listens no more, yet it runs");
}
