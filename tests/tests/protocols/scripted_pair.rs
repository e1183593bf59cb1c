//! A prefill and a decode worker with scripted answers, behind a gateway.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engines::{RecordedRequest, Role, static_config};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::scripted::{Answer, ScriptedWorker};
use serde_json::{Value, json};

use crate::client_requests::CHAT;

pub struct ScriptedPair {
    pub prefill: ScriptedWorker,
    pub decode: ScriptedWorker,
    pub gateway: Gateway,
}

impl ScriptedPair {
    /// Workers with these scripts, and a pool with these fields.
    pub async fn start(
        proxy: Proxy,
        pool: Value,
        prefill: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
        decode: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
    ) -> ScriptedPair {
        let prefill = ScriptedWorker::start(prefill).await;
        let decode = ScriptedWorker::start(decode).await;
        let workers = vec![prefill.listed(Role::Prefill), decode.listed(Role::Decode)];
        let gateway = Gateway::start(proxy, &static_config(workers, pool), &[]).await;
        gateway.is_ready().await;
        ScriptedPair {
            prefill,
            decode,
            gateway,
        }
    }

    /// Sends the request of the case with this number.
    pub async fn ask(&self, case: usize, streamed: bool) -> Reply {
        let ask = Ask::post(CHAT, asking(case, streamed));
        self.gateway.send(ask).await
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
