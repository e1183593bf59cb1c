//! Owns a request as routing sees it: where it is sent, what model it asks for, how long its prompt and answer may be.

mod buffered;
mod embeds;
mod forged;
mod limits;
mod nvext;
mod parts;
pub mod prompt;
pub mod rename;
pub mod sequences;
pub mod steering;

pub use buffered::{BufferedRequest, ParsedRequest};
pub use forged::check_unread;
pub use parts::Part;
pub use sequences::{Prompts, Sequences};
pub use steering::{Pin, Steering};

use std::borrow::Cow;
use std::rc::Rc;

use memchr::memmem;
use percent_encoding::percent_decode;

use crate::handoff::direct;
use crate::handoff::terminal::Form;
use crate::json::{
    JsonError, MAX_DEPTH, MAX_VALUES, Member, Object, has_more_values_than, is_deeper_than,
};
use crate::route::Refusal;

/// What a request's line and headers say, before any of its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head<'a> {
    /// `GET`, `POST`, …
    pub method: &'a [u8],
    /// Path with its query.
    pub path: &'a [u8],
    /// `content-encoding`, where the client sent one.
    pub encoding: Option<&'a [u8]>,
}

/// Below this are answers that were stored, by their ids.
const STORED: &[u8] = b"/v1/responses/";

/// The kinds of request that generate text, and so have a prefill and a decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// SGLang's own `/generate`
    Generate,
    /// Another engine's or vendor's path, which may generate text: it can only be run whole.
    Other,
}

/// What must be known of a request before its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It generates text: its body is read, its two workers are picked.
    Generation(Generation),
    /// Anything else: models, tokenisation, what becomes of an answer that was stored. One worker answers, the body is not looked at.
    Plain,
}

impl Head<'_> {
    /// What kind of request this is. Paths are compared by their end, so that prefixes such as `/openai` do not hide
    /// them, without their query, and decoded, as the engines' servers do before they look at them.
    ///
    /// Whatever is sent to a path that is not known may generate text: it counts as a generation that can only be run whole,
    /// so that no decode worker gets it without a hand-off.
    pub fn kind(&self) -> Kind {
        // By no other method does an engine generate.
        if !matches!(self.method, b"POST" | b"PUT" | b"PATCH") {
            return Kind::Plain;
        }
        let path = self
            .path
            .split(|byte| *byte == b'?')
            .next()
            .unwrap_or_default();
        let path: Cow<'_, [u8]> = percent_decode(path).into();
        let path = path.strip_suffix(b"/").unwrap_or(&path);
        if memmem::find(path, STORED).is_some() {
            return Kind::Plain;
        }
        let known = [
            (
                &b"/chat/completions"[..],
                Kind::Generation(Generation::Chat),
            ),
            (b"/completions", Kind::Generation(Generation::Completions)),
            (b"/v1/responses", Kind::Generation(Generation::Responses)),
            // Below `/v1` and `/api` other interfaces have that name.
            (b"/v1/generate", Kind::Generation(Generation::Other)),
            (b"/api/generate", Kind::Generation(Generation::Other)),
            (b"/generate", Kind::Generation(Generation::Generate)),
            (b"/tokenize", Kind::Plain),
            (b"/detokenize", Kind::Plain),
            (b"/count_tokens", Kind::Plain),
            (b"/render", Kind::Plain),
        ];
        let found = known.iter().find(|(end, _)| path.ends_with(end));
        found.map_or(Kind::Generation(Generation::Other), |(_, kind)| *kind)
    }

    /// Whether the body is compressed, and so cannot be read here.
    pub fn is_encoded(&self) -> bool {
        self.encoding
            .is_some_and(|value| !value.is_empty() && !value.eq_ignore_ascii_case(b"identity"))
    }
}

impl Generation {
    /// The fields that may hold the prompt. Of several the first one that is there counts.
    fn prompt_fields(self) -> &'static [&'static str] {
        match self {
            Self::Chat | Self::Other => &["messages"],
            Self::Completions => &["prompt"],
            Self::Responses => &["input"],
            Self::Generate => &["text", "input_ids", "input_embeds"],
        }
    }

    /// The member that holds the prompt.
    fn prompt<'o, 'a>(self, body: &'o Object<'a>) -> Option<&'o Member<'a>> {
        let mut members = self
            .prompt_fields()
            .iter()
            .filter_map(|name| body.get(name));
        match self {
            Self::Generate => members.find(|member| member.value != "null"),
            _ => members.next(),
        }
    }
}

