//! Owns the clients' requests and the expected answer of each.

use bytes::Bytes;
use serde_json::{Value, json};

use super::scenario::ClientMix;
use crate::run::fleet::MODEL;

/// A request and its expected answer.
#[derive(Clone, Debug)]
pub struct Ask {
    /// HTTP path.
    pub path: &'static str,
    /// Its body.
    pub body: Bytes,
    /// The expected answer.
    pub expected: ExpectedAnswer,
    /// Whether an engine can serve the request.
    pub fit: Fit,
}

/// Whether any engine can serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Every healthy engine can.
    Sound,
    /// None can: the request makes every engine fail that takes it.
    Poison,
}

/// The answer that a simulated engine gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedAnswer {
    /// The shape that carries the text.
    pub shape: AnswerShape,
    /// Unstreamed, or as events.
    pub delivery: Delivery,
    /// Number of tokens.
    pub tokens: u64,
}

/// Shape of an answer's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerShape {
    /// A chat completion.
    Chat,
    /// A completion.
    Text,
}

/// How an answer is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Unstreamed: in one piece.
    Unstreamed,
    /// As events.
    Stream,
}

/// Kinds of prompt, so that every way of reading one is covered.
const KINDS: usize = 5;
/// Words of a system prompt that many requests share: about 150 tokens.
const SHARED_WORDS: usize = 100;
/// About 1,100 tokens.
const LONG_WORDS: usize = 700;
const IDS: u64 = 180;

/// Range of tokens of most answers: some end soon, and some are still running when a fault occurs.
const SHORTEST: u64 = 4;
const LONGEST: u64 = 40;
/// Tokens of the answers that are read slowly. Each token comes with 64 KiB, so that an answer exceeds the buffers of the system
/// and the proxy, about 4 MB on Linux: a client that does not read then keeps the gateway from reading on.
const LONG_ANSWER: u64 = 125;
/// Minimum tokens of the other long answers, which run throughout; at most twice as many.
const LONG_STREAM: u64 = 150;
/// Marker in the prompt that asks an engine for a long answer.
const WORDY: &str = "<|wordy|>";
/// Markers that make an engine of either role fail, with and without an answer.
const POISON: [&str; 4] = [
    "<|fail-prefill|>",
    "<|break-prefill|>",
    "<|fail-decode|>",
    "<|break-decode|>",
];

impl ExpectedAnswer {
    /// Text of the full answer.
    pub fn text(self) -> String {
        let words: Vec<_> = (0..self.tokens)
            .map(|token| format!("token{token}"))
            .collect();
        words.join(" ")
    }
}

/// The client's request number `turn`; every second client asks for streams.
pub fn ask(mix: ClientMix, client: usize, turn: usize) -> Ask {
    let delivery = match client % 2 {
        0 if mix != ClientMix::SlowReaders => Delivery::Unstreamed,
        _ => Delivery::Stream,
    };
    let slowly = reads_slowly(mix, client);
    let tokens = match (slowly, mix) {
        (true, _) => LONG_ANSWER,
        (false, ClientMix::SlowReaders) => {
            LONG_STREAM + (client * 37 + turn * 53) as u64 % LONG_STREAM
        }
        (false, _) => SHORTEST + (client * 7 + turn * 13) as u64 % (LONGEST - SHORTEST),
    };
    let mark = poison(mix, client, turn);
    let (shape, mut body) = match slowly {
        true => wordy(client, turn),
        false => prompt(client, turn, mark.unwrap_or_default()),
    };
    body["model"] = json!(MODEL);
    body["max_tokens"] = json!(tokens);
    if delivery == Delivery::Stream {
        body["stream"] = json!(true);
    }
    if delivery == Delivery::Stream && turn.is_multiple_of(2) {
        body["stream_options"] = json!({"include_usage": true});
    }
    Ask {
        path: match shape {
            AnswerShape::Chat => "/v1/chat/completions",
            AnswerShape::Text => "/v1/completions",
        },
        body: body.to_string().into(),
        expected: ExpectedAnswer {
            shape,
            delivery,
            tokens,
        },
        fit: match mark {
            Some(_) => Fit::Poison,
            None => Fit::Sound,
        },
    }
}

/// The marker that makes engines fail, if this request carries one. Every marker is used, with and without streams.
fn poison(mix: ClientMix, client: usize, turn: usize) -> Option<&'static str> {
    let is_poison = mix == ClientMix::WithPoison && (client + turn).is_multiple_of(3);
    let mark = POISON.get((client / 6 + turn) % POISON.len());
    mark.copied().filter(|_| is_poison)
}

