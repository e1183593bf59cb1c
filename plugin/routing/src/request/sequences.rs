//! Owns the number of sequences in a request: its prompts, and the choices for each of them.

use super::limits::whole;
use super::{Generation, embeds};
use crate::json::{Object, elements, is_empty_list, length};
use crate::refusal::Refusal;

/// The prompts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prompts {
    /// One prompt, as text, token ids or messages.
    One,
    /// A list of this many prompts, which may be one.
    Batch(u64),
}

impl Prompts {
    /// Adds embedded prompts: beside them an empty prompt does not count.
    fn and(self, embedded: Option<u64>, written: Option<&str>) -> Self {
        match embedded {
            None => self,
            Some(embedded) if written.is_none_or(is_nothing) => Self::Batch(embedded),
            Some(embedded) => Self::Batch(self.count().saturating_add(embedded)),
        }
    }

    fn count(self) -> u64 {
        match self {
            Self::One => 1,
            Self::Batch(prompts) => prompts.max(1),
        }
    }
}

/// The sequences that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequences {
    /// Its prompts.
    pub prompts: Prompts,
    /// Choices for each prompt (`n`).
    pub choices: u64,
    /// Choices decoded for each prompt, of which the best are returned. SGLang ignores it.
    pub best_of: u64,
}

impl Sequences {
    /// One prompt, one choice.
    pub(super) const ONE: Self = Self {
        prompts: Prompts::One,
        choices: 1,
        best_of: 1,
    };

    /// Number of sequences that the engine decodes, without those of `best_of` that are not returned.
    pub fn count(&self) -> u64 {
        self.prompts.count().saturating_mul(self.choices)
    }

    /// Number of sequences that may be generated, including those of `best_of` that are not returned.
    pub fn written(&self) -> u64 {
        let best = Self {
            choices: self.choices.max(self.best_of),
            ..*self
        };
        best.count()
    }

    /// Checks that there is a single sequence, as required by a hand-off with a single consumer.
    ///
    /// # Errors
    /// [`Refusal::Field`] names the member that asks for more.
    pub fn check_one(&self) -> Result<(), Refusal> {
        if self.choices.max(self.best_of) > 1 {
            return Err(Refusal::Field {
                name: "n",
                problem: "only one choice can be handed over from prefill to decode, and no worker runs whole requests",
            });
        }
        match self.count() {
            0 | 1 => Ok(()),
            _ => Err(Refusal::Field {
                name: "prompt",
                problem: "only one prompt can be handed over from prefill to decode, and no worker runs whole requests",
            }),
        }
    }

    pub(super) fn read(generation: Generation, body: &Object<'_>) -> Result<Self, Refusal> {
        let prompts = match generation {
            Generation::Completions => {
                let written = generation.prompt(body).map(|member| member.value);
                prompts(generation, body).and(embeds::sequences(body), written)
            }
            Generation::Generate => prompts(generation, body),
            Generation::Chat | Generation::Responses | Generation::Other => Prompts::One,
        };
        Ok(Self {
            prompts,
            choices: choices(generation, body)?.max(1),
            best_of: match generation {
                Generation::Completions => number(body, "best_of", "best_of")?.max(1),
                _ => 1,
            },
        })
    }
}

fn prompts(generation: Generation, body: &Object<'_>) -> Prompts {
    let Some(prompt) = generation.prompt(body) else {
        return Prompts::One;
    };
    let value = prompt.value;
    // Brackets around one prompt: none for text, one for its ids, two for its embeddings.
    let depth = opening_brackets(value);
    let inside = value.trim_start_matches(|c: char| c == '[' || c.is_ascii_whitespace());
    let one = match inside.as_bytes().first() {
        Some(b'"') => 0,
        _ if prompt.key == "input_embeds" => 2,
        _ => 1,
    };
    match depth > one {
        true => Prompts::Batch(length(value).unwrap_or(1) as u64),
        false => Prompts::One,
    }
}

/// Whether a prompt is empty, beside embeddings.
fn is_nothing(prompt: &str) -> bool {
    matches!(prompt, "null" | "\"\"") || is_empty_list(prompt)
}

