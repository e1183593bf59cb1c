//! Envoy Gateway's patches: applied to its generated configuration, they give one that Envoy accepts.

use serde_json::{Value, json};

use crate::bootstraps::are_as_strict;
use crate::files::{document, object};
use crate::judge::is_taken;
use crate::patches::{add, selected};

const GATEWAY: &str = "envoy/envoy-gateway/gateway.yaml";
const PLUGIN: &str = "envoy/envoy-gateway/plugin.yaml";
const ROUTER: &str = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
const MANAGER: &str = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const WASM: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const STRING: &str = "type.googleapis.com/google.protobuf.StringValue";
const HTTP: &str = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

fn name_of(object: &Value) -> String {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or("?").to_owned();
    format!("{}/{}", text("namespace"), text("name"))
}

/// Names that Envoy Gateway derives from those of the objects.
struct Names {
    listener: String,
    decode: String,
    filter: String,
}

impl Names {
    fn of_the_manifests() -> Self {
        let gateway = object(GATEWAY, "Gateway");
        let listener = gateway["spec"]["listeners"][0]["name"].as_str();
        Self {
            listener: format!("{}/{}", name_of(&gateway), listener.unwrap_or("?")),
            decode: format!(
                "httproute/{}/rule/0",
                name_of(&object(GATEWAY, "HTTPRoute"))
            ),
            filter: format!(
                "envoy.filters.http.wasm/envoyextensionpolicy/{}/wasm/0",
                name_of(&object(PLUGIN, "EnvoyExtensionPolicy"))
            ),
        }
    }
}

/// The filter as Envoy Gateway generates it: disabled, except for routes that enable it.
fn filter(names: &Names) -> Value {
    let policy = object(PLUGIN, "EnvoyExtensionPolicy");
    let wasm = &policy["spec"]["wasm"][0];
    json!({
        "name": names.filter,
        "disabled": true,
        "typed_config": {
            "@type": WASM,
            "config": {
                "name": wasm["name"],
                "root_id": wasm["rootID"],
                "vm_config": {
                    "vm_id": names.filter,
                    "runtime": "envoy.wasm.runtime.v8",
                    "code": {"local": {"filename": "target/pd_router.wasm"}},
                },
                "configuration": {"@type": STRING, "value": wasm["config"].to_string()},
            },
        },
    })
}

fn listener(names: &Names) -> Value {
    json!({
        "name": names.listener,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 8080}},
        "default_filter_chain": {"filters": [{
            "name": "envoy.filters.network.http_connection_manager",
            "typed_config": {
                "@type": MANAGER,
                "stat_prefix": "http",
                "route_config": {"virtual_hosts": [{
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{
                        "match": {"prefix": "/"},
                        "route": {"cluster": names.decode},
                        "typed_per_filter_config": {names.filter.clone(): {
                            "@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig",
                            "config": {},
                        }},
                    }],
                }]},
                "http_filters": [
                    filter(names),
                    {"name": "envoy.filters.http.router", "typed_config": {"@type": ROUTER}},
                ],
            },
        }]},
    })
}

fn decode_cluster(names: &Names) -> Value {
    json!({
        "name": names.decode,
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "typed_extension_protocol_options": {HTTP.trim_start_matches("type.googleapis.com/"): {
            "@type": HTTP,
            "explicit_http_config": {"http_protocol_options": {}},
            "common_http_protocol_options": {"idle_timeout": "4s"},
        }},
        "load_assignment": {"cluster_name": names.decode, "endpoints": []},
    })
}

/// Applies the patches as Envoy Gateway does: whole resources are added, others are found by their names.
fn patched(resources: &mut Vec<(String, Value)>) {
    let policy = object(PLUGIN, "EnvoyPatchPolicy");
    for patch in policy["spec"]["jsonPatches"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let operation = &patch["operation"];
        let name = patch["name"].as_str().unwrap_or_default();
        assert_eq!(operation["op"], "add", "{name}");
        let path = operation["path"].as_str().unwrap_or_default();
        if path.is_empty() && operation.get("jsonPath").is_none() {
            assert_eq!(operation["value"]["name"], name);
            resources.push((name.to_owned(), operation["value"].clone()));
            continue;
        }
        let found = resources.iter_mut().find(|(known, _)| known == name);
        let (_, resource) = found.unwrap_or_else(|| panic!("there is no resource {name}"));
        let places = match operation["jsonPath"].as_str() {
            Some(json_path) => selected(resource, json_path),
            None => vec![resource],
        };
        assert!(!places.is_empty(), "{name}: a patch finds nothing");
        for place in places {
            add(place, path, &operation["value"]);
        }
    }
}

/// The resulting configuration of Envoy: the bootstrap with Envoy Gateway's addition, and the patched resources.
fn composed() -> Value {
    let names = Names::of_the_manifests();
    let mut resources = vec![
        (names.listener.clone(), listener(&names)),
        (names.decode.clone(), decode_cluster(&names)),
    ];
    patched(&mut resources);
    let proxy = object(GATEWAY, "EnvoyProxy");
    let addition = proxy["spec"]["bootstrap"]["value"].as_str().unwrap_or("");
    let mut bootstrap: Value = serde_yaml_ng::from_str(addition)
        .unwrap_or_else(|error| panic!("the bootstrap's addition: {error}"));
    let mut resources = resources.into_iter().map(|(_, resource)| resource);
    bootstrap["static_resources"] = json!({
        "listeners": [resources.next()],
        "clusters": resources.collect::<Vec<_>>(),
    });
    bootstrap
}

#[test]
fn what_the_patches_make_is_a_configuration_that_envoy_takes() {
    is_taken("envoy/envoy-gateway", &composed().to_string());
}

#[test]
fn the_patches_bring_what_the_policy_cannot_say() {
    let composed = composed();
    let config = "/static_resources/listeners/0/default_filter_chain/filters/0/typed_config/http_filters/0/typed_config/config";
    let config = composed.pointer(config).expect("there is the filter");
    assert_eq!(config["allow_on_headers_stop_iteration"], json!(true));
    assert_eq!(config["failure_policy"], "FAIL_RELOAD");
}

/// As in the bootstraps for plain Envoy.
#[test]
fn the_clusters_of_workers_are_as_strict_as_without_a_gateway() {
    let composed = composed();
    let names = Names::of_the_manifests();
    are_as_strict(&composed, [names.decode.as_str(), "prefill"]);
    let reference = document("envoy/bootstrap-clusters.yaml");
    assert_eq!(composed["stats_config"], reference["stats_config"]);
}

/// All four circuit breakers are raised for the cluster that Envoy Gateway generates.
#[test]
fn the_circuit_breakers_of_the_route_are_raised() {
    let policy = object(GATEWAY, "BackendTrafficPolicy");
    let breakers = policy["spec"]["circuitBreaker"].as_object().cloned();
    let breakers = breakers.unwrap_or_default();
    assert_eq!(breakers.len(), 4);
    for (name, value) in breakers {
        assert_eq!(value, json!(100_000), "{name}");
    }
}
