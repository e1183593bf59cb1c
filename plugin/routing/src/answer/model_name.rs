//! Owns the name of the model in an answer: the client reads the name that it used, whatever its worker calls the model.

use crate::json::{Object, edited, quoted};

const MODEL: &str = "model";
/// Field of an event of the Responses interface that holds the answer so far.
const RESPONSE: &str = "response";

/// The document (an answer, or the data of one event) with its `model` set to `name`, all other bytes unchanged. None where
/// the document has no model.
pub(super) fn with_model_name(document: &str, name: &str) -> Option<String> {
    let object = Object::parse(document.as_bytes(), &[MODEL, RESPONSE]).ok()?;
    let mut edits = object.edit();
    let mut is_edited = false;
    for member in object.all(MODEL).filter(|member| is_text(member.value)) {
        edits.replace(member, quoted(name));
        is_edited = true;
    }
    if let Some(response) = object.get(RESPONSE)
        && let Some(renamed) = renamed(response.value, name)
    {
        edits.replace(response, renamed);
        is_edited = true;
    }
    if !is_edited {
        return None;
    }
    String::from_utf8(edits.apply(document.as_bytes())).ok()
}

fn renamed(response: &str, name: &str) -> Option<String> {
    edited(response, &[MODEL], |object, edits| {
        for member in object.all(MODEL).filter(|member| is_text(member.value)) {
            edits.replace(member, quoted(name));
        }
    })
}

fn is_text(value: &str) -> bool {
    value.starts_with('"')
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