/// Top-level members that routing or a hand-off reads or edits.
pub const MEMBERS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "prompt_token_ids",
    "prompt_embeds",
    "input",
    "text",
    "input_ids",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "instructions",
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "chat_template_args",
    "reasoning_effort",
    "reasoning",
    "mm_processor_kwargs",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "cache_salt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "truncate_prompt_tokens",
    "n",
    "best_of",
    "sampling_params",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "return_context_logits",
    "use_beam_search",
    "background",
    "previous_response_id",
    "return_logprob",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disaggregated_params",
    "ec_transfer_params",
    "vllm_xargs",
    "rid",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "nvext",
];

/// The most tokens that a client allows its answer, and the member that says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// The member.
    pub name: &'static str,
    /// Tokens.
    pub tokens: u64,
}

/// A request whose body has been read.
#[derive(Debug)]
pub struct Request<'a> {
    /// Which interface it uses.
    pub generation: Generation,
    /// The model asked for; empty where the interface names none.
    pub model: Rc<str>,
    /// An estimate of the prompt's length: one token per four bytes, or the number of token ids.
    pub prompt_tokens: u64,
    /// The members that a hand-off may edit.
    pub body: Object<'a>,
    sequences: Sequences,
    fault: Fault,
    max_tokens: Option<u64>,
    known_tokens: Option<u64>,
    hands_off_itself: bool,
}

impl<'a> Request<'a> {
    /// Reads a body in which nothing is wrong.
    ///
    /// # Errors
    /// As [`Request::read`] and [`Request::check`].
    pub fn parse(generation: Generation, body: &'a [u8]) -> Result<Self, Refusal> {
        let request = Self::read(generation, body)?;
        request.check().map(|()| request)
    }

    /// Reads a body as far as it can be read. What is wrong with it is told by [`Request::check`], and matters where a field decides of two
    /// legs: a worker that runs it whole reads it itself, and takes more than is understood here.
    ///
    /// # Errors
    /// [`Refusal`] where it is no JSON object, or none that can be worked on.
    pub fn read(generation: Generation, body: &'a [u8]) -> Result<Self, Refusal> {
        if has_more_values_than(MAX_VALUES, body) {
            return Err(Refusal::Field {
                name: "body",
                problem: "has more than 2,097,152 JSON values and names in it",
            });
        }
        let object = Object::parse(body, MEMBERS)?;
        if is_deeper_than(MAX_DEPTH, body) {
            return Err(Refusal::Field {
                name: "body",
                problem: "nests lists and objects more than 128 deep",
            });
        }
        // Not every interface names its model: such a request goes by load alone.
        if generation == Generation::Other && object.get("model").is_none() {
            return Err(Refusal::NoHandoffForPath);
        }
        check_nvext(&object)?;
        let mut fault = Fault::default();
        let model = fault.noted(model(generation, &object), String::new());
        let prompt_tokens = match generation {
            Generation::Other => estimate_tokens(body.len()),
            _ => fault.noted(
                prompt_tokens(generation, &object),
                estimate_tokens(body.len()),
            ),
        };
        let sequences = fault.noted(Sequences::read(generation, &object), Sequences::ONE);
        fault.noted(check_stream(&object), ());
        fault.noted(limits::check(&object), ());
        Ok(Self {
            generation,
            model: model.into(),
            prompt_tokens,
            sequences,
            fault,
            max_tokens: limits::max_tokens(generation, &object),
            known_tokens: has_known_prompt(generation, &object, sequences).then_some(prompt_tokens),
            hands_off_itself: forged::own_handoff(&object).is_some(),
            body: object,
        })
    }

    /// What is wrong with it.
    ///
    /// # Errors
    /// [`Refusal`] names the field that is missing or of the wrong type.
    pub fn check(&self) -> Result<(), Refusal> {
        self.fault.0.clone().map_or(Ok(()), Err)
    }
}

/// The first thing found wrong with a request that can be worked on all the same.
#[derive(Debug, Clone, Default)]
struct Fault(Option<Refusal>);

impl Fault {
    /// What was read, or `otherwise`, and a note of why.
    fn noted<T>(&mut self, read: Result<T, Refusal>, otherwise: T) -> T {
        read.unwrap_or_else(|why| {
            self.0.get_or_insert(why);
            otherwise
        })
    }
}

