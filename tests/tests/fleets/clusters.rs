//! The fleet as the proxy's own clusters have it: endpoints from a file, and addresses behind a name.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{Engine, FAST, Fleet, MODEL, Role, config};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;
use pd_router_e2e::traffic::Traffic;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::{INTERVAL, pairs, tally, until_all_say, until_answered_with};

/// The admin page as a cluster.
const ADMIN: &str = "envoy_admin";

const REQUESTS: usize = 16;

/// A pool that asks the proxy for the hosts of its two clusters.
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

/// A file of one cluster's endpoints, which takes the place of the one before.
struct Endpoints {
    cluster: &'static str,
    file: PathBuf,
}

impl Endpoints {
    /// Each address with its health, in EDS' words.
    fn of(cluster: &'static str, hosts: &[(String, &str)]) -> Endpoints {
        let folder = paths::scratch().join(unique_name(cluster));
        fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("no folder: {error}"));
        let endpoints = Endpoints {
            cluster,
            file: folder.join("endpoints.json"),
        };
        endpoints.publish(hosts);
        endpoints
    }

    fn publish(&self, hosts: &[(String, &str)]) {
        let endpoints: Vec<Value> = hosts.iter().map(endpoint).collect();
        let assignment = json!({
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": self.cluster,
            "endpoints": [{"lb_endpoints": endpoints}],
        });
        let next = self.file.with_extension("next");
        let text = json!({"resources": [assignment]}).to_string();
        // Envoy notices that a file takes another's place.
        let moved = fs::write(&next, text).and_then(|()| fs::rename(&next, &self.file));
        moved.unwrap_or_else(|error| panic!("no endpoints: {error}"));
    }

    /// As a gateway's command line has it.
    fn argument(&self) -> String {
        format!("{}=eds:{}", self.cluster, self.file.display())
    }
}

fn endpoint((address, health): &(String, &str)) -> Value {
    let Some((ip, port)) = address.rsplit_once(':') else {
        panic!("not an address: {address}");
    };
    let port: u16 = port.parse().unwrap_or_default();
    json!({
        "health_status": health,
        "endpoint": {"address": {"socket_address": {"address": ip, "port_value": port}}},
    })
}

fn healthy(addresses: &[String]) -> Vec<(String, &'static str)> {
    let one = |address: &String| (address.clone(), "HEALTHY");
    addresses.iter().map(one).collect()
}

async fn start(proxy: Proxy, clusters: [&str; 2]) -> Gateway {
    let arguments = [
        "--cluster",
        clusters[0],
        "--cluster",
        clusters[1],
        "--admin-cluster",
        ADMIN,
    ];
    Gateway::start(proxy, &config(pool()), &arguments).await
}

/// Waits until all threads list exactly these.
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
    let prefill = Endpoints::of("prefill", &healthy(&prefills));
    let decode = Endpoints::of("decode", &healthy(&decodes[..1]));
    let gateway = start(proxy, [&prefill.argument(), &decode.argument()]).await;
    gateway.is_ready().await;
    until_workers_are(&gateway, &[&prefills[..], &decodes[..1]].concat()).await;
    let source = gateway.status().await["discovery"]["source"].clone();
    assert_eq!(source, "envoy_clusters");

    // One joins, the first leaves, under load, and nobody notices.
    let traffic = Traffic::start(gateway.listen, 4);
    decode.publish(&healthy(&decodes));
    traffic.until_answered_by(&decodes[1..]).await;
    decode.publish(&healthy(&decodes[1..]));
    until_workers_are(&gateway, &[&prefills[..], &decodes[1..]].concat()).await;
    let before = fleet.decode[0].state().await.requests;
    traffic.until_answered_by(&decodes[1..]).await;
    let seen = traffic.stop().await;
    assert_eq!(fleet.decode[0].state().await.requests, before);
    let spoilt = seen.put_off_total() + seen.torn + seen.lost + seen.unknown;
    assert_eq!(spoilt, 0, "{seen:?}");

    // The other is restarted in its place.
    fleet.decode[1].kill();
    until_answered_with(&gateway, 503).await;
    let at = fleet.decode[1].address;
    fleet.decode[1] = Engine::start_at(at, Role::Decode, FAST).await;
    until_answered_with(&gateway, 200).await;

    decode.publish(&[]);
    gateway.is_not_ready().await;
    gateway.send(Ask::chat("hello")).await.expect_error(503);
    decode.publish(&healthy(&decodes));
    until_answered_with(&gateway, 200).await;
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn what_envoy_knows_of_its_hosts_counts(proxy: Proxy) {
    let fleet = Fleet::start(2, 2, FAST).await;
    let (prefills, decodes) = (fleet.prefill_addresses(), fleet.decode_addresses());
    let prefill = Endpoints::of("prefill", &healthy(&prefills));
    let decode = Endpoints::of("decode", &healthy(&decodes));
    let gateway = start(proxy, [&prefill.argument(), &decode.argument()]).await;
    gateway.is_ready().await;
    until_workers_are(&gateway, &[prefills.clone(), decodes.clone()].concat()).await;
    for health in ["DRAINING", "UNHEALTHY"] {
        let one_is = [
            (decodes[0].clone(), health),
            (decodes[1].clone(), "HEALTHY"),
        ];
        decode.publish(&one_is);
        until_only(&gateway, &decodes[1]).await;
        decode.publish(&healthy(&decodes));
        until_both(&gateway, &decodes).await;
    }
    // Nobody else is ready: who drains gets nothing all the same.
    let all = |health| -> Vec<(String, &str)> {
        let addresses = decodes.iter().cloned();
        addresses.map(|address| (address, health)).collect()
    };
    decode.publish(&all("DRAINING"));
    gateway.is_not_ready().await;
    gateway.send(Ask::chat("hello")).await.expect_error(503);
    decode.publish(&healthy(&decodes));
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

/// Waits until requests go to both of these.
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

/// As a headless service is: its addresses are all that is known.
pub async fn a_worker_behind_a_name_dies_and_returns(proxy: Proxy) {
    let mut fleet = Fleet::start(1, 1, FAST).await;
    let named = |engine: &Engine| {
        let cluster = engine.role.as_str();
        format!("{cluster}=dns:localhost:{}", engine.address.port())
    };
    let clusters = [named(&fleet.prefill[0]), named(&fleet.decode[0])];
    let gateway = start(proxy, [&clusters[0], &clusters[1]]).await;
    gateway.is_ready().await;
    until_answered_with(&gateway, 200).await;
    let addresses = [fleet.prefill_addresses(), fleet.decode_addresses()].concat();
    until_all_say(&gateway, "the addresses of the name", |pool| {
        let workers = pool["workers"].to_string();
        addresses.iter().all(|address| workers.contains(address))
    })
    .await;

    fleet.decode[0].kill();
    until_answered_with(&gateway, 503).await;
    let at = fleet.decode[0].address;
    fleet.decode[0] = Engine::start_at(at, Role::Decode, FAST).await;
    until_answered_with(&gateway, 200).await;
    let many = (0..REQUESTS).map(|_| gateway.send(Ask::chat("hello")));
    for reply in join_all(many).await {
        reply.expect_tokens(4);
    }
    gateway.assert_comes_to_rest().await;
}
