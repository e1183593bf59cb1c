//! Owns the trace: requests with their arrival times, read from a file of one JSON object per line.

use std::io::BufRead;
use std::time::Duration;

use routing::prefix::Blocks;
use serde::Deserialize;

/// Tokens per block in Mooncake's published traces.
const MOONCAKE_BLOCK_TOKENS: u32 = 512;

/// Maximum length of a trace, ten years: keeps absurd times within the range of the arithmetic.
const LONGEST_SECONDS: f64 = 3.2e8;

/// The requests of a trace, in order of arrival.
#[derive(Debug)]
pub struct Trace {
    /// The requests.
    pub requests: Vec<Request>,
    /// Tokens per block of the trace.
    pub own_block_tokens: u32,
}

/// One request of a trace.
#[derive(Debug, PartialEq)]
pub struct Request {
    /// Time since the first request of the trace.
    pub arrival: Duration,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Tokens of the answer; at least 1.
    pub output_tokens: u64,
    /// The prompt's full blocks, in blocks of the engines' size.
    pub blocks: Blocks,
    /// Hash of the tokens after the last full block, if the trace has an id for them.
    pub tail: Option<u64>,
    /// The request's conversation, if the trace has it.
    pub session: Option<Vec<u8>>,
}

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// A line is not a request.
    #[error("line {line}, column {column}: {what}")]
    Format {
        /// Counted from 1.
        line: usize,
        /// Counted from 1.
        column: usize,
        /// The error.
        what: String,
    },
    /// A line's time is invalid.
    #[error(
        "line {line}: a timestamp must be milliseconds, not negative, and within ten years of the first"
    )]
    Timestamp {
        /// Counted from 1.
        line: usize,
    },
    /// The ids do not fit the prompt's length.
    #[error(
        "line {line}: {ids} hash_ids for {tokens} tokens, which {} blocks of {block_tokens} tokens make; \
         --trace-block-tokens tells of how many tokens the trace's blocks are",
        tokens.div_ceil(u64::from(*block_tokens))
    )]
    BlockCount {
        /// Counted from 1.
        line: usize,
        /// Number of ids.
        ids: usize,
        /// Prompt tokens.
        tokens: u64,
        /// Tokens per block.
        block_tokens: u32,
    },
    /// Neither of the block sizes of engines and trace divides the other.
    #[error(
        "the trace's blocks are of {own} tokens: --block-tokens must divide that or be a multiple of it, and {requested} is neither"
    )]
    BlockTokens {
        /// Block size of the trace.
        own: u32,
        /// Block size of the engines.
        requested: u32,
    },
    /// A request exceeds the maximum length.
    #[error("line {line}: {what} must be at most {most}")]
    TooLong {
        /// Counted from 1.
        line: usize,
        /// The part that is too long.
        what: &'static str,
        /// Its maximum.
        most: u32,
    },
    /// The trace has no request.
    #[error("there is no request in it")]
    Empty,
}

/// A line as written. Further fields are ignored.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
    #[serde(default)]
    session: Option<serde_json::Value>,
    /// Counted from 1.
    #[serde(skip)]
    number: usize,
}

impl Trace {
    /// Reads a trace for engines with blocks of `block_tokens`. `own_block_tokens`: tokens per block of the trace; `None`: the
    /// engines' size if that fits every line, else Mooncake's 512 tokens.
    ///
    /// # Errors
    /// At the first line that is no request, or if the blocks do not fit.
    pub fn read(
        from: impl BufRead,
        block_tokens: u32,
        own_block_tokens: Option<u32>,
    ) -> Result<Self, TraceError> {
        let lines = lines(from)?;
        let own = match own_block_tokens {
            Some(own) => own,
            None if misfit(&lines, block_tokens).is_none() => block_tokens,
            None => MOONCAKE_BLOCK_TOKENS,
        };
        if let Some(error) = misfit(&lines, own) {
            return Err(error);
        }
        if !own.is_multiple_of(block_tokens) && !block_tokens.is_multiple_of(own) {
            return Err(TraceError::BlockTokens {
                own,
                requested: block_tokens,
            });
        }
        let first_ms = lines
            .iter()
            .map(|line| line.timestamp)
            .fold(f64::MAX, f64::min);
        let mut requests = Vec::with_capacity(lines.len());
        for line in lines {
            requests.push(line.request(first_ms, block_tokens, own)?);
        }
        if requests.is_empty() {
            return Err(TraceError::Empty);
        }
        requests.sort_by_key(|request: &Request| request.arrival);
        Ok(Self {
            requests,
            own_block_tokens: own,
        })
    }

