//! Tests of the Envoy-clusters source. `ANSWER` is from Envoy 1.40, shortened.

use serde_json::{Value, json};

use super::*;
use crate::discovery::tests::{answer, names, pool};
use crate::fleet::Role;

const ANSWER: &str = r#"{"cluster_statuses":[
 {"name":"decode","host_statuses":[
  {"address":{"socket_address":{"address":"127.0.0.1","port_value":59101}},
   "stats":[{"name":"cx_connect_fail"},{"value":"7","name":"cx_total"},{"name":"rq_error"},{"name":"rq_success"},{"name":"rq_timeout"},{"type":"GAUGE","name":"cx_active"}],
   "health_status":{"failed_active_health_check":true,"eds_health_status":"HEALTHY"},"weight":1,"locality":{}},
  {"address":{"socket_address":{"address":"::1","port_value":59102}},"stats":[{"name":"cx_connect_fail"}],
   "health_status":{"failed_active_health_check":true,"eds_health_status":"DRAINING"},"weight":1,"locality":{}},
  {"address":{"pipe":{"path":"/tmp/x.sock"}},"health_status":{"eds_health_status":"HEALTHY"},"weight":1,"locality":{}}],
  "circuit_breakers":{"thresholds":[{"max_connections":1024}]},"observability_name":"decode"},
 {"name":"prefill","added_via_api":true,"host_statuses":[
  {"address":{"socket_address":{"address":"10.0.0.2","port_value":8000}},"health_status":{"eds_health_status":"HEALTHY"},"hostname":"localhost","weight":1,"locality":{}},
  {"address":{"socket_address":{"address":"10.0.0.1","port_value":8000}},"health_status":{"eds_health_status":"HEALTHY"},"weight":1},
  {"address":{"socket_address":{"address":"worker.local","port_value":8000}}}]},
 {"name":"envoy_admin","host_statuses":[{"address":{"socket_address":{"address":"10.0.0.9","port_value":8000}}}]}]}"#;

fn source(fields: &str) -> ClusterPoll {
    let fields = format!(
        r#""protocol":"nixl",{fields}"discovery":{{"envoy_clusters":{{"members":{{
        "prefill":{{"role":"prefill","model":"m","dp_size":2,"kv_blocks":100}},"decode":{{"role":"decode","model":"m"}}}}}}}}"#
    );
    let pool = pool(&fields);
    let crate::config::Discovery::EnvoyClusters(clusters) = &pool.discovery else {
        panic!("not Envoy's clusters");
    };
    ClusterPoll::new(clusters, &pool)
}

fn workers(source: &mut ClusterPoll, body: &str) -> (Vec<Worker>, Vec<String>) {
    match source.read_answer(&answer(body.as_bytes())).unwrap() {
        SourceUpdate::Workers(workers, said) => (workers, said),
        SourceUpdate::Unchanged => panic!("unchanged"),
    }
}

#[test]
fn the_hosts_of_the_named_clusters_are_the_workers() {
    let (workers, said) = workers(&mut source(""), ANSWER);
    let seen: Vec<_> = workers
        .iter()
        .map(|worker| (worker.name.as_str(), worker.role, worker.condition))
        .collect();
    assert_eq!(
        seen,
        [
            ("127.0.0.1:59101", Role::Decode, Condition::Unhealthy),
            ("[::1]:59102", Role::Decode, Condition::Draining),
            ("10.0.0.1:8000", Role::Prefill, Condition::Ready),
            ("10.0.0.2:8000", Role::Prefill, Condition::Ready),
        ]
    );
    assert!(said.is_empty(), "{said:?}");
    let prefill = &workers[2];
    assert_eq!(
        (prefill.dp_size, prefill.capacity.kv_blocks),
        (2, Some(100))
    );
    assert_eq!(prefill.model.as_deref(), Some("m"));
    // Same id as a listed worker without one.
    assert_eq!(prefill.id.0, xxh3_64(b"10.0.0.1:8000"));
}

