//! Endpoints that a gateway in front allows: in a trusted caller's header, or in metadata as a text or a list.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask, Reply, chat_body};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{Role, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::plain::{Bootstrap, Plain};
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::{CHAT, Pods, QUICK, REASON, SUBSET, ask, configuration, pool};

/// The namespace in which a gateway's metadata hold the subset.
const NAMESPACE: &str = "envoy.lb.subset_hint";

/// A header that the bootstrap of these tests puts into the stream's metadata.
const HINT: &str = "x-test-hint";

/// Two pods of one host, one of another, and one of IPv6.
async fn pods() -> Pods {
    let one = IpAddr::from(Ipv4Addr::new(127, 0, 4, 1));
    let two = IpAddr::from(Ipv4Addr::new(127, 0, 4, 2));
    Pods::on(&[one, one, two, Ipv6Addr::LOCALHOST.into()]).await
}

/// Lists of endpoints, with the pods that each allows; an empty set is a refusal.
fn cases(pods: &Pods) -> Vec<(Vec<String>, Vec<usize>)> {
    let at: Vec<String> = (0..4).map(|number| pods.named(&[number])).collect();
    let port = pods.addresses()[3].port();
    let cases: Vec<(Vec<&str>, Vec<usize>)> = vec![
        (vec![&at[0]], vec![0]),
        (vec![&at[2], &at[0]], vec![0, 2]),
        (vec![&at[0], &at[1], &at[2], &at[3]], vec![0, 1, 2, 3]),
        // Partly unknown.
        (vec!["10.9.9.9:80", &at[1], "nonsense", ""], vec![1]),
        // An address alone stands for all its ports, an address with a port for that port.
        (vec!["127.0.4.1"], vec![0, 1]),
        (vec!["127.0.4.2", &at[1]], vec![1, 2]),
        // IPv6: as a host, in brackets, and with a port.
        (vec![&at[3]], vec![3]),
        (vec!["::1"], vec![3]),
        (vec!["[::1]", &at[0]], vec![0, 3]),
        // No pod.
        (vec!["10.9.9.9:80"], vec![]),
        (vec!["127.0.4.1:1"], vec![]),
        (vec!["127.0.4.9"], vec![]),
        (vec!["nonsense"], vec![]),
        (vec!["127.0.4.1:99999"], vec![]),
    ];
    let owned = |texts: Vec<&str>| texts.into_iter().map(str::to_owned).collect();
    let mut cases: Vec<(Vec<String>, Vec<usize>)> = cases
        .into_iter()
        .map(|(hint, who)| (owned(hint), who))
        .collect();
    cases.push((vec![format!("[0:0:0:0:0:0:0:1]:{port}")], vec![3]));
    cases
}

/// Requests that meet every allowed pod, by round robin on two threads: one of the threads gets seven, which is what may
/// be left of a round of four, and a whole round.
const TURNS: usize = 14;

/// Fails unless this request reaches exactly these pods, or is refused if there are none.
async fn assert_reaches(gateway: &Gateway, pods: &Pods, ask: &Ask, who: &[usize]) {
    let before = pods.counts();
    if who.is_empty() {
        let reply = gateway.send(ask.clone()).await;
        assert_refused(&reply);
        assert_eq!(pods.counts(), before, "{ask:?}");
        return;
    }
    for _ in 0..TURNS {
        gateway.send(ask.clone()).await.expect(200);
    }
    let wanted: BTreeSet<usize> = who.iter().copied().collect();
    assert_eq!(pods.reached_since(&before), wanted, "{ask:?}");
}

/// Fails unless this is the refusal of a request that no pod may serve.
#[track_caller]
fn assert_refused(reply: &Reply) {
    let message = reply.expect_code(503, "no_eligible_worker");
    assert!(message.contains("subset"), "{message}");
    assert_eq!(reply.header(REASON), Some("rejected-no-endpoints"));
}

async fn over(proxy: Proxy, pods: &Pods, more: Value) -> Gateway {
    let config = configuration(vec![pool("decode", pods.listed(), more)]);
    Gateway::start(proxy, &config, &[]).await
}

pub async fn a_header_names_the_endpoints(proxy: Proxy) {
    let pods = pods().await;
    let gateway = over(proxy, &pods, json!({})).await;
    assert_reaches(&gateway, &pods, &ask(), &[0, 1, 2, 3]).await;
    for (hint, who) in cases(&pods) {
        let hint = hint.join(",");
        assert_reaches(&gateway, &pods, &ask().header(SUBSET, &hint), &who).await;
    }
    // White space and the header name's case do not matter.
    let spaced = format!(" {} ,\t {},", pods.named(&[0]), pods.named(&[3]));
    for name in [SUBSET, "X-Gateway-Destination-Endpoint-Subset"] {
        let ask = ask().header(name, &spaced);
        assert_reaches(&gateway, &pods, &ask, &[0, 3]).await;
    }
    // An empty list is not the same as an absent one.
    for empty in ["", " ", ",", " , ,"] {
        assert_reaches(&gateway, &pods, &ask().header(SUBSET, empty), &[]).await;
    }
    let not_text = ask().header_bytes(SUBSET, b"\xff\xfe");
    assert_reaches(&gateway, &pods, &not_text, &[]).await;
    for at in 0..4 {
        for got in pods.pod(at).requests() {
            assert!(got.values(SUBSET).is_empty(), "{got:?}");
        }
    }
    gateway.assert_comes_to_rest().await;
}

