//! Clients that leave during prefill: a clean-up leg fetches the blocks, or they are counted.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::chat_body;
use pd_router_e2e::engines::Role;
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::metrics::Metrics;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A prefill of the prompt below takes half a second; leases outlast the test.
const SLOW_PREFILL: [&str; 6] = [
    "--prefill-rate",
    "800",
    "--lease-ms",
    "3600000",
    "--token-ms",
    "1",
];

const LEAVERS: u64 = 4;

/// Fates of hand-offs known to be left, and of those that may be.
const LEFT: [&str; 2] = ["leaked", "unknown"];

fn long_body() -> Value {
    chat_body(&"tell ".repeat(320))
}

async fn write(gateway: &Gateway, body: &Value) -> Raw {
    let mut client = Raw::connect(gateway.listen).await;
    let request = raw::post(CHAT, &[], body.to_string().as_bytes());
    client.write(&request).await;
    client
}

/// A fixture, and its counters at the beginning.
struct Rig {
    fixture: Fixture,
    before: Metrics,
}

impl Rig {
    async fn on(spec: FixtureSpec) -> Rig {
        let fixture = Fixture::acquire(spec).await;
        let before = fixture.gateway.metrics().await;
        Rig { fixture, before }
    }

    async fn slow(proxy: Proxy, workers: (usize, usize)) -> Rig {
        Rig::on(FixtureSpec::nixl(proxy, workers).only_options(&SLOW_PREFILL)).await
    }

    async fn more_of(&self, names: &[String]) -> f64 {
        let now = self.fixture.gateway.metrics().await;
        let more = |name: &String| now.expect(name) - self.before.expect(name);
        names.iter().map(more).sum()
    }

    async fn cleaned_up(&self) -> f64 {
        self.more_of(&["pd_router_clean_ups_total".to_owned()])
            .await
    }

    /// Hand-offs of these fates, and their blocks.
    async fn of_fates(&self, fates: &[&str]) -> (f64, f64) {
        let names = |what: &str| -> Vec<String> {
            let name = |fate| format!("pd_router_kv_{fate}_{what}_total");
            fates.iter().map(name).collect()
        };
        let hand_offs = self.more_of(&names("handoffs")).await;
        (hand_offs, self.more_of(&names("blocks")).await)
    }

    /// Sends these requests one after the other, each until its prefill has begun, and leaves.
    async fn leave_during_prefill(&self, bodies: &[Value]) {
        let mut clients = Vec::new();
        let before = self.fixture.total(Role::Prefill).await.requests;
        for body in bodies {
            clients.push(write(&self.fixture.gateway, body).await);
        }
        eventually("the prefills have begun", GENEROUS, || async {
            let state = self.fixture.total(Role::Prefill).await;
            if state.requests == before + bodies.len() as u64 {
                return Ok(());
            }
            Err(format!("{state:?}"))
        })
        .await;
        // Each prefill takes half a second, one after the other.
        drop(clients);
        eventually("the prefills end", GENEROUS, || async {
            let state = self.fixture.total(Role::Prefill).await;
            if state.running == 0 && state.handoffs_issued >= before + bodies.len() as u64 {
                return Ok(());
            }
            Err(format!("{state:?}"))
        })
        .await;
    }

    /// Waits until the gateway has counted exactly the hand-offs that were never pulled.
    async fn assert_leaks_are_counted(&self, hand_offs: u64) {
        eventually("what is left is counted", GENEROUS, || async {
            let state = self.fixture.total(Role::Prefill).await;
            let counted = self.of_fates(&LEFT).await;
            let unused = state.handoffs_issued - state.handoffs_consumed;
            let right = (unused as f64, state.blocks_unpulled as f64);
            if counted == right && unused == hand_offs {
                return Ok(());
            }
            Err(format!(
                "counted {counted:?}, right is {right:?}: {state:?}"
            ))
        })
        .await;
    }

    /// Leaves in the middle of a stream and waits for the engines to notice.
    async fn leave_during_decode(&self) {
        let mut body = chat_body("a long story");
        body["stream"] = json!(true);
        body["max_tokens"] = json!(10_000);
        let mut client = write(&self.fixture.gateway, &body).await;
        client.read_until("data:", 3).await;
        drop(client);
        eventually("no engine runs anything", GENEROUS, || async {
            for engine in self.fixture.living() {
                let state = engine.state().await;
                if state.running > 0 {
                    return Err(format!("{state:?}"));
                }
            }
            Ok(())
        })
        .await;
        self.fixture.gateway.assert_comes_to_rest().await;
        assert_eq!(self.cleaned_up().await, 0.0);
        assert_eq!(self.of_fates(&LEFT).await, (0.0, 0.0));
    }
}

