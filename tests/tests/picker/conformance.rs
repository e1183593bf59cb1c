//! The data-plane half of the Gateway API inference extension's conformance suite, on plain Envoy, under its tests' names.
//!
//! There a header of the test gives the picker its choice; here the subset that a gateway in front allows does.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body, crowd};
use pd_router_e2e::engines::{Engine, Role, with};
use pd_router_e2e::gateway::worker;
use pd_router_e2e::plain::{Bootstrap, Plain};
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::scripted::{Answer, HttpVersion, ScriptedWorker};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::{CHAT, Pods, SERVED, SUBSET, ask, configuration, hundred, pool};

/// The pods' addresses, as a cluster would give them.
fn hosts(count: u8) -> Vec<IpAddr> {
    let host = |last| IpAddr::from(Ipv4Addr::new(127, 0, 3, last));
    (1..=count).map(host).collect()
}

/// A route to a pool in its own cluster.
fn route(prefix: &str, name: &str) -> Value {
    json!({
        "match": {"prefix": prefix},
        "name": name,
        "route": {"cluster": name},
        "metadata": {"filter_metadata": {"pd_router": {"pool": name}}},
    })
}

/// A gateway over one pool of these.
async fn over(pods: &Pods) -> Plain {
    let config = configuration(vec![pool("one", pods.listed(), json!({}))]);
    let bootstrap = Bootstrap::shipped("bootstrap.yaml", &config).trusting();
    let bootstrap = bootstrap.with_clusters(&[("one", pods.addresses())]);
    bootstrap.with_routes(&[route("/", "one")]).start().await
}

/// A bootstrap with two pools, each in its own cluster.
fn two_pools(one: &Pods, two: &Pods) -> Bootstrap {
    let pools = [("one", one), ("two", two)];
    let listed = pools.map(|(name, pods)| pool(name, pods.listed(), json!({})));
    let config = configuration(listed.to_vec());
    let bootstrap = Bootstrap::shipped("bootstrap.yaml", &config).trusting();
    bootstrap.with_clusters(&pools.map(|(name, pods)| (name, pods.addresses())))
}

/// Upstream: GatewayFollowingEPPRouting.
pub async fn gateway_following_epp_routing(_: Proxy) {
    let pods = Pods::on(&hosts(3)).await;
    let plain = over(&pods).await;
    for chosen in [&[0][..], &[2], &[0, 1], &[1, 2], &[0, 1, 2]] {
        let before = pods.counts();
        let ask = ask().header(SUBSET, &pods.named(chosen));
        hundred(plain.gateway.listen, &ask).await;
        let wanted: BTreeSet<usize> = chosen.iter().copied().collect();
        assert_eq!(pods.reached_since(&before), wanted);
    }
    plain.gateway.assert_comes_to_rest().await;
}

/// Upstream: GatewayFollowingEPPRoutingWithDataParallelism.
pub async fn gateway_following_epp_routing_with_data_parallelism(_: Proxy) {
    // Three pods with three ranks each, which have a port each.
    let hosts: Vec<IpAddr> = hosts(3).into_iter().flat_map(|host| [host; 3]).collect();
    let pods = Pods::on(&hosts).await;
    let plain = over(&pods).await;
    for ranks in [&[0][..], &[4], &[1, 5], &[0, 1, 2], &[2, 3, 8]] {
        let before = pods.counts();
        let ask = ask().header(SUBSET, &pods.named(ranks));
        for reply in hundred(plain.gateway.listen, &ask).await {
            let served = reply.header(SERVED).unwrap_or_default().to_owned();
            assert!(pods.named(ranks).contains(&served), "{served:?}");
        }
        let wanted: BTreeSet<usize> = ranks.iter().copied().collect();
        assert_eq!(pods.reached_since(&before), wanted);
    }
    // A pod without a port means all its ranks.
    let before = pods.counts();
    let ask = ask().header(SUBSET, &hosts[3].to_string());
    hundred(plain.gateway.listen, &ask).await;
    assert_eq!(pods.reached_since(&before), BTreeSet::from([3, 4, 5]));
}

/// Upstream: GatewayDestinationEndpointServed.
pub async fn gateway_destination_endpoint_served(_: Proxy) {
    let pods = Pods::on(&hosts(3)).await;
    let plain = over(&pods).await;
    for chosen in 0..3 {
        let ask = ask().header(SUBSET, &pods.named(&[chosen]));
        // A value of this header from a client or a worker has no effect.
        let ask = ask.header(SERVED, "10.9.9.9:80");
        let reply = plain.gateway.send(ask).await.expect(200);
        assert_eq!(reply.header(SERVED), Some(pods.named(&[chosen]).as_str()));
        assert!(pods.pod(chosen).last().values(SERVED).is_empty());
    }
}

