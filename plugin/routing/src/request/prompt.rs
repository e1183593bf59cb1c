//! Owns a request's prompt: the sequence hashes of its blocks and its length, read from JSON in all its shapes.
//!
//! A prompt in text becomes one canonical stream of bytes, cut into blocks. As in the engine's cache, the stream of a
//! conversation is the beginning of the stream of every longer one: a message is written independently of what follows.
//! Everything that a chat template may render counts (roles, names, tools, documents, calls and their results, images), and
//! so do settings of the rendering itself (another template, its arguments). Mere spelling does not count (escapes, white
//! space, the order of a message's members, a content of one text part or of a string). An unknown shape is taken as
//! written. Nothing is refused here.

mod canonical;
mod ids;
mod rendering;

use std::borrow::Cow;

use xxhash_rust::xxh3::Xxh3Default;

use self::canonical::{CanonicalMember, Mark, Shape, Sink, elements, find, members, plain, shape};
use self::ids::TokenIds;
use super::{Generation, Request, embeds};
use crate::json::{Object, is_empty_list};
use crate::prefix::hash::{self, HashScope, Salt, Text};
use crate::prefix::{Blocks, RunLength};

/// Tokens counted per image, sound or film, since the size is unknown: the 24 × 24 patches of a picture of 336 pixels a
/// side in LLaVA. Models that keep the picture's own resolution take from some hundred to some thousand.
pub const MEDIA_TOKENS: u64 = 576;

/// Bytes per medium in the stream, so that blocks and tokens agree: its mark, its hash, and padding.
const MEDIA_BYTES: usize = MEDIA_TOKENS as usize * 4;

/// Media of one prompt that count [`MEDIA_TOKENS`] each; more than any engine takes. Further ones are still distinguished
/// but add almost nothing: a small body must not stand for millions of tokens.
const MOST_MEDIA: u32 = 128;
const MEDIA_REST: [u8; MEDIA_BYTES - 9] = [0; MEDIA_BYTES - 9];

/// The members of a message in the order of writing; others follow by key, so that differences that are not rendered affect
/// as few blocks as possible.
const MESSAGE: [&str; 6] = [
    "role",
    "name",
    "reasoning_content",
    "content",
    "tool_calls",
    "function_call",
];

/// The members of a call.
const CALL: [&str; 3] = ["function", "name", "arguments"];

/// Members of a call that are not part of the prompt. Some templates render the id, but equal conversations have equal ids:
/// a client sends back the ids that it was given.
const CALL_OMITS: [&str; 3] = ["id", "type", "index"];

/// Parts of a content that are text.
const TEXT_PARTS: [&str; 3] = ["text", "input_text", "output_text"];

/// Parts of a content that are images, sound or video.
const MEDIA_PARTS: [&str; 11] = [
    "image_url",
    "input_image",
    "image",
    "audio_url",
    "input_audio",
    "audio",
    "video_url",
    "input_video",
    "video",
    "input_file",
    "file",
];

/// Members of SGLang's `/generate` with media; the text holds their positions.
const MEDIA_DATA: [&str; 3] = ["image_data", "video_data", "audio_data"];

/// What identifies a prompt besides the request's own body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity<'a> {
    /// The requested model.
    pub model: &'a str,
    /// The LoRA adapter.
    pub adapter: Option<&'a str>,
    /// The cache salt given outside the body; one in the body wins.
    pub cache_salt: Option<&'a [u8]>,
    /// The prompt as token ids, given by a trusted caller in place of the body's prompt.
    pub token_data: Option<&'a [u32]>,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// How many blocks each sequence hash stands for.
    pub run_length: RunLength,
}

/// A prompt as seen by the selection of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prompt {
    /// The full blocks.
    pub blocks: Blocks,
    /// The length: the number of ids; for text an estimate of four bytes a token and [`MEDIA_TOKENS`] a medium; at least 1.
    pub tokens: u64,
}

impl Prompt {
    /// A prompt of which only the estimated length is known.
    pub fn unread(request: &Request<'_>) -> Self {
        Self {
            blocks: Blocks::default(),
            tokens: request.prompt_tokens,
        }
    }
}

