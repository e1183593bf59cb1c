//! Owns the fate of a hand-off: whether the KV blocks held by a prefill worker are known to be free, known to stay, or neither.

use super::CallEnd;

/// Fate of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fate {
    /// Fetched, or released.
    Fetched,
    /// Never fetched: the blocks stay until their lease ends.
    Leaked,
    /// Unknown: decode was asked, and ended before the client had read anything of its answer.
    Unknown,
}

impl Fate {
    /// All fates.
    pub const ALL: [Self; 3] = [Self::Fetched, Self::Leaked, Self::Unknown];

    /// Name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fetched => "fetched",
            Self::Leaked => "leaked",
            Self::Unknown => "unknown",
        }
    }

    /// Fate after a clean-up call, which fetches the blocks without a client or releases them; a failed call may have done
    /// so before it failed.
    pub fn after_a_call(answer: CallEnd<'_>) -> Self {
        match answer {
            CallEnd::Whole {
                status: 200..=299, ..
            } => Self::Fetched,
            CallEnd::NotSent | CallEnd::Unsendable => Self::Leaked,
            CallEnd::Whole { .. } | CallEnd::Broken => Self::Unknown,
        }
    }
}

/// A hand-off that waits for its decode leg, or was fetched by that leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handed {
    /// KV blocks.
    pub blocks: u64,
    /// Fate as known now.
    pub fate: Fate,
}

impl Handed {
    /// A hand-off to a decode leg that is dispatched.
    pub fn over(blocks: u64) -> Self {
        Self {
            blocks,
            fate: Fate::Unknown,
        }
    }

    /// The hand-off once the client has begun to read what its decode leg answers.
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
        let whole = |status| CallEnd::Whole { status, body: b"" };
        for (answer, fate) in [
            (whole(200), Fate::Fetched),
            (whole(204), Fate::Fetched),
            (CallEnd::NotSent, Fate::Leaked),
            (CallEnd::Unsendable, Fate::Leaked),
            (CallEnd::Broken, Fate::Unknown),
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
