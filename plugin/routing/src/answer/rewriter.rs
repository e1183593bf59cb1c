//! Owns the edits of an answer on its way to the client: a stream event by event, an unstreamed answer at once.
//!
//! Complete lines are passed on at once. Every byte outside an edit stays as it came.

use super::model_name::with_model_name;
use super::usage::with_cached_tokens;
use super::{MAX_EVENT, PromptLogprobs, line_end};

/// An edit of a JSON document: of an answer, or of the data of one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventEdit {
    /// Sets in `usage` how many prompt tokens came from prefill's cache.
    CachedTokens(u64),
    /// Puts prefill's log-probabilities of the prompt before decode's.
    PromptLogprobs(PromptLogprobs),
    /// Sets `model` to the name that the client used.
    ModelName(String),
}

impl EventEdit {
    /// The edited document; none where the edit does not apply to it.
    pub fn apply(&self, document: &str) -> Option<String> {
        match self {
            Self::CachedTokens(cached) => with_cached_tokens(document, *cached),
            Self::PromptLogprobs(logprobs) => logprobs.before(document),
            Self::ModelName(name) => with_model_name(document, name),
        }
    }
}

/// The document after all of `edits`, in order; none where none applies.
pub fn apply_all(edits: &[EventEdit], document: &str) -> Option<String> {
    let mut edited: Option<String> = None;
    for edit in edits {
        let so_far = edited.as_deref().unwrap_or(document);
        edited = edit.apply(so_far).or(edited);
    }
    edited
}

/// Edits a stream of events, however its bytes are cut.
#[derive(Debug, Default)]
pub struct Rewriter {
    edits: Vec<EventEdit>,
    /// The beginning of a line whose end has not come.
    line: Vec<u8>,
    /// Whether the line is too long to be held back, and passes unchanged.
    passes: bool,
}

impl Rewriter {
    /// A rewriter with one edit.
    pub fn new(edit: EventEdit) -> Self {
        Self {
            edits: vec![edit],
            ..Self::default()
        }
    }

    /// Adds an edit, in place of an edit of the same kind: after a retry another prefill's value counts.
    pub fn add(&mut self, edit: EventEdit) {
        let kind = std::mem::discriminant(&edit);
        self.edits
            .retain(|known| std::mem::discriminant(known) != kind);
        self.edits.push(edit);
    }

    /// An unstreamed answer, edited; none where no edit applies.
    pub fn of_document(&self, document: &str) -> Option<String> {
        apply_all(&self.edits, document)
    }

    /// Reads the next bytes and returns what goes to the client now: all but an unfinished line.
    pub fn read(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.line.len().saturating_add(bytes.len()));
        while let Some(end) = line_end(bytes) {
            let Some((head, rest)) = bytes.split_at_checked(end.saturating_add(1)) else {
                break;
            };
            self.keep(head, &mut out);
            self.end_line(&mut out);
            bytes = rest;
        }
        self.keep(bytes, &mut out);
        out
    }

    /// Ends the stream and returns what was held back.
    pub fn finish(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        self.end_line(&mut out);
        out
    }

    fn keep(&mut self, part: &[u8], out: &mut Vec<u8>) {
        if !self.passes && self.line.len().saturating_add(part.len()) > MAX_EVENT {
            self.passes = true;
            out.append(&mut self.line);
        }
        match self.passes {
            true => out.extend_from_slice(part),
            false => self.line.extend_from_slice(part),
        }
    }

    fn end_line(&mut self, out: &mut Vec<u8>) {
        self.passes = false;
        match edited(&self.line, &self.edits) {
            Some(line) => out.extend_from_slice(line.as_bytes()),
            None => out.extend_from_slice(&self.line),
        }
        self.line.clear();
    }
}