/// The subset applies to requests without a body as well.
pub async fn a_request_without_a_body_is_kept_within_it(proxy: Proxy) {
    let pods = pods().await;
    let gateway = over(proxy, &pods, json!({})).await;
    for (subset, who) in [
        (pods.named(&[1]), vec![1]),
        ("10.9.9.9:80".to_owned(), vec![]),
    ] {
        let before = pods.counts();
        for _ in 0..4 {
            let reply = gateway
                .send(Ask::get("/version").header(SUBSET, &subset))
                .await;
            match who.is_empty() {
                true => _ = reply.expect_error(503),
                false => _ = reply.expect(200),
            }
        }
        let wanted: BTreeSet<usize> = who.into_iter().collect();
        assert_eq!(pods.reached_since(&before), wanted, "{subset}");
    }
}

/// From an untrusted caller the header is removed and has no effect.
pub async fn a_header_of_anybody_is_nothing(proxy: Proxy) {
    let pods = pods().await;
    let gateway = over(proxy, &pods, json!({"trust_clients": false})).await;
    for hint in ["", "10.9.9.9:80", &pods.named(&[1])] {
        let ask = ask().header(SUBSET, hint);
        assert_reaches(&gateway, &pods, &ask, &[0, 1, 2, 3]).await;
    }
    for at in 0..4 {
        for got in pods.pod(at).requests() {
            assert!(got.values(SUBSET).is_empty(), "{got:?}");
        }
    }
}

/// gateway-api-inference-extension #2117: candidates resolved while no worker was present, and then kept.
pub async fn a_subset_is_asked_anew_while_a_request_waits(proxy: Proxy) {
    let mut engines = EngineSet::with_roles((Role::Prefill, Role::Aggregated), (0, 2), QUICK).await;
    engines.start(Role::Aggregated).await;
    engines.describe(Role::Aggregated, |_| json!({"role": "aggregated"}));
    let pool = json!({
        "protocol": "aggregated",
        "trust_clients": true,
        "admission": {"decode": {"blocks": 0}, "queue": {"deadline_ms": 120_000}},
    });
    let gateway = engines.gateway_on_one_thread(proxy, pool).await;
    let [busy, comes] = [0, 1].map(|at: usize| engines.decode[at].address.to_string());
    let only = |subset: &str| Ask::chat("hello").header(SUBSET, subset);
    // No worker is present, and the refusal is not remembered.
    let reply = gateway.send(only(&busy)).await;
    reply.expect_error(503);
    assert_eq!(reply.header(REASON), Some("rejected-no-endpoints"));

    engines.list_one(Role::Aggregated, 0);
    gateway.is_ready().await;
    // The present worker does not serve the other's subset.
    gateway
        .send(only(&comes))
        .await
        .expect_code(503, "no_eligible_worker");
    let mut first = Raw::connect(gateway.listen).await;
    let endless = with(
        chat_body("the first"),
        json!({"stream": true, "max_tokens": 1_000_000}),
    );
    first
        .write(&raw::post(CHAT, &[], endless.to_string().as_bytes()))
        .await;
    first.read_until("data:", 3).await;
    let waits = only(&format!("{busy},{comes}"));
    let waits = tokio::spawn(client::try_send(gateway.listen, waits));
    eventually("it waits", GENEROUS, || async {
        let status = gateway.status().await;
        (status["waiting"] == 1)
            .then_some(())
            .ok_or(status.to_string())
    })
    .await;
    engines.list_one(Role::Aggregated, 1);
    let reply = waits.await.unwrap_or_else(|error| panic!("{error}"));
    let reply = reply.unwrap_or_else(|failure| panic!("no answer: {failure}"));
    reply.expect_tokens(4);
    assert_eq!(engines.decode[1].engine().requests().await.len(), 1);
    drop(first);
    gateway.assert_comes_to_rest().await;
}

/// A filter that copies a header into the stream's metadata, as a gateway's own filters would.
fn into_metadata() -> Value {
    json!({
        "name": "hint",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
            "request_rules": [{
                "header": HINT,
                "on_header_present": {
                    "metadata_namespace": NAMESPACE,
                    "key": SUBSET,
                    "type": "PROTOBUF_VALUE",
                    "encode": "BASE64",
                },
                "remove": true,
            }],
        },
    })
}

