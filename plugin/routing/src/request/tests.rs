//! Tests of the reading of requests: their kind, their errors, their length.

use super::*;

fn kind(method: &str, path: &str) -> Kind {
    Head {
        method: method.as_bytes(),
        path: path.as_bytes(),
        encoding: None,
    }
    .kind()
}

#[test]
fn only_posts_to_generation_paths_have_two_legs() {
    for (path, generation) in [
        ("/v1/chat/completions", Generation::Chat),
        ("/v1/chat/completions?x=1", Generation::Chat),
        ("/openai/v1/chat/completions/", Generation::Chat),
        ("/v1/completions", Generation::Completions),
        ("/v1/responses", Generation::Responses),
        ("/generate", Generation::Generate),
        ("/generate/?x", Generation::Generate),
        ("/sglang/generate", Generation::Generate),
        ("/inference/v1/generate", Generation::Other),
        ("/api/generate", Generation::Other),
        ("/generate_stream", Generation::Other),
        ("/v1/chat%2Fcompletions", Generation::Chat),
        ("/v1/%63hat/completion%73", Generation::Chat),
        ("/v1/chat/completions/batch", Generation::Other),
        ("/invocations", Generation::Other),
        ("/v1/embeddings", Generation::Other),
        ("/flush_cache", Generation::Other),
        ("/", Generation::Other),
        ("", Generation::Other),
        ("/x?y=/v1/completions", Generation::Other),
    ] {
        assert_eq!(kind("POST", path), Kind::Generation(generation), "{path}");
        assert_eq!(kind("GET", path), Kind::Plain, "{path}");
    }
    for path in [
        "/tokenize",
        "/v1/detokenize",
        "/v1/chat/completions/render",
        "/v1/messages/count_tokens",
    ] {
        assert_eq!(kind("POST", path), Kind::Plain, "{path}");
    }
}

#[test]
fn found_w10_what_is_asked_of_a_stored_answer_generates_nothing() {
    for (method, path) in [
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/openai/v1/responses/resp_1/cancel/"),
        ("DELETE", "/v1/chat/completions"),
    ] {
        assert_eq!(kind(method, path), Kind::Plain, "{method} {path}");
    }
    for path in ["/v1/responses", "/v1/responses/"] {
        let responses = Kind::Generation(Generation::Responses);
        assert_eq!(kind("POST", path), responses, "{path}");
    }
}

fn refused(generation: Generation, body: &str) -> Refusal {
    Request::parse(generation, body.as_bytes())
        .map(|_| ())
        .unwrap_err()
}

