//! Workers with names and ids, conversations that grow, and what the status page says.

use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engines::{Engine, MODEL, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

pub const CHAT: &str = "/v1/chat/completions";

/// Some thirty blocks of sixteen tokens.
fn system_prompt() -> Value {
    let text = "Answer in one sentence, in plain words, and only what you are sure of. ".repeat(28);
    json!({"role": "system", "content": text})
}

/// The engines as a configuration lists them: named by `letter` and number, with ids that are always the same.
pub fn named(engines: &[Engine], letter: &str, first_id: u64) -> Vec<Value> {
    let one = |(at, engine): (usize, &Engine)| {
        let fields = json!({"name": format!("{letter}{at}"), "id": first_id + at as u64});
        with(engine.listed(), fields)
    };
    engines.iter().enumerate().map(one).collect()
}

/// How a turn spells the contents of messages. To a reader all are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// As strings.
    Text,
    /// As strings in one turn, as arrays of parts in the next.
    Alternating,
}

/// A conversation: each turn sends all that was said before. Every other answer is a stream.
pub struct Conversation {
    topic: String,
    spelling: Spelling,
    messages: Vec<Value>,
    turns: usize,
}

impl Conversation {
    /// One about `topic` that begins with the system prompt that all share.
    pub fn about(topic: &str, spelling: Spelling) -> Conversation {
        Conversation {
            topic: topic.to_owned(),
            spelling,
            messages: vec![system_prompt()],
            turns: 0,
        }
    }

    /// The body of the next turn.
    pub fn body(&mut self) -> Value {
        let question = format!(
            "Question {} about {}: {}",
            self.turns,
            self.topic,
            format!("what of {}? ", self.topic).repeat(12)
        );
        self.messages
            .push(json!({"role": "user", "content": question}));
        let in_parts = self.spelling == Spelling::Alternating && self.turns % 2 == 1;
        let messages: Vec<Value> = match in_parts {
            true => self.messages.iter().map(as_parts).collect(),
            false => self.messages.clone(),
        };
        let is_stream = self.turns % 2 == 1;
        self.turns += 1;
        json!({"model": MODEL, "messages": messages, "max_tokens": 8, "stream": is_stream})
    }

    /// The next turn.
    pub fn ask(&mut self) -> Ask {
        Ask::post(CHAT, self.body().to_string())
    }

    /// Takes the answer into the conversation.
    pub fn hear(&mut self, reply: &Reply) {
        let text: String = match self.turns % 2 {
            1 => said(&reply.json()["choices"][0]["message"]).to_owned(),
            _ => {
                let events = reply.events();
                let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
                deltas.map(said).collect()
            }
        };
        assert!(!text.is_empty(), "nothing was said: {reply:?}");
        self.messages
            .push(json!({"role": "assistant", "content": text}));
    }

    /// Sends the next turn on a connection of its own and hears the answer.
    pub async fn turn(&mut self, gateway: &Gateway) -> Reply {
        let reply = gateway.send(self.ask()).await.expect(200);
        self.hear(&reply);
        reply
    }
}

fn said(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn as_parts(message: &Value) -> Value {
    let part = json!({"type": "text", "text": message["content"]});
    with(message.clone(), json!({"content": [part]}))
}

/// What the status page says of the worker of this name; null where it is not there.
pub fn worker(status: &Value, name: &str) -> Value {
    let workers = status["workers"].as_array().cloned().unwrap_or_default();
    let found = workers.into_iter().find(|worker| worker["name"] == name);
    found.unwrap_or_default()
}

/// Waits until so many requests wait.
pub async fn until_waiting(gateway: &Gateway, count: u64) {
    eventually(&format!("{count} wait"), GENEROUS, || async {
        let status = gateway.status().await;
        if status["waiting"] == count {
            return Ok(());
        }
        Err(status.to_string())
    })
    .await;
}
