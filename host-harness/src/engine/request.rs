//! Owns the parsing of an OpenAI generation request, with vLLM's rules and refusals.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::lease::HandoffPrompt;
use super::marker::Markers;
use super::refusal::Refusal;
use native::Limits;

mod ids;
mod native;
#[cfg(test)]
mod tests;

pub use ids::PromptIds;
pub use native::Logprobs;

/// Output tokens if the request sets no limit.
const DEFAULT_OUTPUT_TOKENS: u64 = 16;
/// The largest accepted output limit, in tokens.
const MOST_OUTPUT_TOKENS: i64 = 1_000_000;
/// The largest accepted number of choices (`n`).
const MOST_CHOICES: i64 = 128;
/// Bytes of text per token.
const BYTES_PER_TOKEN: usize = 4;

/// The generation paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// SGLang's own, `/generate`.
    Generate,
}

impl Endpoint {
    /// The generation endpoint at `path`, if it is one.
    pub fn at(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            "/v1/responses" => Some(Self::Responses),
            "/generate" => Some(Self::Generate),
            _ => None,
        }
    }

    /// Name of the field with the output limit.
    pub fn limit(self) -> &'static str {
        match self {
            Self::Chat | Self::Completions => "max_tokens",
            Self::Responses => "max_output_tokens",
            Self::Generate => "max_new_tokens",
        }
    }
}

/// A parsed request.
#[derive(Debug)]
pub struct Generation {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// The model's name. Without a name, as always in SGLang's own endpoint, the served model is meant.
    pub model: Option<String>,
    /// Tokens of each prompt; one entry except for a batch of completions. Never empty.
    pub prompts: Vec<u64>,
    /// Whether the prompt is a list of prompts, even of one.
    pub batch: bool,
    /// Identity of the prompts: equal for equal ones, also in another engine of this build.
    pub fingerprint: u64,
    /// Choices per prompt (`n`).
    pub choices: u64,
    /// Tokens to generate for each choice.
    pub output_tokens: u64,
    /// Whether the answer is to be streamed.
    pub stream: bool,
    /// Whether a stream ends with a usage chunk.
    pub include_usage: bool,
    /// Markers in the prompts' text.
    pub markers: Markers,
    /// SGLang's own endpoint: the requested log probabilities.
    pub logprobs: Logprobs,
    /// vLLM's hand-off part, with either connector, unparsed: a dialect parses it. `None` also for `null`.
    pub kv_transfer_params: Option<Box<RawValue>>,
    /// SGLang's hand-off part.
    pub bootstrap: BootstrapFields,
    /// TensorRT-LLM's hand-off part.
    pub disaggregated_params: Option<Box<RawValue>>,
    /// The prompt's ids, if TensorRT-LLM's part is present.
    pub ids: Option<PromptIds>,
    /// The ids as a leg of TensorRT-LLM carries them beside the prompt.
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// The fields of SGLang's hand-off, unparsed. `None` also for `null`.
#[derive(Debug)]
pub struct BootstrapFields {
    /// The request's id.
    pub rid: Option<Box<RawValue>>,
    /// Host of the prefill engine's bootstrap server.
    pub host: Option<Box<RawValue>>,
    /// Port of the prefill engine's bootstrap server.
    pub port: Option<Box<RawValue>>,
    /// The room in which the legs meet.
    pub room: Option<Box<RawValue>>,
    /// The rank that is to run this leg.
    pub routed_dp_rank: Option<Box<RawValue>>,
    /// The rank that runs the prefill.
    pub disagg_prefill_dp_rank: Option<Box<RawValue>>,
}

impl Generation {
    /// Parses a request body.
    ///
    /// # Errors
    /// [`Refusal::BadRequest`] that names the field.
    pub fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Self, Refusal> {
        let fields = Fields::parse(body)?;
        let (model, logprobs) = match endpoint {
            Endpoint::Generate => (None, native::logprobs(&fields)?),
            _ => (fields.optional("model")?, None),
        };
        let Prompts {
            tokens: prompts,
            batch,
            fingerprint,
            markers,
        } = read_prompts(endpoint, &fields)?;
        let Limits {
            choices,
            output_tokens,
        } = read_limits(endpoint, &fields)?;
        let stream = fields.optional("stream")?.unwrap_or(false);
        let include_usage = read_stream_options(endpoint, &fields, stream)?;
        let disaggregated_params: Option<Box<RawValue>> =
            fields.optional("disaggregated_params")?;
        let ids = disaggregated_params.as_ref();
        let ids = ids
            .map(|_| PromptIds::read(endpoint, &fields))
            .transpose()?;
        Ok(Self {
            endpoint,
            model,
            prompts,
            batch,
            // Over ids, since one leg of TensorRT-LLM carries text and the other ids.
            fingerprint: ids
                .as_ref()
                .map_or(fingerprint, |prompt| identity(&prompt.ids)),
            choices,
            output_tokens,
            stream,
            include_usage,
            markers,
            logprobs,
            kv_transfer_params: fields.optional("kv_transfer_params")?,
            bootstrap: BootstrapFields {
                rid: fields.optional("rid")?,
                host: fields.optional("bootstrap_host")?,
                port: fields.optional("bootstrap_port")?,
                room: fields.optional("bootstrap_room")?,
                routed_dp_rank: fields.optional("routed_dp_rank")?,
                disagg_prefill_dp_rank: fields.optional("disagg_prefill_dp_rank")?,
            },
            prompt_token_ids: match disaggregated_params {
                Some(_) => fields.optional("prompt_token_ids")?,
                None => None,
            },
            disaggregated_params,
            ids,
        })
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().sum()
    }

