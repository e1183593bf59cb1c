//! Owns one line of a `/metrics` text: its name, labels and value. Nothing is copied.

/// A line with a name.
pub(super) struct Sample<'a> {
    /// The name, before the labels.
    pub name: &'a [u8],
    /// The rest: from the opening brace of the labels; without labels, the value.
    rest: &'a [u8],
}

impl<'a> Sample<'a> {
    /// None where the line is a comment, empty, or cannot begin a name of interest.
    pub fn of(line: &'a [u8]) -> Option<Self> {
        // Most lines are histogram buckets of the same engines, so the first byte rules out only other programs' lines.
        if !matches!(line.first(), Some(b'v' | b's' | b't' | b'n' | b'p')) {
            return None;
        }
        let name_end = memchr::memchr3(b'{', b' ', b'\t', line)?;
        let (name, rest) = line.split_at_checked(name_end)?;
        Some(Self { name, rest })
    }

    /// The value; none where it is not a finite number of zero or more.
    pub fn value(&self) -> Option<f64> {
        let after = match self.rest.strip_prefix(b"{") {
            Some(labels) => Labels(labels).skip_all()?,
            None => self.rest,
        };
        // A time stamp or an exemplar may follow the value.
        number(
            after
                .split(u8::is_ascii_whitespace)
                .find(|word| !word.is_empty())?,
        )
    }

    /// Value of a label, as written: escapes stay.
    pub fn label(&self, name: &[u8]) -> Option<&'a [u8]> {
        let mut labels = Labels(self.rest.strip_prefix(b"{")?);
        std::iter::from_fn(|| labels.next()).find_map(|(one, value)| (one == name).then_some(value))
    }

    /// Value of a label, as a number.
    pub fn number_of(&self, label: &[u8]) -> Option<f64> {
        number(self.label(label)?)
    }

    /// Whether another series already holds this value. SGLang has a series for each rank of a tensor or pipeline parallel
    /// engine, all with the same requests, and one for each priority beside the total; data-parallel ranks have their own
    /// requests.
    pub fn repeats_another(&self) -> bool {
        let other_than = |label: &[u8], usual: &[u8]| {
            self.label(label)
                .is_some_and(|value| !value.is_empty() && value != usual)
        };
        other_than(b"priority", b"")
            || other_than(b"pp_rank", b"0")
            || (other_than(b"tp_rank", b"0") && self.label(b"dp_rank").is_none())
    }
}

fn number(text: &[u8]) -> Option<f64> {
    let number: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number)
}

/// Labels not read yet, and what follows them.
struct Labels<'a>(&'a [u8]);

impl<'a> Labels<'a> {
    /// The next label's name and value; none at the end of the labels, and where they cannot be read.
    fn next(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        let padding = |byte: &u8| matches!(byte, b',' | b' ' | b'\t');
        let start = self.0.iter().position(|byte| !padding(byte))?;
        let from = self.0.get(start..)?;
        if from.first() == Some(&b'}') {
            return None;
        }
        let equals = memchr::memchr(b'=', from)?;
        let (name, value) = from.split_at_checked(equals)?;
        let value = value.get(1..)?.trim_ascii_start().strip_prefix(b"\"")?;
        let end = quote(value)?;
        self.0 = value.get(end + 1..)?;
        Some((name.trim_ascii_end(), value.get(..end)?))
    }

    /// What follows the closing brace.
    fn skip_all(mut self) -> Option<&'a [u8]> {
        while self.next().is_some() {}
        let rest = self.0.trim_ascii_start();
        rest.strip_prefix(b",")
            .map_or(rest, <[u8]>::trim_ascii_start)
            .strip_prefix(b"}")
    }
}

/// Position of the closing quote of a value.
fn quote(text: &[u8]) -> Option<usize> {
    let mut escaped = false;
    text.iter().position(|byte| {
        let ends = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    })
}
