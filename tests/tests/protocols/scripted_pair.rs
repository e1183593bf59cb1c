//! A prefill and a decode worker with scripted answers, behind a fixture's gateway.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engines::{RecordedRequest, Role};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::scripted::{Answer, ScriptedWorker};
use serde_json::{Value, json};

use crate::client_requests::CHAT;

pub struct ScriptedPair {
    pub fixture: Fixture,
}

impl ScriptedPair {
    /// Workers with these scripts, and a pool of this protocol with these further fields.
    pub async fn start(
        proxy: Proxy,
        (protocol, pool): (Protocol, Value),
        prefill: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
        decode: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
    ) -> ScriptedPair {
        let spec = FixtureSpec::of(proxy, protocol).pool(pool);
        let mut fixture = Fixture::acquire(spec.workers((0, 0))).await;
        fixture.play(Role::Prefill, prefill).await;
        fixture.play(Role::Decode, decode).await;
        fixture.list_scripted().await;
        ScriptedPair { fixture }
    }

    pub fn prefill(&self) -> &ScriptedWorker {
        &self.fixture.scripted[0]
    }

    pub fn decode(&self) -> &ScriptedWorker {
        &self.fixture.scripted[1]
    }

    /// Sends the request of the case with this number.
    pub async fn ask(&self, case: usize, streamed: bool) -> Reply {
        let ask = Ask::post(CHAT, asking(case, streamed));
        self.fixture.send(ask).await
    }

    /// Releases the gateway to the next test, once no booking is open.
    pub async fn ends(self) {
        self.fixture.gateway.assert_comes_to_rest().await;
        self.fixture.release();
    }
}

/// The body of the request for the case with this number.
pub fn asking(case: usize, streamed: bool) -> String {
    format!(
        r#"{{"model":"sim","messages":[{{"role":"user","content":"case <{case}>"}}],"max_tokens":4,"stream":{streamed}}}"#
    )
}

/// The number of the requested case.
pub fn case_of(got: &RecordedRequest) -> usize {
    let number = got.text().split(['<', '>']).nth(1);
    let number = number.and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("no case in {got:?}"))
}

/// A complete chat answer that ended at the length limit, with this text, this usage and these further members.
pub fn answer(text: &str, usage: &Value, members: &str) -> String {
    let choice = json!({
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "length",
    });
    format!(
        r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"sim","choices":[{choice}],"usage":{usage}{members}}}"#
    )
}

pub fn usage() -> Value {
    json!({"prompt_tokens": 64, "total_tokens": 68, "completion_tokens": 4})
}

/// An event of a streamed chat answer with this text.
pub fn event(text: &str) -> String {
    let choice = json!({"index": 0, "delta": {"content": text}, "finish_reason": null});
    let event = json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "sim", "choices": [choice],
    });
    format!("data: {event}\n\n")
}

/// End of a stream.
pub const DONE: &str = "data: [DONE]\n\n";

/// An answer in the requested form: unstreamed, or as events.
pub fn as_asked(got: &RecordedRequest, text: &str) -> Answer {
    match got.text().contains("\"stream\":true") {
        true => Answer::stream([event(text), event("more"), DONE.to_owned()]),
        false => Answer::json(answer(text, &usage(), "")),
    }
}
