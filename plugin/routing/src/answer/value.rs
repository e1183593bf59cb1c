//! Owns the reading of one JSON value: whether it has content, its text, the reason for an answer's end.

use std::borrow::Cow;
use std::fmt;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// A text; empty where the value is no text. Borrowed unless it holds an escape.
#[derive(Default)]
pub(super) struct Word<'a>(pub(super) Cow<'a, str>);

/// Whether a value has content. Null, false, an empty text, and lists and objects of only these have none.
#[derive(Default)]
pub(super) struct Says(pub(super) bool);

/// The reason that an answer gives for its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Reason {
    /// No reason given.
    #[default]
    Unreported,
    /// Generation ended by itself.
    Itself,
    /// The token limit was reached.
    Limit,
    /// The engine gave up.
    GaveUp,
}

impl Reason {
    /// The reason that a word of any interface stands for.
    pub(super) fn of(word: &str) -> Self {
        match word {
            "" => Self::Unreported,
            "length" | "max_tokens" | "max_output_tokens" | "not_finished" => Self::Limit,
            "abort" | "aborted" | "error" | "cancelled" | "canceled" | "timeout" => Self::GaveUp,
            _ => Self::Itself,
        }
    }
}

/// A part of an answer: a message, a delta, a block. A text is a part, too.
#[derive(Default)]
pub(super) struct AnswerPart<'a> {
    /// The part's own type.
    pub(super) kind: Word<'a>,
    /// Whether the part has more than its type and its role.
    pub(super) says: bool,
    /// The reason for the answer's end, where given.
    pub(super) reason: Reason,
}

/// Whether any of a list of parts has content; for a value that is no list, whether the value has.
#[derive(Default)]
pub(super) struct Parts(pub(super) bool);

/// Values without content, which need no function of their own.
macro_rules! scalars {
    ($bool:expr, $number:expr) => {
        fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
            Ok($bool(value))
        }
        fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
            Ok($number)
        }
        fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
            Ok($number)
        }
        fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
            Ok($number)
        }
        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("a value")
        }
    };
}

fn skip_list<'de, A: SeqAccess<'de>>(mut list: A) -> Result<(), A::Error> {
    while list.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

fn skip_object<'de, A: MapAccess<'de>>(mut object: A) -> Result<(), A::Error> {
    while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
    Ok(())
}

struct WordVisitor;

impl<'de> Visitor<'de> for WordVisitor {
    type Value = Word<'de>;

    scalars!(|_| Word::default(), Word::default());

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Word(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Word(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        skip_list(list).map(|()| Word::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<Self::Value, A::Error> {
        skip_object(object).map(|()| Word::default())
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Word<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(WordVisitor)
    }
}

struct SaysVisitor;

impl<'de> Visitor<'de> for SaysVisitor {
    type Value = Says;

    scalars!(Says, Says(true));

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Says(!text.is_empty()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut says = false;
        while let Some(Says(element)) = list.next_element()? {
            says |= element;
        }
        Ok(Says(says))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut says = false;
        while let Some((IgnoredAny, Says(value))) = object.next_entry()? {
            says |= value;
        }
        Ok(Says(says))
    }
}

impl<'de> Deserialize<'de> for Says {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(SaysVisitor)
    }
}

struct ReasonVisitor;

impl<'de> Visitor<'de> for ReasonVisitor {
    type Value = Reason;

    scalars!(|_| Reason::Unreported, Reason::Unreported);

    fn visit_str<E>(self, word: &str) -> Result<Self::Value, E> {
        Ok(Reason::of(word))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        skip_list(list).map(|()| Reason::Unreported)
    }

    /// SGLang gives the reason as an object.
    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut reason = Reason::Unreported;
        while let Some(Word(key)) = object.next_key()? {
            let Word(value) = object.next_value()?;
            if key == "type" {
                reason = Reason::of(&value);
            }
        }
        Ok(reason)
    }
}

impl<'de> Deserialize<'de> for Reason {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ReasonVisitor)
    }
}

struct PartVisitor;

impl AnswerPart<'_> {
    fn that(says: bool) -> Self {
        Self {
            says,
            ..Self::default()
        }
    }
}

impl<'de> Visitor<'de> for PartVisitor {
    type Value = AnswerPart<'de>;

    scalars!(AnswerPart::that, AnswerPart::that(true));

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(AnswerPart::that(!text.is_empty()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        SaysVisitor
            .visit_seq(list)
            .map(|Says(says)| AnswerPart::that(says))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut part = AnswerPart::default();
        while let Some(Word(key)) = object.next_key()? {
            match &*key {
                "type" => part.kind = object.next_value()?,
                "stop_reason" => part.reason = object.next_value()?,
                "role" | "stop_sequence" => {
                    object.next_value::<IgnoredAny>()?;
                }
                _ => part.says |= object.next_value::<Says>()?.0,
            }
        }
        Ok(part)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for AnswerPart<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(PartVisitor)
    }
}

struct PartsVisitor;

impl<'de> Visitor<'de> for PartsVisitor {
    type Value = Parts;

    scalars!(Parts, Parts(true));

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Parts(!text.is_empty()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut says = false;
        while let Some(part) = list.next_element::<AnswerPart<'_>>()? {
            says |= part.says;
        }
        Ok(Parts(says))
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<Self::Value, A::Error> {
        SaysVisitor.visit_map(object).map(|Says(says)| Parts(says))
    }
}

impl<'de> Deserialize<'de> for Parts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(PartsVisitor)
    }
}