    /// Sequences to generate: prompts times choices.
    pub fn sequences(&self) -> u64 {
        self.prompts.len() as u64 * self.choices
    }

    /// Tokens of all sequences.
    pub fn completion_tokens(&self) -> u64 {
        self.sequences() * self.output_tokens
    }

    /// KV blocks of `block_tokens` tokens that the prompts fill.
    pub fn prompt_blocks(&self, block_tokens: u32) -> u64 {
        let blocks = |tokens: &u64| tokens.div_ceil(u64::from(block_tokens));
        self.prompts.iter().map(blocks).sum()
    }

    /// Identity of the KV of all prompts.
    pub fn kv(&self) -> HandoffPrompt {
        HandoffPrompt {
            prompt_tokens: self.prompt_tokens(),
            prompt_fingerprint: self.fingerprint,
        }
    }

    /// Identity of each sequence's KV, where each sequence has its own.
    pub fn kv_of_each(&self) -> impl Iterator<Item = HandoffPrompt> {
        let of = |(number, tokens): (u64, &u64)| HandoffPrompt {
            prompt_tokens: *tokens,
            prompt_fingerprint: self.fingerprint.wrapping_add(number),
        };
        let choices = usize::try_from(self.choices).unwrap_or(usize::MAX);
        let prompts = (0..).zip(&self.prompts).map(of);
        prompts.flat_map(move |of| std::iter::repeat_n(of, choices))
    }
}

/// The members of the top-level object, unparsed. Of equal names the last counts, as in Python.
struct Fields<'a>(HashMap<Cow<'a, str>, &'a RawValue>);

impl<'a> Fields<'a> {
    fn parse(body: &'a [u8]) -> Result<Self, Refusal> {
        serde_json::from_slice(body)
            .map(Self)
            .map_err(|error| Refusal::Invalid {
                place: match error.is_data() || body.is_empty() {
                    true => "body".to_owned(),
                    // vLLM reports the character at which parsing stopped.
                    false => format!("body.{}", error.column()),
                },
                problem: format!("Invalid JSON body: {error}"),
            })
    }

    fn optional<T: DeserializeOwned>(&self, name: &'static str) -> Result<Option<T>, Refusal> {
        let Some(value) = self.0.get(name) else {
            return Ok(None);
        };
        serde_json::from_str(value.get())
            .map_err(|error| invalid(name, format!("Invalid `{name}`: {error}")))
    }