/// Reads the prompt of a request. Never fails: what is not understood is taken as written.
pub fn read(request: &Request<'_>, identity: &Identity<'_>) -> Prompt {
    let cache_salt = cache_salt(request, identity);
    let identity = Identity {
        cache_salt: cache_salt.as_deref(),
        ..*identity
    };
    if let Some(ids) = identity.token_data
        && !ids.is_empty()
    {
        return identity.by_ids(&TokenIds::given(ids));
    }
    let member = |name| request.body.get(name).map(|member| member.value);
    let prompt = request.prompt().unwrap_or("null");
    let mut stream = Stream(Text::new(identity.block_tokens, identity.run_length), 0);
    match request.generation {
        // Embeddings are not read.
        Generation::Completions if embeds::sequences(&request.body).is_some() => {
            return Prompt::unread(request);
        }
        Generation::Other => return Prompt::unread(request),
        Generation::Completions => match TokenIds::read(prompt) {
            Some(ids) => return identity.by_ids(&ids),
            None => stream.prompts(prompt),
        },
        Generation::Generate => match TokenIds::read(prompt) {
            Some(ids) => return identity.by_ids(&ids),
            None => {
                MEDIA_DATA
                    .iter()
                    .filter_map(|name| request.body.get(name))
                    .for_each(|data| stream.media(&data.key, data.value));
                stream.prompts(prompt);
            }
        },
        Generation::Chat => {
            stream.leading("tools", member("tools"));
            stream.leading("functions", member("functions"));
            stream.leading("documents", member("documents"));
            stream.messages(member("messages").unwrap_or("null"));
        }
        Generation::Responses => {
            stream.leading("tools", member("tools"));
            stream.instructions(member("instructions").unwrap_or("null"));
            stream.input(member("input").unwrap_or("null"));
        }
    }
    identity.by_text(stream.0, rendering::of(request))
}

impl Identity<'_> {
    fn by_ids(&self, ids: &TokenIds) -> Prompt {
        let salt = Salt::new(self.adapter, self.cache_salt);
        let scope = hash::scope(self.model, HashScope::ByIds);
        let hashes = hash::ids(ids.bytes(), self.block_tokens, salt);
        Prompt {
            blocks: Blocks::of_hashes(scope, hashes, self.run_length),
            tokens: ids.count().max(1),
        }
    }

    fn by_text(&self, text: Text, rendering: Option<u64>) -> Prompt {
        let known = HashScope::ByText {
            adapter: self.adapter,
            cache_salt: self.cache_salt,
            rendering,
        };
        let tokens = text.tokens();
        Prompt {
            blocks: Blocks {
                scope: hash::scope(self.model, known),
                sequence: text.finish(),
                run_length: self.run_length,
            },
            tokens,
        }
    }
}

/// vLLM's member, else Dynamo's, else the salt given outside the body. An empty one counts as none.
fn cache_salt<'a>(request: &Request<'a>, identity: &Identity<'a>) -> Option<Cow<'a, [u8]>> {
    let said = |value: &'a str| match plain(value) {
        text if text.is_empty() || value == "null" => None,
        Cow::Borrowed(text) => Some(Cow::Borrowed(text.as_bytes())),
        Cow::Owned(text) => Some(Cow::Owned(text.into_bytes())),
    };
    let own = request
        .body
        .get("cache_salt")
        .and_then(|own| said(own.value));
    let nvext = || {
        let nvext = request.body.get("nvext")?.value.as_bytes();
        let nvext = Object::parse(nvext, &["cache_salt"]).ok()?;
        said(nvext.get("cache_salt")?.value)
    };
    own.or_else(nvext)
        .or(identity.cache_salt.map(Cow::Borrowed))
}

/// The canonical stream of a prompt in text.
struct Stream(
    Text,
    /// Media so far.
    u32,
);

impl Stream {
    /// Writes one prompt, or a batch of prompts.
    fn prompts(&mut self, prompt: &str) {
        if shape(prompt) != Shape::List {
            return self.text_or_value(prompt);
        }
        let mut first = true;
        elements(prompt, |prompt| {
            if !first {
                self.0.mark(Mark::Prompt);
            }
            first = false;
            self.text_or_value(prompt);
        });
    }

    /// Writes tools and documents, which come first because templates put them into the system prompt.
    fn leading(&mut self, key: &str, value: Option<&str>) {
        let says = |value: &&str| shape(value) != Shape::Null && !is_empty_list(value);
        if let Some(value) = value.filter(says) {
            self.member(key, value);
        }
    }

    fn messages(&mut self, messages: &str) {
        elements(messages, |message| self.message(message));
    }

    /// Writes the system prompt of the Responses interface.
    fn instructions(&mut self, instructions: &str) {
        if shape(instructions) != Shape::Null {
            self.0.mark(Mark::Message);
            self.0.put(b"system");
            self.content(instructions);
        }
    }

    /// Writes the input of the Responses interface: items, or one user message.
    fn input(&mut self, input: &str) {
        if shape(input) == Shape::List {
            return self.messages(input);
        }
        self.0.mark(Mark::Message);
        self.0.put(b"user");
        self.content(input);
    }

    /// Writes a message, or an item of the Responses interface.
    fn message(&mut self, message: &str) {
        self.0.mark(Mark::Message);
        let Some(members) = members(message, &MESSAGE) else {
            return canonical::value(message, &mut self.0);
        };
        for (key, value) in &members {
            match key.as_ref() {
                "role" => self.text_or_value(value),
                "content" => self.content(value),
                "tool_calls" => self.calls(value),
                "function_call" => {
                    self.0.member(key);
                    self.call(value);
                }
                // An item without a type is a message too.
                "type" if *value == "\"message\"" => {}
                _ => self.member(key, value),
            }
        }
    }

