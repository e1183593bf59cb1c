//! Tests of a configuration's explanation.

use std::path::Path;

use serde_json::{Value, json};

use super::{SOURCES, sound};
use crate::check::explain::{Explanation, Origin};
use crate::check::{CheckError, Findings, Source, find, output};

fn explained(document: &Value) -> Explanation {
    let source = Source::new("some.json".to_owned(), document.to_string().into_bytes());
    source.unwrap().explain()
}

fn findings(document: &Value) -> Findings {
    Findings {
        explanations: vec![explained(document)],
        ..Findings::default()
    }
}

#[test]
fn what_is_written_is_told_apart_from_defaults() {
    let mut document = sound("static");
    document["pools"][0]["prefill"] = json!({"attempts": 5});
    let explanation = explained(&document);
    let setting = |path: &str| {
        let mut settings = explanation.settings.iter();
        let found = settings.find(|setting| setting.path == path);
        found.unwrap_or_else(|| panic!("nothing is said of {path}"))
    };
    let attempts = setting("pools[0].prefill.attempts");
    assert_eq!(
        (&attempts.value, attempts.origin),
        (&json!(5), Origin::Written)
    );
    let timeout = setting("pools[0].prefill.timeout_ms");
    assert_eq!(
        (&timeout.value, timeout.origin),
        (&json!(120_000), Origin::Default)
    );
    assert_eq!(timeout.unit.as_deref(), Some("milliseconds"));
    assert_eq!(
        setting("pools[0].prefill.hedge_after_ms").value,
        Value::Null
    );
    assert_eq!(setting("pools[0].admission.queue.max_requests").value, 256);
    assert_eq!(
        setting("pools[0].discovery.static.workers[0].role").value,
        "decode"
    );
    assert_eq!(setting("sharing.interval_ms").origin, Origin::Default);
}

#[test]
fn a_secret_is_not_told() {
    let findings = findings(&sound("registration"));
    let texts = [
        output::for_people(&findings, None),
        output::for_machines(&findings),
    ];
    for text in texts {
        assert!(text.contains("discovery.registration.token"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn every_source_is_told_of() {
    for source in SOURCES {
        let explanation = explained(&sound(source));
        let summary = explanation.pools[0].says.join("\n");
        let word = match source {
            "static" => "listed here: 1 decode",
            "dynamo" => "frontends' /health",
            "document" => "a document at /workers in the cluster `c`",
            "envoy_clusters" => "the hosts of the clusters `a` (decode)",
            _ => "register themselves",
        };
        assert!(summary.contains(word), "{summary}");
        assert!(summary.contains("256 requests may wait"), "{summary}");
    }
}

#[test]
fn people_read_what_a_pool_does_and_then_its_settings() {
    let text = output::for_people(&findings(&sound("static")), None);
    for part in [
        "some.json: sound\n",
        "\nPool \"p\" (pools[0])\n  Protocol nixl: vLLM",
        "When a prefill worker fails, others are tried, 3 in all; then the request fails.",
        "  written:\n",
        "  by default:\n",
        "300000 milliseconds\n",
        "\nAll pools\n",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn what_is_wrong_is_told_with_its_file_and_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let mut document = sound("static");
    document["pools"][0]["prefill"] = json!({"attempts": 0});
    std::fs::write(&path, document.to_string()).unwrap();
    let error = find(Some(&path), None).unwrap_err();
    let message = error.to_string();
    assert!(
        message.ends_with("config.json: pools[0].prefill.attempts: must be at least 1"),
        "{message}"
    );
    let line: Value = serde_json::from_str(&output::failure_for_machines(&error)).unwrap();
    assert_eq!(line["sound"], false);
    assert_eq!(line["path"], "pools[0].prefill.attempts");
    let absent = find(Some(Path::new("/nowhere/at/all")), None);
    assert!(matches!(absent, Err(CheckError::Read(_))));
}
