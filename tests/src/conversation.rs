//! Owns conversations that grow: each turn sends all earlier messages.

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::client::{self, Ask, Reply};
use crate::engines::{MODEL, with};
use crate::gateway::Gateway;

/// Path of chat requests.
pub const CHAT: &str = "/v1/chat/completions";

/// A sentence of the shared system prompt, which repeats it some thirty times: that is as many blocks of sixteen tokens.
const PLAIN: &str = "Answer in one sentence, in plain words, and only what you are sure of. ";

/// How a turn spells the contents of messages. All spellings mean the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// As strings.
    Text,
    /// As strings in one turn, as arrays of parts in the next.
    Alternating,
}

/// A conversation: each turn sends all earlier messages. Every other answer is a stream.
pub struct Conversation {
    topic: String,
    spelling: Spelling,
    messages: Vec<Value>,
    turns: usize,
}

impl Conversation {
    /// A conversation about `topic` that begins with the shared system prompt.
    pub fn about(topic: &str, spelling: Spelling) -> Conversation {
        Conversation::beginning(topic, spelling, PLAIN)
    }

    /// A conversation about `topic` that shares its prefix with no other.
    pub fn alone(topic: &str) -> Conversation {
        let instruction =
            format!("Speak of {topic} as one who has seen it all before, and briefly. ");
        Conversation::beginning(topic, Spelling::Text, &instruction)
    }

    fn beginning(topic: &str, spelling: Spelling, instruction: &str) -> Conversation {
        Conversation {
            topic: topic.to_owned(),
            spelling,
            messages: vec![json!({"role": "system", "content": instruction.repeat(28)})],
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

    /// The request of the next turn.
    pub fn ask(&mut self) -> Ask {
        Ask::post(CHAT, self.body().to_string())
    }

    /// Appends the answer to the conversation.
    pub fn append_reply(&mut self, reply: &Reply) {
        let text: String = match self.turns % 2 {
            1 => content(&reply.json()["choices"][0]["message"]).to_owned(),
            _ => {
                let events = reply.events();
                let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
                deltas.map(content).collect()
            }
        };
        assert!(!text.is_empty(), "the answer has no text: {reply:?}");
        self.messages
            .push(json!({"role": "assistant", "content": text}));
    }

    /// Sends the next turn over its own connection and appends the answer.
    pub async fn turn(&mut self, gateway: &Gateway) -> Reply {
        self.turn_at(gateway.listen).await
    }

    /// The same at any address.
    pub async fn turn_at(&mut self, gateway: SocketAddr) -> Reply {
        let ask = self.ask();
        self.turn_as(gateway, ask).await
    }

    /// The same with these headers.
    pub async fn turn_with(&mut self, gateway: SocketAddr, headers: &[(&str, &str)]) -> Reply {
        let ask = headers
            .iter()
            .fold(self.ask(), |ask, (name, value)| ask.header(name, value));
        self.turn_as(gateway, ask).await
    }

    async fn turn_as(&mut self, gateway: SocketAddr, ask: Ask) -> Reply {
        let reply = client::send(gateway, ask).await.expect(200);
        self.append_reply(&reply);
        reply
    }
}

fn content(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn as_parts(message: &Value) -> Value {
    let part = json!({"type": "text", "text": message["content"]});
    with(message.clone(), json!({"content": [part]}))
}
