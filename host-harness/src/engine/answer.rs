//! Writes answers as vLLM's OpenAI server does: whole ones, and the events of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::request::{Endpoint, Generation};

/// One request's answer, before it is written.
pub struct Answer {
    endpoint: Endpoint,
    id: String,
    model: String,
    created: u64,
    sequences: u64,
    output_tokens: u64,
    usage: Usage,
    include_usage: bool,
}

/// Token counts of an answer.
#[derive(Clone, Copy)]
struct Usage {
    prompt: u64,
    completion: u64,
    cached: u64,
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [C; 1],
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u64,
    delta: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    content: &'a str,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u64,
    text: &'a str,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

impl Answer {
    /// The answer with the given id to `generation`, of whose prompt `cached_tokens` were not computed here.
    pub fn new(id: String, generation: &Generation, cached_tokens: u64) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            endpoint: generation.endpoint,
            id,
            model: generation.model.clone(),
            created: since_1970.map_or(0, |time| time.as_secs()),
            sequences: generation.sequences(),
            output_tokens: generation.output_tokens,
            usage: Usage {
                prompt: generation.prompt_tokens(),
                completion: generation.completion_tokens(),
                cached: cached_tokens,
            },
            include_usage: generation.include_usage,
        }
    }

    /// The whole answer; `kv_transfer_params` is a prefill engine's hand-off.
    pub fn whole(&self, kv_transfer_params: Option<Value>) -> Bytes {
        let text: String = (0..self.output_tokens).map(word).collect();
        let mut answer = match self.endpoint {
            Endpoint::Chat => self.listed("chat.completion", |index| {
                json!({"index": index, "message": {"role": "assistant", "content": text},
                    "logprobs": null, "finish_reason": "length"})
            }),
            Endpoint::Completions => self.listed("text_completion", |index| {
                json!({"index": index, "text": text, "logprobs": null, "finish_reason": "length"})
            }),
            Endpoint::Responses => self.response(&text),
        };
        if let Some(handoff) = kv_transfer_params {
            answer["kv_transfer_params"] = handoff;
        }
        Bytes::from(answer.to_string())
    }

    /// What a stream begins with: for a chat one chunk per choice that carries the role and no text.
    pub fn opening(&self) -> Vec<Bytes> {
        match self.endpoint {
            Endpoint::Chat => (0..self.sequences)
                .map(|index| self.chat_chunk(index, Some("assistant"), "", None))
                .collect(),
            Endpoint::Completions => Vec::new(),
            Endpoint::Responses => {
                let response = json!({"type": "response.created", "response": {
                    "id": self.id, "object": "response", "created_at": self.created,
                    "model": self.model, "status": "in_progress", "output": []}});
                vec![named_event("response.created", &response)]
            }
        }
    }

    /// The events of token number `number` (from 0) of every choice; the last one carries the finish reason.
    pub fn token(&self, number: u64) -> Vec<Bytes> {
        let text = word(number);
        let finish = (number + 1 == self.output_tokens).then_some("length");
        (0..self.sequences)
            .map(|index| match self.endpoint {
                Endpoint::Chat => self.chat_chunk(index, None, &text, finish),
                Endpoint::Completions => self.text_chunk(index, &text, finish),
                Endpoint::Responses => {
                    let delta = json!({"type": "response.output_text.delta", "item_id": self.id,
                        "output_index": index, "content_index": 0, "delta": text});
                    named_event("response.output_text.delta", &delta)
                }
            })
            .collect()
    }

    /// What a complete stream ends with.
    pub fn closing(&self) -> Vec<Bytes> {
        if self.endpoint == Endpoint::Responses {
            let text: String = (0..self.output_tokens).map(word).collect();
            let done = json!({"type": "response.incomplete", "response": self.response(&text)});
            return vec![named_event("response.incomplete", &done)];
        }
        let mut events = Vec::new();
        if self.include_usage {
            let chunk = json!({"id": self.id, "object": self.chunk_object(), "created": self.created,
                "model": self.model, "choices": [], "usage": self.usage.json()});
            events.push(event(&chunk));
        }
        events.push(Bytes::from_static(b"data: [DONE]\n\n"));
        events
    }

    fn listed(&self, object: &str, choice: impl Fn(u64) -> Value) -> Value {
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": (0..self.sequences).map(choice).collect::<Vec<_>>(), "usage": self.usage.json()})
    }

    fn response(&self, text: &str) -> Value {
        let usage = self.usage;
        json!({"id": self.id, "object": "response", "created_at": self.created, "model": self.model,
            "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},
            "output": [{"id": format!("msg-{}", self.id), "type": "message", "role": "assistant",
                "status": "incomplete",
                "content": [{"type": "output_text", "text": text, "annotations": []}]}],
            "usage": {"input_tokens": usage.prompt, "output_tokens": usage.completion,
                "total_tokens": usage.prompt + usage.completion,
                "input_tokens_details": {"cached_tokens": usage.cached}}})
    }

    fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions | Endpoint::Responses => "text_completion",
        }
    }

    fn chat_chunk(
        &self,
        index: u64,
        role: Option<&'static str>,
        content: &str,
        finish_reason: Option<&'static str>,
    ) -> Bytes {
        self.chunk(ChatChoice {
            index,
            delta: Delta { role, content },
            logprobs: None,
            finish_reason,
        })
    }

    fn text_chunk(&self, index: u64, text: &str, finish_reason: Option<&'static str>) -> Bytes {
        self.chunk(TextChoice {
            index,
            text,
            logprobs: None,
            finish_reason,
        })
    }

    fn chunk(&self, choice: impl Serialize) -> Bytes {
        event(&Chunk {
            id: &self.id,
            object: self.chunk_object(),
            created: self.created,
            model: &self.model,
            choices: [choice],
        })
    }
}

impl Usage {
    fn json(self) -> Value {
        json!({"prompt_tokens": self.prompt, "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached}})
    }
}

/// The text of token number `number`: "token0", " token1", …
fn word(number: u64) -> String {
    match number {
        0 => "token0".to_owned(),
        _ => format!(" token{number}"),
    }
}

fn event(data: &impl Serialize) -> Bytes {
    framed(b"data: ".to_vec(), data)
}

fn named_event(name: &str, data: &Value) -> Bytes {
    framed(format!("event: {name}\ndata: ").into_bytes(), data)
}

fn framed(mut event: Vec<u8>, data: &impl Serialize) -> Bytes {
    // Strings and numbers only: writing them to memory cannot fail.
    let _ = serde_json::to_writer(&mut event, data);
    event.extend_from_slice(b"\n\n");
    Bytes::from(event)
}
