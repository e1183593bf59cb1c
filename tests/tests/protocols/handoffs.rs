//! The contract between routers and sidecars, C09 to C13: prefill's hand-off. The test plays both workers.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::golden::front;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::scripted::Answer;
use serde_json::json;

use crate::client_requests::CHAT;
use crate::rig::Rig;
use crate::scripted_pair::{ScriptedPair, answer, as_asked, asking, case_of, usage};

/// Prefill answers with the members of the requested case.
async fn scripted_pair(proxy: Proxy, cases: &'static [&'static str]) -> ScriptedPair {
    let prefill = |got: &pd_router_e2e::engines::RecordedRequest| {
        Answer::json(answer("one", &usage(), cases[case_of(got)]))
    };
    ScriptedPair::start(proxy, (Protocol::Nixl, json!({})), prefill, |got| {
        as_asked(got, "two")
    })
    .await
}

/// Fails if decode gets a request after these hand-offs.
async fn never_reaches_decode(proxy: Proxy, cases: &'static [&'static str]) {
    let pair = scripted_pair(proxy, cases).await;
    for case in 0..cases.len() {
        for streamed in [false, true] {
            let reply = pair.ask(case, streamed).await;
            reply.expect_code(502, "prefill_no_handoff");
        }
    }
    assert_eq!(pair.prefill().requests().len(), 2 * cases.len());
    assert!(
        pair.decode().requests().is_empty(),
        "{:?}",
        pair.decode().requests()
    );
    pair.ends().await;
}

/// Fails unless decode gets these hand-offs byte for byte.
async fn reaches_decode(proxy: Proxy, cases: &'static [&'static str]) {
    let pair = scripted_pair(proxy, cases).await;
    for (case, members) in cases.iter().enumerate() {
        for streamed in [false, true] {
            pair.ask(case, streamed).await.expect(200);
            let hand_off = members.strip_prefix(',').unwrap_or(members);
            let golden = front(&asking(case, streamed), hand_off);
            assert_eq!(pair.decode().last().text(), golden);
        }
    }
    pair.ends().await;
}

pub async fn c09_a_missing_hand_off_never_reaches_decode(proxy: Proxy) {
    let cases = &[
        "",
        r#","kv_transfer_params":null"#,
        r#","kv_transfer_params":"text""#,
        r#","kv_transfer_params":7"#,
        r#","kv_transfer_params":[]"#,
        r#","kv_transfer_params":{}"#,
    ];
    never_reaches_decode(proxy, cases).await;
}

pub async fn c10_fields_of_the_wrong_type_never_reach_decode(proxy: Proxy) {
    let cases = &[
        r#","kv_transfer_params":{"do_remote_prefill":"true","remote_block_ids":[[1]]}"#,
        r#","kv_transfer_params":{"do_remote_prefill":1,"remote_block_ids":[[1]]}"#,
        r#","kv_transfer_params":{"do_remote_prefill":null,"remote_block_ids":[[1]]}"#,
        r#","kv_transfer_params":{"do_remote_prefill":false,"remote_block_ids":[[1]]}"#,
        r#","kv_transfer_params":{"remote_block_ids":[[1]]}"#,
    ];
    never_reaches_decode(proxy, cases).await;
    no_prefill_is_wasted(proxy).await;
}

/// A request that decode would refuse is refused before prefill, from whose leg the edits hide the error.
async fn no_prefill_is_wasted(proxy: Proxy) {
    let rig = Rig::start(proxy, Protocol::Nixl).await;
    for member in [
        r#""max_tokens":"many""#,
        r#""max_tokens":1.5"#,
        r#""max_completion_tokens":{}"#,
        r#""min_tokens":"few""#,
        r#""stream":"yes""#,
        r#""stream":true,"stream_options":7"#,
        r#""n":"two""#,
    ] {
        let body =
            format!(r#"{{"model":"sim","messages":[{{"role":"user","content":"hi"}}],{member}}}"#);
        let reply = rig.fixture.send(Ask::post(CHAT, body)).await;
        assert_eq!(reply.status, 400, "{member}: {}", reply.text());
        let state = rig.fixture.state().await;
        assert_eq!(state.issued, 0, "{member}: {state:?}");
    }
    rig.ends().await;
}

pub async fn c11_nested_groups_of_blocks_are_kept(proxy: Proxy) {
    let cases = &[
        r#","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1, 2],[3 ,4,5]],"remote_engine_id":"e"}"#,
        r#","kv_transfer_params":{"remote_block_ids":[[[1],[2]],[[3]]],"do_remote_prefill":true}"#,
        r#","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1,2,3],"remote_engine_id":"e"}"#,
    ];
    reaches_decode(proxy, cases).await;
}

pub async fn c12_empty_groups_of_blocks_are_accepted(proxy: Proxy) {
    let cases = &[
        r#","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[],"remote_engine_id":"e"}"#,
        r#","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[]],"remote_engine_id":"e"}"#,
        r#","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[],[7]],"remote_engine_id":"e"}"#,
        r#","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":null,"remote_engine_id":"e"}"#,
    ];
    reaches_decode(proxy, cases).await;
}

pub async fn c13_further_fields_of_a_hand_off_are_forwarded(proxy: Proxy) {
    let cases = &[
        r#","kv_transfer_params":{"a_newer_field":{"x":[1.0,1e2,null]},"do_remote_prefill" : true,"remote_block_ids":[[1]],"tp_size":8,"tp_size":9,"big":9223372036854775807,"é":"\u00e9\/"}"#,
    ];
    reaches_decode(proxy, cases).await;
}
