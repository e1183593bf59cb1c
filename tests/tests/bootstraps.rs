//! Properties that the shipped bootstraps share. The suite `deployments` tests that Envoy accepts them.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use pd_router_e2e::paths;
use serde_json::Value;

const ALL: [&str; 9] = [
    "bootstrap.yaml",
    "bootstrap-clusters.yaml",
    "bootstrap-fail-open.yaml",
    "dynamo/bootstrap.yaml",
    "inference-pool/bootstrap.yaml",
    "llm-d/bootstrap.yaml",
    "sglang/bootstrap.yaml",
    "trtllm/bootstrap.yaml",
    "vllm/bootstrap.yaml",
];

fn read(name: &str) -> String {
    let shipped = paths::workspace().join("envoy").join(name);
    std::fs::read_to_string(&shipped)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", shipped.display()))
}

fn parsed(name: &str) -> Value {
    serde_yaml_ng::from_str(&read(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn manager(bootstrap: &Value) -> &Value {
    &bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
}

#[test]
fn all_have_the_same_labels_of_metrics() {
    let [one, others @ ..] = ALL.map(|name| parsed(name)["stats_config"].take());
    assert!(one.is_object());
    for other in others {
        assert_eq!(other, one);
    }
}

/// The headers that no client may set, as the listener removes them.
fn stripped(name: &str) -> BTreeSet<String> {
    let bootstrap = parsed(name);
    let extension = &manager(&bootstrap)["early_header_mutation_extensions"][0];
    let mutations = extension["typed_config"]["mutations"].as_array().cloned();
    let mutations = mutations.unwrap_or_default();
    mutations.iter().map(Value::to_string).collect()
}

/// If a request may bypass the filter, only the listener strips the headers that a client must not set.
#[test]
fn one_that_stays_open_strips_whatever_the_others_do() {
    let open = stripped("bootstrap-fail-open.yaml");
    for name in ["bootstrap.yaml", "bootstrap-clusters.yaml"] {
        let closed = stripped(name);
        assert!(closed.len() > 20, "{name} strips {closed:?}");
        let lacks: Vec<&String> = closed.difference(&open).collect();
        assert!(lacks.is_empty(), "{name} strips {lacks:?}");
    }
}

/// The filter's workers are also the cluster's hosts.
#[test]
fn one_that_stays_open_names_the_hosts_of_its_cluster() {
    let bootstrap = parsed("bootstrap-fail-open.yaml");
    let config = &manager(&bootstrap)["http_filters"][0]["typed_config"]["config"];
    let document = config["configuration"]["value"]
        .as_str()
        .unwrap_or_default();
    let document: Value =
        serde_json::from_str(document).unwrap_or_else(|error| panic!("{error}: {document}"));
    let pool = &document["pools"][0];
    let workers = pool["discovery"]["static"]["workers"].as_array().cloned();
    let workers = workers.unwrap_or_default();
    let believed: Vec<String> = workers
        .iter()
        .map(|worker| worker["address"].as_str().unwrap_or_default().to_owned())
        .collect();
    let assignment = &bootstrap["static_resources"]["clusters"][0]["load_assignment"];
    let hosts = assignment["endpoints"][0]["lb_endpoints"]
        .as_array()
        .cloned();
    let hosts = hosts.unwrap_or_default();
    let address = |host: &Value| {
        let address = &host["endpoint"]["address"]["socket_address"];
        format!(
            "{}:{}",
            address["address"].as_str().unwrap_or_default(),
            address["port_value"]
        )
    };
    assert_eq!(believed, hosts.iter().map(address).collect::<Vec<_>>());
    assert!(!believed.is_empty());
    // Both the failed filter and the empty pool fail open.
    assert_eq!(config["failure_policy"], "FAIL_OPEN");
    assert_eq!(
        (&pool["on_empty"], &pool["protocol"]),
        (&"pass".into(), &"aggregated".into())
    );
}

/// The paths allowed without the filter are those that a pool forwards by default.
#[test]
fn found_b5_one_that_stays_open_lets_the_inference_paths_through_and_no_others() {
    let bootstrap = parsed("bootstrap-fail-open.yaml");
    let filters = manager(&bootstrap)["http_filters"].as_array().cloned();
    let filters = filters.unwrap_or_default();
    let names: Vec<&str> = filters
        .iter()
        .filter_map(|one| one["name"].as_str())
        .collect();
    // The rule stands behind the filter, whose own pages are no engine's.
    assert_eq!(
        names,
        ["pd_router", "only_inference", "envoy.filters.http.router"]
    );
    let policy = &filters[1]["typed_config"]["rules"]["policies"]["inference"];
    let rules = &policy["permissions"][0]["and_rules"]["rules"];
    let named = rules[2]["or_rules"]["rules"].as_array().cloned();
    let matchers: Vec<Value> = named
        .unwrap_or_default()
        .iter()
        .map(|rule| rule["url_path"]["path"].clone())
        .collect();
    let lets = |matcher: &Value, path: &str| match (&matcher["suffix"], &matcher["contains"]) {
        (Value::String(suffix), Value::Null) => path.ends_with(suffix),
        (Value::Null, Value::String(part)) => path.contains(part.as_str()),
        _ => panic!("{matcher}"),
    };
    let pool = routing::config::Config::parse(POOL.as_bytes())
        .unwrap()
        .pools[0]
        .clone();
    let paths: Vec<String> = pool
        .paths
        .iter()
        .map(|path| path.replace("/**", "/a/b").replace('*', "a"))
        .collect();
    for path in &paths {
        let found = matchers.iter().any(|matcher| lets(matcher, path));
        assert!(found, "{path} is not let through");
    }
    for matcher in &matchers {
        let found = paths.iter().any(|path| lets(matcher, path));
        assert!(found, "no pool forwards {matcher}");
    }
}

const POOL: &str = r#"{"pools": [{"name": "p", "protocol": "aggregated", "discovery": {"static": {"workers": []}}}]}"#;
