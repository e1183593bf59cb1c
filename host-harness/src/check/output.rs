//! Owns the output of findings: for people, or as one line of JSON.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::explain::{Explanation, Origin, Setting};
use super::summary::name_of;
use super::traps::Warning;
use super::{CheckError, Findings};

/// One line of JSON.
pub fn for_machines(findings: &Findings) -> String {
    let configurations: Vec<_> = findings
        .explanations
        .iter()
        .map(|one| json!({"place": one.place, "pools": one.pools, "settings": one.settings}))
        .collect();
    let document = json!({
        "sound": true,
        "configurations": configurations,
        "warnings": findings.warnings,
    });
    format!("{document}\n")
}

/// One line of JSON with the error.
pub fn failure_for_machines(error: &CheckError) -> String {
    let document = json!({"sound": false, "error": error.to_string(), "path": error.path()});
    format!("{document}\n")
}

/// Text for people.
pub fn for_people(findings: &Findings, bootstrap: Option<&Path>) -> String {
    let mut text = String::new();
    for explanation in &findings.explanations {
        explain(&mut text, explanation);
    }
    if let Some(path) = bootstrap {
        warn(&mut text, &findings.warnings, path);
    }
    text
}

fn explain(text: &mut String, explanation: &Explanation) {
    let _ = writeln!(text, "{}: sound", explanation.place);
    for (index, pool) in explanation.pools.iter().enumerate() {
        let _ = writeln!(text, "\nPool \"{}\" (pools[{index}])", pool.name);
        for sentence in &pool.says {
            let _ = writeln!(text, "  {sentence}");
        }
        list(text, &explanation.settings_of(Some(index)));
    }
    let _ = writeln!(text, "\nAll pools");
    list(text, &explanation.settings_of(None));
}

/// Settings, written ones before defaults. Defaults shared by all items of a list appear once.
fn list(text: &mut String, settings: &[(&str, &Setting)]) {
    let mut rows = Vec::new();
    for (origin, heading) in [
        (Origin::Written, "written"),
        (Origin::Default, "by default"),
    ] {
        let mut listed = BTreeSet::new();
        for (path, setting) in settings.iter().filter(|(_, one)| one.origin == origin) {
            let path = match origin {
                Origin::Written => (*path).to_owned(),
                Origin::Default => without_indices(path),
            };
            if listed.insert(path.clone()) {
                rows.push((heading, path, value(setting)));
            }
        }
    }
    let width = rows.iter().map(|(_, path, _)| path.len()).max();
    let width = width.unwrap_or_default();
    let mut last = "";
    for (heading, path, value) in rows {
        if heading != last {
            let _ = writeln!(text, "  {heading}:");
            last = heading;
        }
        let _ = writeln!(text, "    {path:width$}  {value}");
    }
}

/// `workers[3].set` as `workers[].set`.
fn without_indices(path: &str) -> String {
    let mut parts = path.split('[');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |path, part| {
        let (_, rest) = part.split_once(']').unwrap_or_default();
        format!("{path}[]{rest}")
    })
}

fn value(setting: &Setting) -> String {
    match (&setting.value, &setting.unit) {
        (Value::Null, _) => "none".to_owned(),
        (Value::String(text), _) if !text.is_empty() => text.clone(),
        (value, Some(unit)) if value == 1 => format!("{value} {}", unit.trim_end_matches('s')),
        (value, Some(unit)) => format!("{value} {unit}"),
        (value, None) => value.to_string(),
    }
}

fn warn(text: &mut String, warnings: &[Warning], bootstrap: &Path) {
    let count = match warnings.len() {
        0 => "no warning".to_owned(),
        1 => "1 warning".to_owned(),
        several => format!("{several} warnings"),
    };
    let _ = writeln!(text, "\n{}: {count}", bootstrap.display());
    for warning in warnings {
        let _ = writeln!(
            text,
            "\n  {}\n    where  {}\n    wrong  {}\n    right  {}",
            name_of(&warning.code),
            warning.place,
            warning.wrong,
            warning.right
        );
    }
}
