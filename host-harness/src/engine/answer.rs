//! Owns the writing of answers as vLLM's OpenAI server writes them: unstreamed, and as the events of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::dialect::{Dialect, HandoffFields, trtllm};
use super::request::{Endpoint, Generation, Logprobs};
use members::AnswerMembers;
use native::Native;

mod members;
mod native;
mod responses;

/// How every sequence of an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// At the limit of output tokens.
    Length,
    /// At a stop token.
    Stop,
}

/// The output of each sequence.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// Tokens.
    pub tokens: u64,
    /// How it ends.
    pub finish: Finish,
}

/// One request's answer, before serialisation.
pub struct Answer {
    endpoint: Endpoint,
    id: String,
    model: String,
    created: u64,
    sequences: u64,
    output: Output,
    usage: Usage,
    include_usage: bool,
    members: &'static AnswerMembers,
    native: Native,
}

/// Token counts, with vLLM's names and in its order.
#[derive(Clone, Copy, Serialize)]
struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: PromptTokensDetails,
    #[serde(flatten)]
    more: Nulls,
}

#[derive(Clone, Copy, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    created_cache_tokens: Option<u64>,
    #[serde(flatten)]
    more: Nulls,
}

/// An unstreamed answer.
#[derive(Serialize)]
struct UnstreamedAnswer<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'static str>,
    usage: Usage,
    #[serde(flatten)]
    more: Nulls,
    #[serde(flatten)]
    handoff: &'a HandoffFields,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'static str>,
    #[serde(flatten)]
    more: Nulls,
}

#[derive(Serialize)]
struct WholeChatChoice<'a> {
    index: u64,
    message: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
    #[serde(flatten)]
    more: Nulls,
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregated_params: Option<&'a trtllm::DisaggregatedParams>,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u64,
    delta: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
    #[serde(flatten)]
    more: Nulls,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    content: &'a str,
    #[serde(flatten)]
    more: Nulls,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u64,
    text: &'a str,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
    #[serde(flatten)]
    more: Nulls,
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregated_params: Option<&'a trtllm::DisaggregatedParams>,
}

/// Members that are always `null`.
#[derive(Clone, Copy, Debug)]
struct Nulls(&'static [&'static str]);

const NONE: Nulls = Nulls(&[]);

impl Serialize for Nulls {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|name| (name, ())))
    }
}

const ASSISTANT: Option<&str> = Some("assistant");

