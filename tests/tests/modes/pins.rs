//! Requests that name their workers.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{Role, in_turns};
use pd_router_e2e::fixture::FixtureSpec;
use serde_json::json;

use crate::rig::{Rig, answered, ask, chat_with};

/// Both spellings of the headers, prefill's first.
const SPELLINGS: [[&str; 2]; 2] = [
    ["x-prefill-instance-id", "x-worker-instance-id"],
    [
        "x-dynamo-prefill-instance-id",
        "x-dynamo-worker-instance-id",
    ],
];

fn pinned([prefill_header, decode_header]: [&str; 2], prefill: u64, decode: u64) -> Ask {
    Ask::chat("hello")
        .header(prefill_header, &prefill.to_string())
        .header(decode_header, &decode.to_string())
}

pub async fn pins_in_headers_are_kept(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    for spelling in SPELLINGS {
        for (p, prefill) in rig.prefill.iter().enumerate() {
            for (d, decode) in rig.decode.iter().enumerate() {
                for _ in 0..3 {
                    let reply = rig.send(pinned(spelling, prefill.id, decode.id)).await;
                    let chosen = reply.expect(200).pair();
                    assert_eq!(chosen, rig.pair(p, d));
                }
            }
        }
    }
    rig.fixture.assert_good_hand_offs().await;
    rig.ends().await;
}

pub async fn pins_in_the_body_are_kept(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    for (p, prefill) in rig.prefill.iter().enumerate() {
        for (d, decode) in rig.decode.iter().enumerate() {
            let pins = json!({"prefill_worker_id": prefill.id, "decode_worker_id": decode.id});
            let reply = rig.send(ask(&chat_with(pins))).await;
            let chosen = reply.expect(200).pair();
            assert_eq!(chosen, rig.pair(p, d));
        }
    }
    rig.fixture.assert_good_hand_offs().await;
    rig.ends().await;
}

pub async fn one_pin_leaves_the_other_side_free(proxy: Proxy) {
    let rig = Rig::trusting_in_turns(proxy).await;
    let mut connection = rig.connect().await;
    let mut decodes = BTreeSet::new();
    let mut prefills = BTreeSet::new();
    for _ in 0..6 {
        let body = chat_with(json!({"prefill_worker_id": rig.prefill[0].id}));
        let chosen = answered(&mut connection, ask(&body)).await.pair();
        assert_eq!(chosen.prefill, rig.prefill[0].name);
        decodes.insert(chosen.decode);
        let body = chat_with(json!({"decode_worker_id": rig.decode[1].id}));
        let chosen = answered(&mut connection, ask(&body)).await.pair();
        assert_eq!(chosen.decode, rig.decode[1].name);
        prefills.insert(chosen.prefill);
    }
    assert_eq!((prefills.len(), decodes.len()), (2, 2));
    rig.ends().await;
}

pub async fn headers_win_over_the_body(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    for spelling in SPELLINGS {
        let body = chat_with(json!({
            "prefill_worker_id": rig.prefill[0].id,
            "decode_worker_id": rig.decode[0].id,
        }));
        let ask = ask(&body)
            .header(spelling[0], &rig.prefill[1].id.to_string())
            .header(spelling[1], &rig.decode[1].id.to_string());
        let chosen = rig.send(ask).await.expect(200).pair();
        assert_eq!(chosen, rig.pair(1, 1));
    }
    rig.ends().await;
}

pub async fn a_pin_does_not_move_the_next_request(proxy: Proxy) {
    let rig = Rig::trusting_in_turns(proxy).await;
    let mut connection = rig.connect().await;
    for _ in 0..8 {
        let first = answered(&mut connection, Ask::chat("hello")).await.pair();
        let pinned = pinned(SPELLINGS[0], rig.prefill[0].id, rig.decode[0].id);
        answered(&mut connection, pinned).await;
        let second = answered(&mut connection, Ask::chat("hello")).await.pair();
        assert_ne!(first.prefill, second.prefill, "prefill's turns");
        assert_ne!(first.decode, second.decode, "decode's turns");
    }
    rig.ends().await;
}

pub async fn an_unknown_id_is_refused_by_name(proxy: Proxy) {
    let rejecting = json!({"trust_clients": true, "on_stale_pin": "reject"});
    let rig = Rig::start(proxy, rejecting).await;
    for field in ["prefill_worker_id", "decode_worker_id"] {
        let reply = rig.send(ask(&chat_with(json!({field: 424_242})))).await;
        let message = reply.expect_code(503, "stale_worker_id");
        assert!(message.contains("424242"), "{message}");
    }
    for header in SPELLINGS.concat() {
        let reply = rig.send(Ask::chat("hello").header(header, "424242"));
        let message = reply.await.expect_code(503, "stale_worker_id");
        assert!(message.contains("424242"), "{message}");
    }
    rig.assert_no_engine_requests().await;
    rig.ends().await;
}

