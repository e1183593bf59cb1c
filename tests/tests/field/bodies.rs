//! Bodies that broke other gateways: long ones, prompts of every form, and compressed answers.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{RecordedRequest, Role};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::scripted::Answer;

const CHAT: &str = "/v1/chat/completions";

/// A fixture with an aggregated worker of these answers.
async fn over(
    proxy: Proxy,
    answer: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
) -> Fixture {
    let spec = FixtureSpec::of(proxy, Protocol::Aggregated).workers((0, 0));
    let mut fixture = Fixture::acquire(spec).await;
    fixture.play(Role::Aggregated, answer).await;
    fixture.list_scripted().await;
    fixture
}

fn short_answer(_: &RecordedRequest) -> Answer {
    Answer::json(
        r#"{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}"#,
    )
}

/// gateway-api-inference-extension #854: a body beyond a picker's message limit.
pub async fn long_prompts_reach_the_worker_byte_for_byte(proxy: Proxy) {
    let fixture = over(proxy, short_answer).await;
    for kilobytes in [62, 64, 65, 128, 150, 220, 1024] {
        // The bytes vary, so that a displaced piece is detected.
        let words = (0..kilobytes * 128).map(|number| format!("{number:07} "));
        let prompt: String = words.collect();
        let body = format!(
            "{{ \"model\":\"sim\", \"seed\":9007199254740993,\r\n\"messages\" : [{{\"role\":\"user\",\"content\":\"<&> {prompt}\"}}]}}"
        );
        fixture
            .send(Ask::post(CHAT, body.clone()))
            .await
            .expect(200);
        let got = fixture.scripted[0].last();
        assert!(
            got.text() == body,
            "{kilobytes} KiB are others at the worker"
        );
        assert_eq!(got.values("content-length"), [body.len().to_string()]);
        assert!(got.values("transfer-encoding").is_empty());
    }
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

/// llm-d-router #860, gateway-api-inference-extension #2856: prompts as lists of texts, of token ids, of lists of ids.
pub async fn prompts_and_inputs_of_all_shapes_are_answered(proxy: Proxy) {
    let fixture = over(proxy, short_answer).await;
    let shapes = [
        r#""one text""#,
        r#"["two", "texts"]"#,
        "[ 1,2, 3,4]",
        "[[1,2,3],[4, 5]]",
    ];
    for shape in shapes {
        for (path, member) in [("/v1/completions", "prompt"), ("/v1/embeddings", "input")] {
            let body = format!("{{\"model\":\"sim\", \"{member}\": {shape}}}");
            fixture
                .send(Ask::post(path, body.clone()))
                .await
                .expect(200);
            let got = fixture.scripted[0].last();
            assert_eq!((got.path.as_str(), got.text()), (path, body.as_str()));
        }
    }
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

/// "hello", compressed with gzip.
const GZIPPED: &[u8] = &[
    31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 203, 72, 205, 201, 201, 7, 0, 134, 166, 16, 54, 5, 0, 0, 0,
];

/// ai-gateway #1189: an answer that the gateway cannot parse.
pub async fn a_compressed_answer_passes_as_it_is(proxy: Proxy) {
    let fixture = over(proxy, |got| {
        let answer = match got.text().contains("\"stream\":true") {
            true => Answer::stream_of_bytes(GZIPPED.chunks(5)),
            false => Answer::json(GZIPPED),
        };
        answer.header("content-encoding", "gzip")
    })
    .await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        let ask = ask.header("accept-encoding", "gzip");
        let reply = fixture.send(ask).await.expect(200);
        assert_eq!(reply.body, GZIPPED);
        assert_eq!(reply.header("content-encoding"), Some("gzip"));
    }
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}
