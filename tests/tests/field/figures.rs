//! The engines' own metrics (gateway-api-inference-extension #365).

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{RecordedRequest, Role, static_config};
use pd_router_e2e::gateway::{self, Gateway};
use pd_router_e2e::scripted::{Answer, ScriptedWorker};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

/// Requests that show the preferred worker.
const ENOUGH: usize = 8;

/// A worker that reports this share of its KV cache in use, and this many requests of other gateways.
async fn worker(share: f64, requests: u64) -> ScriptedWorker {
    ScriptedWorker::start(move |got: &RecordedRequest| match got.path.as_str() {
        "/metrics" => Answer::json(format!(
            "vllm:kv_cache_usage_perc {share}\nvllm:num_requests_running {requests}\nvllm:num_requests_waiting {requests}\nvllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"1000\"}} 1\n"
        )),
        _ => Answer::json(r#"{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}"#),
    })
    .await
}

/// Number of client requests that the worker received.
fn served(worker: &ScriptedWorker) -> usize {
    let requests = worker.requests();
    requests.iter().filter(|got| got.method == "POST").count()
}

pub async fn every_worker_is_asked_at_its_own_port(proxy: Proxy) {
    // On one host: only their ports differ.
    let (busy, idle) = (worker(0.9, 50).await, worker(0.0, 0).await);
    let workers = [&busy, &idle].map(|one| one.listed(Role::Aggregated));
    let pool = json!({"protocol": "aggregated", "engine_metrics": {"interval_ms": 100}});
    let gateway = Gateway::start(proxy, &static_config(workers.to_vec(), pool), &[]).await;
    // Each worker has its own metrics, which a poll at the other's port would not give.
    eventually("the figures are known", GENEROUS, || async {
        let status = gateway.status().await;
        let known = [(&busy, 50), (&idle, 0)].map(|(one, waiting)| {
            let name = one.address.to_string();
            gateway::worker(&status, &name)["engine"]["waiting"] == waiting
        });
        (known == [true, true])
            .then_some(())
            .ok_or(status.to_string())
    })
    .await;
    eventually("the idle one is preferred", GENEROUS, || async {
        let before = served(&busy);
        for number in 0..ENOUGH {
            let ask = Ask::chat(&format!("question {number}"));
            gateway.send(ask).await.expect(200);
        }
        match served(&busy) - before {
            0 => Ok(()),
            others => Err(format!("{others} of {ENOUGH} went to the busy one")),
        }
    })
    .await;
    gateway.assert_comes_to_rest().await;
}
