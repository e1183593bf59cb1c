//! Owns the target of streamed answers: however a stream's bytes are cut, the parsed values and the forwarded bytes are the same.
#![no_main]

use fuzz::Choices;
use libfuzzer_sys::fuzz_target;
use routing::answer::PromptLogprobs;
use routing::answer::{EventEdit, Form, Reader, Rewriter, Verdict};

fn read<'a>(
    form: Form,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> (Verdict, u64, [bool; 2], Verdict) {
    let mut reader = match form {
        Form::Events => Reader::of_events(),
        Form::Whole => Reader::new(b"application/json", None),
    };
    pieces.for_each(|piece| reader.read(piece));
    let so_far = reader.verdict();
    let known = [reader.has_begun(), reader.may_have_ended()];
    reader.finish();
    (so_far, reader.tokens(), known, reader.verdict())
}

fn rewritten<'a>(edit: &EventEdit, pieces: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut rewriter = Rewriter::new(edit.clone());
    let mut out: Vec<u8> = pieces.flat_map(|piece| rewriter.read(piece)).collect();
    out.extend(rewriter.finish());
    out
}

/// The stream in pieces whose lengths are the bytes of `cuts`, repeated; some pieces are empty.
fn cut<'a>(stream: &'a [u8], cuts: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let lengths = cuts.iter().map(|byte| usize::from(*byte % 61));
    let mut lengths = lengths.chain([61]).collect::<Vec<_>>().into_iter().cycle();
    let mut rest = stream;
    std::iter::from_fn(move || {
        let length = lengths.next().filter(|_| !rest.is_empty())?;
        let (piece, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        Some(piece)
    })
}

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let cuts = choices.bytes(6);
    let form = choices.one(&[Form::Events, Form::Whole]);
    let stream = choices.0;
    let whole = || std::iter::once(stream);
    assert_eq!(read(form, whole()), read(form, cut(stream, cuts)));
    let bytewise = stream.chunks(1);
    assert_eq!(read(form, whole()), read(form, bytewise));
    let mut edits = vec![
        EventEdit::CachedTokens(7),
        EventEdit::ModelName("a \"name\"".to_owned()),
    ];
    let prefill = br#"{"meta_info":{"input_token_logprobs":[[-0.5,1,null]]}}"#;
    edits.extend(PromptLogprobs::read(prefill).map(EventEdit::PromptLogprobs));
    for edit in &edits {
        let at_once = rewritten(edit, whole());
        assert_eq!(rewritten(edit, cut(stream, cuts)), at_once);
        assert_eq!(rewritten(edit, stream.chunks(1)), at_once);
        // No line is lost or added.
        let lines = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(lines(stream), lines(&at_once));
    }
});
