//! Tests of each trap in a shipped bootstrap: only the change causes a warning.

use std::fs;
use std::path::{Path, PathBuf};

use routing::config::Config;
use serde_json::{Value, json};

use crate::check::bootstrap::{Bootstrap, BootstrapReadError};
use crate::check::traps::{self, Code, Warning};

const SHIPPED: &str = include_str!("../../../../envoy/bootstrap.yaml");

const LISTENER: &str = "/static_resources/listeners/0";
const MANAGER: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
const PLUGIN: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/0/typed_config/config";
const TABLE: &str =
    "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config";
const HOST: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0";
const ROUTE: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes/0";
const PREFILL: &str = "/static_resources/clusters/0";
const DECODE: &str = "/static_resources/clusters/1";
const OVERRIDE: &str = "load_balancing_policy/policies/0/typed_extension_config/typed_config";

fn yaml(text: &str) -> Value {
    serde_yaml_ng::from_str(text).unwrap()
}

fn warnings(bootstrap: &Value) -> Vec<Warning> {
    let bootstrap = Bootstrap::parse(bootstrap.to_string().as_bytes()).unwrap();
    let gateways = bootstrap.gateways().unwrap();
    let warn = |gateway| {
        let document = crate::check::bootstrap::FilterOccurrence::configuration(gateway).unwrap();
        let config = Config::parse(&document).unwrap();
        traps::warnings(&bootstrap.root(), gateway, &config)
    };
    gateways.iter().flat_map(warn).collect()
}

/// The shipped bootstrap with one place replaced; null: removed.
fn changed(place: &str, name: &str, value: Value) -> Value {
    let mut bootstrap = yaml(SHIPPED);
    change(&mut bootstrap, place, name, value);
    bootstrap
}

fn change(bootstrap: &mut Value, place: &str, name: &str, value: Value) {
    let object = bootstrap.pointer_mut(place).unwrap();
    match (value, object) {
        (Value::Null, Value::Object(fields)) => {
            fields.remove(name).unwrap();
        }
        (value, object) => object[name] = value,
    }
}

/// The path for a JSON pointer, as warnings write it.
fn path(pointer: &str) -> String {
    let mut path = String::new();
    for name in pointer.split('/').skip(1) {
        match name.parse::<usize>() {
            Ok(index) => path.push_str(&format!("[{index}]")),
            Err(_) if path.is_empty() => path.push_str(name),
            Err(_) => path.push_str(&format!(".{name}")),
        }
    }
    path
}

fn is_warned_of(bootstrap: &Value, code: Code, pointer: &str, words: &[&str]) {
    let found = warnings(bootstrap);
    let [warning] = &found[..] else {
        panic!("{code:?} at {pointer}: {found:#?}");
    };
    assert_eq!(warning.code, code, "{warning:?}");
    assert_eq!(warning.place, path(pointer), "{warning:?}");
    for word in words {
        assert!(warning.wrong.contains(word), "{word}: {warning:?}");
    }
    assert!(!warning.right.is_empty());
}

/// The shipped bootstrap with a changed plugin configuration.
fn with_config(change: impl Fn(&mut Value)) -> Value {
    let mut bootstrap = yaml(SHIPPED);
    let place = bootstrap
        .pointer_mut(&format!("{PLUGIN}/configuration/value"))
        .unwrap();
    let mut config: Value = serde_json::from_str(place.as_str().unwrap()).unwrap();
    change(&mut config);
    *place = json!(config.to_string());
    bootstrap
}

/// Every bootstrap in a folder and its subfolders.
fn bootstraps_in(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            bootstraps_in(&path, found);
        } else if name.starts_with("bootstrap") && name.ends_with(".yaml") {
            found.push(path);
        }
    }
}

#[test]
fn what_is_shipped_is_without_warning() {
    let mut shipped = Vec::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../envoy");
    bootstraps_in(&folder, &mut shipped);
    assert!(shipped.len() >= 3, "{shipped:?}");
    for path in shipped {
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(warnings(&yaml(&text)), [], "{}", path.display());
    }
}

