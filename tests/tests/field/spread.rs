//! Selection for prompts of which no worker holds a prefix, and for prompts that differ late.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Connection, Reply};
use pd_router_e2e::engines::{FAST, Fleet, MODEL};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::within_tries;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// sgl-project/sglang #14305, vllm-project/aibrix #1393: misses that all go to one worker.
pub async fn prompts_that_nobody_knows_go_to_whoever_has_least_to_do(proxy: Proxy) {
    let fleet = Fleet::start(2, 2, &["--prefill-rate", "1000", "--token-ms", "5"]).await;
    let gateway = Gateway::start_on_one_thread(proxy, &fleet.config(), &[]).await;
    // Distinct prefixes of 500 tokens each: one of them keeps a worker busy for half a second.
    let bodies = (0..8).map(|number| {
        let prompt = format!("{number} ").repeat(1000);
        json!({"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 2})
    });
    let mut clients = Vec::new();
    for body in bodies {
        let mut client = Raw::connect(gateway.listen).await;
        let request = raw::post(CHAT, &[], body.to_string().as_bytes());
        client.write(&request).await;
        clients.push(client);
    }
    for client in &mut clients {
        client.read_reply().await.expect(200);
    }
    for engine in &fleet.prefill {
        let got = engine.state().await.requests;
        assert!((3..=5).contains(&got), "{got} of 8 went to one prefill");
    }
    gateway.assert_comes_to_rest().await;
}

async fn prefill_of(connection: &mut Connection, messages: &Value, tools: &Value) -> String {
    let body = json!({"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 2});
    let reply = connection.send(Ask::post(CHAT, body.to_string())).await;
    let reply: Reply = reply.unwrap_or_else(|failure| panic!("no answer: {failure}"));
    reply.expect(200).pair().prefill
}

/// So many are looked at, however soon they spread.
const CONVERSATIONS: usize = 12;

/// sgl-project/sglang #26263: a prefix that is known by its first message only.
pub async fn a_conversation_is_known_by_all_its_messages_and_its_tools(proxy: Proxy) {
    let fleet = Fleet::start(3, 1, FAST).await;
    let gateway = Gateway::start_on_one_thread(proxy, &fleet.config(), &[]).await;
    let opened = Connection::open(gateway.listen).await;
    let mut connection = opened.unwrap_or_else(|failure| panic!("no connection: {failure}"));
    let first = json!({"role": "system", "content": "short"});
    let tool = |name: &str| {
        let function = json!({"name": name, "description": format!("{name} ").repeat(400)});
        json!([{"type": "function", "function": function}])
    };
    // Prompts that share their first message only: they spread, and each stays with its worker. Of idle workers one is drawn.
    let mut seen = BTreeSet::new();
    within_tries("several have some", async |number| {
        let long = format!("{number} ").repeat(800);
        let messages = json!([first, {"role": "user", "content": long}]);
        let tools = tool(&format!("tool{number}"));
        let prefill = prefill_of(&mut connection, &messages, &tools).await;
        for _ in 0..2 {
            let again = prefill_of(&mut connection, &messages, &tools).await;
            assert_eq!(again, prefill, "conversation {number}");
        }
        seen.insert(prefill);
        match seen.len() > 1 && number + 1 >= CONVERSATIONS {
            true => Ok(()),
            false => Err(format!("{seen:?}")),
        }
    })
    .await;
    gateway.assert_comes_to_rest().await;
}