/// A line with its data edited; everything around the data stays, the line end included.
fn edited(line: &[u8], edits: &[EventEdit]) -> Option<String> {
    const FIELD: &str = "data:";
    let line = std::str::from_utf8(line).ok()?;
    let data = line.strip_prefix(FIELD)?.trim_ascii();
    let edited = apply_all(edits, data)?;
    let rest = line.strip_prefix(FIELD)?;
    let before = rest.len().saturating_sub(rest.trim_ascii_start().len());
    let after = rest.trim_ascii_end().len();
    Some(format!(
        "{FIELD}{}{edited}{}",
        rest.get(..before)?,
        rest.get(after..)?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &str = concat!(
        ": a comment\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"\\u00e9\u{e9}\"}}],\"usage\":null}\r\n\r\n",
        "event: x\ndata:{\"choices\":[],\"usage\":{\"prompt_tokens\":9}} \n\n",
        "data: [DONE]\n\n",
        "data: {\"usage\":{}}",
    );

    /// The stream with the cached tokens.
    fn edited_stream() -> String {
        let details = "{\"prompt_tokens_details\":{\"cached_tokens\":7}";
        STREAM
            .replace(
                "{\"prompt_tokens\":9}",
                &format!("{details},\"prompt_tokens\":9}}"),
            )
            .replace("{\"usage\":{}}", &format!("{{\"usage\":{details}}}}}"))
    }

    fn rewritten(edit: EventEdit, parts: &[&[u8]]) -> Vec<u8> {
        let mut rewriter = Rewriter::new(edit);
        let mut out: Vec<u8> = parts.iter().flat_map(|part| rewriter.read(part)).collect();
        out.extend(rewriter.finish());
        assert!(rewriter.finish().is_empty());
        out
    }

    fn cut(bytes: &[u8], mut cuts: Vec<usize>) -> Vec<&[u8]> {
        cuts.retain(|cut| *cut <= bytes.len());
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        cuts.windows(2)
            .map(|pair| &bytes[pair[0]..pair[1]])
            .collect()
    }

    /// Prefill's log-probabilities for the third answer of a batch, which the streams here do not have.
    fn of_nobody() -> EventEdit {
        let prefill = br#"[{},{},{"meta_info":{"input_token_logprobs":[1]}}]"#;
        EventEdit::PromptLogprobs(PromptLogprobs::read(prefill).unwrap())
    }

    #[test]
    fn whole_lines_go_on_at_once() {
        let mut rewriter = Rewriter::new(EventEdit::CachedTokens(7));
        assert_eq!(
            rewriter.read(b"data: {\"choices\":[]}\n\ndata: {\"usa"),
            b"data: {\"choices\":[]}\n\n"
        );
        assert_eq!(rewriter.read(b"ge\":null}"), b"");
        assert_eq!(rewriter.read(b"\r"), b"data: {\"usage\":null}\r");
        assert_eq!(rewriter.read(b"\n"), b"\n");
        assert_eq!(rewriter.finish(), b"");
    }

    #[test]
    fn prefills_log_probabilities_come_into_each_event_of_its_answer() {
        let prefill = br#"{"meta_info":{"input_token_logprobs":[1,2]}}"#;
        let edit = EventEdit::PromptLogprobs(PromptLogprobs::read(prefill).unwrap());
        let stream = "data: {\"text\":\"a\",\"meta_info\":{\"input_token_logprobs\":[]}}\n\ndata: {\"text\":\"ab\",\"meta_info\":{\"input_token_logprobs\":[]}}\n\ndata: [DONE]\n\n";
        let out = rewritten(edit, &[stream.as_bytes()]);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            stream.replace("[]", "[1,2]")
        );
    }

    #[test]
    fn a_line_that_is_too_long_passes_and_the_next_one_is_edited() {
        let mut rewriter = Rewriter::new(EventEdit::CachedTokens(7));
        let long = format!(
            "data: {{\"x\":\"{}\",\"usage\":{{}}}}",
            "x".repeat(3 * MAX_EVENT)
        );
        let mut out = Vec::new();
        for part in long.as_bytes().chunks(4096) {
            out.extend(rewriter.read(part));
            assert!(rewriter.line.len() <= MAX_EVENT);
        }
        assert_eq!(out, long.as_bytes());
        assert_eq!(rewriter.read(b"\n"), b"\n");
        let next = rewriter.read(b"data: {\"usage\":{}}\n");
        assert!(
            String::from_utf8(next)
                .unwrap()
                .contains("\"cached_tokens\":7")
        );
    }

    #[test]
    fn an_answer_in_one_piece_is_edited_too() {
        let edit = EventEdit::CachedTokens(7);
        assert!(edit.apply("{\"usage\":{\"prompt_tokens\":9}}").is_some());
        assert_eq!(edit.apply("{}"), None);
    }

    #[test]
    fn a_later_edit_of_a_kind_takes_the_place_of_the_first() {
        let mut rewriter = Rewriter::new(EventEdit::CachedTokens(7));
        rewriter.add(EventEdit::CachedTokens(9));
        assert_eq!(rewriter.edits, [EventEdit::CachedTokens(9)]);
    }

    #[test]
    fn several_edits_are_all_made_wherever_the_stream_is_cut() {
        let stream = "data: {\"id\":\"model\",\"model\":\"engine\",\"choices\":[{\"delta\":{\"content\":\"\\\"model\\\":\\\"engine\\\"\"}}],\"usage\":{}}\n\ndata: [DONE]\n\n";
        let wanted = stream
            .replace(
                "\"model\":\"engine\",",
                "\"model\":\"client's \\\"own\\\"\",",
            )
            .replace(
                "\"usage\":{}",
                "\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":7}}",
            );
        for at in 0..=stream.len() {
            let mut rewriter = Rewriter::new(EventEdit::CachedTokens(7));
            rewriter.add(EventEdit::ModelName("client's \"own\"".to_owned()));
            let (one, two) = stream.as_bytes().split_at(at);
            let mut out = rewriter.read(one);
            out.extend(rewriter.read(two));
            out.extend(rewriter.finish());
            assert_eq!(String::from_utf8(out).unwrap(), wanted, "cut at {at}");
        }
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_the_bytes_are_cut(cuts in prop::collection::vec(0..=STREAM.len(), 0..20)) {
            let out = rewritten(EventEdit::CachedTokens(7), &cut(STREAM.as_bytes(), cuts));
            prop_assert_eq!(String::from_utf8(out).unwrap(), edited_stream());
        }

        #[test]
        fn an_edit_that_applies_to_nothing_changes_nothing(
            lines in prop::collection::vec(prop::sample::select(&[
                "data: {\"text\":\"a\",\"meta_info\":{},\"index\":1}\n", "data: [DONE]\r\n", "\n", "data:", "\r", "{}", "\u{e9}",
            ][..]), 0..30),
            noise in prop::collection::vec(any::<u8>(), 0..200),
            cuts in prop::collection::vec(0..2000_usize, 0..20),
        ) {
            let mut bytes = lines.concat().into_bytes();
            bytes.extend(noise);
            prop_assert_eq!(rewritten(of_nobody(), &cut(&bytes, cuts)), bytes);
        }

        #[test]
        fn any_bytes_pass(bytes in prop::collection::vec(any::<u8>(), 0..2000), cuts in prop::collection::vec(0..2000_usize, 0..20)) {
            let at_once = rewritten(EventEdit::CachedTokens(7), &[&bytes]);
            prop_assert_eq!(rewritten(EventEdit::CachedTokens(7), &cut(&bytes, cuts)), at_once);
        }
    }
}