#[test]
fn the_filter() {
    let name = "allow_on_headers_stop_iteration";
    for value in [Value::Null, json!(false)] {
        let bootstrap = changed(PLUGIN, name, value);
        let place = format!("{PLUGIN}/{name}");
        is_warned_of(&bootstrap, Code::NoStopIteration, &place, &["hangs"]);
    }
    let place = format!("{PLUGIN}/failure_policy");
    let open = changed(PLUGIN, "failure_policy", json!("FAIL_OPEN"));
    is_warned_of(&open, Code::FailOpen, &place, &["\"default\""]);
    for value in [Value::Null, json!("FAIL_CLOSED")] {
        let closed = changed(PLUGIN, "failure_policy", value);
        is_warned_of(&closed, Code::NoReload, &place, &["503"]);
    }
    let older = changed(PLUGIN, "fail_open", json!(true));
    is_warned_of(&older, Code::FailOpen, &format!("{PLUGIN}/fail_open"), &[]);
}

/// Aggregated workers may serve requests that bypass the filter.
#[test]
fn fail_open_before_whole_request_workers_is_none() {
    let mut bootstrap = with_config(|config| {
        let pool = &mut config["pools"][0];
        pool["protocol"] = json!("aggregated");
        pool["discovery"]["static"]["workers"] =
            json!([{"address": "127.0.0.1:9201", "role": "aggregated"}]);
    });
    change(&mut bootstrap, PLUGIN, "failure_policy", json!("FAIL_OPEN"));
    // Any member may serve them then.
    let wide = json!({"policies": [{"typed_extension_config": {"typed_config": {"@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"}}}]});
    let place = format!("{DECODE}/{OVERRIDE}");
    change(&mut bootstrap, &place, "fallback_policy", wide);
    assert_eq!(warnings(&bootstrap), []);
}

#[test]
fn buffers() {
    let name = "request_body_buffer_limit";
    let place = format!("{ROUTE}/{name}");
    let none = changed(ROUTE, name, Value::Null);
    is_warned_of(&none, Code::SmallBuffer, &place, &["1048576"]);
    let small = changed(ROUTE, name, json!(65536));
    is_warned_of(&small, Code::SmallBuffer, &place, &["65536", "413"]);

    // Otherwise the virtual host's limit applies, then the listener's.
    let listeners = "per_connection_buffer_limit_bytes";
    let mut bootstrap = changed(ROUTE, name, Value::Null);
    change(&mut bootstrap, LISTENER, listeners, json!(32768));
    let place = format!("{LISTENER}/{listeners}");
    is_warned_of(&bootstrap, Code::SmallBuffer, &place, &["32768"]);
    change(&mut bootstrap, HOST, name, json!(33_554_432));
    assert_eq!(warnings(&bootstrap), []);
    change(&mut bootstrap, HOST, name, Value::Null);
    change(&mut bootstrap, LISTENER, listeners, json!(33_554_432));
    assert_eq!(warnings(&bootstrap), []);
}

#[test]
fn circuit_breakers() {
    for cluster in [PREFILL, DECODE] {
        for (name, default) in [
            ("max_connections", 1024),
            ("max_pending_requests", 1024),
            ("max_requests", 1024),
            ("max_retries", 3),
        ] {
            let place = format!("{cluster}/circuit_breakers/thresholds/0");
            let setting = format!("{name} {default}");
            for value in [Value::Null, json!(default)] {
                let bootstrap = changed(&place, name, value);
                is_warned_of(&bootstrap, Code::CircuitBreaker, &place, &[&setting]);
            }
        }
        let none = changed(cluster, "circuit_breakers", Value::Null);
        let place = format!("{cluster}/circuit_breakers/thresholds");
        let words = ["max_connections 1024", "max_retries 3"];
        is_warned_of(&none, Code::CircuitBreaker, &place, &words);
    }
    // Thresholds of another priority do not apply to the requests.
    let place = format!("{DECODE}/circuit_breakers/thresholds/0");
    let high = changed(&place, "priority", json!("HIGH"));
    assert_eq!(warnings(&high)[0].code, Code::CircuitBreaker);
}

#[test]
fn retries() {
    let policy = json!({"retry_on": "5xx", "num_retries": 2});
    for place in [format!("{ROUTE}/route"), HOST.to_owned()] {
        let bootstrap = changed(&place, "retry_policy", policy.clone());
        let at = format!("{place}/retry_policy");
        is_warned_of(&bootstrap, Code::RetryPolicy, &at, &[]);
    }
}

#[test]
fn headers_that_are_removed() {
    let name = "request_headers_to_remove";
    for place in [ROUTE, HOST, TABLE] {
        let removed = json!(["x-debug", "X-Gateway-Destination-Endpoint"]);
        let bootstrap = changed(place, name, removed);
        let at = format!("{place}/{name}/1");
        let words = ["X-Gateway-Destination-Endpoint"];
        is_warned_of(&bootstrap, Code::HeaderRemoval, &at, &words);
        for header in [
            "x-prefiller-host-port",
            "x-worker-instance-id",
            "x-data-parallel-rank",
            "x-envoy-max-retries",
        ] {
            let bootstrap = changed(place, name, json!([header]));
            let at = format!("{place}/{name}/0");
            is_warned_of(&bootstrap, Code::HeaderRemoval, &at, &[header]);
        }
        assert_eq!(warnings(&changed(place, name, json!(["x-debug"]))), []);
    }
}

