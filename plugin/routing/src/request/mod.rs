//! Owns a request as routing sees it: where it is sent, what model it asks for, how long its prompt and answer may be.

pub mod prompt;
pub mod steering;

pub use steering::{Pin, Steering};

use std::borrow::Cow;

use percent_encoding::percent_decode;

use crate::handoff::terminal::Form;
use crate::handoff::{direct, sglang};
use crate::json::{JsonError, Member, Object};
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

/// The kinds of request that generate text, and so have a prefill and a decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// Another engine's or vendor's path, which may generate text: it can only be run whole.
    Other,
}

/// What must be known of a request before its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It generates text: its body is read, its two workers are picked.
    Generation(Generation),
    /// Anything else: models, tokenisation, metrics. One worker answers, the body is not looked at.
    Plain,
}

impl Head<'_> {
    /// What kind of request this is. Paths are compared by their end, so that prefixes such as `/openai` do not hide
    /// them, without their query, and decoded, as the engines' servers do before they look at them.
    ///
    /// Whatever is sent to a path that is not known may generate text: it counts as a generation that can only be run whole,
    /// so that no decode worker gets it without a hand-off.
    pub fn kind(&self) -> Kind {
        if matches!(self.method, b"GET" | b"HEAD" | b"OPTIONS") {
            return Kind::Plain;
        }
        let path = self
            .path
            .split(|byte| *byte == b'?')
            .next()
            .unwrap_or_default();
        let path: Cow<'_, [u8]> = percent_decode(path).into();
        let path = path.strip_suffix(b"/").unwrap_or(&path);
        let known = [
            (
                &b"/chat/completions"[..],
                Kind::Generation(Generation::Chat),
            ),
            (b"/completions", Kind::Generation(Generation::Completions)),
            (b"/v1/responses", Kind::Generation(Generation::Responses)),
            (b"/tokenize", Kind::Plain),
            (b"/detokenize", Kind::Plain),
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
    /// The field that holds the prompt.
    fn prompt_field(self) -> &'static str {
        match self {
            Self::Chat | Self::Other => "messages",
            Self::Completions => "prompt",
            Self::Responses => "input",
        }
    }
}

/// Top-level members that routing or a hand-off reads or edits.
pub const MEMBERS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "input",
    "instructions",
    "tools",
    "functions",
    "cache_salt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "rid",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "nvext",
];

/// A request whose body has been read.
#[derive(Debug)]
pub struct Request<'a> {
    /// Which interface it uses.
    pub generation: Generation,
    /// The model asked for.
    pub model: String,
    /// An estimate of the prompt's length: one token per four bytes, or the number of token ids.
    pub prompt_tokens: u64,
    /// The members that a hand-off may edit.
    pub body: Object<'a>,
}

impl<'a> Request<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// [`Refusal`] names the field that is missing or of the wrong type.
    pub fn parse(generation: Generation, body: &'a [u8]) -> Result<Self, Refusal> {
        let object = Object::parse(body, MEMBERS)?;
        let model = match generation {
            // Not every interface names its model: such a request goes by load alone.
            Generation::Other if object.get("model").is_none() => {
                return Err(Refusal::NoHandoffForPath);
            }
            _ => text_field(&object, "model")?,
        };
        let prompt_tokens = match generation {
            Generation::Other => estimate_tokens(body.len()),
            _ => prompt_tokens(&object, generation.prompt_field())?,
        };
        check_stream(&object)?;
        check_handoff_is_ours(&object)?;
        check_nvext(&object)?;
        Ok(Self {
            generation,
            model,
            prompt_tokens,
            body: object,
        })
    }
}

