//! Tests of registration: authorisation, the meaning of a body, and the answers.

use super::*;
use crate::discovery::tests::pool;

const RULES: &str = r#""protocol":"nixl","destinations":{"original_dst":{"networks":["10.0.0.0/8","fd00::/8"]}},
    "discovery":{"registration":{"token":"s3cret"}}"#;

fn open(pool: &Pool) -> RegistrationPool<'_> {
    registration_pool(
        [pool].into_iter(),
        "/pd-router/workers",
        Some(b"Bearer s3cret"),
    )
    .unwrap()
}

fn reply(problem: &Problem) -> (u32, String) {
    let reply = problem.reply();
    (reply.status, reply.body)
}

#[test]
fn only_the_very_token_opens() {
    let pool = pool(RULES);
    let ask = |header: Option<&[u8]>| {
        registration_pool([&pool].into_iter(), "/pd-router/workers", header)
    };
    for header in [&b"Bearer s3cret"[..], b"bearer s3cret", b"BEARER  s3cret "] {
        assert!(ask(Some(header)).is_ok());
    }
    for header in [
        None,
        Some(&b""[..]),
        Some(b"Bearer"),
        Some(b"Bearer "),
        Some(b"Bearer s3cre"),
        Some(b"Bearer s3crets"),
        Some(b"Bearer s3crets3cret"),
        Some(b"Bearer S3CRET"),
        Some(b"Basic  s3cret"),
        Some(b"s3cret"),
        Some(b"\xff\xff\xff\xff\xff\xff\xff\xff"),
    ] {
        let refused = ask(header).unwrap_err().reply();
        assert_eq!(
            (refused.status, refused.headers),
            (401, vec![("www-authenticate", "Bearer")])
        );
        assert!(!refused.body.contains("s3cret"));
    }
    assert!(!format!("{pool:?}").contains("s3cret"));
}

#[test]
fn a_pool_is_found_by_its_name_and_alone_without() {
    let mut pools = vec![pool(RULES), pool(RULES)];
    pools[1].name = "q r".to_owned();
    let ask = |pools: &[Pool], path: &str| {
        let found = registration_pool(pools.iter(), path, Some(b"Bearer s3cret"));
        found.map(|registration_pool| registration_pool.pool.name.clone())
    };
    assert_eq!(ask(&pools, "/w").unwrap_err(), Problem::WhichPool);
    assert_eq!(ask(&pools, "/w?x=1&pool=p").as_deref(), Ok("p"));
    assert_eq!(ask(&pools, "/w?pool=q%20r").as_deref(), Ok("q r"));
    assert_eq!(ask(&pools[..1], "/w").as_deref(), Ok("p"));
    let none = ask(&pools, "/w?pool=z").unwrap_err();
    assert!(reply(&none).0 == 404 && reply(&none).1.contains("`z`"));
    let fixed = pool_without();
    assert_eq!(reply(&ask(&fixed, "/w").unwrap_err()).0, 404);
    assert_eq!(reply(&ask(&fixed, "/w?pool=p").unwrap_err()).0, 404);
}

fn pool_without() -> Vec<Pool> {
    vec![pool(
        r#""protocol":"nixl","discovery":{"static":{"workers":[]}}"#,
    )]
}

