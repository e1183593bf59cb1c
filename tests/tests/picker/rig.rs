//! Helpers of this suite: workers that identify themselves, pools of them, and requests as in the conformance suite.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use pd_router_e2e::client::{self, Ask, Reply};
use pd_router_e2e::engines::with;
use pd_router_e2e::scripted::{Answer, HttpVersion, ScriptedWorker};
use serde_json::{Value, json};

pub const COMPLETIONS: &str = "/v1/completions";
pub const CHAT: &str = "/v1/chat/completions";

/// The endpoints that a gateway in front allows.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// The endpoint that answered.
pub const SERVED: &str = "x-gateway-destination-endpoint-served";
/// The reason for dropping a request.
pub const REASON: &str = "x-llm-d-request-dropped-reason";

/// Engines that answer soon, though not at once.
pub const QUICK: &[&str] = &["--prefill-rate", "100000", "--token-ms", "10"];

/// The body that the conformance suite sends.
pub const BODY: &str =
    r#"{"model":"conformance-fake-model","prompt":"Write as if you were a critic: San Francisco"}"#;

/// The request that the conformance suite sends.
pub fn ask() -> Ask {
    Ask::post(COMPLETIONS, BODY)
}

/// Aggregated workers that answer 200 with the port that they listen on.
pub struct Pods {
    pods: Vec<ScriptedWorker>,
}

impl Pods {
    /// This many pods, all on one host.
    pub async fn start(count: usize) -> Pods {
        Pods::on(&vec![Ipv4Addr::LOCALHOST.into(); count]).await
    }

    /// One pod on each of these hosts.
    pub async fn on(hosts: &[IpAddr]) -> Pods {
        Pods::speaking(HttpVersion::Http1, hosts).await
    }

    /// The same with this HTTP version only.
    pub async fn speaking(version: HttpVersion, hosts: &[IpAddr]) -> Pods {
        let mut pods = Vec::new();
        for host in hosts {
            let answer = json!({"object": "text_completion", "choices": [{"text": "hello"}]});
            let answer = answer.to_string();
            let script = move |_: &_| Answer::json(answer.clone());
            pods.push(ScriptedWorker::start_at(*host, version, script).await);
        }
        Pods { pods }
    }

    /// Addresses of the pods.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.pods.iter().map(|pod| pod.address).collect()
    }

    /// The pods with these numbers in the form of a subset.
    pub fn named(&self, numbers: &[usize]) -> String {
        let addresses = self.addresses();
        let named = numbers.iter().map(|&at| addresses[at].to_string());
        named.collect::<Vec<_>>().join(",")
    }

    /// The pods as entries of a configuration.
    pub fn listed(&self) -> Vec<Value> {
        let one =
            |address: SocketAddr| json!({"address": address.to_string(), "role": "aggregated"});
        self.addresses().into_iter().map(one).collect()
    }

    /// Number of requests of each pod.
    pub fn counts(&self) -> Vec<usize> {
        self.pods.iter().map(|pod| pod.requests().len()).collect()
    }

    /// The pod with this number.
    pub fn pod(&self, number: usize) -> &ScriptedWorker {
        &self.pods[number]
    }

    /// Pods that got requests since these counts.
    pub fn reached_since(&self, before: &[usize]) -> BTreeSet<usize> {
        let counts = self.counts();
        let more = counts.iter().zip(before).enumerate();
        more.filter_map(|(at, (now, before))| (now > before).then_some(at))
            .collect()
    }
}

/// A pool of aggregated workers in a cluster of its name, which trusts the gateway in front.
pub fn pool(name: &str, workers: Vec<Value>, more: Value) -> Value {
    let pool = json!({
        "name": name,
        "protocol": "aggregated",
        "clusters": {"decode": name},
        "trust_clients": true,
        "discovery": {"static": {"workers": workers}},
        "selection": {"decode": "round_robin"},
    });
    with(pool, more)
}

/// A configuration of these pools, with response headers and the status page on.
pub fn configuration(pools: Vec<Value>) -> Value {
    json!({"pools": pools, "response_headers": true, "status": true})
}

/// Ten concurrent clients with ten requests each; fails unless all are answered with 200.
pub async fn hundred(to: SocketAddr, ask: &Ask) -> Vec<Reply> {
    let replies = client::crowd(to, 10, 10, ask).await;
    replies.into_iter().map(|reply| reply.expect(200)).collect()
}