#[test]
fn a_routes_time() {
    let place = format!("{ROUTE}/route");
    let at = format!("{place}/timeout");
    let default = changed(&place, "timeout", Value::Null);
    is_warned_of(&default, Code::RouteTimeout, &at, &["15s"]);
    let limited = changed(&place, "timeout", json!("600s"));
    is_warned_of(&limited, Code::RouteTimeout, &at, &["600s"]);
    assert_eq!(warnings(&changed(&place, "timeout", json!("0.0s"))), []);
}

#[test]
fn where_routes_lead() {
    let place = format!("{ROUTE}/route");
    let elsewhere = changed(&place, "cluster", json!("prefill"));
    let at = format!("{TABLE}/virtual_hosts");
    is_warned_of(&elsewhere, Code::NoRoute, &at, &["`decode`"]);
    let mut weighted = changed(&place, "cluster", Value::Null);
    let clusters = json!({"clusters": [{"name": "decode", "weight": 1, "request_headers_to_remove": ["x-gateway-destination-endpoint"]}]});
    change(&mut weighted, &place, "weighted_clusters", clusters);
    let at = format!("{place}/weighted_clusters/clusters/0/request_headers_to_remove/0");
    is_warned_of(&weighted, Code::HeaderRemoval, &at, &[]);
    // Routes from a control plane are not visible.
    let mut elsewhere = changed(MANAGER, "route_config", Value::Null);
    change(
        &mut elsewhere,
        MANAGER,
        "rds",
        json!({"route_config_name": "r"}),
    );
    assert_eq!(warnings(&elsewhere), []);
}

#[test]
fn clusters_that_there_are_not() {
    let mut bootstrap = yaml(SHIPPED);
    change(&mut bootstrap, PREFILL, "name", json!("prefil"));
    let at = "/static_resources/clusters";
    let words = ["`prefill`", "\"default\" calls prefill workers in it"];
    is_warned_of(&bootstrap, Code::MissingCluster, at, &words);
    bootstrap["dynamic_resources"] = json!({"cds_config": {"ads": {}}});
    assert_eq!(warnings(&bootstrap), []);

    for (discovery, name) in [
        (
            json!({"document": {"cluster": "registry", "addresses": ["127.0.0.1:1"]}}),
            "`registry`",
        ),
        (
            json!({"envoy_clusters": {"members": {"prefill": {"role": "prefill"}}}}),
            "`envoy_admin`",
        ),
        (
            json!({"envoy_clusters": {"cluster": "decode", "members": {"other": {"role": "prefill"}}}}),
            "`other`",
        ),
    ] {
        let bootstrap = with_config(|config| config["pools"][0]["discovery"] = discovery.clone());
        is_warned_of(&bootstrap, Code::MissingCluster, at, &[name]);
    }
    // If another component runs the prefill leg, its cluster is not needed.
    let mut bootstrap = with_config(|config| config["pools"][0]["protocol"] = json!("llmd"));
    change(&mut bootstrap, PREFILL, "name", json!("unused"));
    assert_eq!(warnings(&bootstrap), []);
}

#[test]
fn who_picks_the_host() {
    for cluster in [PREFILL, DECODE] {
        let name = "load_balancing_policy";
        let at = format!("{cluster}/{name}");
        let none = changed(cluster, name, Value::Null);
        is_warned_of(&none, Code::LoadBalancing, &at, &["by itself"]);
        let place = format!("{cluster}/{OVERRIDE}");
        let other = changed(
            &place,
            "override_host_sources",
            json!([{"header": "x-other"}]),
        );
        is_warned_of(&other, Code::LoadBalancing, &at, &[]);
        let round = "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin";
        let other = changed(&place, "@type", json!(round));
        is_warned_of(&other, Code::LoadBalancing, &at, &[]);
        let wide =
            json!({"policies": [{"typed_extension_config": {"typed_config": {"@type": round}}}]});
        let wide = changed(&place, "fallback_policy", wide);
        let at = format!("{place}/fallback_policy");
        is_warned_of(&wide, Code::WideFallback, &at, &[]);
        let subset =
            format!("{place}/fallback_policy/policies/0/typed_extension_config/typed_config");
        let any = changed(&subset, "fallback_policy", json!("ANY_ENDPOINT"));
        is_warned_of(&any, Code::WideFallback, &at, &[]);
    }
}