    /// Writes a message's content: a string counts as a list of one text. An empty content leaves no trace, like a missing one.
    fn content(&mut self, content: &str) {
        if shape(content) != Shape::List {
            self.part(Mark::Content, content);
            return;
        }
        let mut border = Mark::Content;
        elements(content, |part| {
            if self.part(border, part) == Written::Something {
                border = Mark::Part;
            }
        });
    }

    fn part(&mut self, border: Mark, part: &str) -> Written {
        let members = members(part, &[]);
        let part = Part::of(part, members.as_deref());
        if matches!(part, Part::Text("")) {
            return Written::Nothing;
        }
        self.0.mark(border);
        match part {
            Part::Text(text) => canonical::text(text, &mut self.0),
            Part::Medium(members) => self.medium(members),
            Part::Other(raw) => canonical::value(raw, &mut self.0),
        }
        Written::Something
    }

    /// Writes a medium as its hash, padded to the bytes of its counted tokens, whatever its data.
    fn medium(&mut self, members: &[CanonicalMember<'_>]) {
        self.0.mark(Mark::Media);
        self.0.put(&medium_hash(members).to_le_bytes());
        self.1 = self.1.saturating_add(1);
        if self.1 <= MOST_MEDIA {
            self.0.put(&MEDIA_REST);
        }
    }

    /// Writes media beside the prompt: one, or a list. They come before the text that refers to them.
    fn media(&mut self, key: &str, data: &str) {
        let mut put = |one: &str| self.medium(&[(Cow::Borrowed(key), one)]);
        match shape(data) {
            Shape::Null => {}
            Shape::List => elements(data, put),
            _ => put(data),
        }
    }

    fn calls(&mut self, calls: &str) {
        if is_empty_list(calls) {
            return;
        }
        self.0.member("tool_calls");
        if shape(calls) != Shape::List {
            return canonical::value(calls, &mut self.0);
        }
        elements(calls, |call| {
            self.0.mark(Mark::Part);
            self.call(call);
        });
    }

    /// Writes a call, or the function in it.
    fn call(&mut self, call: &str) {
        let Some(members) = members(call, &CALL) else {
            return canonical::value(call, &mut self.0);
        };
        for (key, value) in &members {
            if CALL_OMITS.contains(&key.as_ref()) {
                continue;
            }
            match key.as_ref() {
                "function" => {
                    self.0.member(key);
                    self.function(value);
                }
                _ => self.member(key, value),
            }
        }
    }

    fn function(&mut self, function: &str) {
        let Some(members) = members(function, &CALL) else {
            return canonical::value(function, &mut self.0);
        };
        for (key, value) in &members {
            self.member(key, value);
        }
    }

    fn member(&mut self, key: &str, value: &str) {
        self.0.member(key);
        canonical::value(value, &mut self.0);
    }

    fn text_or_value(&mut self, value: &str) {
        match shape(value) {
            Shape::String(text) => canonical::text(text, &mut self.0),
            _ => canonical::value(value, &mut self.0),
        }
    }
}

/// Whether a part left a trace in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Written {
    Nothing,
    Something,
}

/// A part of a content.
enum Part<'a, 'm> {
    /// The inside of a string.
    Text(&'a str),
    Medium(&'m [CanonicalMember<'a>]),
    Other(&'a str),
}

impl<'a, 'm> Part<'a, 'm> {
    /// The kind of a part, by its type, or without a type by its member, as in the engines.
    fn of(raw: &'a str, members: Option<&'m [CanonicalMember<'a>]>) -> Self {
        let Some(members) = members else {
            return match shape(raw) {
                Shape::Null => Self::Text(""),
                Shape::String(text) => Self::Text(text),
                _ => Self::Other(raw),
            };
        };
        let is = |kinds: &[&str]| match find(members, "type") {
            Some(kind) => kinds.contains(&plain(kind).as_ref()),
            None => kinds.iter().any(|kind| find(members, kind).is_some()),
        };
        match find(members, "text").map(shape) {
            Some(Shape::String(text)) if is(&TEXT_PARTS) => Self::Text(text),
            _ if is(&MEDIA_PARTS) => Self::Medium(members),
            _ => Self::Other(raw),
        }
    }
}

/// The hash of a medium's part without its type. A URL and an object that holds only a URL have the same hash.
fn medium_hash(part: &[CanonicalMember<'_>]) -> u64 {
    let mut hash = Xxh3Default::new();
    let mut put = |key: &str, value: &str| {
        hash.member(key);
        canonical::value(value, &mut hash);
    };
    for (key, value) in part.iter().filter(|(key, _)| key != "type") {
        let inside = members(value, &["url"]);
        match inside.as_deref() {
            Some([(name, url), others @ ..]) if name == "url" => {
                put(key, url);
                others.iter().for_each(|(name, value)| put(name, value));
            }
            _ => put(key, value),
        }
    }
    hash.digest()
}

#[cfg(test)]
mod tests;
