//! The plugin's cost of an event, in instructions instead of time: at most a constant for each received byte, for any bytes,
//! and each byte once.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask};
use pd_router_e2e::engines::{MODEL, Role, static_config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::scripted::{Answer, ScriptedWorker};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

/// Bytes of a long input.
const LENGTHS: [usize; 2] = [64 * 1024, 512 * 1024];

/// Instructions for a byte. Text takes 25, the smallest values (`[1]`, `{}`) up to 470: each is read, counted and hashed.
const PER_BYTE: u64 = 600;

/// Instructions for an event, however short.
const PER_EVENT: u64 = 150_000;

/// Instructions for a request: its selection, its calls and its end.
const PER_REQUEST: u64 = 2_000_000;

const TICK: &str = "proxy_on_tick";

/// A gateway that counts its steps, and the answers of its two workers.
struct Rig {
    gateway: Gateway,
    answers: Arc<Mutex<[Answer; 2]>>,
    _workers: [ScriptedWorker; 2],
}

impl Rig {
    async fn start() -> Rig {
        Rig::of(json!({}), [json!({}), json!({})]).await
    }

    /// With these fields of the pool, and further fields of the two workers' entries.
    async fn of(pool: Value, further: [Value; 2]) -> Rig {
        let answers = Arc::new(Mutex::new([good_prefill(), good_decode()]));
        let scripted_at = |at: usize| {
            let answers = Arc::clone(&answers);
            ScriptedWorker::start(move |_| {
                answers.lock().unwrap_or_else(PoisonError::into_inner)[at].clone()
            })
        };
        let workers = [scripted_at(0).await, scripted_at(1).await];
        let [of_prefill, of_decode] = further;
        let listed = vec![
            with(workers[0].listed(Role::Prefill), of_prefill),
            with(workers[1].listed(Role::Decode), of_decode),
        ];
        // With Dynamo the second worker plays its frontend.
        let pool = match pool["protocol"] == "direct" {
            true => with(pool, json!({"frontends": [workers[1].address.to_string()]})),
            false => pool,
        };
        let config = static_config(listed, with(json!({"health": {"eject_after": 0}}), pool));
        let config = with(config, json!({"response_headers": false}));
        let counting = ["--count-steps"];
        let gateway = Gateway::start_on_one_thread(Proxy::Wasmtime, &config, &counting).await;
        Rig {
            gateway,
            answers,
            _workers: workers,
        }
    }

    /// Sets the answers of both workers.
    fn set_answers(&self, prefill: Answer, decode: Answer) {
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner) = [prefill, decode];
    }

    async fn reset(&self) {
        let ask = Ask::post("/steps/reset", "");
        client::send(self.gateway.admin, ask).await.expect(200);
    }

    async fn steps(&self) -> Value {
        let reply = client::send(self.gateway.admin, Ask::get("/steps")).await;
        reply.expect(200).json()
    }

    /// Host calls of one request in all events but ticks: the fewest of several requests, as the first one defines metrics, and
    /// one in a while reads what other threads have published.
    async fn host_calls(&self, is_streamed: bool) -> u64 {
        let whole = json!({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]});
        let decode = match is_streamed {
            true => good_decode(),
            false => Answer::json(whole.to_string()),
        };
        self.set_answers(good_prefill(), decode);
        let messages = json!([{"role": "user", "content": "hello"}]);
        let body =
            json!({"model": MODEL, "stream": is_streamed, "max_tokens": 8, "messages": messages});
        let mut fewest = u64::MAX;
        for _ in 0..REQUESTS_COUNTED {
            self.gateway.assert_comes_to_rest().await;
            self.reset().await;
            let ask = Ask::post("/v1/chat/completions", body.to_string());
            self.gateway.send(ask).await.expect(200);
            self.gateway.assert_comes_to_rest().await;
            fewest = fewest.min(self.host_calls_since_reset().await);
        }
        fewest
    }

    async fn host_calls_since_reset(&self) -> u64 {
        let steps = self.steps().await;
        let events = steps.as_object().into_iter().flatten();
        let requests = events.filter(|(event, _)| *event != TICK);
        let calls = requests.map(|(_, counted)| counted["host_calls"].as_u64().unwrap_or_default());
        calls.sum()
    }

    /// Fails if the events since the reset took more instructions than this many bytes of one request allow.
    async fn assert_bounded(&self, what: &str, bytes: usize) {
        self.gateway.assert_comes_to_rest().await;
        let steps = self.steps().await;
        let (mut taken, mut allowed) = (0, PER_REQUEST + PER_BYTE * bytes as u64);
        for (event, counted) in steps.as_object().into_iter().flatten() {
            let figure = |name: &str| counted[name].as_u64().unwrap_or_default();
            if event == TICK {
                assert!(
                    figure("most") < PER_REQUEST,
                    "{what}: a tick took {counted}"
                );
                continue;
            }
            taken += figure("total");
            allowed += PER_EVENT * figure("events");
        }
        assert!(taken > 0, "nothing was counted: {steps}");
        assert!(
            taken <= allowed,
            "{what}: {taken} instructions for {bytes} bytes, {allowed} are allowed: {steps}"
        );
    }
}

