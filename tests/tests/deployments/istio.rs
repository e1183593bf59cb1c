//! Istio's patches: applied to its generated configuration, they give one that Envoy accepts.

use serde_json::{Value, json};

use crate::bootstraps::are_as_strict;
use crate::files::{documents, object};
use crate::judge::is_taken;
use crate::patches::merge;

const GATEWAY: &str = "envoy/istio/gateway.yaml";
const FILTER: &str = "envoy/istio/envoy-filter.yaml";
const PLACE: &str = "envoy/istio/place.yaml";
const WASM_PLUGIN: &str = "envoy/istio/wasm-plugin.yaml";
const ROUTER: &str = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
const MANAGER: &str = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";

/// Istio's configuration for a gateway and a route, before the patches.
struct GeneratedConfig {
    listener: Value,
    clusters: Vec<Value>,
    extensions: Vec<Value>,
}

/// Istio's name of the cluster of the route's destination.
fn decode_cluster() -> String {
    let route = object(GATEWAY, "VirtualService");
    let destination = &route["spec"]["http"][0]["route"][0]["destination"];
    let host = destination["host"].as_str().unwrap_or("?");
    format!("outbound|{}||{host}", destination["port"]["number"])
}

impl GeneratedConfig {
    /// A configuration with these filters before the router; they mark the places of WasmPlugins.
    fn with_filters(names: &[&str]) -> Self {
        let decode = decode_cluster();
        let marks = names.iter().map(|name| json!({"name": name}));
        let router =
            json!({"name": "envoy.filters.http.router", "typed_config": {"@type": ROUTER}});
        let filters: Vec<Value> = marks.chain([router]).collect();
        Self {
            listener: json!({
                "name": "0.0.0.0_8080",
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": 8080}},
                "filter_chains": [{"filters": [{
                    "name": "envoy.filters.network.http_connection_manager",
                    "typed_config": {
                        "@type": MANAGER,
                        "stat_prefix": "outbound",
                        "route_config": {"virtual_hosts": [{
                            "name": "all",
                            "domains": ["*"],
                            "routes": [{"match": {"prefix": "/"}, "route": {"cluster": decode, "timeout": "0s"}}],
                        }]},
                        "http_filters": filters,
                    },
                }]}],
            }),
            clusters: vec![json!({
                "name": decode,
                "type": "STATIC",
                "connect_timeout": "10s",
                "lb_policy": "LEAST_REQUEST",
                "load_assignment": {"cluster_name": decode, "endpoints": []},
            })],
            extensions: Vec::new(),
        }
    }

    fn manager(&mut self) -> &mut Value {
        &mut self.listener["filter_chains"][0]["filters"][0]
    }

    fn http_filters(&mut self) -> &mut Vec<Value> {
        let filters = &mut self.manager()["typed_config"]["http_filters"];
        filters.as_array_mut().expect("the filters are a list")
    }

    /// Applies every patch of the file; returns how many found nothing to patch.
    fn patch(&mut self, file: &str) -> usize {
        let filters = documents(file)
            .into_iter()
            .filter(|found| found.is("EnvoyFilter"));
        let mut idle = 0;
        for filter in filters {
            let patches = filter.content["spec"]["configPatches"].as_array().cloned();
            for patch in patches.into_iter().flatten() {
                idle += usize::from(!self.apply(&patch));
            }
        }
        idle
    }

    fn apply(&mut self, patch: &Value) -> bool {
        let what = patch["applyTo"].as_str().unwrap_or_default();
        let operation = patch["patch"]["operation"].as_str().unwrap_or_default();
        let value = &patch["patch"]["value"];
        match (what, operation) {
            ("EXTENSION_CONFIG", "ADD") => self.extensions.push(value.clone()),
            ("LISTENER", "MERGE") => merge(&mut self.listener, value),
            ("NETWORK_FILTER", "MERGE") => {
                let name = &patch["match"]["listener"]["filterChain"]["filter"]["name"];
                assert_eq!(*name, self.manager()["name"]);
                merge(self.manager(), value);
            }
            ("CLUSTER", "ADD") => self.clusters.push(value.clone()),
            ("CLUSTER", "MERGE") => {
                let wanted = &patch["match"]["cluster"];
                let host = wanted["service"].as_str().unwrap_or("?");
                let name = format!("outbound|{}||{host}", wanted["portNumber"]);
                let found = self.clusters.iter_mut().find(|known| known["name"] == name);
                let cluster = found.unwrap_or_else(|| panic!("there is no cluster {name}"));
                merge(cluster, value);
            }
            ("HTTP_FILTER", operation) => return self.place(patch, operation),
            other => panic!("what does Istio make of {other:?}?"),
        }
        true
    }