    /// Time from the first arrival to the last.
    pub fn lasts(&self) -> Duration {
        self.requests
            .last()
            .map(|last| last.arrival)
            .unwrap_or_default()
    }
}

fn lines(from: impl BufRead) -> Result<Vec<Line>, TraceError> {
    let mut lines = Vec::new();
    for (index, text) in from.lines().enumerate() {
        let text = text?;
        if text.trim().is_empty() {
            continue;
        }
        let number = index + 1;
        let line: Line = serde_json::from_str(&text).map_err(|error| misread(number, &error))?;
        lines.push(Line { number, ..line }.checked()?);
    }
    Ok(lines)
}

/// The error of one line, which serde_json parsed as a document: its own line number is always 1.
fn misread(line: usize, error: &serde_json::Error) -> TraceError {
    let (column, what) = (error.column(), error.to_string());
    let suffix = format!(" at line 1 column {column}");
    TraceError::Format {
        line,
        column,
        what: what.trim_end_matches(&suffix).to_owned(),
    }
}

/// An error for the first line whose ids do not fit blocks of `block_tokens`.
fn misfit(lines: &[Line], block_tokens: u32) -> Option<TraceError> {
    let line = lines.iter().find(|line| {
        // A trace may leave out the partial last block, which no other prompt shares.
        let expected = line.input_length.div_ceil(block_tokens) as usize;
        !line.hash_ids.is_empty() && line.hash_ids.len() != expected
    })?;
    Some(TraceError::BlockCount {
        line: line.number,
        ids: line.hash_ids.len(),
        tokens: line.input_length.into(),
        block_tokens,
    })
}

/// Maximum tokens of a prompt or an answer: far beyond any model's, and few enough to be stored and counted one by one.
const MOST_TOKENS: u32 = 10_000_000;

impl Line {
    fn checked(self) -> Result<Self, TraceError> {
        let lengths = [
            ("input_length", self.input_length),
            ("output_length", self.output_length),
        ];
        match lengths
            .into_iter()
            .find(|(_, length)| *length > MOST_TOKENS)
        {
            None => Ok(self),
            Some((what, _)) => Err(TraceError::TooLong {
                line: self.number,
                what,
                most: MOST_TOKENS,
            }),
        }
    }

    fn request(self, first_ms: f64, block_tokens: u32, own: u32) -> Result<Request, TraceError> {
        let seconds = (self.timestamp - first_ms) / 1000.0;
        if !(self.timestamp >= 0.0 && (0.0..=LONGEST_SECONDS).contains(&seconds)) {
            return Err(TraceError::Timestamp { line: self.number });
        }
        let full = (self.input_length / block_tokens) as usize;
        let mut names = names(&self.hash_ids, block_tokens, own);
        let tail = names.get(full).copied();
        names.truncate(full);
        Ok(Request {
            arrival: Duration::from_secs_f64(seconds),
            prompt_tokens: self.input_length.into(),
            output_tokens: u64::from(self.output_length).max(1),
            blocks: Blocks {
                scope: 0,
                sequence: names,
                ..Blocks::default()
            },
            tail,
            session: self.session.and_then(session),
        })
    }
}

fn session(value: serde_json::Value) -> Option<Vec<u8>> {
    match value {
        serde_json::Value::Null => None,
        serde_json::Value::String(name) => Some(name.into_bytes()),
        other => Some(other.to_string().into_bytes()),
    }
}

/// Sequence hashes of blocks of `block_tokens`, each chained to all blocks before it, so that ids need not be unique to their
/// position. A larger block of the trace is split, smaller ones are combined.
fn names(ids: &[u64], block_tokens: u32, own: u32) -> Vec<u64> {
    let parts = (own / block_tokens).max(1) as u64;
    let together = (block_tokens / own).max(1) as usize;
    let mut before = 0;
    let mut names = Vec::new();
    for group in ids.chunks(together) {
        before = group.iter().fold(before, |before, id| chained(before, *id));
        for part in 0..parts {
            before = chained(before, part);
            names.push(before);
        }
    }
    names
}

