//! Owns how outside text (from a client, a worker or a source) appears in logs and answers: on one line, and cut.

use std::fmt::{self, Write as _};

/// Longest name, in bytes.
pub const NAME: usize = 128;
/// Longest message, in bytes.
pub const MESSAGE: usize = 1024;
/// Longest log line, in bytes.
pub const LINE: usize = 8192;

/// The text on one line, in at most `most` bytes, followed by the number of bytes cut. Written piece by piece, so that the
/// cut part takes no memory. An excerpt of an excerpt is the same.
pub fn excerpt(what: impl fmt::Display, most: usize) -> String {
    taken(what, most, is_plain)
}

/// An excerpt that also escapes blanks and brackets, for an id at the beginning of a line.
pub fn word(what: impl fmt::Display, most: usize) -> String {
    taken(what, most, |letter| {
        letter.is_ascii_graphic() && !matches!(letter, '[' | ']')
    })
}

/// Whether a text may stand in a line unchanged.
pub fn is_line(text: &str) -> bool {
    text.chars().all(is_plain)
}

/// Whether a character neither ends a line nor changes how other characters are shown: no control character, no line or
/// paragraph separator, no change of writing direction, not invisible.
fn is_plain(letter: char) -> bool {
    let is_format = matches!(
        letter,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    );
    !letter.is_control() && !is_format
}

fn taken(what: impl fmt::Display, most: usize, is_kept: impl Fn(char) -> bool) -> String {
    let mut taker = Taker {
        taken: String::new(),
        most,
        beyond: 0,
        is_kept,
    };
    // The taker never fails, so an error is the value's own; the part written before it stays.
    let _ = write!(taker, "{what}");
    taker.finish()
}

fn escaped(letter: char) -> String {
    match letter {
        '\n' | '\r' | '\t' => letter.escape_default().to_string(),
        other => other.escape_unicode().to_string(),
    }
}

struct Taker<F> {
    taken: String,
    most: usize,
    /// Bytes that were cut.
    beyond: usize,
    is_kept: F,
}

impl<F: Fn(char) -> bool> Taker<F> {
    fn take(&mut self, letter: char) {
        let written = match (self.is_kept)(letter) {
            true => letter.to_string(),
            false => escaped(letter),
        };
        match self.taken.len().saturating_add(written.len()) <= self.most {
            true => self.taken.push_str(&written),
            false => self.beyond = letter.len_utf8(),
        }
    }

    fn finish(mut self) -> String {
        if self.beyond > 0 {
            self.taken.push_str(&format!("...+{}", self.beyond));
        }
        self.taken
    }
}

impl<F: Fn(char) -> bool> fmt::Write for Taker<F> {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        for (at, letter) in piece.char_indices() {
            if self.beyond > 0 {
                let rest = piece.len().saturating_sub(at);
                self.beyond = self.beyond.saturating_add(rest);
                break;
            }
            self.take(letter);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn found_b10_what_would_be_a_line_of_its_own_is_escaped() {
        let said = "m\r\n[2026-11-29][critical] all is lost\u{2028}\u{202e}\u{7f}\0\u{85}\t";
        assert_eq!(
            excerpt(said, MESSAGE),
            r"m\r\n[2026-11-29][critical] all is lost\u{2028}\u{202e}\u{7f}\u{0}\u{85}\t"
        );
        assert_eq!(
            word("a] [b c\n\u{e9}", NAME),
            r"a\u{5d}\u{20}\u{5b}b\u{20}c\n\u{e9}"
        );
        let plain = "qwen/Qwen3-8B:v1 \u{65e5}\u{672c} caf\u{e9} \\n \"x\"";
        assert_eq!(excerpt(plain, MESSAGE), plain);
        assert!(is_line(plain) && !is_line(said));
    }

    #[test]
    fn found_b10_what_is_long_is_cut_and_its_length_is_told() {
        let long = "x".repeat(20 << 20);
        assert_eq!(excerpt(&long, 4), format!("xxxx...+{}", (20 << 20) - 4));
        assert_eq!(excerpt("abcd", 4), "abcd");
        assert_eq!(excerpt("ab\ncd", 3), "ab...+3");
        assert_eq!(excerpt("\u{65e5}\u{672c}", 4), "\u{65e5}...+3");
        assert_eq!(excerpt("", 0), "");
    }

    proptest! {
        #[test]
        fn found_b10_an_excerpt_is_one_short_line_whatever_is_written(text in "\\PC{0,40}|(?s).{0,60}", most in 0_usize..80) {
            let once = excerpt(&text, most);
            prop_assert!(is_line(&once), "{once:?}");
            prop_assert!(once.len() <= most + "...+".len() + 20, "{once:?}");
            prop_assert_eq!(excerpt(&once, once.len()), once.clone());
            if is_line(&text) && text.len() <= most {
                prop_assert_eq!(once, text);
            }
        }

        #[test]
        fn found_b10_a_word_has_neither_blanks_nor_brackets(text in "(?s).{0,60}", most in 0_usize..80) {
            let said = word(&text, most);
            prop_assert!(said.chars().all(|letter| letter.is_ascii_graphic()), "{said:?}");
            prop_assert!(!said.contains(['[', ']']), "{said:?}");
        }
    }
}
