//! The worker at an address: a new id is a new worker.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Reply;
use pd_router_e2e::conversation::Conversation;
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, Role};
use pd_router_e2e::gateway::{Gateway, worker};
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::threads::endless;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::{UNHURRIED, until_listed};

const PIN: &str = "x-prefill-instance-id";
const EXPLAIN: &str = "x-pd-router-explain";

/// Blocks of the prompt that this prefill worker holds, by the explanation.
fn credit(reply: &Reply, name: &str) -> f64 {
    let text = reply.header(EXPLAIN).unwrap_or_default();
    let choices: Vec<Value> = serde_json::from_str(text).unwrap_or_default();
    let of_prefill = choices.iter().filter(|choice| choice["role"] == "prefill");
    let mut candidates = of_prefill.flat_map(|choice| choice["candidates"].as_array());
    let of_name = candidates
        .next()
        .and_then(|all| all.iter().find(|one| one["worker"] == name));
    let credit = of_name.and_then(|one| one["terms"]["credit_blocks"].as_f64());
    credit.unwrap_or_else(|| panic!("no credit of {name} in {text}"))
}

/// The next turn, whose answer explains its selection.
async fn explained(conversation: &mut Conversation, gateway: &Gateway) -> Reply {
    let ask = conversation.ask().header(EXPLAIN, "1");
    let reply = gateway.send(ask).await.expect(200);
    conversation.append_reply(&reply);
    reply
}

pub async fn a_new_id_at_a_known_address_is_a_new_worker(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(2, 1, FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let pool = json!({"trust_clients": true});
    let gateway = engines.gateway_on_one_thread(proxy, pool).await;
    gateway.is_ready().await;
    let old = engines.prefill[0].name();
    let mut conversation = Conversation::alone("the old one");
    let id = engines.prefill[0].id().to_string();
    conversation.turn_with(gateway.listen, &[(PIN, &id)]).await;
    let reply = explained(&mut conversation, &gateway).await;
    assert_eq!(reply.pair().prefill, old);
    assert!(credit(&reply, &old) > 20.0, "{reply:?}");

    engines.prefill[0].kill().await;
    engines.prefill[0].start().await;
    engines.list_one(Role::Prefill, 0);
    let new = engines.prefill[0].name();
    until_listed(&gateway, &new, true).await;
    let status = gateway.status().await;
    assert!(worker(&status, &old).is_null(), "{status}");
    let found = worker(&status, &new);
    assert_eq!(found["prefix_blocks"], 0, "{status}");
    assert_eq!(found["bookings"]["prefill_tokens"], 0, "{status}");
    let reply = explained(&mut conversation, &gateway).await;
    assert_eq!(credit(&reply, &new), 0.0, "{reply:?}");
    gateway.assert_comes_to_rest().await;
}

pub async fn a_stream_outlives_the_identity_of_its_worker(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(1, 1, UNHURRIED).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let gateway = engines.gateway_on_one_thread(proxy, json!({})).await;
    gateway.is_ready().await;
    let mut client = Raw::connect(gateway.listen).await;
    let body = endless("for ever").to_string();
    let request = raw::post("/v1/chat/completions", &[], body.as_bytes());
    client.write(&request).await;
    client.read_until("data:", 3).await;
    let name = engines.decode[0].name();
    eventually("the stream is booked", GENEROUS, || async {
        let status = gateway.status().await;
        match worker(&status, &name)["bookings"]["decodes"] == 1 {
            true => Ok(()),
            false => Err(status.to_string()),
        }
    })
    .await;

    // The engine runs on, but the source gives its address another id.
    engines.rename(Role::Decode, 0, 7, "somebody");
    until_listed(&gateway, "somebody", true).await;
    let status = gateway.status().await;
    assert!(worker(&status, &name).is_null(), "{status}");
    let bookings = &worker(&status, "somebody")["bookings"];
    assert_eq!(bookings["decodes"], 0, "{status}");
    assert_eq!(bookings["decode_blocks"], 0, "{status}");
    let seen = client.seen().matches("data:").count();
    client.read_until("data:", seen + 10).await;

    drop(client);
    gateway.assert_comes_to_rest().await;
    let status = gateway.status().await;
    let bookings = &worker(&status, "somebody")["bookings"];
    assert_eq!(bookings["decodes"], 0, "{status}");
    assert_eq!(bookings["decode_blocks"], 0, "{status}");
}
