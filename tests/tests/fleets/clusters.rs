//! The fleet as the proxy's own clusters give it: endpoints from a file, and addresses of a name.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::dns_server::DnsServer;
use pd_router_e2e::endpoints::{Endpoints, Health};
use pd_router_e2e::engines::{Engine, FAST, Fleet, MODEL, Role, config};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::gateway_builder::GatewayBuilder;
use pd_router_e2e::traffic::Traffic;
use pd_router_e2e::wait::{GENEROUS, eventually};
use pd_router_e2e::worker_document::own_loopback;
use serde_json::{Value, json};

use crate::rig::{INTERVAL, pairs, tally, until_all_say, until_answered_with};

/// The admin page as a cluster.
const ADMIN: &str = "envoy_admin";

const REQUESTS: usize = 16;

/// A pool that discovers its workers from the proxy's two clusters.
fn pool() -> Value {
    let attributes = |role: Role| json!({"role": role.as_str(), "model": MODEL});
    json!({"discovery": {"envoy_clusters": {
        "cluster": ADMIN,
        "interval_ms": INTERVAL.as_millis() as u64,
        "timeout_ms": 1000,
        "members": {
            "prefill": attributes(Role::Prefill),
            "decode": attributes(Role::Decode),
        },
    }}})
}

/// A file that lists these engines as healthy.
fn listing(cluster: &str, engines: &[Engine]) -> Endpoints {
    let endpoints = Endpoints::of(cluster);
    endpoints.list(&addresses(engines));
    endpoints
}

fn addresses(engines: &[Engine]) -> Vec<SocketAddr> {
    engines.iter().map(|engine| engine.address).collect()
}

/// A gateway over two files of endpoints.
async fn start(proxy: Proxy, prefill: &Endpoints, decode: &Endpoints) -> Gateway {
    let config = config(pool());
    let builder = GatewayBuilder::new(proxy, &config).admin_cluster(ADMIN);
    let builder = builder.eds("prefill", prefill.path());
    builder.eds("decode", decode.path()).start().await
}

/// Waits until all threads list exactly these workers.
async fn until_workers_are(gateway: &Gateway, wanted: &[String]) {
    let wanted: BTreeSet<&str> = wanted.iter().map(String::as_str).collect();
    until_all_say(gateway, &format!("the workers are {wanted:?}"), |pool| {
        let workers = pool["workers"].as_array().cloned().unwrap_or_default();
        let names: BTreeSet<&str> = workers
            .iter()
            .filter_map(|worker| worker["name"].as_str())
            .collect();
        names == wanted
    })
    .await;
}