pub async fn what_clients_leave_behind_in_prefill_is_cleaned_up(proxy: Proxy) {
    let mut rig = Rig::slow(proxy, (2, 1)).await;
    let mut streamed = long_body();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    streamed["max_completion_tokens"] = json!(50);
    streamed["min_tokens"] = json!(3);
    let bodies = [long_body(), streamed.clone(), long_body(), streamed];
    rig.leave_during_prefill(&bodies).await;
    eventually("the blocks are fetched", GENEROUS, || async {
        let state = rig.fixture.total(Role::Prefill).await;
        if state.blocks_unpulled == 0 && state.handoffs_consumed == LEAVERS {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
    rig.fixture.gateway.assert_comes_to_rest().await;
    assert_eq!(rig.cleaned_up().await, LEAVERS as f64);
    assert_eq!(rig.of_fates(&LEFT).await, (0.0, 0.0));
    let fetched = rig.of_fates(&["fetched"]).await;
    let blocks = rig.fixture.total(Role::Prefill).await.blocks_pulled;
    assert_eq!(fetched, (LEAVERS as f64, blocks as f64));

    let legs = rig.fixture.decode(0).requests().await;
    assert_eq!(legs.len() as u64, LEAVERS);
    for leg in legs {
        let body = leg.json();
        assert_eq!(body["max_tokens"], 1, "{body}");
        let most = body["max_completion_tokens"].as_u64();
        assert!(most.is_none_or(|most| most == 1), "{body}");
        assert_ne!(body["stream"], true, "{body}");
        assert!(body.get("stream_options").is_none(), "{body}");
        let least = body["min_tokens"].as_u64();
        assert!(least.is_none_or(|least| least == 1), "{body}");
        assert!(body["kv_transfer_params"].is_object(), "{body}");
    }
    let decode = rig.fixture.total(Role::Decode).await;
    assert_eq!(decode.refused(), 0, "{decode:?}");
    assert!(decode.prompt_tokens_computed <= LEAVERS, "{decode:?}");
    rig.fixture.gateway.assert_serves().await;
    rig.fixture.gateway.assert_comes_to_rest().await;
    rig.fixture.release();
}

pub async fn what_a_clean_up_cannot_fetch_is_counted(proxy: Proxy) {
    let mut rig = Rig::slow(proxy, (1, 1)).await;
    rig.fixture.engines.kill(Role::Decode).await;
    rig.leave_during_prefill(&[long_body(), long_body()]).await;
    rig.assert_leaks_are_counted(2).await;
    // A clean-up leg without an answer may have fetched its hand-off before.
    let known = rig.of_fates(&["leaked"]).await;
    assert_eq!(known, (0.0, 0.0));
    rig.fixture.gateway.assert_comes_to_rest().await;
    rig.fixture.release();
}

pub async fn without_clean_up_what_is_left_is_counted(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (1, 1)).only_options(&SLOW_PREFILL);
    let mut rig = Rig::on(spec.pool(json!({"cleanup": {"held_bytes": 0}}))).await;
    rig.leave_during_prefill(&[long_body(), long_body()]).await;
    rig.assert_leaks_are_counted(2).await;
    assert_eq!(rig.fixture.total(Role::Decode).await.requests, 0);
    // No leg was sent that could have fetched it.
    let unknown = rig.of_fates(&["unknown"]).await;
    assert_eq!(unknown, (0.0, 0.0));
    assert_eq!(rig.cleaned_up().await, 0.0);
    rig.fixture.gateway.assert_serves().await;
    rig.fixture.gateway.assert_comes_to_rest().await;
    rig.fixture.release();
}

pub async fn a_client_that_leaves_an_aggregated_worker_leaves_nothing_to_clean_up(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (0, 0)).aggregated(1);
    let rig = Rig::on(spec.only_options(&["--token-ms", "100"])).await;
    rig.leave_during_decode().await;
    assert_eq!(rig.fixture.decode(0).state().await.requests, 1);
    rig.fixture.release();
}

pub async fn a_client_that_leaves_during_decode_leaves_nothing_to_clean_up(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (1, 1));
    let rig = Rig::on(spec.only_options(&["--token-ms", "100"])).await;
    rig.leave_during_decode().await;
    assert_eq!(rig.fixture.total(Role::Decode).await.requests, 1);
    assert_eq!(rig.fixture.total(Role::Prefill).await.blocks_unpulled, 0);
    rig.fixture.release();
}

/// Their decode legs have no answer yet and may or may not have fetched the hand-off: the leak is in doubt.
pub async fn found_b18_what_decode_was_asked_to_fetch_is_in_doubt_when_clients_leave(proxy: Proxy) {
    let rig = Rig::on(FixtureSpec::nixl(proxy, (1, 1))).await;
    rig.fixture.decode(0).fault(&json!({"kind": "hang"})).await;
    let mut clients = Vec::new();
    for _ in 0..LEAVERS {
        clients.push(write(&rig.fixture.gateway, &chat_body("hello")).await);
    }
    eventually("decode is asked", GENEROUS, || async {
        let requests = rig.fixture.total(Role::Decode).await.requests;
        (requests == LEAVERS)
            .then_some(())
            .ok_or(requests.to_string())
    })
    .await;
    drop(clients);
    let fates = eventually("their ends are counted", GENEROUS, || async {
        let unknown = rig.of_fates(&["unknown"]).await.0;
        let known = rig.of_fates(&["leaked"]).await.0;
        match unknown + known >= LEAVERS as f64 {
            true => Ok((unknown, known)),
            false => Err(format!("{unknown} in doubt, {known} known")),
        }
    })
    .await;
    assert_eq!(fates, (LEAVERS as f64, 0.0), "in doubt, and known");
    rig.fixture.release();
}
