//! Owns how far an answer has come: nothing yet, content, ended, empty or failed. The one reader of answers, for both legs,
//! every interface and every form.
//!
//! A stream of server-sent events is read line by line, however the bytes are cut and whether lines end with LF, CR or
//! both. An event that carries text, reasoning, ids or a tool call is content; an event with only a role is not. An
//! unstreamed answer is read when all of it is there. Bytes that cannot be read (compressed, of an unknown form) or not
//! understood are content: no worker is blamed for them, and no client waits for their end.

mod event;
mod model_name;
mod prompt_logprobs;
mod rewriter;
pub mod usage;
mod value;
mod verdict;

#[cfg(test)]
mod tests;

pub use prompt_logprobs::PromptLogprobs;
pub use rewriter::{EventEdit, Rewriter};
pub use verdict::{End, Verdict, Why};

use crate::headers::begins;
use event::{DocumentFacts, is_clean_end};
use verdict::{DocumentTotals, Progress};

/// Longest line, in bytes, that is read; a longer one counts as one token. Far beyond any chunk of text.
const MAX_EVENT: usize = 64 * 1024;

/// Bytes of an unstreamed answer that are kept until its end: a longer answer is content, whatever it says.
pub const MAX_DOCUMENT: usize = 64 * 1024;

/// How an answer comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As server-sent events.
    Events,
    /// Unstreamed, in one piece.
    Whole,
}

impl Form {
    /// The form that a `content-type` names.
    pub fn of(content_type: &[u8]) -> Self {
        match begins(content_type, "text/event-stream") {
            true => Self::Events,
            false => Self::Whole,
        }
    }
}

/// Position of the first line end: LF, CR, or the first of both.
fn line_end(bytes: &[u8]) -> Option<usize> {
    memchr::memchr2(b'\n', b'\r', bytes)
}

/// Reads an answer while it passes.
#[derive(Debug)]
pub struct Reader {
    sight: Sight,
    said: DocumentTotals,
    progress: Progress,
    /// Whether a byte has come.
    has_come: bool,
}

/// How much of an answer can be read.
#[derive(Debug)]
enum Sight {
    Events(Lines),
    /// One JSON document.
    Document(Document),
    /// Only whether bytes come.
    Nothing,
}

impl Reader {
    /// A reader for an answer with these headers.
    pub fn new(content_type: &[u8], encoding: Option<&[u8]>) -> Self {
        let is_plain = |encoding: &[u8]| matches!(encoding, b"" | b"identity");
        if encoding.is_some_and(|encoding| !is_plain(encoding)) {
            return Self::with(Sight::Nothing);
        }
        match Form::of(content_type) {
            Form::Events => Self::of_events(),
            Form::Whole if begins(content_type, "application/json") => {
                Self::with(Sight::Document(Document::default()))
            }
            Form::Whole => Self::with(Sight::Nothing),
        }
    }

    /// A reader for a stream of events.
    pub fn of_events() -> Self {
        Self::with(Sight::Events(Lines::default()))
    }

    fn with(sight: Sight) -> Self {
        Self {
            sight,
            said: DocumentTotals::default(),
            progress: Progress::Open,
            has_come: false,
        }
    }

    /// Reads the next bytes.
    pub fn read(&mut self, bytes: &[u8]) {
        self.has_come |= !bytes.is_empty();
        match &mut self.sight {
            Sight::Events(lines) => lines.read(bytes, &mut self.said),
            Sight::Document(document) => document.keep(bytes),
            Sight::Nothing => {}
        }
    }

    /// Ends the answer, with its body or with the trailers after it: a last line without a line end is read too.
    pub fn finish(&mut self) {
        if self.progress == Progress::Over {
            return;
        }
        self.progress = Progress::Over;
        match &mut self.sight {
            Sight::Events(lines) => lines.finish(&mut self.said),
            Sight::Document(document) => document.finish(&mut self.said),
            Sight::Nothing => {}
        }
    }

