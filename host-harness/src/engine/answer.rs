//! Writes answers as vLLM's OpenAI server does: whole ones, and the events of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::dialect::{Written, trtllm};
use super::request::{Endpoint, Generation, Logprobs};
use native::Native;

mod native;

/// How every sequence of an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// At the limit of output tokens.
    Length,
    /// By itself.
    Stop,
}

/// What is generated for each sequence.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// Tokens.
    pub tokens: u64,
    /// How it ends.
    pub finish: Finish,
}

/// One request's answer, before it is written.
pub struct Answer {
    endpoint: Endpoint,
    id: String,
    model: String,
    created: u64,
    sequences: u64,
    output: Output,
    usage: Usage,
    include_usage: bool,
    native: Native,
}

/// Token counts, in vLLM's words and order.
#[derive(Clone, Copy, Serialize)]
struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u64,
}

/// A whole answer.
#[derive(Serialize)]
struct Whole<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    usage: Usage,
    #[serde(flatten)]
    handoff: &'a Written,
}

/// One event of a stream.
#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

#[derive(Serialize)]
struct WholeChatChoice<'a> {
    index: u64,
    message: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregated_params: Option<&'a trtllm::Params>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregated_params: Option<&'a trtllm::Params>,
}

const ASSISTANT: Option<&str> = Some("assistant");

