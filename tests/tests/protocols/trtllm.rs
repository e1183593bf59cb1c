//! TensorRT-LLM only: the context engine's answer reaches the generation engine byte for byte.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::RecordedRequest;
use pd_router_e2e::golden::front;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::scripted::Answer;
use serde_json::json;

use crate::client_requests::{CHAT, COMPLETIONS};
use crate::scripted_pair::{ScriptedPair, answer, as_asked, usage};

/// A context engine's parameters: an id of its own, numbers that no float holds, escapes, white space.
const PARAMS: [&str; 2] = [
    r#"{ "request_type" :"#,
    r#", "first_gen_tokens":[ 151644,7 ],"ctx_request_id":9223372036854775807,"encoded_opaque_state":"AQ\/+==","draft_tokens":null,"disagg_request_id":4611686018427387905,"ctx_dp_rank":0,"ctx_info_endpoint":["tcp:\/\/10.0.0.1:5"],"newer":{"a":1.0} }"#,
];

const IDS: &str = "[1, 2 ,18446744073709551615]";
const USAGE: &str = r#"{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1,"x":1.0}"#;

/// The parameters with this request type.
fn params(request_type: &str) -> String {
    let [before, after] = PARAMS;
    format!("{before}\"{request_type}\"{after}")
}

fn context_answer(got: &RecordedRequest) -> Answer {
    let choice = match got.path.as_str() {
        COMPLETIONS => r#""text":"one""#,
        _ => r#""message":{"role":"assistant","content":"one"}"#,
    };
    let params = params("context_only");
    Answer::json(format!(
        r#"{{"id":"c","object":"x","model":"sim","choices":[{{"index":0,{choice},"finish_reason":"length","disaggregated_params":{params}}}],"usage":{USAGE},"prompt_token_ids":{IDS}}}"#
    ))
}

pub async fn the_context_answer_reaches_generation_byte_for_byte(proxy: Proxy) {
    let pool = (Protocol::Trtllm, json!({}));
    let pair = ScriptedPair::start(proxy, pool, context_answer, |got| as_asked(got, "two")).await;
    let parameters = params("generation_only");
    let handed = format!(
        "\"disaggregated_params\":{}",
        parameters.replacen('{', &format!("{{\"ctx_usage\":{USAGE},"), 1)
    );
    let chat = r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":4}"#;
    pair.fixture.send(Ask::post(CHAT, chat)).await.expect(200);
    let golden = front(chat, &format!("{handed},\"prompt_token_ids\":{IDS}"));
    assert_eq!(pair.decode().last().text(), golden);

    let completion = r#"{"model":"sim","prompt" : "Once","max_tokens":4,"stream":true}"#;
    pair.fixture
        .send(Ask::post(COMPLETIONS, completion))
        .await
        .expect(200);
    let golden = front(&completion.replace("\"Once\"", IDS), &handed);
    assert_eq!(pair.decode().last().text(), golden);
    pair.ends().await;
}

pub async fn a_context_answer_without_ids_is_a_failure(proxy: Proxy) {
    let pool = (Protocol::Trtllm, json!({}));
    // An answer that ended at the limit, without the parameters or the ids.
    let script = |_: &RecordedRequest| Answer::json(answer("one", &usage(), ""));
    let pair = ScriptedPair::start(proxy, pool, script, |got| as_asked(got, "two")).await;
    for streamed in [false, true] {
        let reply = pair.ask(0, streamed).await;
        reply.expect_code(502, "prefill_no_handoff");
    }
    assert!(pair.decode().requests().is_empty());
    pair.ends().await;
}