    /// The answer's verdict so far.
    pub fn verdict(&self) -> Verdict {
        match (&self.sight, self.progress) {
            (Sight::Events(_), progress) => self.said.verdict(progress),
            (Sight::Document(document), _) => document.verdict,
            (Sight::Nothing, _) if self.has_come => Verdict::Content,
            (Sight::Nothing, Progress::Over) => Verdict::Empty,
            (Sight::Nothing, Progress::Open) => Verdict::Nothing,
        }
    }

    /// Whether the first token has come; for an answer that is not read token by token, the first byte.
    pub fn has_begun(&self) -> bool {
        match self.sight {
            Sight::Events(_) => self.said.has_content(),
            Sight::Document(_) | Sight::Nothing => self.has_come,
        }
    }

    /// Tokens so far: the count in `usage`, else the events that carried any.
    pub fn tokens(&self) -> u64 {
        match self.sight {
            Sight::Events(_) => self.said.tokens(),
            Sight::Document(_) | Sight::Nothing => self.said.reported_tokens(),
        }
    }

    /// Whether the event after which nothing comes is there.
    pub fn is_over(&self) -> bool {
        self.progress == Progress::Over || self.said.is_last()
    }

    /// Whether a client may take what has come for a good end: a reason for the end is given, an event that ends the answer
    /// has begun, or a line has begun, which may be any.
    pub fn may_have_ended(&self) -> bool {
        match &self.sight {
            Sight::Events(lines) => {
                self.said.tells_end() || is_clean_end(&lines.name) || self.is_amid_line()
            }
            Sight::Document(_) | Sight::Nothing => self.has_come,
        }
    }

    /// Whether the last line has begun and not ended. A line that is too long to be read does not count.
    pub fn is_amid_line(&self) -> bool {
        match &self.sight {
            Sight::Events(lines) => !lines.line.is_empty(),
            Sight::Document(_) | Sight::Nothing => false,
        }
    }
}

/// The lines of a stream of events.
#[derive(Debug, Default)]
struct Lines {
    /// The beginning of a line whose end has not come.
    line: Vec<u8>,
    /// The field of a line that is too long to be kept.
    long: Option<Field>,
    /// Whether the last line ended with CR: an LF right after it ends no further line.
    after_cr: bool,
    /// The name of the current event.
    name: String,
    /// Data of the current event that can be read only together with its other lines, if at all.
    data: Vec<u8>,
}

/// Kinds of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    /// Ends an event.
    Blank,
    /// Part of an event's data.
    Data,
    /// An event's name.
    Name,
    /// Carries nothing of the answer: a comment, an id, a delay.
    Silent,
    /// No line of a stream of events.
    Unknown,
}

impl Field {
    /// The field of a line, and its value.
    fn of(line: &[u8]) -> (Self, &[u8]) {
        if line.is_empty() {
            return (Self::Blank, line);
        }
        let colon = memchr::memchr(b':', line).unwrap_or(line.len());
        let (field, rest) = line.split_at(colon);
        let value = rest.get(1..).unwrap_or_default();
        let field = match field {
            b"data" => Self::Data,
            b"event" => Self::Name,
            b"" | b"id" | b"retry" => Self::Silent,
            _ => Self::Unknown,
        };
        (field, value)
    }
}

impl Lines {
    fn read(&mut self, mut bytes: &[u8], said: &mut DocumentTotals) {
        if self.after_cr && !bytes.is_empty() {
            self.after_cr = false;
            bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
        }
        while let Some(end) = line_end(bytes) {
            let (head, rest) = bytes.split_at(end);
            self.end_line(head, said);
            bytes = match rest {
                [b'\r', b'\n', rest @ ..] | [_, rest @ ..] => rest,
                [] => rest,
            };
            self.after_cr = rest == b"\r";
        }
        self.keep(bytes);
    }

    fn keep(&mut self, part: &[u8]) {
        if self.long.is_none() && self.line.len().saturating_add(part.len()) > MAX_EVENT {
            self.line
                .extend_from_slice(part.get(..MAX_EVENT).unwrap_or(part));
            self.long = Some(Field::of(&self.line).0);
            self.line.clear();
        }
        if self.long.is_none() {
            self.line.extend_from_slice(part);
        }
    }