    fn required<T: DeserializeOwned>(&self, name: &'static str) -> Result<T, Refusal> {
        self.optional(name)?
            .ok_or_else(|| invalid(name, format!("Field required: `{name}`")))
    }
}

fn invalid(name: &str, problem: String) -> Refusal {
    Refusal::Invalid {
        place: format!("body.{name}"),
        problem,
    }
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize, Hash)]
struct Message {
    role: String,
    content: Option<Content>,
}

#[derive(Deserialize, Hash)]
struct Item {
    role: Option<String>,
    content: Option<Content>,
}

#[derive(Deserialize, Hash)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize, Hash)]
struct Part {
    text: Option<String>,
}

#[derive(Deserialize, Hash)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Item>),
}

#[derive(Deserialize, Hash)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl Content {
    fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            Self::Parts(parts) => {
                let texts = parts.iter().flat_map(|part| &part.text);
                texts.map(String::as_str).collect()
            }
        }
    }
}

impl Input {
    fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            Self::Items(items) => {
                let contents = items.iter().flat_map(|item| &item.content);
                contents.flat_map(Content::texts).collect()
            }
        }
    }
}

impl Prompt {
    fn tokens(&self) -> Vec<u64> {
        match self {
            Self::Text(text) => vec![text_tokens(text.len())],
            Self::Tokens(tokens) => vec![tokens.len() as u64],
            Self::Texts(texts) => texts.iter().map(|text| text_tokens(text.len())).collect(),
            Self::TokenLists(lists) => lists.iter().map(|list| list.len() as u64).collect(),
        }
    }

    fn is_batch(&self) -> bool {
        matches!(self, Self::Texts(_) | Self::TokenLists(_))
    }

    fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            Self::Texts(texts) => texts.iter().map(String::as_str).collect(),
            Self::Tokens(_) | Self::TokenLists(_) => Vec::new(),
        }
    }
}

/// Tokens of a text: one per four bytes or part of them, at least one.
fn text_tokens(bytes: usize) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN).max(1) as u64
}

/// The prompts of a request.
struct Prompts {
    /// Tokens of each prompt.
    tokens: Vec<u64>,
    batch: bool,
    fingerprint: u64,
    markers: Markers,
}

impl Prompts {
    fn conversation(texts: &[&str], fingerprint: u64) -> Self {
        Self {
            tokens: vec![conversation_tokens(texts)],
            batch: false,
            fingerprint,
            markers: Markers::find(texts),
        }
    }

    fn plain(prompt: &Prompt) -> Self {
        Self {
            tokens: prompt.tokens(),
            batch: prompt.is_batch(),
            fingerprint: identity(prompt),
            markers: Markers::find(&prompt.texts()),
        }
    }
}

fn read_prompts(endpoint: Endpoint, fields: &Fields) -> Result<Prompts, Refusal> {
    let prompts = match endpoint {
        Endpoint::Chat => {
            let messages: Vec<Message> = fields.required("messages")?;
            if messages.is_empty() {
                return Err(empty_conversation());
            }
            let contents = messages.iter().flat_map(|message| &message.content);
            let texts: Vec<&str> = contents.flat_map(Content::texts).collect();
            Prompts::conversation(&texts, identity(&messages))
        }
        Endpoint::Responses => {
            let input: Input = fields.required("input")?;
            if matches!(&input, Input::Items(items) if items.is_empty()) {
                return Err(empty_conversation());
            }
            Prompts::conversation(&input.texts(), identity(&input))
        }
        Endpoint::Completions => match fields.optional("prompt")? {
            Some(Prompt::Text(text)) if text.is_empty() => return Err(no_prompt()),
            Some(prompt) => Prompts::plain(&prompt),
            None => return Err(no_prompt()),
        },
        Endpoint::Generate => Prompts::plain(&native::prompt(fields)?),
    };
    if prompts.tokens.is_empty() || prompts.tokens.contains(&0) {
        return Err(Refusal::BadRequest("`prompt` must not be empty".into()));
    }
    Ok(prompts)
}

