//! Tests of requests as parsed and refused.

use super::*;

fn completions(body: &str) -> Result<Generation, Refusal> {
    Generation::parse(Endpoint::Completions, body.as_bytes())
}

#[test]
fn all_prompt_shapes_are_counted() {
    let cases = [
        (r#""12345678""#, vec![2]),
        (r#""123456789""#, vec![3]),
        (r#"[1,2,3]"#, vec![3]),
        (r#"["1234","12345"]"#, vec![1, 2]),
        (r#"[[1,2],[3]]"#, vec![2, 1]),
    ];
    for (prompt, tokens) in cases {
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        assert_eq!(completions(&body).expect(prompt).prompts, tokens);
    }
    for prompt in ["[]", "[[]]", "null", r#""""#, "5", r#"[1,"a"]"#] {
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        assert!(completions(&body).is_err(), "{prompt}");
    }
}

#[test]
fn chat_counts_text_and_parts_and_knows_prompts_apart() {
    let parse = |content: &str| {
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":{content},"x":[[]]}}]}}"#
        );
        Generation::parse(Endpoint::Chat, body.as_bytes()).expect("valid")
    };
    let text = parse(r#""12345678""#);
    let parts = parse(r#"[{"type":"text","text":"12345678"},{"type":"image_url"}]"#);
    assert_eq!(text.prompts, [2]);
    assert_eq!(parts.prompts, [2]);
    assert_eq!(text.fingerprint, parse(r#""12345678""#).fingerprint);
    assert_ne!(text.fingerprint, parse(r#""12345679""#).fingerprint);
    assert_eq!(parse("null").prompts, [1]);
}

#[test]
fn the_last_of_equal_names_counts() {
    let body = r#"{"model":"a","prompt":"x","max_tokens":0,"model":"b","max_tokens":3}"#;
    let generation = completions(body).expect("valid");
    assert_eq!(
        (generation.model.as_deref(), generation.output_tokens),
        (Some("b"), 3)
    );
}

#[test]
fn faults_are_refused_by_name() {
    let cases = [
        ("", "Invalid JSON"),
        ("[]", "Invalid JSON"),
        (r#"{"model":3,"prompt":"x"}"#, "`model`"),
        (r#"{"model":"m"}"#, "`prompt`"),
        (r#"{"model":"m","prompt":"x","max_tokens":0}"#, "max_tokens"),
        (
            r#"{"model":"m","prompt":"x","max_tokens":-1}"#,
            "max_tokens",
        ),
        (
            r#"{"model":"m","prompt":"x","max_tokens":1.5}"#,
            "max_tokens",
        ),
        (
            r#"{"model":"m","prompt":"x","max_tokens":1e30}"#,
            "max_tokens",
        ),
        (r#"{"model":"m","prompt":"x","n":0}"#, "n must"),
        (
            r#"{"model":"m","prompt":"x","max_tokens":1,"min_tokens":2}"#,
            "min_tokens",
        ),
        (
            r#"{"model":"m","prompt":"x","stream_options":{}}"#,
            "Stream options",
        ),
        (r#"{"model":"m","prompt":"x","stream":"yes"}"#, "`stream`"),
    ];
    for (body, named) in cases {
        let refusal = completions(body).expect_err(body).to_string();
        assert!(refusal.contains(named), "{body}: {refusal}");
    }
}

#[test]
fn depth_is_no_danger() {
    let deep = format!(
        r#"{{"model":"m","prompt":"x","x":{}{}}}"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    assert!(completions(&deep).is_ok());
    let prompt = format!(r#"{{"model":"m","prompt":{}"#, "[".repeat(100_000));
    assert!(completions(&prompt).is_err());
}