    fn end_line(&mut self, head: &[u8], said: &mut DocumentTotals) {
        // Most lines come in one piece and are read in place.
        if self.line.is_empty() && self.long.is_none() && head.len() <= MAX_EVENT {
            return self.take(head, said);
        }
        self.keep(head);
        let mut line = std::mem::take(&mut self.line);
        match self.long.take() {
            Some(field) => self.take_long(field, said),
            None => self.take(&line, said),
        }
        line.clear();
        self.line = line;
    }

    fn take_long(&self, field: Field, said: &mut DocumentTotals) {
        match field {
            Field::Data | Field::Unknown => said.take(&DocumentFacts::too_long(&self.name)),
            Field::Blank | Field::Name | Field::Silent => {}
        }
    }

    fn take(&mut self, line: &[u8], said: &mut DocumentTotals) {
        let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        match Field::of(line) {
            (Field::Blank, _) => self.end_event(said),
            (Field::Data, value) => self.take_data(value.trim_ascii(), said),
            (Field::Name, value) => self.take_name(value.trim_ascii(), said),
            (Field::Silent, _) => {}
            (Field::Unknown, _) => said.take(&DocumentFacts::unknown()),
        }
    }

    fn take_name(&mut self, name: &[u8], said: &mut DocumentTotals) {
        self.name = String::from_utf8_lossy(name).into_owned();
        // Dynamo sends the text of an error as a comment, without data.
        if name == b"error" {
            said.take(&DocumentFacts::failure());
        }
    }

    /// Data that is not readable by itself waits for the event's other lines.
    fn take_data(&mut self, data: &[u8], said: &mut DocumentTotals) {
        if data == b"[DONE]" {
            return said.take_done();
        }
        if data.is_empty() {
            return;
        }
        if self.data.is_empty()
            && let Some(facts) = DocumentFacts::of(data, &self.name)
        {
            return said.take(&facts);
        }
        if self.data.len().saturating_add(data.len()) > MAX_EVENT {
            self.data.clear();
            return said.take(&DocumentFacts::too_long(&self.name));
        }
        self.data.extend_from_slice(data);
        self.data.push(b'\n');
    }

    fn end_event(&mut self, said: &mut DocumentTotals) {
        if !self.data.is_empty() {
            said.take(&DocumentFacts::read(&self.data, &self.name));
            self.data.clear();
        }
        self.name.clear();
    }

    fn finish(&mut self, said: &mut DocumentTotals) {
        if !self.line.is_empty() || self.long.is_some() {
            self.end_line(b"", said);
        }
        self.end_event(said);
    }
}

/// An unstreamed answer.
#[derive(Debug)]
struct Document {
    /// All bytes; the last ones where the answer is long.
    kept: Vec<u8>,
    verdict: Verdict,
}

impl Default for Document {
    fn default() -> Self {
        Self {
            kept: Vec::new(),
            verdict: Verdict::Nothing,
        }
    }
}

impl Document {
    fn keep(&mut self, bytes: &[u8]) {
        let tail = bytes.len().saturating_sub(MAX_DOCUMENT);
        let length = self.kept.len().saturating_add(bytes.len());
        if length > MAX_DOCUMENT {
            self.verdict = Verdict::Content;
        }
        self.kept
            .extend_from_slice(bytes.get(tail..).unwrap_or_default());
        if self.kept.len() > 2 * MAX_DOCUMENT {
            let gone = self.kept.len().saturating_sub(MAX_DOCUMENT);
            self.kept.drain(..gone);
        }
    }

    fn finish(&mut self, said: &mut DocumentTotals) {
        match self.verdict {
            Verdict::Nothing => self.verdict = said.take_document(&self.kept),
            _ => said.take_tail(&self.kept),
        }
        self.kept = Vec::new();
    }
}