fn opening_brackets(value: &str) -> usize {
    let opening = value
        .bytes()
        .take_while(|byte| *byte == b'[' || byte.is_ascii_whitespace());
    opening.filter(|byte| *byte == b'[').count()
}

fn choices(generation: Generation, body: &Object<'_>) -> Result<u64, Refusal> {
    match generation {
        Generation::Chat | Generation::Completions => number(body, "n", "n"),
        Generation::Generate => sampled(body),
        Generation::Responses | Generation::Other => Ok(1),
    }
}

/// SGLang's `n` is a sampling parameter: one object, or one for each prompt of a batch, all with the same `n`.
fn sampled(body: &Object<'_>) -> Result<u64, Refusal> {
    let wrong = Refusal::Field {
        name: "sampling_params",
        problem: "must be an object, or a list of objects",
    };
    let mut most = 1;
    for member in body.all("sampling_params") {
        for object in objects(member.value).ok_or_else(|| wrong.clone())? {
            let object = Object::parse(object.as_bytes(), SAMPLING).map_err(|_| wrong.clone())?;
            most = most.max(number(&object, "n", "sampling_params.n")?);
        }
    }
    Ok(most)
}

/// Members of the sampling parameters that are read or edited.
pub const SAMPLING: &[&str] = &["n", "max_new_tokens", "min_new_tokens"];

/// The objects of the sampling parameters; none where they are neither an object nor a list.
pub fn objects(sampling: &str) -> Option<Vec<&str>> {
    match sampling.as_bytes().first() {
        Some(b'{') => Some(vec![sampling]),
        Some(b'n') => Some(Vec::new()),
        _ => elements(sampling),
    }
}

