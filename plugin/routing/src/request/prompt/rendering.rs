//! Owns a request's settings for the rendering of its text into tokens: the same text under another template, or under
//! other template arguments, is another prompt from the first token on.

use xxhash_rust::xxh3::Xxh3Default;

use super::canonical::{self, Shape, Sink, members, shape};
use crate::request::{Generation, Request};

/// Members that change how a conversation is rendered. Not among them: members that write after its end
/// (`add_generation_prompt`, `continue_final_message`), since the next turn does not begin with that text.
const OF_CHAT: [&str; 8] = [
    "chat_template",
    "chat_template_kwargs",
    // Dynamo's name for the same.
    "chat_template_args",
    "reasoning_effort",
    "reasoning",
    "mm_processor_kwargs",
    "add_special_tokens",
    "truncate_prompt_tokens",
];

/// Members that change how a plain text is rendered.
const OF_TEXT: [&str; 2] = ["add_special_tokens", "truncate_prompt_tokens"];

/// The hash of a request's rendering; none where all of it is left to the engine. Null, `{}` and the order of an object's
/// members do not matter.
pub(super) fn of(request: &Request<'_>) -> Option<u64> {
    let names: &[&str] = match request.generation {
        Generation::Chat | Generation::Responses => &OF_CHAT,
        Generation::Completions => &OF_TEXT,
        Generation::Generate | Generation::Other => &[],
    };
    let mut hash = Xxh3Default::new();
    let mut says_something = false;
    for name in names {
        let Some(member) = request.body.get(name) else {
            continue;
        };
        says_something |= put(&mut hash, name, member.value);
    }
    says_something.then(|| hash.digest())
}

/// Hashes a member, and returns whether its value matters.
fn put(hash: &mut Xxh3Default, name: &str, value: &str) -> bool {
    let inside = members(value, &[]);
    if shape(value) == Shape::Null || inside.as_ref().is_some_and(Vec::is_empty) {
        return false;
    }
    let mut member = |key: &str, value: &str| {
        hash.member(key);
        canonical::value(value, hash);
    };
    match inside {
        None => member(name, value),
        Some(inside) => {
            member(name, "{}");
            inside.iter().for_each(|(key, value)| member(key, value));
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PLAIN, body, read_as};
    use super::*;
    use crate::request::prompt::Prompt;

    const LONG: &str = r#""messages":[{"role":"user","content":"the same words, whatever is said of how they are rendered"}]"#;

    fn chat(more: &str) -> Prompt {
        read_as(Generation::Chat, &body(&format!("{LONG}{more}")), &PLAIN)
    }

    #[test]
    fn found_template_arguments_are_part_of_what_a_prompt_is_known_by() {
        let plain = chat("");
        let mut scopes = vec![plain.blocks.scope];
        for more in [
            r#","chat_template_kwargs":{"enable_thinking":false}"#,
            r#","chat_template_kwargs":{"enable_thinking":true}"#,
            r#","chat_template_args":{"enable_thinking":true}"#,
            r#","chat_template":"{{ messages }}""#,
            r#","reasoning_effort":"low""#,
            r#","reasoning_effort":"high""#,
            r#","reasoning":{"effort":"high"}"#,
            r#","mm_processor_kwargs":{"size":7}"#,
            r#","add_special_tokens":true"#,
            r#","truncate_prompt_tokens":100"#,
            r#","reasoning_effort":"low","add_special_tokens":true"#,
        ] {
            let other = chat(more);
            // Rendering is not part of the prompt's length.
            assert_eq!(other.tokens, plain.tokens, "{more}");
            scopes.push(other.blocks.scope);
        }
        let count = scopes.len();
        scopes.sort_unstable();
        scopes.dedup();
        assert_eq!(scopes.len(), count);
    }

    #[test]
    fn found_documents_are_part_of_the_prompt() {
        let with = |documents: &str| chat(&format!(r#","documents":{documents}"#));
        let plain = chat("");
        let one = with(r#"[{"title":"a","text":"b"}]"#);
        assert_eq!(one.blocks.scope, plain.blocks.scope);
        assert!(one.tokens > plain.tokens);
        assert_ne!(one.blocks.sequence.first(), None);
        assert_ne!(one.blocks.sequence[5], plain.blocks.sequence[5]);
        assert_ne!(one, with(r#"[{"title":"a","text":"c"}]"#));
        for nothing in ["null", "[]", "[ ]"] {
            assert_eq!(with(nothing), plain, "{nothing}");
        }
    }

    #[test]
    fn what_says_nothing_and_how_it_is_spelt_changes_nothing() {
        let plain = chat("");
        for more in [
            r#","chat_template_kwargs":{}"#,
            r#","chat_template_kwargs":null,"reasoning_effort":null"#,
            r#","chat_template_kwargs":{"a":null}"#,
            r#","add_generation_prompt":true,"continue_final_message":false,"temperature":1"#,
        ] {
            assert_eq!(chat(more), plain, "{more}");
        }
        let one = chat(r#","chat_template_kwargs":{"a":1,"b":"é"}"#);
        let other = chat(r#","chat_template_kwargs": { "b" : "\u00e9", "a" : 1 }"#);
        assert_eq!(one, other);
    }

    #[test]
    fn ids_are_the_prompt_whatever_is_said_of_its_rendering() {
        let completion = |prompt: &str, more: &str| {
            let body = body(&format!(r#""prompt":{prompt}{more}"#));
            read_as(Generation::Completions, &body, &PLAIN)
        };
        let special = r#","add_special_tokens":false"#;
        assert_eq!(completion("[1,2,3]", special), completion("[1,2,3]", ""));
        assert_ne!(
            completion(r#""a b c""#, special),
            completion(r#""a b c""#, "")
        );
    }
}
