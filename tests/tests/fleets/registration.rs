//! Workers that register themselves at one gateway, for as long as they renew it.

use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engines::{Engine, FAST, Fleet, config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::rig::{pairs, until_all_say, until_answered_with};

const WORKERS: &str = "/pd-router/workers";
const TOKEN: &str = "swordfish-and-chips";
const LEASE_MS: u64 = 4_000;
const HEARTBEAT: Duration = Duration::from_millis(1000);

/// The clusters list no hosts: every worker that registers within the networks is reached.
const CLUSTERS: [&str; 4] = [
    "--cluster",
    "prefill=original_dst",
    "--cluster",
    "decode=original_dst",
];

async fn open(proxy: Proxy, registration: Value) -> Gateway {
    let registration = with(json!({"token": TOKEN, "lease_ms": LEASE_MS}), registration);
    let pool = json!({
        "discovery": {"registration": registration},
        "destinations": {"original_dst": {"networks": ["127.0.0.0/8"]}},
    });
    Gateway::start(proxy, &config(pool), &CLUSTERS).await
}

fn authorised(ask: Ask) -> Ask {
    ask.header("authorization", &format!("Bearer {TOKEN}"))
}

async fn register(gateway: &Gateway, body: &Value) -> Reply {
    let ask = Ask::post(WORKERS, body.to_string());
    gateway.send(authorised(ask)).await
}

async fn listed(gateway: &Gateway) -> String {
    let page = gateway.send(authorised(Ask::get(WORKERS))).await;
    page.expect(200).text().into_owned()
}

fn all_of(fleet: &Fleet) -> Value {
    let workers: Vec<Value> = fleet.engines().map(Engine::listed).collect();
    json!({"workers": workers})
}

/// Fails if a page or the log shows the token.
async fn assert_keeps_its_secret(gateway: &mut Gateway) {
    let status = gateway.whole_status().await.to_string();
    assert!(!status.contains(TOKEN), "{status}");
    let listed = listed(gateway).await;
    assert!(!listed.contains(TOKEN), "{listed}");
    let log = gateway.process().log();
    assert!(!log.contains(TOKEN), "{log}");
}

pub async fn workers_register_renew_and_expire(proxy: Proxy) {
    let fleet = Fleet::start(2, 2, FAST).await;
    let mut gateway = open(proxy, json!({})).await;
    gateway.is_not_ready().await;
    // One worker registers alone, then all of them together.
    let reply = register(&gateway, &fleet.prefill[0].listed()).await;
    let answer = reply.expect(200).json();
    assert_eq!(answer["registered"], 1, "{answer}");
    assert_eq!(answer["lease_ms"], LEASE_MS, "{answer}");
    assert_eq!(answer["scope"], "this gateway only", "{answer}");
    let reply = register(&gateway, &all_of(&fleet)).await.expect(200);
    assert_eq!(reply.json()["registered"], 4, "{reply:?}");
    gateway.is_ready().await;
    until_all_say(&gateway, "the source", |pool| {
        pool["discovery"]["source"] == "registration"
            && pool["workers"].as_array().is_some_and(|all| all.len() == 4)
    })
    .await;
    let page = listed(&gateway).await;
    for engine in fleet.engines() {
        assert!(page.contains(&engine.address.to_string()), "{page}");
    }

    // Heartbeats keep them for several leases.
    for _ in 0..2 * LEASE_MS / 1000 {
        sleep(HEARTBEAT).await;
        register(&gateway, &all_of(&fleet)).await.expect(200);
        pairs(&gateway, 2).await;
    }
    // One worker stops its heartbeats; the others continue.
    let silent = fleet.decode[0].address.to_string();
    let others: Vec<Value> = fleet.engines().map(Engine::listed).collect();
    let others = others.into_iter().filter(|line| line["address"] != silent);
    let others = json!({"workers": others.collect::<Vec<Value>>()});
    eventually("who is silent is forgotten", GENEROUS, || async {
        register(&gateway, &others).await.expect(200);
        let page = listed(&gateway).await;
        match page.contains(&silent) {
            true => Err(page),
            false => Ok(()),
        }
    })
    .await;
    until_all_say(&gateway, "three workers", |pool| {
        !pool["workers"].to_string().contains(&silent)
    })
    .await;
    register(&gateway, &others).await.expect(200);
    let before = fleet.decode[0].state().await.requests;
    pairs(&gateway, 8).await;
    assert_eq!(fleet.decode[0].state().await.requests, before);

    until_answered_with(&gateway, 503).await;
    gateway.is_not_ready().await;
    assert_keeps_its_secret(&mut gateway).await;
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn workers_are_taken_off_the_list(proxy: Proxy) {
    let fleet = Fleet::start(1, 2, FAST).await;
    let gateway = open(proxy, json!({"lease_ms": 600_000})).await;
    register(&gateway, &all_of(&fleet)).await.expect(200);
    gateway.is_ready().await;
    let first = fleet.decode[0].address.to_string();
    let ask = Ask::delete_with(WORKERS, &json!({"address": first}));
    gateway.send(ask.clone()).await.expect(401);
    gateway.send(authorised(ask)).await.expect(200);
    until_all_say(&gateway, "it is gone", |pool| {
        !pool["workers"].to_string().contains(&first)
    })
    .await;
    assert!(!listed(&gateway).await.contains(&first));
    let before = fleet.decode[0].state().await.requests;
    pairs(&gateway, 8).await;
    assert_eq!(fleet.decode[0].state().await.requests, before);

    let rest = fleet
        .engines()
        .map(|engine| json!({"address": engine.address.to_string()}));
    let rest: Vec<Value> = rest.collect();
    let ask = Ask::delete_with(WORKERS, &json!({"workers": rest}));
    gateway.send(authorised(ask)).await.expect(200);
    // An authorised removal of all workers is no failure of a source.
    until_answered_with(&gateway, 503).await;
    gateway.assert_comes_to_rest().await;
}

pub async fn nobody_registers_without_the_token(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut gateway = open(proxy, json!({})).await;
    let body = all_of(&fleet).to_string();
    let address = json!({"address": fleet.prefill[0].address.to_string()});
    for header in [
        None,
        Some("Bearer wrong".to_owned()),
        Some(format!("Bearer {TOKEN}x")),
        Some(format!("Basic {TOKEN}")),
        Some("Bearer ".to_owned()),
    ] {
        for ask in [
            Ask::post(WORKERS, body.clone()),
            Ask::get(WORKERS),
            Ask::delete_with(WORKERS, &address),
        ] {
            let ask = match &header {
                Some(value) => ask.header("authorization", value),
                None => ask,
            };
            let reply = gateway.send(ask).await.expect(401);
            let challenge = reply.header("www-authenticate").unwrap_or_default();
            assert!(challenge.starts_with("Bearer"), "{reply:?}");
            let known = fleet.prefill[0].address.to_string();
            assert!(!reply.text().contains(&known), "{reply:?}");
        }
    }
    gateway.is_not_ready().await;
    assert_keeps_its_secret(&mut gateway).await;
}

pub async fn what_cannot_be_registered_is_refused_by_name(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut gateway = open(proxy, json!({})).await;
    let sound = fleet.prefill[0].listed();
    let outside = with(sound.clone(), json!({"address": "10.9.9.9:8000"}));
    for (body, named) in [
        (outside.clone(), "address"),
        (json!({"workers": [sound, outside]}), "workers[1].address"),
        (
            with(fleet.prefill[0].listed(), json!({"role": "cook"})),
            "role",
        ),
        (
            with(fleet.prefill[0].listed(), json!({"adress": "x"})),
            "adress",
        ),
        (
            with(fleet.prefill[0].listed(), json!({"address": "here"})),
            "address",
        ),
        (json!({"workers": 7}), "workers"),
    ] {
        let reply = register(&gateway, &body).await.expect(400);
        assert!(reply.text().contains(named), "{named}: {}", reply.text());
    }
    let ask = Ask::post(WORKERS, "not JSON");
    gateway.send(authorised(ask)).await.expect(400);
    let large = json!({"workers": [], "x": "y".repeat(1 << 20)});
    register(&gateway, &large).await.expect(413);
    // The whole list is refused: its valid worker is not registered either.
    let page = listed(&gateway).await;
    assert!(!page.contains("127.0.0.1:"), "{page}");

    let elsewhere = Ask::post("/pd-router/workers?pool=nobody", all_of(&fleet).to_string());
    gateway.send(authorised(elsewhere)).await.expect(404);
    let by_name = Ask::post("/pd-router/workers?pool=sim", all_of(&fleet).to_string());
    gateway.send(authorised(by_name)).await.expect(200);
    gateway.answers().await;
    assert_keeps_its_secret(&mut gateway).await;
}

pub async fn a_full_list_takes_nobody_more(proxy: Proxy) {
    let fleet = Fleet::start(1, 2, FAST).await;
    let gateway = open(proxy, json!({"max_workers": 2, "lease_ms": 600_000})).await;
    register(&gateway, &fleet.prefill[0].listed())
        .await
        .expect(200);
    register(&gateway, &fleet.decode[0].listed())
        .await
        .expect(200);
    register(&gateway, &fleet.decode[1].listed())
        .await
        .expect(409);
    // A registered worker can still renew.
    register(&gateway, &fleet.decode[0].listed())
        .await
        .expect(200);
    gateway.is_ready().await;
    pairs(&gateway, 4).await;
    assert_eq!(fleet.decode[1].state().await.requests, 0);
    let first = json!({"address": fleet.decode[0].address.to_string()});
    let ask = authorised(Ask::delete_with(WORKERS, &first));
    gateway.send(ask).await.expect(200);
    register(&gateway, &fleet.decode[1].listed())
        .await
        .expect(200);
    let name = fleet.decode[1].address.to_string();
    until_all_say(&gateway, "the other is there", |pool| {
        pool["workers"].to_string().contains(&name)
    })
    .await;
    pairs(&gateway, 4).await;
}

pub async fn a_pool_with_another_source_takes_no_registrations(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    for path in [WORKERS, "/pd-router/workers?pool=sim"] {
        let ask = Ask::post(path, all_of(&fleet).to_string());
        gateway.send(authorised(ask)).await.expect(404);
        gateway.send(authorised(Ask::get(path))).await.expect(404);
    }
}