impl Request<'_> {
    /// How the client wants its answer.
    pub fn form(&self) -> Form {
        let stream = self.body.get("stream");
        match stream.is_some_and(|member| parts::is_true(member.value)) {
            true => Form::Stream {
                usage: self.wants_usage(),
            },
            false => Form::Whole,
        }
    }

    fn wants_usage(&self) -> bool {
        #[derive(serde::Deserialize)]
        struct Options {
            include_usage: Option<bool>,
        }
        let options = self.body.get("stream_options");
        let options = options.and_then(|member| serde_json::from_str::<Options>(member.value).ok());
        options
            .and_then(|options| options.include_usage)
            .unwrap_or(false)
    }

    /// The most tokens that an answer may have, where the client says so.
    pub fn max_tokens(&self) -> Option<u64> {
        self.max_tokens
    }

    /// The limit by which an engine refuses a request that is too long. Responses have none: theirs is cut.
    pub fn limit(&self) -> Option<Limit> {
        let names: &[&'static str] = match self.generation {
            Generation::Chat => &["max_completion_tokens", "max_tokens"],
            Generation::Completions => &["max_tokens"],
            Generation::Generate => {
                let name = "sampling_params";
                return self.max_tokens.map(|tokens| Limit { name, tokens });
            }
            Generation::Responses | Generation::Other => &[],
        };
        names.iter().find_map(|&name| {
            let tokens = limits::whole(self.body.get(name)?.value)?;
            Some(Limit { name, tokens })
        })
    }

    /// The tokens of the one prompt, where it came as ids and is taken as it is.
    pub fn known_tokens(&self) -> Option<u64> {
        self.known_tokens
    }

    /// How many sequences it asks for.
    pub fn sequences(&self) -> Sequences {
        self.sequences
    }

    /// The prompt as it is written.
    fn prompt(&self) -> Option<&str> {
        self.generation
            .prompt(&self.body)
            .map(|member| member.value)
    }

    /// The prompt as token ids, where the client sent it so.
    pub fn prompt_ids(&self) -> Option<Vec<u32>> {
        match self.generation {
            Generation::Completions | Generation::Generate => {
                serde_json::from_str(self.prompt()?).ok()
            }
            _ => None,
        }
    }

    /// Whether the client itself hands the request from one worker to another: it set a field of a hand-off, and to something.
    pub fn hands_off_itself(&self) -> bool {
        self.hands_off_itself
    }

    /// That the hand-off is left to the router: a client that could set it could read another's KV cache. Null and `{}` say
    /// nothing.
    ///
    /// # Errors
    /// [`Refusal::Field`] names the field that is set.
    pub fn check_handoff_is_ours(&self) -> Result<(), Refusal> {
        match forged::forged(&self.body) {
            None => Ok(()),
            Some(name) => Err(forged::refusal(name)),
        }
    }
}

impl From<JsonError> for Refusal {
    fn from(error: JsonError) -> Self {
        match error {
            JsonError::Syntax(detail) => Self::NotJson { detail },
            JsonError::NotAnObject => Self::Field {
                name: "body",
                problem: "must be a JSON object",
            },
            JsonError::TooManyRepeats => Self::Field {
                name: "body",
                problem: "repeats a member too often",
            },
        }
    }
}

/// The model asked for; empty where the interface names none.
fn model(generation: Generation, object: &Object<'_>) -> Result<String, Refusal> {
    match generation {
        Generation::Generate if is_absent(object, "model") => Ok(String::new()),
        _ => text_field(object, "model"),
    }
}

/// A required, non-empty string.
fn text_field(object: &Object<'_>, name: &'static str) -> Result<String, Refusal> {
    let Some(member) = object.get(name) else {
        return Err(Refusal::Field {
            name,
            problem: "is missing; a string is required",
        });
    };
    match serde_json::from_str::<String>(member.value) {
        Ok(text) if !text.is_empty() => Ok(text),
        Ok(_) => Err(Refusal::Field {
            name,
            problem: "must not be empty",
        }),
        // A string of a body that is JSON cannot be read only for an escape that stands for half a character.
        Err(_) if member.value.starts_with('"') => Err(Refusal::Field {
            name,
            problem: "is not valid Unicode",
        }),
        Err(_) => Err(Refusal::Field {
            name,
            problem: "must be a string",
        }),
    }
}

