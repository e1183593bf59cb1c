//! Owns what the command lines share: numbers within bounds, tables of text, and the progress bar.

use std::ops::RangeInclusive;
use std::str::FromStr;

use indicatif::{ProgressBar, ProgressStyle};

/// A number in this range.
///
/// # Errors
/// The words, which name the unit and the range.
pub fn within<T: FromStr + PartialOrd>(
    text: &str,
    range: RangeInclusive<T>,
    words: &'static str,
) -> Result<T, &'static str> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or(words)
}

/// Lines of aligned cells; the first `words` columns are aligned left, as words are, and the others right, as numbers are.
pub fn aligned<const N: usize>(lines: &[[String; N]], words: usize) -> String {
    let mut widths = [0; N];
    for line in lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    for line in lines {
        let mut padded = String::new();
        for (at, (cell, width)) in line.iter().zip(widths).enumerate() {
            padded += &match at < words {
                true => format!("{cell:width$}  "),
                false => format!("{cell:>width$}  "),
            };
        }
        text += padded.trim_end();
        text.push('\n');
    }
    text
}

/// A progress bar with room for messages of this many letters; only a terminal shows it.
pub fn progress_bar(steps: u64, letters: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    let template = format!("{{msg:{letters}}} {{wide_bar}} {{percent:>3}} %  {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar
}