fn good_prefill() -> Answer {
    let handoff = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e", "remote_block_ids": [[1, 2]],
        "remote_host": "127.0.0.1", "remote_port": 5600,
    });
    Answer::json(
        json!({"choices": [{"finish_reason": "length"}], "kv_transfer_params": handoff})
            .to_string(),
    )
}

fn event(text: &str) -> String {
    let choice = json!({"index": 0, "delta": {"content": text}});
    format!("data: {}\n\n", json!({ "choices": [choice] }))
}

fn good_decode() -> Answer {
    let end = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]});
    let pieces = [event("a"), format!("data: {end}\n\ndata: [DONE]\n\n")];
    Answer::stream(pieces)
}

/// A text of at most `length` bytes with this beginning and end, and repetitions of `repeated` between.
fn long(before: &str, repeated: &str, after: &str, length: usize) -> String {
    let room = length.saturating_sub(before.len() + after.len() + repeated.len());
    let mut elements = vec![repeated; room / (repeated.len() + 1)];
    elements.push(repeated);
    format!("{before}{}{after}", elements.join(","))
}

fn chat(members: &str) -> String {
    format!(r#"{{"model":"{MODEL}","stream":true,{members}"#)
}

/// Requests: path, and the body before, within and after the repeated part.
fn requests() -> Vec<(&'static str, String, &'static str, &'static str)> {
    const CHAT: &str = "/v1/chat/completions";
    const COMPLETIONS: &str = "/v1/completions";
    let content = chat(r#""messages":[{"role":"user","content":"#);
    vec![
        (CHAT, format!("{content}\""), "once upon a time", "\"}]}"),
        (
            CHAT,
            format!("{content}\""),
            r#"\"\\\u00e9\n\ud83d\ude00"#,
            "\"}]}",
        ),
        (CHAT, format!("{content}\""), "é漢🦀", "\"}]}"),
        (
            CHAT,
            format!("{content}["),
            r#"{"type":"text","text":"a"}"#,
            "]}]}",
        ),
        (CHAT, format!("{content}["), "\"\"", "]}]}"),
        (
            CHAT,
            chat(r#""messages":["#),
            r#"{"role":"user","content":"a"}"#,
            "]}",
        ),
        (CHAT, chat(r#""messages":["#), "{}", "]}"),
        (
            CHAT,
            chat(r#""messages":[],"tools":["#),
            r#"{"type":"function"}"#,
            "]}",
        ),
        (CHAT, chat(r#""messages":[],"stop":["#), "\"a\"", "]}"),
        (CHAT, "[".to_owned(), "[[[[[[[[", ""),
        (CHAT, "{".to_owned(), r#""messages":[]"#, "}"),
        (CHAT, "{".to_owned(), r#""a\u0062c":1"#, "}"),
        (CHAT, String::new(), "        ", ""),
        (CHAT, String::new(), "\u{0}\u{1}", ""),
        (CHAT, "\"".to_owned(), "\\\\\\", ""),
        (COMPLETIONS, chat(r#""prompt":["#), "31999", "]}"),
        (COMPLETIONS, chat(r#""prompt":["#), "\"a\"", "]}"),
        (COMPLETIONS, chat(r#""prompt":["#), "[1,2,3]", "]}"),
        (COMPLETIONS, chat(r#""max_tokens":"#), "1", "}"),
        (
            "/v1/responses",
            chat(r#""input":["#),
            r#"{"role":"user","content":"a"}"#,
            "]}",
        ),
        (
            "/v1/messages",
            chat(r#""messages":["#),
            r#"{"role":"user","content":"a"}"#,
            "]}",
        ),
        ("/v1/embeddings", chat(r#""input":["#), "\"a\"", "]}"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn found_b13_a_request_costs_a_constant_for_each_byte_whatever_they_are() {
    let rig = Rig::start().await;
    for length in LENGTHS {
        for (path, before, repeated, after) in requests() {
            let body = long(&before, repeated, after, length);
            let what = format!("{path} {before}{repeated}… of {length}");
            rig.reset().await;
            rig.gateway.send(Ask::post(path, body.clone())).await;
            rig.assert_bounded(&what, body.len()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn found_b13_a_body_in_many_pieces_is_read_once() {
    const PIECES: usize = 256;
    let rig = Rig::start().await;
    let before = chat(r#""messages":[{"role":"user","content":""#);
    let body = long(&before, "once upon a time", "\"}]}", LENGTHS[1]);
    rig.reset().await;
    let mut client = Raw::connect(rig.gateway.listen).await;
    let request = raw::post("/v1/chat/completions", &[], body.as_bytes());
    for piece in request.chunks(request.len() / PIECES) {
        client.write(piece).await;
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    client.read_until("[DONE]", 1).await;
    let events = rig.steps().await["proxy_on_request_body"]["events"].as_u64();
    assert!(events > Some(8), "it came in {events:?} pieces");
    rig.assert_bounded("a body in pieces", body.len()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn found_b8_a_prefill_answer_costs_a_constant_for_each_byte_whatever_they_are() {
    let rig = Rig::start().await;
    let before = r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":["#;
    let shapes = [
        (before, "31999", "]}}"),
        (before, "[]", "]}}"),
        (before, "[[[[[", "]}}"),
        (before, "\"a\\u0062\"", "]}}"),
        (r#"{"choices":["#, r#"{"finish_reason":"length"}"#, "]}"),
        (r#"{"choices":[{"message":{"content":""#, "a\\n", "\"}}]}"),
        ("{", r#""kv_transfer_params":{}"#, "}"),
        ("", "<html>", ""),
        ("", "        ", ""),
    ];
    for length in LENGTHS {
        for (before, repeated, after) in shapes {
            let answer = long(before, repeated, after, length);
            for status in [200, 400, 500] {
                rig.set_answers(Answer::json(answer.clone()).status(status), good_decode());
                rig.reset().await;
                let _ = rig.gateway.try_send(Ask::chat("hello")).await;
                let what = format!("{status} {before}{repeated}… of {length}");
                rig.assert_bounded(&what, answer.len()).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn found_b8_an_answer_costs_a_constant_for_each_byte_whatever_they_are() {
    let rig = Rig::start().await;
    let one_event = event("a");
    let shapes = [
        one_event.as_str(),
        "data: ",
        "\r",
        "\n",
        ": a comment\n",
        "data: [DONE]\n\n",
        "data: {\"error\":",
        "[[[[[[[[",
        "\"\\u0061\"",
        "event: x\ndata: {}\n\n",
        "\u{0}",
    ];
    for length in LENGTHS {
        for repeated in shapes {
            let text = repeated.repeat(length / repeated.len());
            let whole = Answer::stream([event("a"), text.clone()]);
            let as_json = Answer::json(text.clone());
            let halves = text.split_at(floor(&text, length / 2));
            let in_halves = Answer::stream([halves.0.to_owned(), halves.1.to_owned()]);
            for answer in [whole, as_json, in_halves] {
                rig.set_answers(good_prefill(), answer);
                rig.reset().await;
                let ask = json!({"model": MODEL, "stream": true, "messages": [{"role": "user", "content": "a"}]});
                let ask = Ask::post("/v1/chat/completions", ask.to_string());
                let _ = rig.gateway.try_send(ask).await;
                let what = format!("{repeated:?} of {length}");
                rig.assert_bounded(&what, text.len()).await;
            }
        }
    }
}

/// The last position at or before `at` where a text may be cut.
fn floor(text: &str, at: usize) -> usize {
    (0..=at)
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn found_b8_a_page_of_figures_costs_a_constant_for_each_byte_whatever_they_are() {
    let shapes = [
        "vllm:num_requests_running{model_name=\"sim\",engine=\"0\"} 1\n",
        "vllm:num_requests_running 1e308\n",
        "# HELP a comment\n",
        "a{",
        "a=\"b\",",
        "\\\"",
        "\n",
        "\u{0}",
    ];
    let page = Arc::new(Mutex::new(String::new()));
    let shown = Arc::clone(&page);
    let worker = ScriptedWorker::start(move |_| {
        Answer::json(shown.lock().unwrap_or_else(PoisonError::into_inner).clone())
    })
    .await;
    let pool = json!({"protocol": "aggregated", "engine_metrics": {"interval_ms": 100}});
    let config = static_config(vec![worker.listed(Role::Aggregated)], pool);
    let gateway = Gateway::start_on_one_thread(Proxy::Wasmtime, &config, &["--count-steps"]).await;
    for length in LENGTHS {
        for repeated in shapes {
            let text = repeated.repeat(length / repeated.len());
            *page.lock().unwrap_or_else(PoisonError::into_inner) = text.clone();
            let before = worker.requests().len();
            eventually("the page was read", GENEROUS, || async {
                let received = worker.requests().len() - before;
                // The first poll may have read the former page.
                (received > 2).then_some(()).ok_or(received.to_string())
            })
            .await;
            let steps = client::send(gateway.admin, Ask::get("/steps"))
                .await
                .expect(200)
                .json();
            let most = steps["proxy_on_http_call_response"]["most"].as_u64();
            let allowed = PER_EVENT + PER_BYTE * text.len() as u64;
            assert!(
                most.is_some_and(|most| most > text.len() as u64 / 8 && most < allowed),
                "{repeated:?} of {length}: {most:?} instructions, {allowed} are allowed"
            );
            client::send(gateway.admin, Ask::post("/steps/reset", ""))
                .await
                .expect(200);
        }
    }
}

/// Host calls of one request by protocol: an unstreamed answer, and a stream of two pieces. None may rise.
const HOST_CALLS: [(&str, [u64; 2]); 3] = [
    ("direct", [21, 23]),
    ("nixl", [34, 36]),
    ("sglang", [35, 37]),
];

/// Requests of which the fewest host calls count.
const REQUESTS_COUNTED: usize = 6;

/// Host calls that a request may take less than the table has, if pieces come together.
const TOGETHER: u64 = 4;

#[tokio::test(flavor = "multi_thread")]
async fn a_request_takes_no_more_host_calls_than_the_table_has() {
    let mut counted = Vec::new();
    for (protocol, _) in HOST_CALLS {
        let pool = json!({"protocol": protocol});
        let rig = Rig::of(pool, further_of_workers(protocol)).await;
        counted.push((
            protocol,
            [rig.host_calls(false).await, rig.host_calls(true).await],
        ));
    }
    for ((protocol, counted_here), (_, allowed)) in counted.iter().zip(HOST_CALLS) {
        for (calls, allowed) in counted_here.iter().zip(allowed) {
            let is_so = (allowed.saturating_sub(TOGETHER)..=allowed).contains(calls);
            assert!(
                is_so,
                "{protocol}: {calls} calls, {allowed} in the table: {counted:?}"
            );
        }
    }
}

fn further_of_workers(protocol: &str) -> [Value; 2] {
    match protocol {
        "sglang" => [json!({"bootstrap_port": 8998}), json!({})],
        "direct" => [json!({"id": 1}), json!({"id": 2})],
        _ => [json!({}), json!({})],
    }
}