/// Whether a member is not there, or null.
fn is_absent(object: &Object<'_>, name: &str) -> bool {
    object.get(name).is_none_or(|member| member.value == "null")
}

fn prompt_tokens(generation: Generation, object: &Object<'_>) -> Result<u64, Refusal> {
    if generation != Generation::Completions {
        return written_tokens(generation, object);
    }
    let embedded = embeds::tokens(object)?;
    match embedded > 0 && is_absent(object, "prompt") {
        true => Ok(embedded),
        false => Ok(written_tokens(generation, object)?.saturating_add(embedded)),
    }
}

/// The tokens of what is written, or given as ids.
fn written_tokens(generation: Generation, object: &Object<'_>) -> Result<u64, Refusal> {
    let name = generation.prompt_fields().first().copied();
    let missing = Refusal::Field {
        name: name.unwrap_or_default(),
        problem: "is missing; the prompt is required",
    };
    let prompt = generation.prompt(object).ok_or(missing)?;
    let fields = generation.prompt_fields().iter();
    let name = fields
        .copied()
        .find(|name| prompt.key == *name)
        .unwrap_or_default();
    let kind = prompt.value.as_bytes().first();
    match (name, kind) {
        ("messages", Some(b'[')) => Ok(estimate_tokens(prompt.value.len())),
        ("input_embeds", Some(b'[')) => Ok(count_embeddings(prompt.value)),
        ("input_ids", Some(b'[')) => Ok(count_prompt(prompt.value)),
        ("prompt" | "input" | "text", Some(b'[' | b'"')) => Ok(count_prompt(prompt.value)),
        ("messages", _) => Err(Refusal::Field {
            name,
            problem: "must be a list of messages",
        }),
        ("input_ids" | "input_embeds", _) => Err(Refusal::Field {
            name,
            problem: "must be a list",
        }),
        _ => Err(Refusal::Field {
            name,
            problem: "must be a string or a list",
        }),
    }
}

/// One list of numbers is one token: it opens behind a bracket or a comma, and a number follows.
fn count_embeddings(value: &str) -> u64 {
    let mut after = None;
    let mut found = 0_u64;
    for byte in value.bytes().filter(|byte| !byte.is_ascii_whitespace()) {
        found = found.saturating_add(u64::from(after == Some(b'[') && byte != b'['));
        after = Some(byte);
    }
    found.max(1)
}

/// Token ids are counted, text is estimated.
fn count_prompt(value: &str) -> u64 {
    match is_ids(value) {
        true => value.bytes().filter(|byte| *byte == b',').count() as u64 + 1,
        false => estimate_tokens(value.len()),
    }
}

/// Whether there is one prompt, which came as ids and is taken as it is.
fn has_known_prompt(generation: Generation, object: &Object<'_>, sequences: Sequences) -> bool {
    let has_ids = matches!(generation, Generation::Completions | Generation::Generate);
    let is_one = matches!(sequences.prompts, Prompts::One | Prompts::Batch(1));
    let others = ["truncate_prompt_tokens", "prompt_embeds"];
    let is_alone = others.iter().all(|name| is_absent(object, name));
    let prompt = generation.prompt(object);
    let prompt = prompt.filter(|_| has_ids && is_one && is_alone);
    prompt.is_some_and(|prompt| prompt.value.starts_with('[') && is_ids(prompt.value))
}

/// Whether nothing but numbers and lists of them stands there.
fn is_ids(value: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_digit() || b"[], \t\r\n".contains(&byte);
    value.bytes().all(is_part)
}

/// One token per four bytes of text: what the picker of the Gateway API inference extension assumes too.
fn estimate_tokens(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(4).max(1)
}

fn check_stream(object: &Object<'_>) -> Result<(), Refusal> {
    match object.get("stream").map(|member| member.value) {
        None | Some("true" | "false" | "null") => Ok(()),
        Some(_) => Err(Refusal::Field {
            name: "stream",
            problem: "must be true or false",
        }),
    }
}

/// What steers in `nvext` must be found to be heard, or to be taken out.
fn check_nvext(object: &Object<'_>) -> Result<(), Refusal> {
    let repeats = |member: &Member<'_>| {
        Object::parse(member.value.as_bytes(), &direct::STEERING).err()
            == Some(JsonError::TooManyRepeats)
    };
    match object.all("nvext").any(repeats) {
        true => Err(Refusal::Field {
            name: "nvext",
            problem: "repeats a member too often",
        }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