#[test]
fn who_lies_outside_the_networks_is_left_out() {
    let mut source =
        source(r#""destinations":{"original_dst":{"networks":["10.0.0.0/8","::1"]}},"#);
    let (names, said) = names(source.read_answer(&answer(ANSWER.as_bytes())).unwrap());
    assert_eq!(names, ["[::1]:59102", "10.0.0.1:8000", "10.0.0.2:8000"]);
    assert!(
        said.len() == 1 && said[0].contains("127.0.0.1:59101"),
        "{said:?}"
    );
}

#[test]
fn an_answer_without_any_of_the_clusters_says_nothing_and_one_that_misses_one_says_so() {
    let mut source = source("");
    for body in [
        r#"{"cluster_statuses":[]}"#,
        r#"{"cluster_statuses":[{"name":"other","host_statuses":[]}]}"#,
        "{}",
        "[]",
        "",
    ] {
        assert!(
            source.read_answer(&answer(body.as_bytes())).is_err(),
            "{body}"
        );
    }
    let half = r#"{"cluster_statuses":[{"name":"decode"}]}"#;
    let (workers, said) = workers(&mut source, half);
    assert!(
        workers.is_empty() && said[0].contains("`prefill`"),
        "{said:?}"
    );
}

#[test]
fn one_address_in_two_clusters_is_one_worker() {
    let host = json!({"address": {"socket_address": {"address": "10.0.0.1", "port_value": 8000}}});
    let body = json!({"cluster_statuses": [
        {"name": "prefill", "host_statuses": [host]}, {"name": "decode", "host_statuses": [host]}]});
    let (workers, said) = workers(&mut source(""), &body.to_string());
    assert_eq!((workers.len(), workers[0].role), (1, Role::Decode));
    assert!(said[0].contains("10.0.0.1:8000"), "{said:?}");
}

fn host(health: &Value, counters: [u64; 4]) -> String {
    let names = ["cx_connect_fail", "rq_error", "rq_timeout", "rq_success"];
    let stats: Vec<Value> = names
        .iter()
        .zip(counters)
        .map(|(name, count)| match count {
            0 => json!({ "name": name }),
            count => json!({"name": name, "value": count.to_string()}),
        })
        .collect();
    json!({"cluster_statuses": [{"name": "decode", "host_statuses": [
        {"address": {"socket_address": {"address": "10.0.0.1", "port_value": 80}}, "stats": stats, "health_status": health}]}]})
    .to_string()
}

fn condition(source: &mut ClusterPoll, health: &Value, counters: [u64; 4]) -> Condition {
    workers(source, &host(health, counters)).0[0].condition
}

#[test]
fn what_envoy_says_of_a_host_is_its_condition() {
    use Condition::{Draining, Ready, Unhealthy};
    for (health, wanted) in [
        (json!({}), Ready),
        (json!({"eds_health_status": "HEALTHY"}), Ready),
        (json!({"eds_health_status": "UNKNOWN"}), Ready),
        (json!({"eds_health_status": "DRAINING"}), Draining),
        (
            json!({"eds_health_status": "HEALTHY", "pending_dynamic_removal": true}),
            Draining,
        ),
        (json!({"eds_health_status": "UNHEALTHY"}), Unhealthy),
        (json!({"eds_health_status": "TIMEOUT"}), Unhealthy),
        (json!({"eds_health_status": "DEGRADED"}), Unhealthy),
        (json!({"failed_active_health_check": true}), Unhealthy),
        (json!({"failed_outlier_check": true}), Unhealthy),
        (json!({"failed_active_degraded_check": true}), Unhealthy),
        (json!({"pending_active_hc": true}), Unhealthy),
        (json!({"active_hc_timeout": true}), Unhealthy),
    ] {
        assert_eq!(
            condition(&mut source(""), &health, [0; 4]),
            wanted,
            "{health}"
        );
    }
}

#[test]
fn one_that_only_fails_is_not_well_until_it_works_or_is_left_alone() {
    use Condition::{Ready, Unhealthy};
    let check = |steps: &[([u64; 4], Condition)]| {
        let mut source = source("");
        for (step, (counters, wanted)) in steps.iter().enumerate() {
            let seen = condition(&mut source, &json!({}), *counters);
            assert_eq!(seen, *wanted, "step {step} of {steps:?}");
        }
    };
    // Earlier failures do not count; two new ones are below the limit.
    check(&[([90, 90, 0, 5], Ready), ([92, 92, 0, 5], Ready)]);
    // One failed request counts twice in Envoy, and once here.
    check(&[([0, 0, 0, 0], Ready), ([2, 2, 2, 0], Ready)]);
    // The host works again.
    check(&[
        ([0; 4], Ready),
        ([3, 3, 0, 0], Unhealthy),
        ([3, 3, 0, 0], Unhealthy),
        ([3, 4, 0, 1], Ready),
    ]);
    // The host gets no requests.
    check(&[
        ([0; 4], Ready),
        ([0, 0, 3, 0], Unhealthy),
        ([0, 0, 3, 0], Unhealthy),
        ([0, 0, 4, 0], Unhealthy),
        ([0, 0, 4, 0], Unhealthy),
        ([0, 0, 4, 0], Unhealthy),
        ([0, 0, 4, 0], Ready),
    ]);
    // Failures among successes are the requests' own.
    check(&[([0; 4], Ready), ([0, 50, 0, 1], Ready)]);
    // The counters of a host that came back start at zero.
    check(&[([9; 4], Ready), ([0; 4], Ready), ([2, 0, 0, 0], Ready)]);
}
