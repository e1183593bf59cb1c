//! Owns what becomes of a hand-off: whether the KV blocks that a prefill worker holds are known to be free, known to stay, or neither.

use crate::route::PrefillAnswer;

/// What has become of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fate {
    /// It was fetched, or given back.
    Fetched,
    /// Nobody fetches it: its blocks stay until its lease ends.
    Leaked,
    /// Nobody tells: decode was asked, and had not begun to answer when it ended.
    Unknown,
}

impl Fate {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Fetched, Self::Leaked, Self::Unknown];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fetched => "fetched",
            Self::Leaked => "leaked",
            Self::Unknown => "unknown",
        }
    }

    /// After a call that was to fetch it for nobody, or to give it back: one that failed may have done so before.
    pub fn after_a_call(answer: PrefillAnswer<'_>) -> Self {
        match answer {
            PrefillAnswer::Whole {
                status: 200..=299, ..
            } => Self::Fetched,
            PrefillAnswer::NotSent | PrefillAnswer::Unsendable => Self::Leaked,
            PrefillAnswer::Whole { .. } | PrefillAnswer::Broken => Self::Unknown,
        }
    }
}

/// A hand-off that waits for its decode leg, or was fetched by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handed {
    /// KV blocks.
    pub blocks: u64,
    /// As it would be told now.
    pub fate: Fate,
}

impl Handed {
    /// To a decode leg that is dispatched.
    pub fn over(blocks: u64) -> Self {
        Self {
            blocks,
            fate: Fate::Unknown,
        }
    }

    /// Its decode leg has begun to answer.
    pub fn fetched(self) -> Self {
        Self {
            fate: Fate::Fetched,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_b18_only_what_nobody_was_asked_to_fetch_is_known_to_leak() {
        let whole = |status| PrefillAnswer::Whole { status, body: b"" };
        for (answer, fate) in [
            (whole(200), Fate::Fetched),
            (whole(204), Fate::Fetched),
            (PrefillAnswer::NotSent, Fate::Leaked),
            (PrefillAnswer::Unsendable, Fate::Leaked),
            (PrefillAnswer::Broken, Fate::Unknown),
            (whole(400), Fate::Unknown),
            (whole(500), Fate::Unknown),
            (whole(503), Fate::Unknown),
        ] {
            assert_eq!(Fate::after_a_call(answer), fate, "{answer}");
        }
    }

    #[test]
    fn found_b18_a_hand_off_is_in_doubt_until_decode_begins() {
        let handed = Handed::over(7);
        assert_eq!((handed.blocks, handed.fate), (7, Fate::Unknown));
        let fetched = handed.fetched();
        assert_eq!((fetched.blocks, fetched.fate), (7, Fate::Fetched));
    }
}
