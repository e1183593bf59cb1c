//! Owns the name of the model in an answer: the client reads the name that it used, whatever its worker calls the model.

use crate::json::{Edits, Object, edited, quoted};

const MODEL: &str = "model";
/// Field of an event of the Responses interface that holds the answer so far.
const RESPONSE: &str = "response";

/// The document (an answer, or the data of one event) with its `model` set to `name`, all other bytes unchanged. None where
/// the document has no model.
pub(super) fn with_model_name(document: &str, name: &str) -> Option<String> {
    let object = Object::parse(document.as_bytes(), &[MODEL, RESPONSE]).ok()?;
    let mut edits = object.edit();
    let mut is_edited = rename(&object, name, &mut edits);
    if let Some(response) = object.get(RESPONSE)
        && let Some(renamed) = edited(response.value, &[MODEL], |object, edits| {
            rename(object, name, edits);
        })
    {
        edits.replace(response, renamed);
        is_edited = true;
    }
    if !is_edited {
        return None;
    }
    String::from_utf8(edits.apply(document.as_bytes())).ok()
}

/// Renames the model of an object; returns whether it has one.
fn rename(object: &Object<'_>, name: &str, edits: &mut Edits) -> bool {
    let mut names = object
        .all(MODEL)
        .filter(|member| member.value.starts_with('"'))
        .peekable();
    let has_name = names.peek().is_some();
    names.for_each(|member| edits.replace(member, quoted(name)));
    has_name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_models_name_changes() {
        for (document, wanted) in [
            (
                r#"{ "model" : "e" ,"seed":9007199254740993,"a":"<&> \"model\":\"e\""}"#,
                Some(r#"{ "model" : "c\"" ,"seed":9007199254740993,"a":"<&> \"model\":\"e\""}"#),
            ),
            (
                r#"{"type":"response.created","response":{"id":1,"model":"e"}}"#,
                Some(r#"{"type":"response.created","response":{"id":1,"model":"c\""}}"#),
            ),
            (r#"{"choices":[{"model":"e"}]}"#, None),
            (r#"{"model":null}"#, None),
            ("[DONE]", None),
            ("", None),
        ] {
            assert_eq!(
                with_model_name(document, "c\"").as_deref(),
                wanted,
                "{document}"
            );
        }
    }
}