impl Answer {
    /// The answer of `output` with the given id to `generation`, of whose prompt `cached_tokens` were not computed here
    /// and of which `logprobs` are known.
    pub fn new(
        id: String,
        generation: &Generation,
        output: Output,
        cached_tokens: u64,
        logprobs: Logprobs,
    ) -> Self {
        let completion_tokens = generation.sequences() * output.tokens;
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            endpoint: generation.endpoint,
            id,
            model: generation.model.clone().unwrap_or_default(),
            created: since_1970.map_or(0, |time| time.as_secs()),
            sequences: generation.sequences(),
            output,
            usage: Usage {
                prompt_tokens: generation.prompt_tokens(),
                total_tokens: generation.prompt_tokens() + completion_tokens,
                completion_tokens,
                prompt_tokens_details: PromptTokensDetails { cached_tokens },
            },
            include_usage: generation.include_usage,
            native: Native::new(generation, logprobs),
        }
    }

    /// Of each prompt, `tokens` were found in the prefix cache.
    pub fn found(&mut self, tokens: Vec<u64>) {
        self.usage.prompt_tokens_details.cached_tokens = tokens.iter().sum();
        self.native.found = tokens;
    }

    /// Tokens of each sequence.
    pub fn output_tokens(&self) -> u64 {
        self.output.tokens
    }

    /// The token counts, as a whole answer has them.
    pub fn usage(&self) -> Value {
        json!(self.usage)
    }

    /// The whole answer, with the part that a dialect writes about a hand-off.
    pub fn whole(&self, handoff: Written) -> Bytes {
        let text = self.text();
        match self.endpoint {
            Endpoint::Chat => self.listed("chat.completion", &handoff, |index| WholeChatChoice {
                index,
                message: Delta {
                    role: ASSISTANT,
                    content: &text,
                },
                logprobs: None,
                finish_reason: Some(self.finish()),
                disaggregated_params: handoff.disaggregated_params.as_ref(),
            }),
            Endpoint::Completions => self.listed("text_completion", &handoff, |index| TextChoice {
                index,
                text: &text,
                logprobs: None,
                finish_reason: Some(self.finish()),
                disaggregated_params: handoff.disaggregated_params.as_ref(),
            }),
            Endpoint::Responses => {
                let mut response = self.response(&text);
                if let Some(params) = handoff.kv_transfer_params {
                    response["kv_transfer_params"] = json!(params);
                }
                framed(Vec::new(), &response, b"")
            }
            Endpoint::Generate => self.native_whole(),
        }
    }

    /// What a stream begins with: for a chat one chunk per choice that carries the role and no text.
    pub fn opening(&self) -> Vec<Bytes> {
        match self.endpoint {
            Endpoint::Chat => (0..self.sequences)
                .map(|index| self.chat_chunk(index, ASSISTANT, "", None))
                .collect(),
            Endpoint::Completions | Endpoint::Generate => Vec::new(),
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
        let finish = (number + 1 == self.output.tokens).then(|| self.finish());
        (0..self.sequences)
            .map(|index| match self.endpoint {
                Endpoint::Chat => self.chat_chunk(index, None, &text, finish),
                Endpoint::Completions => self.text_chunk(index, &text, finish),
                Endpoint::Generate => self.native_event(index, number + 1),
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
            let name = format!("response.{}", self.status());
            let done = json!({"type": name, "response": self.response(&self.text())});
            return vec![named_event(&name, &done)];
        }
        let mut events = Vec::new();
        if self.include_usage && self.endpoint != Endpoint::Generate {
            events.push(self.chunk::<TextChoice>(&[], Some(self.usage)));
        }
        events.push(Bytes::from_static(b"data: [DONE]\n\n"));
        events
    }

    fn text(&self) -> String {
        (0..self.output.tokens).map(word).collect()
    }

    fn finish(&self) -> &'static str {
        match self.output.finish {
            Finish::Length => "length",
            Finish::Stop => "stop",
        }
    }

    /// The same in the words of the responses API.
    fn status(&self) -> &'static str {
        match self.output.finish {
            Finish::Length => "incomplete",
            Finish::Stop => "completed",
        }
    }

    fn listed<C: Serialize>(
        &self,
        object: &'static str,
        handoff: &Written,
        choice: impl Fn(u64) -> C,
    ) -> Bytes {
        let whole = Whole {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices: (0..self.sequences).map(choice).collect(),
            usage: self.usage,
            handoff,
        };
        framed(Vec::new(), &whole, b"")
    }

    fn response(&self, text: &str) -> Value {
        let usage = self.usage;
        let incomplete = match self.output.finish {
            Finish::Length => json!({"reason": "max_output_tokens"}),
            Finish::Stop => Value::Null,
        };
        json!({"id": self.id, "object": "response", "created_at": self.created, "model": self.model,
            "status": self.status(), "incomplete_details": incomplete,
            "output": [{"id": format!("msg-{}", self.id), "type": "message", "role": "assistant",
                "status": self.status(),
                "content": [{"type": "output_text", "text": text, "annotations": []}]}],
            "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
                "input_tokens_details": usage.prompt_tokens_details}})
    }

    fn chat_chunk(
        &self,
        index: u64,
        role: Option<&'static str>,
        content: &str,
        finish_reason: Option<&'static str>,
    ) -> Bytes {
        let choice = ChatChoice {
            index,
            delta: Delta { role, content },
            logprobs: None,
            finish_reason,
        };
        self.chunk(&[choice], None)
    }

    fn text_chunk(&self, index: u64, text: &str, finish_reason: Option<&'static str>) -> Bytes {
        let choice = TextChoice {
            index,
            text,
            logprobs: None,
            finish_reason,
            disaggregated_params: None,
        };
        self.chunk(&[choice], None)
    }

    fn chunk<C: Serialize>(&self, choices: &[C], usage: Option<Usage>) -> Bytes {
        let chunk = Chunk {
            id: &self.id,
            object: match self.endpoint {
                Endpoint::Chat => "chat.completion.chunk",
                Endpoint::Completions | Endpoint::Responses | Endpoint::Generate => {
                    "text_completion"
                }
            },
            created: self.created,
            model: &self.model,
            choices,
            usage,
        };
        framed(b"data: ".to_vec(), &chunk, b"\n\n")
    }
}

/// The text of token number `number`: "token0", " token1", …
fn word(number: u64) -> String {
    match number {
        0 => "token0".to_owned(),
        _ => format!(" token{number}"),
    }
}

fn named_event(name: &str, data: &Value) -> Bytes {
    framed(format!("event: {name}\ndata: ").into_bytes(), data, b"\n\n")
}

fn framed(mut written: Vec<u8>, content: &impl Serialize, end: &[u8]) -> Bytes {
    // Strings and numbers only: writing them to memory cannot fail.
    let _ = serde_json::to_writer(&mut written, content);
    written.extend_from_slice(end);
    Bytes::from(written)
}
