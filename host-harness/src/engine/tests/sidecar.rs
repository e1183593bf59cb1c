//! Tests of llm-d's sidecar in front of a decode engine.

use super::*;

fn llmd(role: Role) -> EngineConfig {
    EngineConfig {
        dialect: Dialect::Llmd,
        ..quick(role)
    }
}

impl Probe {
    /// A complete request, with the address of the engine for its prefill leg.
    async fn through(&self, decode: &Engine, prefiller: &str, body: &Value) -> (u16, String) {
        let request = Request::post(format!("http://{}{CHAT}", decode.address))
            .header("x-prefiller-host-port", prefiller)
            .body(Full::from(body.to_string()))
            .expect("a request");
        let (head, body) = self.raw(request).await;
        let text = String::from_utf8(body.to_vec()).expect("text");
        (head.status().as_u16(), text)
    }
}

#[tokio::test]
async fn a_sidecar_runs_the_prefill_leg_and_hands_it_to_its_engine() {
    let (prefill, decode) = (
        start(llmd(Role::Prefill)).await,
        start(llmd(Role::Decode)).await,
    );
    let probe = Probe::new();
    let at = prefill.address.to_string();
    let (status, body) = probe.through(&decode, &at, &chat("hello")).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(
        parsed(&body)["choices"][0]["message"]["content"],
        "token0 token1 token2"
    );
    let stream = with(&chat("hello"), "stream", json!(true));
    let (status, body) = probe.through(&decode, &at, &stream).await;
    assert_eq!((status, body.ends_with("data: [DONE]\n\n")), (200, true));
    let state = probe.state(prefill.address).await;
    assert_eq!(state["pulled"], 2);
    assert_eq!(state["requests_by_leg"]["prefill"], 2);
    assert_eq!(probe.state(decode.address).await["recomputed"], 0);
}

#[tokio::test]
async fn a_sidecar_says_502_of_a_dead_prefill_and_else_what_that_one_says() {
    let (prefill, decode) = (
        start(llmd(Role::Prefill)).await,
        start(llmd(Role::Decode)).await,
    );
    let probe = Probe::new();
    let at = prefill.address.to_string();
    let refused = probe.through(&decode, &at, &chat("<|fail-prefill|>")).await;
    let own = probe
        .post(prefill.address, CHAT, &prefill_leg("<|fail-prefill|>"))
        .await;
    assert_eq!((refused.0, &refused), (500, &own));
    prefill.stop().await;
    let dead = probe.through(&decode, &at, &chat("hello")).await;
    assert_eq!(dead, (502, String::new()));
    let alone = probe.post(decode.address, CHAT, &chat("hello")).await;
    assert_eq!(alone.0, 200, "without a name the engine runs it whole");
}
