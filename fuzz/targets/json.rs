//! Owns the target of JSON objects as spans: any edits of any object leave valid JSON, and every other member unchanged.
#![no_main]

use fuzz::{Choices, check_edited};
use libfuzzer_sys::fuzz_target;
use routing::json::{Object, each_edited, elements, length, says_nothing};

const NAMES: [&str; 4] = ["a", "b", "model", "kv_transfer_params"];

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let plan = choices.bytes(NAMES.len());
    let body = choices.0;
    if let Ok(text) = std::str::from_utf8(body) {
        let _ = says_nothing(text);
        if let Some(found) = elements(text) {
            assert_eq!(length(text), Some(found.len()));
            let unchanged = each_edited(text, |_, _| None);
            assert_eq!(unchanged.as_deref(), Some(text));
            let edited = each_edited(text, |at, _| (at % 2 == 0).then(|| "7".to_owned()));
            assert_eq!(edited.as_deref().and_then(length), Some(found.len()));
        }
    }
    let Ok(object) = Object::parse(body, &NAMES) else {
        return;
    };
    assert_eq!(object.edit().apply(body), body);
    let mut edits = object.edit();
    for (name, what) in NAMES.iter().zip(plan) {
        match what % 4 {
            0 => object.all(name).for_each(|member| edits.remove(member)),
            1 => object
                .all(name)
                .for_each(|member| edits.replace(member, "{\"x\":1}")),
            2 => edits.insert(*name, "[]"),
            _ => {
                object.all(name).for_each(|member| edits.remove(member));
                edits.insert(*name, "null");
            }
        }
    }
    check_edited(body, &edits.apply(body), &NAMES);
});