/// Mixes an id into the hash before it: the finishing step of SplitMix64.
fn chained(before: u64, id: u64) -> u64 {
    let mut mixed = before.rotate_left(23) ^ id.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, block_tokens: u32) -> Result<Trace, TraceError> {
        Trace::read(text.as_bytes(), block_tokens, None)
    }

    #[test]
    fn what_is_longer_than_any_request_is_refused_with_its_line() {
        let line = r#"{"timestamp": 1, "input_length": 4294967295, "output_length": 1}"#;
        let error = Trace::read(line.as_bytes(), 1, None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("line 1: input_length"), "{error}");
    }

    #[test]
    fn a_line_is_a_request_and_a_partial_block_has_no_name() {
        let trace = read(
            "{\"timestamp\": 7000, \"input_length\": 1100, \"output_length\": 0, \"hash_ids\": [1, 2, 3], \"more\": 1}\n\n\
             {\"timestamp\": 5500.5, \"input_length\": 512, \"output_length\": 9, \"hash_ids\": [1], \"session\": \"a\"}\n",
            512,
        )
        .unwrap();
        let [first, second] = &trace.requests[..] else {
            panic!("{trace:?}")
        };
        assert_eq!(
            first.arrival,
            Duration::ZERO,
            "sorted, and counted from the first"
        );
        assert_eq!(second.arrival, Duration::from_micros(1_499_500));
        assert_eq!((second.prompt_tokens, second.output_tokens), (1100, 1));
        assert_eq!(second.blocks.sequence.len(), 2);
        assert_eq!(first.blocks.sequence[0], second.blocks.sequence[0]);
        assert_eq!(first.session.as_deref(), Some(b"a".as_slice()));
        assert_eq!(trace.lasts(), second.arrival);
    }

    #[test]
    fn a_bad_line_is_named_by_its_number() {
        let good = r#"{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#;
        for (bad, why) in [
            ("{", "line 3, column 1: EOF while parsing an object"),
            (
                r#"{"timestamp": 1, "output_length": 1}"#,
                "line 3, column 36: missing field `input_length`",
            ),
            (
                r#"{"timestamp": 1, "input_length": -4, "output_length": 1}"#,
                "line 3, column 35: invalid value: integer `-4`",
            ),
            (
                r#"{"timestamp": -1, "input_length": 4, "output_length": 1}"#,
                "line 3: a timestamp must be",
            ),
            (
                r#"{"timestamp": 1e300, "input_length": 4, "output_length": 1}"#,
                "line 3: a timestamp must be",
            ),
            (
                r#"{"timestamp": 1, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2]}"#,
                "line 3: 2 hash_ids for 1025 tokens, which 3 blocks of 512 tokens make",
            ),
        ] {
            let error = read(&format!("{good}\n\n{bad}\n"), 512)
                .unwrap_err()
                .to_string();
            // A negative time makes the valid line the late one.
            let fits =
                error.starts_with(why) || (bad.contains("-1,") && error.contains("timestamp"));
            assert!(fits, "{error}");
        }
        assert_eq!(
            read("\n", 512).unwrap_err().to_string(),
            "there is no request in it"
        );
    }

    #[test]
    fn names_are_chained() {
        let chain = names(&[1, 2, 1, 2], 512, 512);
        let distinct: std::collections::HashSet<_> = chain.iter().collect();
        assert_eq!(distinct.len(), 4);
        assert_eq!(chain[..2], names(&[1, 2, 9], 512, 512)[..2]);
        assert_ne!(chain[3], names(&[2, 2, 1, 2], 512, 512)[3]);
    }

    #[test]
    fn what_is_behind_the_last_full_block_has_a_name_where_the_trace_tells() {
        let tail = |length: u32, ids: &str| {
            let line = format!(
                r#"{{"timestamp": 1, "input_length": {length}, "output_length": 1, "hash_ids": {ids}}}"#
            );
            read(&line, 512).unwrap().requests[0].tail
        };
        assert_eq!(
            tail(1100, "[1, 2, 3]"),
            Some(names(&[1, 2, 3], 512, 512)[2])
        );
        assert_eq!(tail(1024, "[1, 2]"), None);
        assert_eq!(tail(1100, "[]"), None);
    }

    #[test]
    fn blocks_of_another_size_are_cut_or_taken_together() {
        let line =
            r#"{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 3]}"#;
        let count = |block_tokens| {
            read(line, block_tokens).unwrap().requests[0]
                .blocks
                .sequence
                .len()
        };
        assert_eq!(
            (count(512), count(256), count(16), count(1024)),
            (2, 4, 68, 1)
        );
        assert_eq!(
            read(line, 500).unwrap().own_block_tokens,
            500,
            "three blocks of 500 tokens fit as well"
        );
        let error = read(line, 300).unwrap_err().to_string();
        assert!(error.contains("300 is neither"), "{error}");
        let error = Trace::read(line.as_bytes(), 512, Some(256)).unwrap_err();
        assert!(
            error.to_string().contains("which 5 blocks of 256"),
            "{error}"
        );
    }

    #[test]
    fn parts_of_equal_blocks_are_equal_and_of_others_not() {
        let (a, b) = (names(&[1, 2], 128, 512), names(&[1, 3], 128, 512));
        assert_eq!(a[..4], b[..4]);
        assert!(a[4..].iter().zip(&b[4..]).all(|(a, b)| a != b));
    }
}