fn empty_conversation() -> Refusal {
    let why = "Cannot apply chat template to an empty conversation. Provide at least one message.";
    Refusal::BadRequest(why.into())
}

fn no_prompt() -> Refusal {
    Refusal::BadParameter {
        name: "prompt",
        problem: "Either `prompt` or `prompt_embeds` must be provided and non-empty.".into(),
    }
}

/// Tokens of a prompt that consists of several texts.
fn conversation_tokens(texts: &[&str]) -> u64 {
    text_tokens(texts.iter().map(|text| text.len()).sum())
}

fn identity(prompt: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    prompt.hash(&mut hasher);
    hasher.finish()
}

/// The responses API has no such options; vLLM ignores them.
fn read_stream_options(endpoint: Endpoint, fields: &Fields, stream: bool) -> Result<bool, Refusal> {
    if endpoint == Endpoint::Responses {
        return Ok(false);
    }
    let Some(options) = fields.optional::<StreamOptions>("stream_options")? else {
        return Ok(false);
    };
    if !stream {
        return Err(Refusal::BadParameter {
            name: "stream_options",
            problem: "Stream options can only be defined when `stream=True`.".into(),
        });
    }
    Ok(options.include_usage.unwrap_or(false))
}

fn read_limits(endpoint: Endpoint, fields: &Fields) -> Result<Limits, Refusal> {
    if endpoint == Endpoint::Generate {
        return native::limits(fields);
    }
    let choices = match endpoint {
        // That API has no choices.
        Endpoint::Responses => None,
        _ => bounded(fields, "n", MOST_CHOICES)?,
    };
    Ok(Limits {
        choices: choices.unwrap_or(1),
        output_tokens: read_output_tokens(endpoint, fields)?,
    })
}

fn read_output_tokens(endpoint: Endpoint, fields: &Fields) -> Result<u64, Refusal> {
    let max_tokens = bounded(fields, "max_tokens", MOST_OUTPUT_TOKENS)?;
    let limit = match endpoint {
        Endpoint::Chat => {
            bounded(fields, "max_completion_tokens", MOST_OUTPUT_TOKENS)?.or(max_tokens)
        }
        Endpoint::Completions | Endpoint::Generate => max_tokens,
        Endpoint::Responses => bounded(fields, "max_output_tokens", MOST_OUTPUT_TOKENS)?,
    };
    let min_tokens = fields.optional::<i64>("min_tokens")?.unwrap_or(0);
    if min_tokens < 0 {
        return Err(Refusal::BadRequest(format!(
            "min_tokens must be greater than or equal to 0, got {min_tokens}."
        )));
    }
    if let Some(limit) = limit
        && min_tokens as u64 > limit
    {
        return Err(Refusal::BadRequest(format!(
            "min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}."
        )));
    }
    Ok(limit.unwrap_or(DEFAULT_OUTPUT_TOKENS))
}

/// An integer from 1 to `most`, if the field is present.
fn bounded(fields: &Fields, name: &'static str, most: i64) -> Result<Option<u64>, Refusal> {
    within(name, fields.optional(name)?, most)
}

fn within(name: &str, value: Option<i64>, most: i64) -> Result<Option<u64>, Refusal> {
    match value {
        None => Ok(None),
        Some(value) if value < 1 => Err(out_of_range(
            name,
            format!("{name} must be at least 1, got {value}."),
        )),
        Some(value) if value > most => Err(out_of_range(
            name,
            format!("{name} is too large: {value}. This model supports at most {most}."),
        )),
        Some(value) => Ok(Some(value as u64)),
    }
}

/// vLLM names the parameter, by its own name, only for its limits on output.
fn out_of_range(name: &str, problem: String) -> Refusal {
    match name {
        "max_tokens" | "max_completion_tokens" | "max_output_tokens" => Refusal::BadParameter {
            name: "max_tokens",
            problem,
        },
        _ => Refusal::BadRequest(problem),
    }
}
