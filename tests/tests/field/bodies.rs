//! Bodies that broke other gateways: long ones, prompts of every form, and compressed answers.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{RecordedRequest, Role, static_config};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::scripted::{Answer, ScriptedWorker};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

/// An aggregated worker with these answers, behind a gateway.
async fn over(
    proxy: Proxy,
    answer: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
) -> (ScriptedWorker, Gateway) {
    let worker = ScriptedWorker::start(answer).await;
    let pool = json!({"protocol": "aggregated"});
    let config = static_config(vec![worker.listed(Role::Aggregated)], pool);
    let gateway = Gateway::start(proxy, &config, &[]).await;
    (worker, gateway)
}

fn short_answer(_: &RecordedRequest) -> Answer {
    Answer::json(
        r#"{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}"#,
    )
}

/// gateway-api-inference-extension #854: a body beyond a picker's message limit.
pub async fn long_prompts_reach_the_worker_byte_for_byte(proxy: Proxy) {
    let (worker, gateway) = over(proxy, short_answer).await;
    for kilobytes in [62, 64, 65, 128, 150, 220, 1024] {
        // The bytes vary, so that a displaced piece is detected.
        let words = (0..kilobytes * 128).map(|number| format!("{number:07} "));
        let prompt: String = words.collect();
        let body = format!(
            "{{ \"model\":\"sim\", \"seed\":9007199254740993,\r\n\"messages\" : [{{\"role\":\"user\",\"content\":\"<&> {prompt}\"}}]}}"
        );
        gateway
            .send(Ask::post(CHAT, body.clone()))
            .await
            .expect(200);
        let got = worker.last();
        assert!(
            got.text() == body,
            "{kilobytes} KiB are others at the worker"
        );
        assert_eq!(got.values("content-length"), [body.len().to_string()]);
        assert!(got.values("transfer-encoding").is_empty());
    }
    gateway.assert_comes_to_rest().await;
}

/// llm-d-router #860, gateway-api-inference-extension #2856: prompts as lists of texts, of token ids, of lists of ids.
pub async fn prompts_and_inputs_of_all_shapes_are_answered(proxy: Proxy) {
    let (worker, gateway) = over(proxy, short_answer).await;
    let shapes = [
        r#""one text""#,
        r#"["two", "texts"]"#,
        "[ 1,2, 3,4]",
        "[[1,2,3],[4, 5]]",
    ];
    for shape in shapes {
        for (path, member) in [("/v1/completions", "prompt"), ("/v1/embeddings", "input")] {
            let body = format!("{{\"model\":\"sim\", \"{member}\": {shape}}}");
            gateway
                .send(Ask::post(path, body.clone()))
                .await
                .expect(200);
            let got = worker.last();
            assert_eq!((got.path.as_str(), got.text()), (path, body.as_str()));
        }
    }
    gateway.assert_comes_to_rest().await;
}

/// "hello", compressed with gzip.
const GZIPPED: &[u8] = &[
    31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 203, 72, 205, 201, 201, 7, 0, 134, 166, 16, 54, 5, 0, 0, 0,
];

/// ai-gateway #1189: an answer that the gateway cannot parse.
pub async fn a_compressed_answer_passes_as_it_is(proxy: Proxy) {
    let (_worker, gateway) = over(proxy, |got| {
        let answer = match got.text().contains("\"stream\":true") {
            true => Answer::stream_of_bytes(GZIPPED.chunks(5)),
            false => Answer::json(GZIPPED),
        };
        answer.header("content-encoding", "gzip")
    })
    .await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        let ask = ask.header("accept-encoding", "gzip");
        let reply = gateway.send(ask).await.expect(200);
        assert_eq!(reply.body, GZIPPED);
        assert_eq!(reply.header("content-encoding"), Some("gzip"));
    }
    gateway.assert_comes_to_rest().await;
}
