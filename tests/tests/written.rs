//! Names in the documents exist: the tests of tests/FIELD_CASES.md and SECURITY.md, and the rows of docs/failures.md. README is
//! short.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;

use pd_router_e2e::paths::workspace;

fn read(path: &str) -> String {
    let path = workspace().join(path);
    fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

/// Whether this source has a function of this name.
fn has_function(source: &str, name: &str) -> bool {
    let wanted = format!("fn {name}");
    let places = source.match_indices(&wanted);
    let after = |(at, found): (usize, &str)| source[at + found.len()..].chars().next();
    places
        .map(after)
        .any(|next| matches!(next, Some('(' | '<')))
}

/// Everything between back quotes that names a test, as `path::function`.
fn tests_named(text: &str) -> Vec<(&str, &str)> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted
        .filter_map(|quoted| quoted.split_once(".rs::"))
        .map(|(path, function)| (path, function.trim()))
        .collect()
}

/// Fails if a document names fewer tests than that, or one that does not exist.
fn assert_names_tests(document: &str, least: usize) {
    let text = read(document);
    let named = tests_named(&text);
    assert!(named.len() > least, "only {} tests are named", named.len());
    for (path, function) in named {
        let source = read(&format!("{path}.rs"));
        assert!(
            has_function(&source, function),
            "{path}.rs has no {function}"
        );
    }
}

/// Most words of README: what is beyond them belongs into a page of docs/.
const README_WORDS: usize = 1200;

/// Longest line of README, in characters; tables aside.
const README_COLUMNS: usize = 120;

#[test]
fn readme_is_short() {
    let page = read("README.md");
    let words = page.split_whitespace().count();
    assert!(words <= README_WORDS, "{words} words");
    let mut lines = page.lines().filter(|line| !line.starts_with('|'));
    let long = lines.find(|line| line.chars().count() > README_COLUMNS);
    assert_eq!(long, None);
}

#[test]
fn the_field_cases_name_tests_that_exist() {
    assert_names_tests("tests/FIELD_CASES.md", 20);
}

#[test]
fn the_limits_name_tests_that_exist() {
    assert_names_tests("SECURITY.md", 40);
}

/// Each limit names its test, and each fuzz target has its figures.
#[test]
fn every_limit_has_a_test_and_every_fuzz_target_its_figures() {
    let text = read("SECURITY.md");
    let section = |heading: &str| {
        let after = text.split(&format!("\n## {heading}\n")).nth(1);
        let section = after.and_then(|after| after.split("\n## ").next());
        section.unwrap_or_else(|| panic!("there is no section {heading}"))
    };
    let rows = section("Limits")
        .lines()
        .filter(|line| line.starts_with('|'));
    let rows: Vec<&str> = rows.skip(2).collect();
    assert!(rows.len() > 20, "only {} limits", rows.len());
    for row in rows {
        assert!(!tests_named(row).is_empty(), "{row}");
    }
    let figures = section("Fuzzing");
    let targets = fs::read_dir(workspace().join("fuzz/targets")).expect("the fuzz targets");
    for target in targets {
        let path = target.expect("a fuzz target").path();
        let name = path
            .file_stem()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        assert!(
            figures.contains(&format!("| `{name}` |")),
            "{name} has no figures"
        );
    }
}

/// Each entry names its test, or the reason why it does not apply.
#[test]
fn every_field_case_has_a_test_or_a_reason() {
    let text = read("tests/FIELD_CASES.md");
    let mut entries = text.split("\n### ").skip(1).peekable();
    assert!(entries.peek().is_some(), "there are no entries");
    for entry in entries {
        let entry = entry.split("\n## ").next().unwrap_or_default();
        let reasoned = entry.contains("Does not apply, because");
        assert!(!tests_named(entry).is_empty() || reasoned, "{entry}");
    }
}

/// The rows of docs/failures.md under each of its columns.
fn documented() -> BTreeMap<String, Vec<String>> {
    let text = read("docs/failures.md");
    let lines = text.lines().filter(|line| line.starts_with('|'));
    let cells = lines.map(|line| -> Vec<String> {
        let cells = line.trim_matches('|').split('|');
        cells
            .map(|cell| cell.trim().trim_matches('`').to_owned())
            .collect()
    });
    let mut cells = cells.filter(|cells| !cells.concat().starts_with('-'));
    let heads = cells.next().unwrap_or_default();
    let mut columns: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in cells {
        for (head, cell) in heads.iter().zip(&row).skip(2) {
            let rows = columns.entry(head.clone()).or_default();
            if cell != "–" {
                rows.extend(row.first().cloned());
            }
        }
    }
    columns
}

/// The rows that the suite runs under each protocol.
fn run() -> BTreeMap<String, Vec<String>> {
    let text = read("tests/tests/faults/main.rs");
    let (_, listed) = text
        .split_once("columns! {\n")
        .unwrap_or_else(|| panic!("the suite lists no columns"));
    let blocks = listed.split('}').filter_map(|block| {
        let (head, rows) = block.rsplit_once(" {\n")?;
        head.contains('=').then_some((head, rows))
    });
    let column = |(head, rows): (&str, &str)| {
        let head = head.split('=').next().unwrap_or_default();
        let name = head
            .split_whitespace()
            .last()
            .unwrap_or_default()
            .to_owned();
        let rows = rows.split(',').map(|row| row.trim().to_owned());
        (name, rows.filter(|row| !row.is_empty()).collect())
    };
    blocks.map(column).collect()
}

/// The texts in a folder and its subfolders.
fn texts_below(folder: &str) -> Vec<(String, String)> {
    let entries = fs::read_dir(workspace().join(folder))
        .unwrap_or_else(|error| panic!("cannot read {folder}: {error}"));
    let below = entries.flat_map(|entry| {
        let entry = entry.unwrap_or_else(|error| panic!("{folder}: {error}"));
        let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
        match entry.path().is_dir() {
            true => texts_below(&path),
            false => vec![(path.clone(), read(&path))],
        }
    });
    below.collect()
}

#[test]
fn found_v6_every_vllm_worker_has_the_role_that_it_plays() {
    let texts = texts_below("envoy").into_iter().chain(texts_below("docs"));
    let mut roles = BTreeMap::new();
    for (path, text) in texts {
        let of_role = |role: &str| text.matches(&format!("\"kv_role\":\"{role}\"")).count();
        let [both, producers, consumers] = ["kv_both", "kv_producer", "kv_consumer"].map(of_role);
        assert_eq!(both, 0, "{path}");
        if producers + consumers > 0 {
            roles.insert(path, (producers, consumers));
        }
    }
    assert!(roles.len() > 2, "{roles:?}");
    assert!(roles.values().all(|found| *found == (1, 1)), "{roles:?}");
}

#[test]
fn every_row_of_failures_is_run_where_it_has_an_entry_and_nowhere_else() {
    assert_eq!(documented(), run());
}