impl Request<'_> {
    /// How the client wants its answer.
    pub fn form(&self) -> Form {
        match self.body.get("stream").map(|member| member.value) {
            Some("true") => Form::Stream {
                usage: self.wants_usage(),
            },
            _ => Form::Whole,
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

    /// The most tokens that the answer may have, where the client says so.
    pub fn max_tokens(&self) -> Option<u64> {
        let names = ["max_completion_tokens", "max_output_tokens", "max_tokens"];
        names
            .iter()
            .find_map(|name| self.body.get(name)?.value.parse().ok())
    }

    /// The prompt as token ids, where the client sent it so.
    pub fn prompt_ids(&self) -> Option<Vec<u32>> {
        serde_json::from_str(self.body.get("prompt")?.value).ok()
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
        Err(_) => Err(Refusal::Field {
            name,
            problem: "must be a string",
        }),
    }
}

fn prompt_tokens(object: &Object<'_>, name: &'static str) -> Result<u64, Refusal> {
    let missing = Refusal::Field {
        name,
        problem: "is missing; the prompt is required",
    };
    let value = object.get(name).ok_or(missing)?.value;
    match value.as_bytes().first() {
        Some(b'[') if name == "messages" => Ok(estimate_tokens(value.len())),
        Some(b'[' | b'"') if name != "messages" => Ok(count_prompt(value)),
        _ if name == "messages" => Err(Refusal::Field {
            name,
            problem: "must be a list of messages",
        }),
        _ => Err(Refusal::Field {
            name,
            problem: "must be a string or a list",
        }),
    }
}

/// Token ids are counted, text is estimated.
fn count_prompt(value: &str) -> u64 {
    let is_ids = |byte: u8| byte.is_ascii_digit() || b"[], \t\r\n".contains(&byte);
    match value.bytes().all(is_ids) {
        true => value.bytes().filter(|byte| *byte == b',').count() as u64 + 1,
        false => estimate_tokens(value.len()),
    }
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

/// A hand-off is the router's to set: a client that could set it could read another's KV cache. Null and `{}` say nothing.
fn check_handoff_is_ours(object: &Object<'_>) -> Result<(), Refusal> {
    let says_nothing = |value: &str| {
        let bare: String = value.chars().filter(|c| !c.is_ascii_whitespace()).collect();
        bare == "null" || bare == "{}"
    };
    let mut fields = std::iter::once("kv_transfer_params").chain(sglang::FIELDS);
    match fields.find(|name| !object.all(name).all(|member| says_nothing(member.value))) {
        None => Ok(()),
        Some(name) => Err(Refusal::Field {
            name,
            problem: "is set by the router; a request must not carry it",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(method: &str, path: &str) -> Kind {
        Head {
            method: method.as_bytes(),
            path: path.as_bytes(),
            encoding: None,
        }
        .kind()
    }

    #[test]
    fn only_posts_to_generation_paths_have_two_legs() {
        for (path, generation) in [
            ("/v1/chat/completions", Generation::Chat),
            ("/v1/chat/completions?x=1", Generation::Chat),
            ("/openai/v1/chat/completions/", Generation::Chat),
            ("/v1/completions", Generation::Completions),
            ("/v1/responses", Generation::Responses),
            ("/generate", Generation::Other),
            ("/v1/chat%2Fcompletions", Generation::Chat),
            ("/v1/%63hat/completion%73", Generation::Chat),
            ("/v1/chat/completions/batch", Generation::Other),
            ("/invocations", Generation::Other),
            ("/v1/embeddings", Generation::Other),
            ("/flush_cache", Generation::Other),
            ("/", Generation::Other),
            ("", Generation::Other),
            ("/x?y=/v1/completions", Generation::Other),
        ] {
            assert_eq!(kind("POST", path), Kind::Generation(generation), "{path}");
            assert_eq!(kind("GET", path), Kind::Plain, "{path}");
        }
        for path in ["/tokenize", "/v1/detokenize", "/v1/chat/completions/render"] {
            assert_eq!(kind("POST", path), Kind::Plain, "{path}");
        }
    }

    fn refused(generation: Generation, body: &str) -> Refusal {
        Request::parse(generation, body.as_bytes())
            .map(|_| ())
            .unwrap_err()
    }

    #[test]
    fn a_wrong_field_is_named() {
        for (generation, body, name) in [
            (Generation::Chat, "{}", "model"),
            (Generation::Chat, r#"{"model":1,"messages":[]}"#, "model"),
            (Generation::Chat, r#"{"model":"","messages":[]}"#, "model"),
            (Generation::Chat, r#"{"model":"m"}"#, "messages"),
            (
                Generation::Chat,
                r#"{"model":"m","messages":"hi"}"#,
                "messages",
            ),
            (
                Generation::Completions,
                r#"{"model":"m","messages":[]}"#,
                "prompt",
            ),
            (
                Generation::Completions,
                r#"{"model":"m","prompt":3}"#,
                "prompt",
            ),
            (Generation::Responses, r#"{"model":"m"}"#, "input"),
            (
                Generation::Chat,
                r#"{"model":"m","messages":[],"stream":"yes"}"#,
                "stream",
            ),
            (Generation::Chat, "[]", "body"),
            (
                Generation::Chat,
                r#"{"model":"m","messages":[],"kv_transfer_params":{"do_remote_prefill":true}}"#,
                "kv_transfer_params",
            ),
        ] {
            let refusal = refused(generation, body);
            assert!(
                matches!(refusal, Refusal::Field { name: named, .. } if named == name),
                "{body}: {refusal}"
            );
        }
        assert!(matches!(
            refused(Generation::Chat, "{,}"),
            Refusal::NotJson { .. }
        ));
    }

    #[test]
    fn prompts_of_all_shapes_are_measured() {
        let tokens = |prompt: &str| {
            let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            Request::parse(Generation::Completions, body.as_bytes())
                .unwrap()
                .prompt_tokens
        };
        assert_eq!(tokens("\"\""), 1);
        assert_eq!(tokens("[1, 2, 3]"), 3);
        assert_eq!(tokens("[[1,2],[3]]"), 3);
        assert_eq!(tokens(r#"["some text","more"]"#), 5);
        assert_eq!(tokens(&format!("\"{}\"", "x".repeat(398))), 100);
    }

    #[test]
    fn a_handoff_that_says_nothing_is_tolerated() {
        for nothing in ["null", "{}", "{ }"] {
            let body = format!(r#"{{"model":"m","messages":[],"kv_transfer_params":{nothing}}}"#);
            assert!(
                Request::parse(Generation::Chat, body.as_bytes()).is_ok(),
                "{nothing}"
            );
        }
    }
}
