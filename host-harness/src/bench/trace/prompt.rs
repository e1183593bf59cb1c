//! Owns the text of a trace's prompts: equal for equal blocks, four bytes per token, and without characters that JSON must
//! escape.

use bytes::Bytes;

use super::PlayOptions;
use crate::replay::Request;

/// Bytes of text per token, as the engines count.
const BYTES_PER_TOKEN: usize = 4;

const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// A streamed chat completion of one message; `number` seeds the text that is unique to the request.
pub fn body(request: &Request, number: usize, options: &PlayOptions) -> Bytes {
    let PlayOptions {
        model, max_tokens, ..
    } = options;
    // A model's name comes from the harness, and needs no escaping.
    let head = format!(
        r#"{{"model":"{model}","max_tokens":{max_tokens},"stream":true,"messages":[{{"role":"user","content":""#
    );
    let text = usize::try_from(request.prompt_tokens).unwrap_or(usize::MAX) * BYTES_PER_TOKEN;
    let mut body = Vec::with_capacity(head.len() + text + 8);
    body.extend_from_slice(head.as_bytes());
    write(&mut body, text, request, number, options.block_tokens);
    body.extend_from_slice(br#""}]}"#);
    Bytes::from(body)
}

/// Writes `left` bytes: each block's text, then the tail's; where the trace names no block, text unique to the request.
fn write(body: &mut Vec<u8>, mut left: usize, request: &Request, number: usize, block_tokens: u32) {
    let block = block_tokens as usize * BYTES_PER_TOKEN;
    for name in &request.blocks.sequence {
        let take = left.min(block);
        fill(body, take, *name);
        left -= take;
    }
    let own = !(number as u64);
    fill(body, left, request.tail.unwrap_or(own));
}

/// Writes `count` bytes derived from this id.
fn fill(body: &mut Vec<u8>, count: usize, name: u64) {
    let end = body.len() + count;
    let mut state = name;
    while body.len() < end {
        // SplitMix64, so that ids close to each other have nothing in common.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        let digits = (0..16).map(|at| DIGITS[(mixed >> (4 * at)) as usize & 15]);
        body.extend(digits.take(end - body.len()));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::replay::Trace;

    fn options(block_tokens: u32) -> PlayOptions {
        PlayOptions {
            speedup: 1.0,
            requests: usize::MAX,
            model: "sim".into(),
            max_tokens: 2,
            block_tokens,
            patience: Duration::from_secs(1),
        }
    }

    /// The prompts of a trace with these lengths and ids.
    fn prompts(lines: &[(u32, &str)]) -> Vec<String> {
        let lines: Vec<String> = lines
            .iter()
            .map(|(length, ids)| {
                format!(
                    r#"{{"timestamp":0,"input_length":{length},"output_length":1,"hash_ids":{ids}}}"#
                )
            })
            .collect();
        let trace = Trace::read(lines.join("\n").as_bytes(), 512, Some(512)).unwrap();
        let bodies = trace.requests.iter().enumerate();
        bodies
            .map(|(number, request)| {
                let body = body(request, number, &options(512));
                let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                assert_eq!(
                    (&body["stream"], &body["max_tokens"]),
                    (&true.into(), &2.into())
                );
                body["messages"][0]["content"].as_str().unwrap().to_owned()
            })
            .collect()
    }

    #[test]
    fn a_prompt_has_as_many_tokens_as_the_trace_says() {
        let prompts = prompts(&[
            (1100, "[1, 2, 3]"),
            (1024, "[1, 2]"),
            (3, "[9]"),
            (700, "[]"),
        ]);
        let lengths: Vec<usize> = prompts.iter().map(String::len).collect();
        assert_eq!(lengths, [4400, 4096, 12, 2800]);
    }

    #[test]
    fn equal_beginnings_have_equal_text() {
        let prompts = prompts(&[
            (1536, "[1, 2, 3]"),
            (1536, "[1, 2, 4]"),
            (1536, "[2, 1, 3]"),
            (1100, "[1, 2, 3]"),
            (1100, "[1, 2, 3]"),
        ]);
        let common = |a: usize, b: usize| {
            let pairs = prompts[a].bytes().zip(prompts[b].bytes());
            pairs.take_while(|(a, b)| a == b).count()
        };
        assert!((4096..4104).contains(&common(0, 1)));
        assert!(common(0, 2) < 8);
        assert_eq!(common(0, 3), 4400, "a block's beginning is its own");
        assert_eq!(common(3, 4), 4400);
    }

    #[test]
    fn what_the_trace_does_not_name_is_nobody_elses() {
        let prompts = prompts(&[(700, "[]"), (700, "[]")]);
        assert_ne!(prompts[0][..16], prompts[1][..16]);
    }
}