impl Answer {
    /// The answer of `output` with the given id to `generation`, with `cached_tokens` of its prompt not computed here, and the
    /// known `logprobs`.
    pub fn new(
        dialect: Dialect,
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
                prompt_tokens_details: PromptTokensDetails {
                    cached_tokens,
                    created_cache_tokens: None,
                    more: NONE,
                },
                more: NONE,
            },
            include_usage: generation.include_usage,
            members: AnswerMembers::of(dialect, generation.endpoint),
            native: Native::new(generation, logprobs),
        }
    }

    /// Sets the tokens of each prompt found in the prefix cache.
    pub fn found(&mut self, tokens: Vec<u64>) {
        self.usage.prompt_tokens_details.cached_tokens = tokens.iter().sum();
        self.native.found = tokens;
    }

    /// Tokens of all prompts that were not computed here.
    pub fn cached_tokens(&self) -> u64 {
        self.usage.prompt_tokens_details.cached_tokens
    }

    /// Tokens of each sequence.
    pub fn output_tokens(&self) -> u64 {
        self.output.tokens
    }

    /// The token counts of an unstreamed answer.
    pub fn usage(&self) -> Value {
        json!(self.usage)
    }

    /// The unstreamed answer, with the dialect's hand-off part.
    pub fn whole(&self, handoff: HandoffFields) -> Bytes {
        let text = self.text();
        match self.endpoint {
            Endpoint::Chat => self.listed("chat.completion", &handoff, |index| WholeChatChoice {
                index,
                message: Delta {
                    role: ASSISTANT,
                    content: &text,
                    more: self.members.message,
                },
                logprobs: None,
                finish_reason: Some(self.finish()),
                more: self.members.choice,
                disaggregated_params: handoff.disaggregated_params.as_ref(),
            }),
            Endpoint::Completions => self.listed("text_completion", &handoff, |index| TextChoice {
                index,
                text: &text,
                logprobs: None,
                finish_reason: Some(self.finish()),
                more: self.members.choice,
                disaggregated_params: handoff.disaggregated_params.as_ref(),
            }),
            Endpoint::Responses => {
                let params = handoff.kv_transfer_params.flatten();
                self.response_whole(json!(params))
            }
            Endpoint::Generate => self.native_whole(),
        }
    }

    /// First events of a stream: for a chat one chunk per choice, with the role and no text.
    pub fn opening(&self) -> Vec<Bytes> {
        match self.endpoint {
            Endpoint::Chat => (0..self.sequences)
                .map(|index| self.chat_chunk(index, ASSISTANT, "", None))
                .collect(),
            Endpoint::Completions | Endpoint::Generate => Vec::new(),
            Endpoint::Responses => self.response_opening(),
        }
    }

    /// The events of token number `number` (from 0) of every choice; the last one carries the finish reason.
    pub fn token(&self, number: u64) -> Vec<Bytes> {
        let text = word(number);
        let finish = (number + 1 == self.output.tokens).then(|| self.finish());
        let each = |event: &dyn Fn(u64) -> Bytes| (0..self.sequences).map(event).collect();
        match self.endpoint {
            Endpoint::Chat => each(&|index| self.chat_chunk(index, None, &text, finish)),
            Endpoint::Completions => each(&|index| self.text_chunk(index, &text, finish)),
            Endpoint::Generate => each(&|index| self.native_event(index, number + 1)),
            Endpoint::Responses => self.response_token(number),
        }
    }

    /// Last events of a complete stream.
    pub fn closing(&self) -> Vec<Bytes> {
        if self.endpoint == Endpoint::Responses {
            return self.response_closing();
        }
        let mut events = Vec::new();
        if self.include_usage && self.endpoint != Endpoint::Generate {
            events.push(self.chunk::<TextChoice>(&[], Some(self.streamed_usage()), NONE));
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

    fn listed<C: Serialize>(
        &self,
        object: &'static str,
        handoff: &HandoffFields,
        choice: impl Fn(u64) -> C,
    ) -> Bytes {
        let whole = UnstreamedAnswer {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices: (0..self.sequences).map(choice).collect(),
            system_fingerprint: self.members.fingerprint,
            usage: self.whole_usage(),
            more: self.members.whole,
            handoff,
        };
        framed(Vec::new(), &whole, b"")
    }

    /// The counts of an unstreamed answer.
    fn whole_usage(&self) -> Usage {
        let mut usage = self.streamed_usage();
        usage.more = self.members.usage;
        usage.prompt_tokens_details.more = self.members.prompt_tokens_details;
        usage
    }

    /// The counts of a stream.
    fn streamed_usage(&self) -> Usage {
        let mut usage = self.usage;
        usage.prompt_tokens_details.created_cache_tokens = self.members.created_cache_tokens;
        usage
    }

    fn chat_chunk(
        &self,
        index: u64,
        role: Option<&'static str>,
        content: &str,
        finish_reason: Option<&'static str>,
    ) -> Bytes {
        let (more, beside) = match (role, finish_reason) {
            (Some(_), _) => (NONE, self.members.opening),
            (None, None) => (self.members.delta, NONE),
            (None, Some(_)) => (self.members.last_delta, NONE),
        };
        let choice = ChatChoice {
            index,
            delta: Delta {
                role,
                content,
                more: NONE,
            },
            logprobs: None,
            finish_reason,
            more,
        };
        self.chunk(&[choice], None, beside)
    }

    fn text_chunk(&self, index: u64, text: &str, finish_reason: Option<&'static str>) -> Bytes {
        let choice = TextChoice {
            index,
            text,
            logprobs: None,
            finish_reason,
            more: self.members.delta,
            disaggregated_params: None,
        };
        self.chunk(&[choice], None, NONE)
    }

    fn chunk<C: Ending>(&self, choices: &[C], usage: Option<Usage>, more: Nulls) -> Bytes {
        // vLLM sends its fingerprint in the last chunk of each choice, or in the chunk with the counts if requested.
        let ends = match self.include_usage {
            true => choices.is_empty(),
            false => choices.iter().any(Ending::ends),
        };
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
            system_fingerprint: self.members.fingerprint.filter(|_| ends),
            more,
        };
        framed(b"data: ".to_vec(), &chunk, b"\n\n")
    }
}

/// A choice in a chunk, possibly its last.
trait Ending: Serialize {
    fn ends(&self) -> bool;
}

impl Ending for ChatChoice<'_> {
    fn ends(&self) -> bool {
        self.finish_reason.is_some()
    }
}

impl Ending for TextChoice<'_> {
    fn ends(&self) -> bool {
        self.finish_reason.is_some()
    }
}

/// vLLM's end of a failed stream: this error, and its usual end.
pub fn failed(error: &str) -> Vec<Bytes> {
    let event = format!("data: {error}\n\ndata: [DONE]\n\n");
    vec![Bytes::from(event)]
}

/// The text of token number `number`: "token0", " token1", …
fn word(number: u64) -> String {
    match number {
        0 => "token0".to_owned(),
        _ => format!(" token{number}"),
    }
}

fn framed(mut written: Vec<u8>, content: &impl Serialize, end: &[u8]) -> Bytes {
    // Strings and numbers only: serialising them cannot fail.
    let _ = serde_json::to_writer(&mut written, content);
    written.extend_from_slice(end);
    Bytes::from(written)
}