    fn place(&mut self, patch: &Value, operation: &str) -> bool {
        let wanted = &patch["match"]["listener"]["filterChain"]["filter"]["subFilter"]["name"];
        let filters = self.http_filters();
        let Some(at) = filters.iter().position(|filter| filter["name"] == *wanted) else {
            return false;
        };
        let value = patch["patch"]["value"].clone();
        match operation {
            "INSERT_BEFORE" => filters.insert(at, value),
            "REPLACE" => filters[at] = value,
            other => panic!("what does Istio make of {other}?"),
        }
        true
    }

    /// The resulting configuration of Envoy: extensions are discovered, and the agent has fetched the image.
    fn composed(mut self) -> Value {
        let extensions = std::mem::take(&mut self.extensions);
        for filter in self.http_filters() {
            let Some(discovery) = filter.get("config_discovery").cloned() else {
                continue;
            };
            let found = extensions
                .iter()
                .find(|known| known["name"] == filter["name"]);
            let mut config = found.expect("the extension is there")["typed_config"].clone();
            assert_eq!(discovery["type_urls"], json!([config["@type"]]));
            let code = &mut config["config"]["vm_config"]["code"];
            let image = code["remote"]["http_uri"]["uri"].as_str().unwrap_or("");
            assert!(image.starts_with("oci://"), "{image}");
            *code = json!({"local": {"filename": "target/pd_router.wasm"}});
            *filter = json!({"name": filter["name"], "typed_config": config});
        }
        json!({"static_resources": {"listeners": [self.listener], "clusters": self.clusters}})
    }
}

/// The result of `kubectl apply` for the gateway, the filter and its place.
fn placed() -> GeneratedConfig {
    let mut generated = GeneratedConfig::with_filters(&[]);
    assert_eq!(generated.patch(FILTER), 0);
    assert_eq!(generated.patch(PLACE), 0);
    generated
}

#[test]
fn what_the_patches_make_is_a_configuration_that_envoy_takes() {
    is_taken("envoy/istio", &placed().composed().to_string());
}

/// One case for each name that Istio's releases have for a WasmPlugin's filter.
#[test]
fn a_wasm_plugin_marks_the_place_as_well() {
    let plugin = object(WASM_PLUGIN, "WasmPlugin");
    let text = |field: &str| plugin["metadata"][field].as_str().unwrap_or("?").to_owned();
    let id = format!("{}.{}", text("namespace"), text("name"));
    let expected = placed().composed();
    for name in [
        format!("extensions.istio.io/wasmplugin/{id}"),
        format!("extensions.istio.io/trafficextension/{id}~istio-translated-wasmplugin"),
    ] {
        let mut generated = GeneratedConfig::with_filters(&[&name]);
        generated.patch(FILTER);
        assert_eq!(
            generated.patch(WASM_PLUGIN),
            1,
            "{name}: one of two patches is for it"
        );
        assert_eq!(generated.composed(), expected, "{name}");
    }
}

/// As in the bootstraps for plain Envoy.
#[test]
fn the_clusters_of_workers_are_as_strict_as_without_a_gateway() {
    let composed = placed().composed();
    let decode = decode_cluster();
    are_as_strict(&composed, [decode.as_str(), "llm-prefill"]);
}

/// The filter's configuration names existing clusters.
#[test]
fn the_clusters_that_the_filters_configuration_names_are_there() {
    let generated = placed();
    let value = &generated.extensions[0]["typed_config"]["config"]["configuration"]["value"];
    let config = value.as_str().expect("the configuration is a string");
    let config: Value = serde_json::from_str(config).expect("it is JSON");
    let pool = &config["pools"][0];
    let members = pool["discovery"]["envoy_clusters"]["members"].as_object();
    let members = members.into_iter().flatten().map(|(name, _)| name.as_str());
    let named = pool["clusters"].as_object().into_iter().flatten();
    let named = named.filter_map(|(_, name)| name.as_str());
    let source = pool["discovery"]["envoy_clusters"]["cluster"].as_str();
    for name in members.chain(named).chain(source) {
        let there = generated
            .clusters
            .iter()
            .any(|cluster| cluster["name"] == name);
        assert!(there, "there is no cluster {name}");
    }
}