/// A count that the client may set; 1 by default.
fn number(object: &Object<'_>, key: &str, name: &'static str) -> Result<u64, Refusal> {
    let wrong = Refusal::Field {
        name,
        problem: "must be a positive integer",
    };
    let Some(member) = object.get(key).filter(|member| member.value != "null") else {
        return Ok(1);
    };
    match whole(member.value) {
        // In OpenAI's interface `best_of` may be 0, which has no effect.
        Some(0) if key != "best_of" => Err(wrong),
        Some(number) => Ok(number),
        None => Err(wrong),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Request;

    fn sequences(generation: Generation, body: &str) -> Result<Sequences, Refusal> {
        Request::parse(generation, body.as_bytes()).map(|request| request.sequences())
    }

    #[test]
    fn prompts_are_counted_in_all_shapes() {
        for (prompt, expected) in [
            (r#""a""#, Prompts::One),
            (r#""[[""#, Prompts::One),
            ("[1,2,3]", Prompts::One),
            ("[]", Prompts::One),
            (r#"["a"]"#, Prompts::Batch(1)),
            (r#"[ "a", "b" ]"#, Prompts::Batch(2)),
            (" [ [1,2] , [3], [] ]", Prompts::Batch(3)),
        ] {
            let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            let found = sequences(Generation::Completions, &body).unwrap();
            assert_eq!(found.prompts, expected, "{prompt}");
        }
        for (member, expected) in [
            (r#""text":"a""#, Prompts::One),
            (r#""text":["a"]"#, Prompts::Batch(1)),
            (r#""text":null,"input_ids":[1,2]"#, Prompts::One),
            (r#""input_ids":[[1],[2]]"#, Prompts::Batch(2)),
            (r#""input_embeds":[[0.5,1],[2,3]]"#, Prompts::One),
            (r#""input_embeds":[[[0.5,1]],[[2,3]]]"#, Prompts::Batch(2)),
        ] {
            let found = sequences(Generation::Generate, &format!("{{{member}}}")).unwrap();
            assert_eq!(found.prompts, expected, "{member}");
        }
    }

    #[test]
    fn found_w5_each_of_several_embedded_prompts_is_a_sequence() {
        for (members, expected) in [
            (r#""prompt":"","prompt_embeds":["QQ==","QQ=="]"#, 2),
            (r#""prompt_embeds":["QQ==","QQ=="]"#, 2),
            (r#""prompt":null,"prompt_embeds":"QQ==""#, 1),
            (r#""prompt":"","prompt_embeds":["QQ=="]"#, 1),
            (r#""prompt":[],"prompt_embeds":["QQ=="]"#, 1),
            (r#""prompt":"a","prompt_embeds":"QQ==""#, 2),
            (r#""prompt":["a","b"],"prompt_embeds":["QQ=="],"n":2"#, 6),
            (r#""prompt":"a","prompt_embeds":null"#, 1),
            (r#""prompt":"a","prompt_embeds":[]"#, 1),
        ] {
            let body = format!(r#"{{"model":"m",{members}}}"#);
            let found = sequences(Generation::Completions, &body).unwrap();
            assert_eq!(found.count(), expected, "{members}");
            assert_eq!(found.check_one().is_ok(), expected == 1, "{members}");
        }
        for bad in ["1", "{}", "[1]", "[null]", "true"] {
            let body = format!(r#"{{"model":"m","prompt":"a","prompt_embeds":{bad}}}"#);
            let refusal = sequences(Generation::Completions, &body).unwrap_err();
            assert!(
                matches!(
                    refusal,
                    Refusal::Field {
                        name: "prompt_embeds",
                        ..
                    }
                ),
                "{bad}: {refusal}"
            );
        }
    }

    #[test]
    fn choices_multiply_the_prompts_and_a_wrong_one_is_named() {
        let completion = |members: &str| {
            let body = format!(r#"{{"model":"m","prompt":["a","b"]{members}}}"#);
            sequences(Generation::Completions, &body).map(|found| found.count())
        };
        assert_eq!(completion(""), Ok(2));
        assert_eq!(completion(r#","n":3,"best_of":0"#), Ok(6));
        assert_eq!(completion(r#","n":2,"best_of":4"#), Ok(4));
        assert_eq!(completion(r#","n":null,"best_of":null"#), Ok(2));
        assert_eq!(completion(r#","n":18446744073709551615"#), Ok(u64::MAX));
        let chat = |n: &str| {
            let body = format!(r#"{{"model":"m","messages":[],"n":{n},"best_of":4}}"#);
            sequences(Generation::Chat, &body).map(|found| found.count())
        };
        assert_eq!(chat("2"), Ok(2));
        for bad in [
            "0",
            "-1",
            "1.5",
            "\"2\"",
            "true",
            "[1]",
            "{}",
            "18446744073709551616",
        ] {
            let refusal = chat(bad).unwrap_err();
            assert!(matches!(refusal, Refusal::Field { name: "n", .. }), "{bad}");
        }
    }

    #[test]
    fn sampling_parameters_are_one_object_or_one_for_each_prompt() {
        let generate = |sampling: &str| {
            let body = format!(r#"{{"text":["a","b"],"sampling_params":{sampling}}}"#);
            sequences(Generation::Generate, &body).map(|found| found.count())
        };
        assert_eq!(generate("null"), Ok(2));
        assert_eq!(generate(r#"{"n":3}"#), Ok(6));
        assert_eq!(generate(r#"[{"n":2},{"n":2}]"#), Ok(4));
        for (bad, named) in [
            (r#"{"n":"2"}"#, "sampling_params.n"),
            ("3", "sampling_params"),
            (r#""x""#, "sampling_params"),
            ("[1]", "sampling_params"),
        ] {
            let refusal = generate(bad).unwrap_err();
            assert!(
                matches!(refusal, Refusal::Field { name, .. } if name == named),
                "{bad}: {refusal}"
            );
        }
    }

    #[test]
    fn a_handoff_with_one_consumer_takes_one_sequence() {
        let check = |members: &str| {
            let body = format!(r#"{{"model":"m",{members}}}"#);
            let found = sequences(Generation::Completions, &body).unwrap();
            found.check_one().err().map(|refusal| match refusal {
                Refusal::Field { name, .. } => name,
                other => panic!("{other}"),
            })
        };
        assert_eq!(check(r#""prompt":"a""#), None);
        assert_eq!(check(r#""prompt":["a"],"n":1"#), None);
        assert_eq!(check(r#""prompt":["a","b"]"#), Some("prompt"));
        assert_eq!(check(r#""prompt":["a","b"],"n":2"#), Some("n"));
        assert_eq!(check(r#""prompt":"a","best_of":2"#), Some("n"));
    }
}