#[test]
fn a_worker_registers_alone_or_with_others_and_an_error_names_the_field() {
    let pool = pool(RULES);
    let put = |body: &str| read_put(body.as_bytes(), open(&pool));
    let count = |body: &str| match put(body).unwrap() {
        RegistryChange::Put(workers) => workers.len(),
        RegistryChange::Delete(_) => 0,
    };
    assert_eq!(
        count(r#"{"address":"10.0.0.1:1","role":"decode","draining":true}"#),
        1
    );
    assert_eq!(
        count(
            r#"{"workers":[{"address":"10.0.0.1:1","role":"decode"},{"address":"[fd00::1]:1","role":"prefill"}]}"#
        ),
        2
    );
    assert_eq!(count(r#"{"workers":[]}"#), 0);
    for (body, param, said) in [
        (r#"{"address":"10.0.0.1:1"}"#, None, "missing field `role`"),
        (
            r#"{"address":"10.0.0.1:1","role":"decode","port":1}"#,
            Some("port"),
            "unknown field",
        ),
        (
            r#"{"address":"host:1","role":"decode"}"#,
            Some("address"),
            "socket address",
        ),
        (r#"{"role":"decode"}"#, Some("address"), "required"),
        (
            r#"{"address":"10.0.0.1:1","role":"decode","dp_size":0}"#,
            Some("dp_size"),
            "1 to 1024",
        ),
        (
            r#"{"address":"10.0.0.1:1","role":"decode","name":"a\nb"}"#,
            Some("name"),
            "control",
        ),
        (
            r#"{"address":"192.168.0.1:1","role":"decode"}"#,
            Some("address"),
            "none of the networks",
        ),
        (
            r#"{"workers":[{"address":"10.0.0.1:1","role":"decode"},{"address":"192.168.0.1:1","role":"decode"}]}"#,
            Some("workers[1].address"),
            "none of the networks",
        ),
        (
            r#"{"workers":[{"address":"10.0.0.1:1","role":"cook"}]}"#,
            Some("workers[0].role"),
            "unknown variant",
        ),
        (
            r#"{"workers":[{"address":"10.0.0.1:1","role":"decode"},{"address":"10.0.0.1:1","role":"decode"}]}"#,
            Some("workers[1]"),
            "twice",
        ),
        (r#"{"workers":[],"x":1}"#, Some("x"), "unknown field"),
        ("[]", None, "must be a worker"),
        ("", None, "EOF"),
        ("{} {}", None, "trailing"),
    ] {
        let refused = put(body).unwrap_err().reply();
        assert_eq!(refused.status, 400, "{body}");
        let error: Value = serde_json::from_str(&refused.body).unwrap();
        assert_eq!(error["error"]["param"].as_str(), param, "{body}: {error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(said), "{body}: {message}");
    }
    let long = vec![b' '; MAX_BODY + 1];
    assert_eq!(reply(&read_put(&long, open(&pool)).unwrap_err()).0, 413);
    assert_eq!(reply(&read_delete(&long).unwrap_err()).0, 413);
}

#[test]
fn found_b16_what_is_too_long_is_so_however_it_begins() {
    let pool = pool(RULES);
    for beginning in [&b"["[..], b"  [", b"{", b"\"", b"x"] {
        let mut body = vec![b' '; MAX_BODY + 1];
        body[..beginning.len()].copy_from_slice(beginning);
        assert_eq!(
            reply(&read_put(&body, open(&pool)).unwrap_err()).0,
            413,
            "{beginning:?}"
        );
        assert_eq!(
            reply(&read_delete(&body).unwrap_err()).0,
            413,
            "{beginning:?}"
        );
    }
}

#[test]
fn found_b16_no_name_of_a_worker_is_more_than_a_line() {
    let pool = pool(RULES);
    for (field, path) in [
        (r#""model":"m‹›""#, "model"),
        (r#""namespace":"n‹›""#, "namespace"),
        (r#""set":"s‹›""#, "set"),
        (r#""name":"w‹›""#, "name"),
        (r#""adapters":["a","b‹›"]"#, "adapters[1]"),
        (
            r#""topology":{"domains":{"rack‹›":"r"}}"#,
            "topology.domains",
        ),
        (
            r#""topology":{"domains":{"rack":"r‹›"}}"#,
            "topology.domains",
        ),
        (
            r#""topology":{"kv_transfer_domain":"rack‹›"}"#,
            "topology.kv_transfer_domain",
        ),
        (r#""topology":{"taints":["t‹›"]}"#, "topology.taints"),
    ] {
        for odd in [
            r"\n", r"\r", r"\u0000", r"\u001b", r"\u007f", r"\u0085", r"\u2028", r"\u202e",
        ] {
            let body = |odd: &str| {
                let field = field.replace("‹›", odd);
                format!(r#"{{"address":"10.0.0.1:1","role":"decode",{field}}}"#)
            };
            assert!(
                read_put(body("").as_bytes(), open(&pool)).is_ok(),
                "{field}"
            );
            let refused = read_put(body(odd).as_bytes(), open(&pool)).unwrap_err();
            let refused = refused.reply();
            let error: Value = serde_json::from_str(&refused.body).unwrap();
            assert_eq!(error["error"]["param"], path, "{field} {odd}: {error}");
            assert_eq!(refused.status, 400);
        }
    }
}

#[test]
fn found_b10_what_a_worker_wrote_is_told_on_one_line_and_cut() {
    let pool = pool(RULES);
    let odd = format!("x\\n[critical] {}", "y".repeat(MAX_BODY / 2));
    for body in [
        format!(r#"{{"{odd}":1}}"#),
        format!(r#"{{"address":"{odd}","role":"decode"}}"#),
        format!(r#"{{"address":"10.0.0.1:1","role":"{odd}"}}"#),
    ] {
        let refused = read_put(body.as_bytes(), open(&pool)).unwrap_err().reply();
        assert_eq!(refused.status, 400);
        assert!(refused.body.len() < 2048, "{}", refused.body.len());
        let error: Value = serde_json::from_str(&refused.body).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(!message.contains(char::is_control), "{message}");
    }
}

#[test]
fn workers_are_taken_out_by_address_or_id() {
    let first = Named::Address("10.0.0.1:1".parse().unwrap());
    for (body, wanted) in [
        (r#"{"address":"10.0.0.1:1"}"#, vec![first]),
        (r#"{"id":18446744073709551615}"#, vec![Named::Id(u64::MAX)]),
        (
            r#"[{"address":"10.0.0.1:1"},{"id":2}]"#,
            vec![first, Named::Id(2)],
        ),
        (r#"{"workers":[{"id":2}]}"#, vec![Named::Id(2)]),
        ("[]", vec![]),
    ] {
        assert_eq!(
            read_delete(body.as_bytes()).unwrap(),
            RegistryChange::Delete(wanted)
        );
    }
    for body in [
        "{}",
        r#"{"address":"10.0.0.1:1","id":2}"#,
        r#"{"name":"x"}"#,
        "7",
        "",
    ] {
        let (status, said) = reply(&read_delete(body.as_bytes()).unwrap_err());
        assert_eq!(status, 400, "{body}: {said}");
    }
}

#[test]
fn answers_say_how_far_they_reach_and_how_old_leases_are() {
    let pool = pool(RULES);
    let registration_pool = open(&pool);
    let said: Value = serde_json::from_str(&registration_pool.registered(2).body).unwrap();
    assert_eq!(
        said,
        json!({"registered": 2, "pool": "p", "lease_ms": 15000, "scope": "this gateway only"})
    );
    let (mut registry, mut leases) = (Registry::default(), Leases::default());
    let put = read_put(
        br#"{"address":"10.0.0.1:1","role":"decode","id":7}"#,
        registration_pool,
    )
    .unwrap();
    registry
        .apply(&put, registration_pool.rules.max_workers)
        .unwrap();
    let list = |leases: &Leases| {
        let reply = registration_pool.list(&registry, leases, 14, 25);
        let said: Value = serde_json::from_str(&reply.body).unwrap();
        said["workers"][0].clone()
    };
    assert_eq!(list(&leases)["lease_age_ms"], Value::Null);
    leases.look(&registry, 10, 600);
    assert_eq!(
        list(&leases),
        json!({"address": "10.0.0.1:1", "role": "decode", "id": 7, "dp_size": 1, "draining": false, "lease_age_ms": 100})
    );
    let full = Problem::from(
        registry
            .apply(&put, 0)
            .err()
            .unwrap_or(RegistryError::Full { max: 0 }),
    );
    assert_eq!(reply(&full).0, 409);
}