#[test]
fn a_wrong_field_is_named() {
    for (generation, body, name) in [
        (Generation::Chat, "{}", "model"),
        (Generation::Chat, r#"{"model":1,"messages":[]}"#, "model"),
        (Generation::Chat, r#"{"model":"","messages":[]}"#, "model"),
        (Generation::Chat, r#"{"model":"m"}"#, "messages"),
        (
            Generation::Chat,
            r#"{"model":"m","messages":"hi"}"#,
            "messages",
        ),
        (
            Generation::Completions,
            r#"{"model":"m","messages":[]}"#,
            "prompt",
        ),
        (
            Generation::Completions,
            r#"{"model":"m","prompt":3}"#,
            "prompt",
        ),
        (Generation::Responses, r#"{"model":"m"}"#, "input"),
        (
            Generation::Chat,
            r#"{"model":"m","messages":[],"stream":"yes"}"#,
            "stream",
        ),
        (Generation::Chat, "[]", "body"),
        (Generation::Generate, "{}", "text"),
        (Generation::Generate, r#"{"text":null}"#, "text"),
        (Generation::Generate, r#"{"text":{}}"#, "text"),
        (Generation::Generate, r#"{"input_ids":"a"}"#, "input_ids"),
        (
            Generation::Generate,
            r#"{"input_embeds":1}"#,
            "input_embeds",
        ),
        (Generation::Generate, r#"{"text":"a","model":1}"#, "model"),
        (Generation::Generate, r#"{"text":"a","stream":1}"#, "stream"),
    ] {
        let refusal = refused(generation, body);
        assert!(
            matches!(refusal, Refusal::Field { name: named, .. } if named == name),
            "{body}: {refusal}"
        );
    }
    assert!(matches!(
        refused(Generation::Chat, "{,}"),
        Refusal::NotJson { .. }
    ));
}

#[test]
fn prompts_of_all_shapes_are_measured() {
    let tokens = |prompt: &str| {
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        Request::parse(Generation::Completions, body.as_bytes())
            .unwrap()
            .prompt_tokens
    };
    assert_eq!(tokens("\"\""), 1);
    assert_eq!(tokens("[1, 2, 3]"), 3);
    assert_eq!(tokens("[[1,2],[3]]"), 3);
    assert_eq!(tokens(r#"["some text","more"]"#), 5);
    assert_eq!(tokens(&format!("\"{}\"", "x".repeat(398))), 100);
}

#[test]
fn found_w5_a_prompt_may_be_embedded_alone() {
    let tokens = |members: &str| {
        let body = format!(r#"{{"model":"m",{members}}}"#);
        let request = Request::parse(Generation::Completions, body.as_bytes());
        request.map(|request| request.prompt_tokens)
    };
    let long = format!(r#""prompt_embeds":["QQ==","{}"]"#, "A".repeat(30_000));
    for (members, expected) in [
        (r#""prompt_embeds":"QQ==""#, 1),
        (r#""prompt":null,"prompt_embeds":["QQ=="]"#, 1),
        (&long, 4),
        (r#""prompt":[1,2],"prompt_embeds":"QQ==""#, 3),
    ] {
        assert_eq!(tokens(members), Ok(expected), "{members}");
    }
    for nothing in [
        r#""prompt_embeds":null"#,
        r#""prompt_embeds":[]"#,
        r#""n":1"#,
    ] {
        let refusal = tokens(nothing).unwrap_err();
        assert!(matches!(refusal, Refusal::Field { name: "prompt", .. }));
    }
}

#[test]
fn generate_names_no_model_and_its_prompt_has_three_shapes() {
    let tokens = |member: &str| {
        let body = format!(r#"{{{member},"sampling_params":{{"max_new_tokens":7}}}}"#);
        let request = Request::parse(Generation::Generate, body.as_bytes()).unwrap();
        assert_eq!((&*request.model, request.max_tokens()), ("", Some(7)));
        request.prompt_tokens
    };
    assert_eq!(tokens(r#""text":"some text""#), 3);
    assert_eq!(tokens(r#""text":null,"input_ids":[1,2,3],"model":null"#), 3);
    assert_eq!(tokens(r#""input_ids":[[1,2],[3]]"#), 3);
    assert_eq!(tokens(r#""input_embeds":[[ [0.5, -1],[2e1,3]],[[1]] ]"#), 3);
    let named = Request::parse(Generation::Generate, br#"{"text":"a","model":"m"}"#).unwrap();
    assert_eq!((&*named.model, named.max_tokens()), ("m", None));
    let limits =
        br#"{"text":["a","b"],"sampling_params":[{"max_new_tokens":7},{"max_new_tokens":9}]}"#;
    let request = Request::parse(Generation::Generate, limits).unwrap();
    assert_eq!(request.max_tokens(), Some(9));
    let ids = Request::parse(Generation::Generate, br#"{"input_ids":[1,2]}"#).unwrap();
    assert_eq!(ids.prompt_ids(), Some(vec![1, 2]));
}

#[test]
fn a_handoff_is_the_routers_unless_it_says_nothing() {
    for name in IN_REQUESTS {
        let sets = |value: &str| {
            let body = format!(r#"{{"model":"m","messages":[],"{name}":{value}}}"#);
            let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
            let refused = match request.check_handoff_is_ours() {
                Ok(()) => None,
                Err(Refusal::Field { name, .. }) => Some(name),
                Err(other) => panic!("{other}"),
            };
            assert_eq!(request.hands_off_itself(), refused.is_some());
            refused
        };
        for nothing in ["null", "{}", "{ }"] {
            assert_eq!(sets(nothing), None, "{name} {nothing}");
        }
        for something in [
            r#"{"do_remote_prefill":true}"#,
            "[]",
            "0",
            r#""x""#,
            "false",
        ] {
            assert_eq!(sets(something), Some(name), "{name} {something}");
        }
        let twice = format!(r#"{{"model":"m","messages":[],"{name}":[1],"{name}":null}}"#);
        let request = Request::parse(Generation::Chat, twice.as_bytes()).unwrap();
        assert!(request.hands_off_itself());
    }
}

#[test]
fn a_models_name_that_is_not_unicode_is_said_to_be_so() {
    let problem = |model: &str| {
        let body = format!(r#"{{"model":{model},"messages":[]}}"#);
        let refusal = Request::parse(Generation::Chat, body.as_bytes()).unwrap_err();
        refusal.to_string()
    };
    assert_eq!(problem(r#""\ud800""#), "model: is not valid Unicode");
    assert_eq!(problem("3"), "model: must be a string");
}
