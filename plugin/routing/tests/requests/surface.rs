//! Tests of routing by the request line alone, and of unusual requests that engines accept.

use routing::fleet::Role;
use routing::request::{Generation, Head, Kind};
use routing::route::{AboutModels, Plan, PlanInput, Refusal, Router};
use serde_json::{Value, json};

use crate::support::*;

fn plan(router: &mut Router, generation: Generation, body: &[u8]) -> Result<Plan, Refusal> {
    router.plan(generation, body, PlanInput::default())
}

fn strict(protocol: &str) -> Router {
    bound(router(
        protocol,
        &two_by_two(),
        json!({"trust_clients": false}),
    ))
}

/// The router with Mooncake's engines known, as from their bootstrap servers.
fn bound(mut router: Router) -> Router {
    let prefills = router.fleet().of_role(Role::Prefill);
    let lives: Vec<_> = prefills.map(|worker| worker.incarnation()).collect();
    for life in lives {
        router.on_reply(&life, br#"{"0": {"engine_id": "e"}}"#);
    }
    router
}

fn kind(router: &Router, method: &str, path: &str) -> Result<Kind, Refusal> {
    router.kind(Head {
        method: method.as_bytes(),
        path: path.as_bytes(),
        encoding: None,
    })
}

#[test]
fn found_b5_a_path_that_the_pool_does_not_name_is_not_found() {
    for protocol in ["nixl", "sglang", "direct", "aggregated"] {
        let router = router(protocol, &[], json!({}));
        for (method, path) in [
            ("GET", "/flush_cache"),
            ("POST", "/update_weights_from_disk"),
            ("GET", "/server_info"),
        ] {
            let refusal = kind(&router, method, path).unwrap_err();
            assert_eq!((refusal.status(), refusal.code()), (404, "unknown_path"));
        }
        let known = kind(&router, "POST", "/v1/chat/completions");
        assert_eq!(known, Ok(Kind::Generation(Generation::Chat)));
    }
}

#[test]
fn found_w10_a_post_without_a_body_goes_to_a_worker() {
    for protocol in ["nixl", "sglang", "trtllm"] {
        let mut router = strict(protocol);
        let (dispatch, _) = forward(plan(&mut router, Generation::Other, b""));
        let port = dispatch.destinations.first().unwrap().port();
        assert!([11, 12].contains(&port), "{port}");
        let (dispatch, _) = forward(router.plan_encoded(b"", None));
        assert!(!dispatch.destinations.is_empty());
        // Where a body is required, the error names it.
        for generation in [Generation::Chat, Generation::Completions] {
            let refusal = refusal(plan(&mut router, generation, b""));
            assert_eq!((refusal.status(), refusal.code()), (400, "invalid_field"));
            assert!(refusal.to_string().contains("body"), "{refusal}");
        }
    }
}

/// Pairs whose decode workers also run whole requests.
fn with_whole(protocol: &str) -> Router {
    let fields = json!({"trust_clients": false, "decode": {"runs_whole_requests": true}});
    bound(router(protocol, &two_by_two(), fields))
}

fn asking(members: &Value) -> Vec<u8> {
    with(json!({"model": "m", "prompt": "p"}), members.clone())
        .to_string()
        .into_bytes()
}

/// A request that no hand-off serves runs on one worker, unchanged, where possible; else the refusal names the field.
fn assert_not_split(protocol: &str, generation: Generation, body: &[u8], field: &str) {
    let (dispatch, assignment) = forward(plan(&mut with_whole(protocol), generation, body));
    assert!(
        dispatch.edits.is_none() && assignment.prefill.is_none(),
        "{field}"
    );
    let refusal = refusal(plan(&mut strict(protocol), generation, body));
    assert_eq!(refusal.status(), 400, "{refusal}");
    assert!(
        matches!(refusal, Refusal::Field { name, .. } if name == field),
        "{refusal}"
    );
}

#[test]
fn found_w4_what_a_hand_off_cannot_serve_runs_whole_or_is_refused() {
    for (protocols, members, field) in [
        (
            &["nixl", "mooncake", "trtllm"][..],
            json!({"prompt_logprobs": 0}),
            "prompt_logprobs",
        ),
        (
            &["nixl", "mooncake", "trtllm", "sglang"],
            json!({"echo": true, "logprobs": 1}),
            "echo",
        ),
        (
            &["trtllm"],
            json!({"return_context_logits": true}),
            "return_context_logits",
        ),
        (
            &["nixl", "mooncake"],
            json!({"use_beam_search": true}),
            "use_beam_search",
        ),
    ] {
        for protocol in protocols {
            let body = asking(&members);
            assert_not_split(protocol, Generation::Completions, &body, field);
        }
    }
    for (members, field) in [
        (json!({"background": true}), "background"),
        (json!({"previous_response_id": "r"}), "previous_response_id"),
    ] {
        let body = with(json!({"model": "m", "input": "p"}), members).to_string();
        assert_not_split("nixl", Generation::Responses, body.as_bytes(), field);
    }
}

#[test]
fn found_w4_what_a_hand_off_can_serve_is_split_still() {
    for members in [
        json!({"logprobs": 1}),
        json!({"echo": true}),
        json!({"echo": false, "logprobs": 1}),
        json!({"prompt_logprobs": null}),
        json!({"use_beam_search": false}),
    ] {
        for protocol in ["nixl", "trtllm"] {
            let body = asking(&members);
            prefill(plan(
                &mut with_whole(protocol),
                Generation::Completions,
                &body,
            ));
        }
    }
}

#[test]
fn found_w4_a_sidecar_is_spared_what_its_engines_cannot_hand_over() {
    let body = asking(&json!({"prompt_logprobs": 1}));
    let (dispatch, _) = forward(plan(
        &mut with_whole("llmd"),
        Generation::Completions,
        &body,
    ));
    let headers: Vec<&str> = dispatch.headers.iter().map(|(name, _)| *name).collect();
    assert!(!headers.contains(&"x-prefiller-host-port"), "{headers:?}");
    let refusal = refusal(plan(&mut strict("llmd"), Generation::Completions, &body));
    assert_eq!(refusal.status(), 400);
}

#[test]
fn found_w5_an_embedded_prompt_is_served_and_a_list_of_them_is_a_batch() {
    let one = json!({"model": "m", "prompt_embeds": "QQ=="}).to_string();
    for protocol in ["nixl", "trtllm"] {
        let mut router = strict(protocol);
        prefill(plan(&mut router, Generation::Completions, one.as_bytes()));
    }
    let two = json!({"model": "m", "prompt": "", "prompt_embeds": ["QQ==", "QQ=="]});
    let two = two.to_string();
    assert_not_split("nixl", Generation::Completions, two.as_bytes(), "prompt");
}

#[test]
fn found_w_responses_of_sglang_are_split_only_where_the_pool_says_so() {
    let body = json!({"model": "m", "input": "p"}).to_string();
    let ask = |router: &mut Router| plan(router, Generation::Responses, body.as_bytes());
    let refusal = refusal(ask(&mut strict("sglang")));
    assert_eq!(
        (refusal.status(), refusal.code()),
        (501, "no_handoff_for_path")
    );
    let (_, assignment) = forward(ask(&mut with_whole("sglang")));
    assert!(assignment.prefill.is_none());
    let fields = json!({"responses": "split"});
    prefill(ask(&mut router("sglang", &two_by_two(), fields.clone())));
    // In other protocols the protocol alone decides.
    prefill(ask(&mut strict("nixl")));
    let error = configured("nixl", &two_by_two(), fields).unwrap_err();
    assert!(error.to_string().contains("responses"), "{error}");
}

/// Aggregated workers only: in a pool without a hand-off, and in one with it.
fn whole_alone(protocol: &str) -> Router {
    let workers = [worker("aggregated", 1), worker("aggregated", 2)];
    router(protocol, &workers, json!({"trust_clients": false}))
}

#[test]
fn found_w_whole_workers_get_what_engines_take() {
    let chat = json!({"model": "m", "messages": []});
    for (generation, body) in [
        (Generation::Chat, with(chat.clone(), json!({"stream": 1}))),
        (
            Generation::Chat,
            with(chat.clone(), json!({"stream": "true"})),
        ),
        (Generation::Chat, with(chat.clone(), json!({"n": 1.0}))),
        (Generation::Chat, with(chat.clone(), json!({"n": "2"}))),
        (Generation::Chat, with(chat, json!({"max_tokens": "5"}))),
        (Generation::Chat, json!({"messages": []})),
        (
            Generation::Completions,
            json!({"model": null, "prompt": "p"}),
        ),
        (Generation::Completions, json!({"model": "m"})),
        (Generation::Responses, json!({"input": "p"})),
    ] {
        let body = body.to_string();
        for protocol in ["aggregated", "nixl"] {
            let mut router = whole_alone(protocol);
            let (dispatch, _) = forward(plan(&mut router, generation, body.as_bytes()));
            assert!(dispatch.edits.is_none(), "{body}");
        }
    }
    // Bodies that no engine accepts, and fields that clients must not set, are still refused.
    for body in ["[]", r#"{"messages":[],"bootstrap_room":7}"#] {
        let mut router = whole_alone("aggregated");
        let refusal = refusal(plan(&mut router, Generation::Chat, body.as_bytes()));
        assert_eq!(refusal.status(), 400, "{body}");
    }
    // These fields decide how a pair's legs are edited.
    let body = br#"{"model":"m","messages":[],"stream":1}"#;
    let refusal = refusal(plan(&mut strict("nixl"), Generation::Chat, body));
    assert!(matches!(refusal, Refusal::Field { name: "stream", .. }));
}

/// Pairs that take 100 tokens, and one decode worker that takes more.
fn of_length(protocol: &str, others: Value) -> Router {
    let of = |role, id, most: u64| worker_with(role, id, json!({"max_model_len": most}));
    let workers = [
        of("prefill", 1, 100),
        of("decode", 11, 50),
        of("decode", 12, 100),
    ];
    let fields = with(json!({"trust_clients": false}), others);
    bound(router(protocol, &workers, fields))
}

#[test]
fn found_v1_what_is_surely_too_long_is_refused_before_prefill() {
    let ids = |count: usize| vec![7; count];
    for protocol in ["nixl", "mooncake", "sglang"] {
        for (generation, body, fits) in [
            (
                Generation::Chat,
                json!({"messages": [], "max_tokens": 99}),
                true,
            ),
            (
                Generation::Chat,
                json!({"messages": [], "max_tokens": 100}),
                false,
            ),
            (
                Generation::Chat,
                json!({"messages": [], "max_completion_tokens": 100, "max_tokens": 1}),
                false,
            ),
            (
                Generation::Completions,
                json!({"prompt": ids(90), "max_tokens": 10}),
                true,
            ),
            (
                Generation::Completions,
                json!({"prompt": ids(90), "max_tokens": 11}),
                false,
            ),
            (Generation::Completions, json!({"prompt": ids(99)}), true),
            (Generation::Completions, json!({"prompt": ids(100)}), false),
            (
                Generation::Completions,
                json!({"prompt": [ids(100)]}),
                false,
            ),
            // Prompts that the engine cuts, and prompts that cannot be counted here.
            (
                Generation::Completions,
                json!({"prompt": ids(100), "truncate_prompt_tokens": 5, "max_tokens": 9}),
                true,
            ),
            (
                Generation::Completions,
                json!({"prompt": "x".repeat(4_000), "max_tokens": 9}),
                true,
            ),
        ] {
            let body = with(json!({"model": "m"}), body).to_string();
            let mut router = of_length(protocol, json!({}));
            let outcome = plan(&mut router, generation, body.as_bytes());
            if fits {
                prefill(outcome);
                continue;
            }
            let refusal = refusal(outcome);
            let found = (refusal.status(), refusal.code());
            assert_eq!(found, (400, "context_length_exceeded"), "{body}");
            assert!(refusal.to_string().contains("100 tokens"), "{refusal}");
            assert_eq!(router.total_load(), routing::load::Load::default());
        }
    }
    let generate = json!({"input_ids": ids(60), "sampling_params": {"max_new_tokens": 50}});
    let mut router = of_length("sglang", json!({}));
    let outcome = plan(
        &mut router,
        Generation::Generate,
        generate.to_string().as_bytes(),
    );
    assert_eq!(refusal(outcome).code(), "context_length_exceeded");
}

#[test]
fn found_v1_what_is_not_known_or_is_cut_by_the_engine_is_let_through() {
    let body = json!({"model": "m", "prompt": "p", "max_tokens": 1_000}).to_string();
    let ask = |mut router: Router| plan(&mut router, Generation::Completions, body.as_bytes());
    prefill(ask(of_length("trtllm", json!({}))));
    prefill(ask(strict("nixl")));
    // The pool's limit counts for workers without one.
    let fields = json!({"max_model_len": 1_000});
    assert_eq!(
        refusal(ask(bound(router("nixl", &two_by_two(), fields)))).status(),
        400
    );
    let one = [
        worker("prefill", 1),
        worker_with("decode", 11, json!({"max_model_len": 9})),
    ];
    assert_eq!(refusal(ask(router("nixl", &one, json!({})))).status(), 400);
    let some = [
        worker("prefill", 1),
        worker("decode", 11),
        worker_with("decode", 12, json!({"max_model_len": 9})),
    ];
    prefill(ask(router("nixl", &some, json!({}))));
}

fn models(router: &Router) -> Value {
    let models = router.models().unwrap();
    serde_json::to_value(models).unwrap()["data"].take()
}

#[test]
fn found_v5_models_are_told_with_what_is_known_of_them() {
    let list = models(&of_length("nixl", json!({})));
    let only = &list[0];
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!((&only["id"], &only["root"]), (&json!("m"), &json!("m")));
    assert_eq!(
        (&only["max_model_len"], &only["parent"]),
        (&json!(50), &Value::Null)
    );
    assert_eq!(only["permission"][0]["object"], "model_permission");
    let unknown = models(&strict("nixl"));
    assert_eq!(unknown[0].get("max_model_len"), None);
    let pools = router("nixl", &two_by_two(), json!({"max_model_len": 77}));
    assert_eq!(models(&pools)[0]["max_model_len"], 77);
}

#[test]
fn found_w11_adapters_are_among_the_models_while_theirs_is_served() {
    let with_adapter = |role, id| worker_with(role, id, json!({"adapters": ["a", "b"]}));
    let workers = [
        with_adapter("prefill", 1),
        with_adapter("decode", 11),
        worker_with("decode", 12, json!({"model": "other", "adapters": ["c"]})),
    ];
    let rewrites = json!({"model_rewrites": [{"model": "mine", "targets": [{"model": "a"}]}]});
    let mut router = router("nixl", &workers, rewrites);
    let list = models(&router);
    let list = list.as_array().unwrap();
    let ids: Vec<_> = list
        .iter()
        .map(|model| ["id", "root", "parent"].map(|name| model[name].as_str()))
        .collect();
    assert_eq!(
        ids,
        [
            [Some("a"), Some("a"), Some("m")],
            [Some("b"), Some("b"), Some("m")],
            [Some("m"), Some("m"), None],
            [Some("mine"), Some("a"), None],
        ]
    );
    leave(&mut router, &[11]);
    assert_eq!(models(&router), json!([]));
}

#[test]
fn found_v5_a_path_about_models_says_which() {
    let one = |name: &str| Some(AboutModels::One(name.to_owned()));
    let ready = |name: &str| Some(AboutModels::Ready(name.to_owned()));
    for (path, asked) in [
        ("/v1/models", Some(AboutModels::All)),
        ("/v1/models/", Some(AboutModels::All)),
        ("/v1/models/m", one("m")),
        ("/v1/models/m/", one("m")),
        ("/v1/models/org/m", one("org/m")),
        ("/v1/models/org%2Fm", one("org/m")),
        ("/v1/models/org%2Fm/ready", ready("org/m")),
        ("/v1/models/m/ready", ready("m")),
        ("/v1/models/%ff", None),
        ("/v1/modelsandmore", None),
        ("/v1/completions", None),
    ] {
        assert_eq!(AboutModels::read(path.as_bytes()), asked, "{path}");
    }
}

/// The gateway answers about one model as in the list: any worker asked might serve another model.
#[test]
fn found_v5_one_model_is_told_of_as_in_the_list() {
    let workers = [
        worker_with("aggregated", 1, json!({"model": "a", "adapters": ["l"]})),
        worker_with("aggregated", 2, json!({"model": "b"})),
    ];
    let mut router = router("aggregated", &workers, json!({}));
    let listed = json!(router.models().unwrap());
    for name in ["a", "b", "l"] {
        let model = json!(router.named(name).unwrap().unwrap());
        assert!(
            listed["data"].as_array().unwrap().contains(&model),
            "{model}"
        );
    }
    let unknown = router.named("c").unwrap().unwrap_err();
    assert_eq!(unknown.status(), 404);
    leave(&mut router, &[2]);
    assert_eq!(router.named("b").unwrap().unwrap_err().status(), 503);
    // Where workers do not name their model, one of them is asked.
    let workers = [worker_with("aggregated", 1, json!({"model": null}))];
    let router = crate::support::router("aggregated", &workers, json!({}));
    assert!(router.named("a").is_none());
}
