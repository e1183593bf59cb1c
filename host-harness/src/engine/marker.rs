//! Owns the markers in a prompt's text that make an engine fail, or end early, on demand: for tests and demonstrations.

/// Descriptions of the markers for `--help`.
pub const MARKERS: &str = "Marks in the text of a prompt, for tests and demonstrations:
  <|end|>                generation ends by itself (\"stop\") at its first token; a prefill engine then hands nothing off, but in sglang
  <|lose|>               a prefill engine ends at the length limit, but hands nothing off; not in sglang
  <|fail-prefill|>       a prefill engine computes, then answers 500; in sglang the decode of its room fails with it
  <|fail-prefill-late|>  an sglang prefill engine hands its KV over, and answers 500 only --late-ms later
  <|die-mid-stream|>     an engine that generates breaks the connection after three tokens
  <|break-prefill|>      a prefill engine computes, then breaks the connection without an answer
  <|fail-decode|>        an engine that generates answers 500 when it has the KV
  <|break-decode|>       the same, but it breaks the connection without an answer
  <|slow-decode|>        an engine that generates takes twenty times as long for each token
  <|wordy|>              an engine that generates says 64 KiB of id with each token";

/// Factor by which `<|slow-decode|>` multiplies the time of a token.
pub const SLOW: f64 = 20.0;
/// Tokens sent before `<|die-mid-stream|>` breaks the connection.
pub const TOKENS_BEFORE_DEATH: u64 = 3;

/// Bytes that `<|wordy|>` adds to an id; each event repeats the id.
pub const WORDY: usize = 64 * 1024;

/// Behaviour that a prompt can request of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// Generation stops at its first token.
    End,
    /// vLLM, prefill: no hand-off, though the length limit ended the prefill.
    Lose,
    /// Prefill: 500 after computing, without a hand-off.
    FailPrefill,
    /// SGLang, prefill: 500 a while after the KV was handed over.
    FailPrefillLate,
    /// The connection breaks after [`TOKENS_BEFORE_DEATH`] tokens.
    DieMidStream,
    /// Prefill: the connection breaks after computing, without a hand-off.
    BreakPrefill,
    /// 500 instead of the first token.
    FailDecode,
    /// The connection breaks instead of the first token.
    BreakDecode,
    /// Each token takes [`SLOW`] times as long.
    SlowDecode,
    /// The id in each event is longer by [`WORDY`] bytes.
    Wordy,
}

const ALL: [(Marker, &str); 10] = [
    (Marker::End, "<|end|>"),
    (Marker::Lose, "<|lose|>"),
    (Marker::FailPrefill, "<|fail-prefill|>"),
    (Marker::FailPrefillLate, "<|fail-prefill-late|>"),
    (Marker::DieMidStream, "<|die-mid-stream|>"),
    (Marker::BreakPrefill, "<|break-prefill|>"),
    (Marker::FailDecode, "<|fail-decode|>"),
    (Marker::BreakDecode, "<|break-decode|>"),
    (Marker::SlowDecode, "<|slow-decode|>"),
    (Marker::Wordy, "<|wordy|>"),
];

/// The markers of one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Markers(Vec<Marker>);

impl Markers {
    /// The markers in any of `texts`.
    pub fn find(texts: &[&str]) -> Self {
        let marked: Vec<&str> = texts
            .iter()
            .copied()
            .filter(|text| text.contains("<|"))
            .collect();
        let is_present = |mark: &str| marked.iter().any(|text| text.contains(mark));
        let found = ALL.iter().filter(|(_, mark)| is_present(mark));
        Self(found.map(|(marker, _)| *marker).collect())
    }

    /// Whether the prompt carries this marker.
    pub fn has(&self, marker: Marker) -> bool {
        self.0.contains(&marker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_found_in_any_text_and_told_apart() {
        let found = Markers::find(&["a <|end|> b", "plain", "<|fail-prefill-late|>"]);
        assert!(found.has(Marker::End));
        assert!(found.has(Marker::FailPrefillLate));
        assert!(!found.has(Marker::FailPrefill));
        assert_eq!(Markers::find(&["<|END|>", "end"]), Markers::default());
    }

    #[test]
    fn the_help_names_every_mark() {
        for (_, mark) in ALL {
            assert!(MARKERS.contains(mark), "{mark}");
        }
    }
}