/// Beside the suite: of a list whose first endpoint refuses connections, the endpoint that answered is named.
pub async fn the_endpoint_served_is_the_one_that_answered(_: Proxy) {
    let pods = Pods::on(&hosts(2)).await;
    let gone = Pods::on(&hosts(1)).await.addresses();
    let mut workers = pods.listed();
    workers.extend(
        gone.iter()
            .map(|gone| json!({"address": gone.to_string(), "role": "aggregated"})),
    );
    let config = configuration(vec![pool("one", workers, json!({}))]);
    let bootstrap = Bootstrap::shipped("bootstrap.yaml", &config).trusting();
    let bootstrap = bootstrap.with_clusters(&[("one", [pods.addresses(), gone].concat())]);
    let plain = bootstrap.with_routes(&[route("/", "one")]).start().await;
    for _ in 0..12 {
        let before = pods.counts();
        let reply = plain.gateway.send(ask()).await.expect(200);
        let reached: Vec<usize> = pods.reached_since(&before).into_iter().collect();
        assert_eq!(reply.header(SERVED), Some(pods.named(&reached).as_str()));
    }
    plain.gateway.assert_comes_to_rest().await;
}

/// dynamo PR #14693: after a retry the load was charged to the worker that was picked, not to the one that serves.
pub async fn the_charge_is_that_ones_too(_: Proxy) {
    let engine = Engine::start(Role::Aggregated, &["--token-ms", "50"]).await;
    let gone = Pods::on(&hosts(1)).await.addresses();
    let mut workers = vec![with(engine.listed(), json!({"name": "serves"}))];
    workers.push(json!({"address": gone[0].to_string(), "role": "aggregated", "name": "gone"}));
    let config = configuration(vec![pool("one", workers, json!({}))]);
    let hosts = [vec![engine.address], gone].concat();
    let bootstrap = Bootstrap::shipped("bootstrap.yaml", &config).trusting();
    let bootstrap = bootstrap.with_clusters(&[("one", hosts)]);
    let plain = bootstrap.with_routes(&[route("/", "one")]).start().await;
    let body = with(
        chat_body("long"),
        json!({"stream": true, "max_tokens": 1_000_000}),
    );
    let request = raw::post(CHAT, &[], body.to_string().as_bytes());
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut client = Raw::connect(plain.gateway.listen).await;
        client.write(&request).await;
        client.read_until("data:", 3).await;
        streams.push(client);
    }
    // Any thread may answer: other threads' bookings arrive with a short delay.
    eventually(
        "all are charged to the one that serves",
        GENEROUS,
        || async {
            let status = plain.gateway.status().await;
            let decodes = |name| {
                let worker = worker(&status, name);
                let own = worker["bookings"]["decodes"].as_u64().unwrap_or_default();
                own + worker["bookings_elsewhere"]["decodes"]
                    .as_u64()
                    .unwrap_or_default()
            };
            match (decodes("serves"), decodes("gone")) {
                (4, 0) => Ok(()),
                _ => Err(status.to_string()),
            }
        },
    )
    .await;
    drop(streams);
    plain.gateway.assert_comes_to_rest().await;
}

/// Upstream: GatewayWeightedAcrossTwoInferencePools.
pub async fn gateway_weighted_across_two_inference_pools(_: Proxy) {
    // So many that a share beyond the tolerance is bad luck once in 10^7 times.
    const REQUESTS: usize = 700;
    const SHARE: f64 = 0.7;
    let (one, two) = (Pods::on(&hosts(2)).await, Pods::on(&hosts(2)).await);
    let weighted = json!({
        "match": {"prefix": "/", "runtime_fraction": {"default_value": {"numerator": 70}}},
    });
    let mut first = route("/", "one");
    first["match"] = weighted["match"].clone();
    let bootstrap = two_pools(&one, &two).with_routes(&[first, route("/", "two")]);
    let plain = bootstrap.start().await;
    // One pod of each pool is picked; requests to others are wrong.
    let subset = format!("{},{}", one.named(&[1]), two.named(&[0]));
    let ask = ask().header(SUBSET, &subset);
    for reply in crowd(plain.gateway.listen, 10, REQUESTS / 10, &ask).await {
        reply.expect(200);
    }
    let (first, second) = (one.counts(), two.counts());
    assert_eq!((first[0], second[1]), (0, 0));
    assert_eq!(first[1] + second[0], REQUESTS);
    let share = first[1] as f64 / REQUESTS as f64;
    let sigma = (SHARE * (1.0 - SHARE) / REQUESTS as f64).sqrt();
    let tolerance = f64::max(0.10, 4.5 * sigma);
    assert!((share - SHARE).abs() <= tolerance, "{share}");
    plain.gateway.assert_comes_to_rest().await;
}