#[test]
fn a_cluster_of_any_address() {
    let mut bootstrap = with_config(|config| {
        config["pools"][0]["destinations"] = json!({"original_dst": {"networks": ["127.0.0.0/8"]}});
    });
    let original =
        json!({"use_http_header": true, "http_header_name": "x-gateway-destination-endpoint"});
    change(&mut bootstrap, PREFILL, "type", json!("ORIGINAL_DST"));
    change(
        &mut bootstrap,
        PREFILL,
        "original_dst_lb_config",
        original.clone(),
    );
    is_warned_of(&bootstrap, Code::LoadBalancing, DECODE, &["original_dst"]);
    change(&mut bootstrap, DECODE, "type", json!("ORIGINAL_DST"));
    change(&mut bootstrap, DECODE, "original_dst_lb_config", original);
    assert_eq!(warnings(&bootstrap), []);
}

#[test]
fn workers_that_are_no_members() {
    let stranger = |role: &str| json!({"address": "127.0.0.1:9999", "role": role});
    for (role, cluster) in [
        ("prefill", PREFILL),
        ("decode", DECODE),
        ("aggregated", DECODE),
    ] {
        let bootstrap = with_config(|config| {
            let workers = &mut config["pools"][0]["discovery"]["static"]["workers"];
            workers.as_array_mut().unwrap().push(stranger(role));
        });
        let at = format!("{cluster}/load_assignment");
        is_warned_of(&bootstrap, Code::NotAMember, &at, &["127.0.0.1:9999"]);
    }
    // The addresses behind a DNS name are not visible.
    let endpoint = format!(
        "{PREFILL}/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address/socket_address"
    );
    let mut named = changed(PREFILL, "type", json!("STRICT_DNS"));
    change(&mut named, &endpoint, "address", json!("prefill.test"));
    assert_eq!(warnings(&named), []);
    // With Dynamo, the frontends must be members.
    let bootstrap = with_config(|config| {
        let pool = &mut config["pools"][0];
        pool["protocol"] = json!("direct");
        pool["frontends"] = json!(["127.0.0.1:9201", "127.0.0.1:7"]);
        pool["discovery"] = json!({"dynamo": {"models": {"dynamo": "m"}}});
    });
    let at = format!("{DECODE}/load_assignment");
    is_warned_of(&bootstrap, Code::NotAMember, &at, &["127.0.0.1:7"]);
}

#[test]
fn an_admin_interface_for_all() {
    let place = "/admin/address/socket_address";
    for address in ["0.0.0.0", "::"] {
        let bootstrap = changed(place, "address", json!(address));
        let at = format!("{place}/address");
        is_warned_of(&bootstrap, Code::ExposedAdmin, &at, &["secrets"]);
    }
}

/// Envoy accepts both spellings of a field, and a configuration as a structure too.
#[test]
fn other_ways_of_writing_are_read() {
    let mut bootstrap = yaml(SHIPPED);
    let allowed = "allow_on_headers_stop_iteration";
    change(&mut bootstrap, PLUGIN, allowed, Value::Null);
    change(
        &mut bootstrap,
        PLUGIN,
        "allowOnHeadersStopIteration",
        json!(true),
    );
    let value = bootstrap
        .pointer_mut(&format!("{PLUGIN}/configuration/value"))
        .unwrap();
    *value = serde_json::from_str(value.as_str().unwrap()).unwrap();
    assert_eq!(warnings(&bootstrap), []);
}

#[test]
fn a_bootstrap_without_the_filter_is_told_so() {
    let bootstrap = changed(MANAGER, "http_filters", json!([]));
    let bootstrap = Bootstrap::parse(bootstrap.to_string().as_bytes()).unwrap();
    assert!(matches!(
        bootstrap.gateways(),
        Err(BootstrapReadError::NoFilter)
    ));
    let bootstrap = changed(PLUGIN, "configuration", Value::Null);
    let bootstrap = Bootstrap::parse(bootstrap.to_string().as_bytes()).unwrap();
    let error = bootstrap.gateways().unwrap()[0]
        .configuration()
        .unwrap_err();
    assert!(
        matches!(error, BootstrapReadError::NoConfiguration(_)),
        "{error}"
    );
    assert!(Bootstrap::parse(b"a: [").is_err());
}
