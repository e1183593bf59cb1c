//! Owns what the command lines share: numbers within bounds, and the progress bar.

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

/// A progress bar with room for messages of this many letters; only a terminal shows it.
pub fn progress_bar(steps: u64, letters: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    let template = format!("{{msg:{letters}}} {{wide_bar}} {{percent:>3}} %  {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar
}