/// A gateway whose streams may carry metadata, over a pool without trusted callers: only the gateway writes metadata.
async fn with_metadata(pods: &Pods, routes: &[Value]) -> Plain {
    let config = configuration(vec![pool(
        "decode",
        pods.listed(),
        json!({"trust_clients": false}),
    )]);
    let bootstrap = Bootstrap::shipped("bootstrap.yaml", &config);
    let bootstrap = bootstrap.with_clusters(&[("decode", pods.addresses())]);
    let bootstrap = bootstrap.with_filter_before(into_metadata());
    bootstrap.with_routes(routes).start().await
}

pub async fn metadata_of_the_stream_name_the_endpoints(_: Proxy) {
    let pods = pods().await;
    let plain = with_metadata(&pods, &[json!({})]).await;
    let gateway = &plain.gateway;
    assert_reaches(gateway, &pods, &ask(), &[0, 1, 2, 3]).await;
    let hinted = |hint: Vec<u8>| ask().header(HINT, &base64(&hint));
    for (listed, who) in cases(&pods) {
        assert_reaches(gateway, &pods, &hinted(text(&listed.join(" , "))), &who).await;
        let entries: Vec<Vec<u8>> = listed.iter().map(|one| text(one)).collect();
        assert_reaches(gateway, &pods, &hinted(list(&entries)), &who).await;
    }
    // A client's header beside the metadata has no effect.
    let listed = pods.named(&[1]);
    let beside = hinted(list(&[text(&listed)])).header(SUBSET, &pods.named(&[2]));
    assert_reaches(gateway, &pods, &beside, &[1]).await;
    // An empty list.
    for empty in [text(""), text(","), list(&[]), list(&[text("")])] {
        assert_reaches(gateway, &pods, &hinted(empty), &[]).await;
    }
    gateway.assert_comes_to_rest().await;
}

/// A value that is neither a text nor a list of texts allows no pod: ignoring it would open the gateway.
pub async fn metadata_of_another_kind_allow_nobody(_: Proxy) {
    let pods = pods().await;
    let plain = with_metadata(&pods, &[json!({})]).await;
    for other in [number(7.0), truth(true), list(&[number(7.0)])] {
        let ask = ask().header(HINT, &base64(&other));
        assert_reaches(&plain.gateway, &pods, &ask, &[]).await;
    }
}

pub async fn metadata_of_the_route_name_the_endpoints(_: Proxy) {
    let pods = pods().await;
    let all = [0, 1, 2, 3];
    let cases = [
        (
            "/list",
            json!([pods.named(&[0]), pods.named(&[2])]),
            &[0, 2][..],
        ),
        (
            "/text",
            json!(format!("{}, ::1", pods.named(&[1]))),
            &[1, 3],
        ),
        ("/nobody", json!(["10.9.9.9:80"]), &[]),
        ("/empty-list", json!([]), &[]),
        ("/empty-text", json!(""), &[]),
    ];
    let route = |(prefix, hint, _): &(&str, Value, &[usize])| {
        json!({
            "match": {"prefix": prefix},
            "metadata": {"filter_metadata": {NAMESPACE: {SUBSET: hint}}},
        })
    };
    let mut routes: Vec<Value> = cases.iter().map(route).collect();
    routes.push(json!({"match": {"prefix": "/"}}));
    let plain = with_metadata(&pods, &routes).await;
    let to = |prefix: &str| Ask::post(&format!("{prefix}/v1/completions"), crate::rig::BODY);
    for (prefix, _, who) in &cases {
        assert_reaches(&plain.gateway, &pods, &to(prefix), who).await;
    }
    assert_reaches(&plain.gateway, &pods, &to(""), &all).await;
}

/// A `google.protobuf.Value` of a text, encoded.
fn text(text: &str) -> Vec<u8> {
    field(3, text.as_bytes())
}

/// A list of such values, encoded.
fn list(values: &[Vec<u8>]) -> Vec<u8> {
    let values: Vec<u8> = values.iter().flat_map(|value| field(1, value)).collect();
    field(6, &values)
}

/// A number, encoded: its tag, and eight bytes.
fn number(number: f64) -> Vec<u8> {
    [&[0x11][..], &number.to_le_bytes()].concat()
}

/// A truth value, encoded.
fn truth(truth: bool) -> Vec<u8> {
    vec![0x20, u8::from(truth)]
}

/// A field of bytes: tag, length, content.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut encoded = vec![number << 3 | 2];
    let mut length = bytes.len();
    while length >= 0x80 {
        encoded.push(length as u8 | 0x80);
        length >>= 7;
    }
    encoded.push(length as u8);
    encoded.extend_from_slice(bytes);
    encoded
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let at = |index: usize| u32::from(three.get(index).copied().unwrap_or_default());
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) & 63;
            match digit <= three.len() {
                true => text.push(char::from(DIGITS[index as usize])),
                false => text.push('='),
            }
        }
    }
    text
}
