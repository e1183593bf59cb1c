//! Tests of the memory that a configuration's limits allow, as in `docs/memory.md`.

use routing::config::{Config, Limits};
use serde_json::{Value, json};

const MIB: usize = 1024 * 1024;

fn most(pool: Value, limits: Value) -> usize {
    config(pool, limits).most_vm_bytes()
}

fn config(pool: Value, limits: Value) -> Config {
    let mut whole =
        json!({"name": "p", "protocol": "nixl", "discovery": {"static": {"workers": []}}});
    let fields = whole.as_object_mut().unwrap();
    fields.extend(pool.as_object().unwrap().clone());
    let document = json!({"pools": [whole], "limits": limits}).to_string();
    Config::parse(document.as_bytes()).unwrap()
}

fn page() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/memory.md");
    std::fs::read_to_string(page).expect("the page")
}

#[test]
fn found_b9_the_page_has_what_the_defaults_come_to_and_it_is_less_than_a_vm_may_take() {
    let plain = most(json!({}), json!({}));
    let with_queue = most(
        json!({"admission": {"decode": {"blocks": 100}, "queue": {}}}),
        json!({}),
    );
    let sums = format!(
        "**{} MiB**, with a queue **{} MiB**",
        plain / MIB,
        with_queue / MIB
    );
    assert!(page().contains(&sums), "{sums}");
    let twice = 2 * Limits::default().bodies_in_flight_bytes;
    let with_bodies = format!(
        "**{} MiB**, with a queue **{} MiB**",
        (plain + twice) / MIB,
        (with_queue + twice) / MIB
    );
    assert!(page().contains(&with_bodies), "{with_bodies}");
    assert!(with_queue < 1024 * MIB);
}

#[test]
fn found_b9_each_thread_counts_and_each_body_twice() {
    let config = config(json!({}), json!({"bodies_in_flight_bytes": 5 * MIB}));
    let of_one = config.most_vm_bytes() + 10 * MIB;
    assert_eq!(config.most_bytes(1), of_one);
    assert_eq!(config.most_bytes(8), 8 * of_one);
    assert_eq!(config.most_bytes(usize::MAX), usize::MAX);
}

#[test]
fn each_limit_counts() {
    let before = most(json!({}), json!({}));
    for (pool, more) in [
        (json!({"prefixes": {"max_blocks": 2 * MIB}}), 32 * MIB),
        (json!({"decode": {"recovery_bytes": 65 * MIB}}), MIB),
        (json!({"cleanup": {"held_bytes": 65 * MIB}}), MIB),
    ] {
        assert_eq!(most(pool.clone(), json!({})), before + more, "{pool}");
    }
    let body = most(json!({}), json!({"body_bytes": 32 * MIB}));
    assert_eq!(body, before + (7 * 32 - 4 * 32 - 16) * MIB);
    let queue = json!({"admission": {"decode": {"blocks": 100}, "queue": {}}});
    let waiting = most(queue, json!({"bodies_in_flight_bytes": 4 * MIB}));
    assert_eq!(waiting, before + 5 * MIB);
}