pub async fn the_hosts_of_a_file_are_the_fleet(proxy: Proxy) {
    let mut fleet = Fleet::start(2, 2, FAST).await;
    let (prefills, decodes) = (fleet.prefill_addresses(), fleet.decode_addresses());
    let prefill = listing("prefill", &fleet.prefill);
    let decode = listing("decode", &fleet.decode[..1]);
    let both = addresses(&fleet.decode);
    let gateway = start(proxy, &prefill, &decode).await;
    gateway.is_ready().await;
    until_workers_are(&gateway, &[&prefills[..], &decodes[..1]].concat()).await;
    let source = gateway.status().await["discovery"]["source"].clone();
    assert_eq!(source, "envoy_clusters");

    // One worker joins and the first leaves, under load and without a failed request.
    let traffic = Traffic::start(gateway.listen, 4);
    decode.list(&both);
    traffic.until_answered_by(&decodes[1..]).await;
    // All threads must know the joiner first: before that, a thread may know only the leaving worker.
    until_workers_are(&gateway, &[&prefills[..], &decodes[..]].concat()).await;
    decode.list(&both[1..]);
    until_workers_are(&gateway, &[&prefills[..], &decodes[1..]].concat()).await;
    let before = fleet.decode[0].state().await.requests;
    traffic.until_answered_by(&decodes[1..]).await;
    let seen = traffic.stop().await;
    assert_eq!(fleet.decode[0].state().await.requests, before);
    let spoilt = seen.put_off_total() + seen.torn + seen.lost + seen.unknown;
    assert_eq!(spoilt, 0, "{seen:?}");

    // The remaining worker is restarted at its address.
    fleet.decode[1].kill();
    until_answered_with(&gateway, 503).await;
    let at = fleet.decode[1].address;
    fleet.decode[1] = Engine::start_at(at, Role::Decode, FAST).await;
    until_answered_with(&gateway, 200).await;

    decode.list(&[]);
    gateway.is_not_ready().await;
    gateway.send(Ask::chat("hello")).await.expect_error(503);
    decode.list(&both);
    until_answered_with(&gateway, 200).await;
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn what_envoy_knows_of_its_hosts_counts(proxy: Proxy) {
    let fleet = Fleet::start(2, 2, FAST).await;
    let (prefills, decodes) = (fleet.prefill_addresses(), fleet.decode_addresses());
    let both = addresses(&fleet.decode);
    let prefill = listing("prefill", &fleet.prefill);
    let decode = listing("decode", &fleet.decode);
    let gateway = start(proxy, &prefill, &decode).await;
    gateway.is_ready().await;
    until_workers_are(&gateway, &[prefills, decodes.clone()].concat()).await;
    for health in [Health::Draining, Health::Unhealthy] {
        decode.publish(&[(both[0], health), (both[1], Health::Healthy)]);
        until_only(&gateway, &decodes[1]).await;
        decode.list(&both);
        until_both(&gateway, &decodes).await;
    }
    // All workers drain: none gets a request.
    decode.publish(&[(both[0], Health::Draining), (both[1], Health::Draining)]);
    gateway.is_not_ready().await;
    gateway.send(Ask::chat("hello")).await.expect_error(503);
    decode.list(&both);
    gateway.is_ready().await;
    gateway.assert_comes_to_rest().await;
}

/// Waits until requests go only to this decode worker.
async fn until_only(gateway: &Gateway, decode: &str) {
    eventually(&format!("only {decode} is used"), GENEROUS, || async {
        let seen = pairs(gateway, REQUESTS).await;
        match seen.iter().all(|pair| pair.decode == decode) {
            true => Ok(()),
            false => Err(format!("{:?}", tally(&seen))),
        }
    })
    .await;
}

/// Waits until requests go to both of these workers.
async fn until_both(gateway: &Gateway, decodes: &[String]) {
    eventually("both are used", GENEROUS, || async {
        let seen = pairs(gateway, REQUESTS).await;
        let seen: BTreeSet<String> = seen.into_iter().map(|pair| pair.decode).collect();
        match decodes.iter().all(|decode| seen.contains(decode)) {
            true => Ok(()),
            false => Err(format!("{seen:?}")),
        }
    })
    .await;
}

/// Like a headless service: a name with the addresses of the ready workers, all at one port.
pub async fn the_addresses_of_a_name_are_the_fleet(proxy: Proxy) {
    let prefill = own_loopback();
    let prefill = Engine::start_at(SocketAddr::from((prefill, 0)), Role::Prefill, FAST).await;
    let [first, second] = [own_loopback(), own_loopback()];
    let one = Engine::start_at(SocketAddr::from((first, 0)), Role::Decode, FAST).await;
    let port = one.address.port();
    let at = SocketAddr::from((second, port));
    let mut other = Engine::start_at(at, Role::Decode, FAST).await;

    let dns = DnsServer::start();
    let IpAddr::V4(of_prefill) = prefill.address.ip() else {
        panic!("not an IPv4 address: {}", prefill.address);
    };
    dns.set("prefill.test", &[of_prefill]);
    dns.set("decode.test", &[first]);
    let config = config(pool());
    let builder = GatewayBuilder::new(proxy, &config).admin_cluster(ADMIN);
    let builder = builder.dns_server(dns.address);
    let builder = builder.dns("prefill", "prefill.test", prefill.address.port());
    let gateway = builder.dns("decode", "decode.test", port).start().await;
    gateway.is_ready().await;
    let listed = |engines: &[&Engine]| -> Vec<String> {
        let addresses = engines.iter().map(|engine| engine.address.to_string());
        addresses.collect()
    };
    until_workers_are(&gateway, &listed(&[&prefill, &one])).await;
    pairs(&gateway, 4).await;

    dns.set("decode.test", &[first, second]);
    until_both(&gateway, &listed(&[&one, &other])).await;
    dns.set("decode.test", &[second]);
    until_workers_are(&gateway, &listed(&[&prefill, &other])).await;
    let before = one.state().await.requests;
    pairs(&gateway, REQUESTS).await;
    assert_eq!(one.state().await.requests, before);

    // The only remaining worker dies, and returns at its address.
    other.kill();
    until_answered_with(&gateway, 503).await;
    other = Engine::start_at(at, Role::Decode, FAST).await;
    until_answered_with(&gateway, 200).await;
    assert_eq!(other.state().await.refused(), 0);
    gateway.assert_comes_to_rest().await;
}