/// Whether this client reads slowly; all slow readers ask for streams.
pub fn reads_slowly(mix: ClientMix, client: usize) -> bool {
    match mix {
        ClientMix::WithSlowReaders => client % 4 == 1,
        ClientMix::SlowReaders => !client.is_multiple_of(3),
        ClientMix::Patient
        | ClientMix::WithLeavers
        | ClientMix::WithPoison
        | ClientMix::WithTricklers
        | ClientMix::WithLongPrompts => false,
    }
}

/// A prompt with a long answer.
fn wordy(client: usize, turn: usize) -> (AnswerShape, Value) {
    let question = format!("{WORDY} question {turn} of client {client}");
    let user = json!({"role": "user", "content": question});
    (AnswerShape::Chat, json!({"messages": [user]}))
}

fn prompt(client: usize, turn: usize, mark: &str) -> (AnswerShape, Value) {
    let question = format!("question {turn} of client {client}{mark}");
    let user = json!({"role": "user", "content": question});
    match (client / 2 + turn) % KINDS {
        0 => (AnswerShape::Chat, json!({"messages": [user]})),
        1 => {
            let system = json!({"role": "system", "content": words("shared", SHARED_WORDS)});
            (AnswerShape::Chat, json!({"messages": [system, user]}))
        }
        2 => (AnswerShape::Text, json!({"prompt": question})),
        // A prompt of token ids carries no marker.
        3 if mark.is_empty() => {
            let ids: Vec<u64> = (0..IDS)
                .map(|id| id * (client as u64 + 1) + turn as u64)
                .collect();
            (AnswerShape::Text, json!({"prompt": ids}))
        }
        _ => {
            let long = words(&format!("w{client}"), LONG_WORDS);
            let parts = json!([{"type": "text", "text": long}, {"type": "text", "text": question}]);
            (
                AnswerShape::Chat,
                json!({"messages": [{"role": "user", "content": parts}]}),
            )
        }
    }
}

fn words(word: &str, count: usize) -> String {
    let words: Vec<_> = (0..count)
        .map(|number| format!("{word} {}", number % 10))
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_ask_for_streams_and_all_kinds_of_prompts_come() {
        let asks: Vec<_> = (0..40)
            .map(|client| ask(ClientMix::Patient, client, 0))
            .collect();
        let streams = asks
            .iter()
            .filter(|ask| ask.expected.delivery == Delivery::Stream);
        assert_eq!(streams.count(), 20);
        for delivery in [Delivery::Unstreamed, Delivery::Stream] {
            let of_it = asks.iter().filter(|ask| ask.expected.delivery == delivery);
            let kinds: std::collections::BTreeSet<_> = of_it
                .map(|ask| {
                    let body: Value = serde_json::from_slice(&ask.body).unwrap();
                    let prompt = [body["prompt"].is_string(), body["prompt"].is_array()];
                    let parts = body["messages"][0]["content"].is_array();
                    let turns = body["messages"].as_array().map(Vec::len);
                    (prompt, parts, turns)
                })
                .collect();
            assert_eq!(kinds.len(), KINDS);
        }
    }

    #[test]
    fn a_third_is_poison_of_every_kind_in_a_crowd_with_poison_only() {
        let asks = |mix| {
            let turns = (0..4).flat_map(|turn| (0..48).map(move |client| (client, turn)));
            turns.map(move |(client, turn)| ask(mix, client, turn))
        };
        let is_poison = |ask: &Ask| ask.fit == Fit::Poison;
        let poison: Vec<_> = asks(ClientMix::WithPoison).filter(is_poison).collect();
        assert_eq!(poison.len(), 64);
        for mark in POISON {
            for delivery in [Delivery::Unstreamed, Delivery::Stream] {
                let of_it = poison
                    .iter()
                    .filter(|ask| ask.expected.delivery == delivery);
                let mut bodies = of_it.map(|ask| String::from_utf8_lossy(&ask.body));
                assert!(bodies.any(|body| body.contains(mark)), "{mark}");
            }
        }
        assert!(!asks(ClientMix::Patient).any(|ask| is_poison(&ask)));
    }

    #[test]
    fn the_right_answer_has_every_token() {
        let mut expected = ask(ClientMix::Patient, 0, 0).expected;
        expected.tokens = 3;
        assert_eq!(expected.text(), "token0 token1 token2");
    }
}