/// Upstream: HTTPRouteMultipleRulesDifferentPools.
pub async fn http_route_multiple_rules_different_pools(_: Proxy) {
    let (one, two) = (Pods::on(&hosts(1)).await, Pods::on(&hosts(1)).await);
    let routes = [route("/primary", "one"), route("/secondary", "two")];
    let plain = two_pools(&one, &two).with_routes(&routes).start().await;
    for (path, reached, other) in [
        ("/primary/v1/completions", &one, &two),
        ("/secondary/v1/completions", &two, &one),
    ] {
        let before = (reached.counts(), other.counts());
        let ask = Ask::post(path, crate::rig::BODY);
        hundred(plain.gateway.listen, &ask).await;
        assert_eq!(reached.counts(), [before.0[0] + 100]);
        assert_eq!(other.counts(), before.1);
        assert_eq!(reached.pod(0).last().path, path);
    }
    // The picker of one pool selects no pod of the other's.
    let ask = Ask::post("/primary/v1/completions", crate::rig::BODY);
    let ask = ask.header(SUBSET, &two.named(&[0]));
    plain.gateway.send(ask).await.expect_error(503);
}

/// Upstream: HTTPRouteMultipleGatewaysDifferentPools.
pub async fn http_route_multiple_gateways_different_pools(_: Proxy) {
    let (one, two) = (Pods::on(&hosts(1)).await, Pods::on(&hosts(1)).await);
    let bootstrap = two_pools(&one, &two).with_routes(&[route("/", "one")]);
    let plain = bootstrap.with_listener(&[route("/", "two")]).start().await;
    let [first, second]: [SocketAddr; 2] = plain
        .listeners
        .clone()
        .try_into()
        .unwrap_or_else(|listeners| panic!("not two listeners: {listeners:?}"));
    for (gateway, reached, other) in [(first, &one, &two), (second, &two, &one)] {
        let before = (reached.counts(), other.counts());
        hundred(gateway, &ask()).await;
        assert_eq!(reached.counts(), [before.0[0] + 100]);
        assert_eq!(other.counts(), before.1);
    }
    plain.gateway.assert_comes_to_rest().await;
}

/// Upstream: InferencePoolAppProtocol.
pub async fn inference_pool_app_protocol(_: Proxy) {
    let http1 = Pods::speaking(HttpVersion::Http1, &hosts(2)).await;
    let h2c = Pods::speaking(HttpVersion::Http2, &hosts(2)).await;
    let mut bootstrap = two_pools(&http1, &h2c);
    let options = &mut bootstrap.cluster("two")["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
    // `kubernetes.io/h2c`; without an app protocol the shipped bootstrap's HTTP/1.1.
    options["explicit_http_config"] = json!({"http2_protocol_options": {}});
    let routes = [route("/http1", "one"), route("/h2c", "two")];
    let plain = bootstrap.with_routes(&routes).start().await;
    for (prefix, pods) in [("/http1", &http1), ("/h2c", &h2c)] {
        for chosen in 0..2 {
            let before = pods.counts();
            let ask = Ask::post(&format!("{prefix}/v1/completions"), crate::rig::BODY);
            let ask = ask.header(SUBSET, &pods.named(&[chosen]));
            hundred(plain.gateway.listen, &ask).await;
            assert_eq!(pods.reached_since(&before), BTreeSet::from([chosen]));
        }
    }
    plain.gateway.assert_comes_to_rest().await;
}

/// Upstream: InferencePoolInvalidEPPService; its data-plane half.
pub async fn inference_pool_invalid_epp_service(_: Proxy) {
    // The picker cannot be fetched: the download is another document.
    let store = ScriptedWorker::start(|_| Answer::json("this is no picker")).await;
    let pods = Pods::on(&hosts(1)).await;
    let config = configuration(vec![pool("one", pods.listed(), json!({}))]);
    let mut bootstrap = Bootstrap::shipped("bootstrap.yaml", &config);
    bootstrap.plugin()["vm_config"]["code"] = json!({"remote": {
        "http_uri": {"uri": "http://store/pd_router.wasm", "cluster": "store", "timeout": "5s"},
        "sha256": "0".repeat(64),
    }});
    let at = json!({"address": store.address.ip(), "port_value": store.address.port()});
    let bootstrap = bootstrap.with_clusters(&[("one", pods.addresses())]);
    let bootstrap = bootstrap.with_cluster(json!({
        "name": "store",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "store", "endpoints": [{"lb_endpoints": [
            {"endpoint": {"address": {"socket_address": at}}},
        ]}]},
    }));
    let plain = bootstrap.with_routes(&[route("/", "one")]).start().await;
    for reply in crowd(plain.gateway.listen, 8, 1, &ask()).await {
        assert!(reply.status >= 500, "{reply:?}");
    }
    assert_eq!(pods.counts(), [0]);
    assert!(!store.requests().is_empty(), "the picker was never fetched");
}