pub async fn a_worker_of_the_wrong_role_is_refused_by_name(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    let swapped = pinned(SPELLINGS[1], rig.decode[0].id, rig.prefill[0].id);
    let reply = rig.send(swapped).await;
    reply.expect_code(400, "invalid_worker_id");
    for (field, id) in [
        ("prefill_worker_id", rig.decode[0].id),
        ("decode_worker_id", rig.prefill[0].id),
    ] {
        let reply = rig.send(ask(&chat_with(json!({field: id})))).await;
        let message = reply.expect_code(400, "invalid_worker_id");
        assert!(message.contains(&id.to_string()), "{message}");
    }
    rig.assert_no_engine_requests().await;
    rig.ends().await;
}

pub async fn a_rank_out_of_range_is_refused_by_name(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    let both = || pinned(SPELLINGS[0], rig.prefill[0].id, rig.decode[0].id);
    for header in [
        "x-prefill-dp-rank",
        "x-dynamo-prefill-dp-rank",
        "x-dp-rank",
        "x-dynamo-dp-rank",
    ] {
        let reply = rig.send(both().header(header, "7")).await;
        let message = reply.expect_code(400, "dp_rank_out_of_range");
        assert!(message.contains('7'), "{message}");
    }
    rig.assert_no_engine_requests().await;
    let good = both()
        .header("x-prefill-dp-rank", "0")
        .header("x-dp-rank", "0");
    rig.send(good).await.expect(200);
    rig.ends().await;
}

pub async fn pins_of_untrusted_callers_are_ignored(proxy: Proxy) {
    let rig = Rig::start(proxy, in_turns()).await;
    let mut connection = rig.connect().await;
    for spelling in SPELLINGS {
        let by_header = || pinned(spelling, rig.prefill[0].id, rig.decode[0].id);
        let first = answered(&mut connection, by_header()).await.pair();
        let second = answered(&mut connection, by_header()).await.pair();
        assert_ne!(first.prefill, second.prefill, "prefill's turns");
        assert_ne!(first.decode, second.decode, "decode's turns");
    }
    let pins = json!({
        "prefill_worker_id": rig.prefill[0].id,
        "decode_worker_id": 424_242,
        "backend_instance_id": 424_242,
    });
    let first = answered(&mut connection, ask(&chat_with(pins.clone()))).await;
    let second = answered(&mut connection, ask(&chat_with(pins))).await;
    assert_ne!(first.pair().prefill, second.pair().prefill);
    rig.ends().await;
}

pub async fn pins_of_untrusted_callers_never_reach_the_engines_headers(proxy: Proxy) {
    let rig = Rig::start(proxy, json!({})).await;
    let ranks = ["x-prefill-dp-rank", "x-dp-rank", "x-data-parallel-rank"];
    let mut ask = Ask::chat("hello");
    for header in SPELLINGS.concat().into_iter().chain(ranks) {
        ask = ask.header(header, "7");
    }
    rig.send(ask).await.expect(200);
    for engine in rig.fixture.living() {
        for got in engine.requests().await {
            for header in SPELLINGS.concat().into_iter().chain(ranks) {
                assert!(!got.values(header).contains(&"7"), "{header}: {got:?}");
            }
        }
    }
    rig.ends().await;
}

pub async fn direct_selection_without_a_pin_names_the_header(proxy: Proxy) {
    for (role, header) in [
        (Role::Prefill, "prefill-instance-id"),
        (Role::Decode, "worker-instance-id"),
    ] {
        let pool = json!({"trust_clients": true, "selection": {role.as_str(): "direct"}});
        let rig = Rig::start(proxy, pool).await;
        let reply = rig.send(Ask::chat("hello")).await;
        let message = reply.expect_code(400, "worker_id_required");
        assert!(message.contains(header), "{message}");
        rig.assert_no_engine_requests().await;
        let header = format!("x-{header}");
        let id = rig.fixture.slots(role)[0].id();
        let pinned = Ask::chat("hello").header(&header, &id.to_string());
        rig.send(pinned).await.expect(200);
        rig.fixture.gateway.assert_comes_to_rest().await;
    }
}

pub async fn an_aggregated_worker_is_pinned_by_its_backend_id(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (0, 0)).aggregated(2);
    let rig = Rig::on(spec.pool(json!({"trust_clients": true}))).await;
    for (at, worker) in rig.decode.iter().enumerate() {
        let id = worker.id;
        let by_body = chat_with(json!({"backend_instance_id": id}));
        let by_header = Ask::chat("hello").header("x-dynamo-backend-instance-id", &id.to_string());
        for pinned in [ask(&by_body), by_header] {
            for _ in 0..4 {
                let reply = rig.send(pinned.clone()).await.expect(200);
                let name = worker.name.as_str();
                assert_eq!(reply.header("x-pd-router-decode"), Some(name));
            }
        }
        assert_eq!(rig.fixture.decode(at).state().await.answered, 8);
    }
    // A pin on an absent worker is ignored.
    let gone = chat_with(json!({"backend_instance_id": 424_242}));
    rig.send(ask(&gone)).await.expect(200);
    rig.ends().await;
}
