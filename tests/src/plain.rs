//! Owns Envoy by itself, with a shipped bootstrap and a test's changes to it: several listeners and routes, filters in front of
//! the plugin, other clusters. The bootstrap that `pd-harness run` writes has none of these.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use pd_harness_common::supervised;
use serde_json::{Value, json};

use crate::client::{self, Ask};
use crate::gateway::Gateway;
use crate::paths;
use crate::process::{Process, unique_name};
use crate::wait::{GENEROUS, eventually};

/// Worker threads: two, as for every other gateway of a test.
const THREADS: u16 = 2;

/// Headers that only a trusted gateway in front may set; those of any other caller are removed before the plugin.
const GATEWAY_HEADERS: [&str; 7] = [
    "x-gateway-destination-endpoint-subset",
    "x-gateway-inference-objective",
    "x-gateway-inference-fairness-id",
    "x-gateway-model-name-rewrite",
    "x-llm-d-inference-objective",
    "x-llm-d-inference-fairness-id",
    "x-llm-d-model-name-rewrite",
];

/// A bootstrap under construction.
pub struct Bootstrap(Value);

/// A running Envoy.
pub struct Plain {
    /// The gateway as the other tests use it; its address is that of the first listener.
    pub gateway: Gateway,
    /// Addresses of the listeners, in the bootstrap's order.
    pub listeners: Vec<SocketAddr>,
}

impl Bootstrap {
    /// The shipped bootstrap of this name, without its clusters, on free ports, with the plugin and this configuration.
    pub fn shipped(name: &str, config: &Value) -> Bootstrap {
        let file = paths::workspace().join("envoy").join(name);
        let text = std::fs::read_to_string(&file)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
        let parsed: Value = serde_yaml_ng::from_str(&text)
            .unwrap_or_else(|error| panic!("{name} is not YAML: {error}"));
        let mut bootstrap = Bootstrap(parsed);
        let nowhere = json!({"socket_address": {"address": "127.0.0.1", "port_value": 0}});
        bootstrap.0["admin"]["address"] = nowhere.clone();
        let resources = &mut bootstrap.0["static_resources"];
        resources["listeners"][0]["address"] = nowhere;
        let wasm = bootstrap.plugin();
        wasm["vm_config"]["code"] = json!({"local": {"filename": paths::plugin()}});
        wasm["configuration"]["value"] = json!(config.to_string());
        bootstrap
    }

    /// Uses another build of the plugin.
    pub fn with_plugin(mut self, plugin: &Path) -> Bootstrap {
        self.plugin()["vm_config"]["code"] = json!({"local": {"filename": plugin}});
        self
    }

    /// Lets the headers of a gateway in front reach the plugin.
    pub fn trusting(mut self) -> Bootstrap {
        let mutations =
            &mut self.manager()["early_header_mutation_extensions"][0]["typed_config"]["mutations"];
        let is_gateway_header = |mutation: &Value| {
            let name = mutation["remove"].as_str().unwrap_or_default();
            GATEWAY_HEADERS.contains(&name)
        };
        list(mutations).retain(|mutation| !is_gateway_header(mutation));
        self
    }

    /// The wasm configuration of the plugin in the first listener.
    pub fn plugin(&mut self) -> &mut Value {
        let filters = list(&mut self.manager()["http_filters"]).iter_mut();
        let mut plugin = filters.filter(|filter| filter["name"] == "pd_router");
        match plugin.next() {
            Some(plugin) => &mut plugin["typed_config"]["config"],
            None => panic!("the bootstrap has no filter pd_router"),
        }
    }

    /// Adds a filter in front of the plugin.
    pub fn with_filter_before(mut self, filter: Value) -> Bootstrap {
        list(&mut self.manager()["http_filters"]).insert(0, filter);
        self
    }

    /// Replaces the shipped clusters; each is as the shipped `decode` except for its name and hosts.
    pub fn with_clusters(mut self, clusters: &[(&str, Vec<SocketAddr>)]) -> Bootstrap {
        let shipped = list(&mut self.0["static_resources"]["clusters"]);
        let decode = shipped.iter().find(|cluster| cluster["name"] == "decode");
        let Some(pattern) = decode.cloned() else {
            panic!("the bootstrap has no cluster decode");
        };
        let cluster = |(name, hosts): &(&str, Vec<SocketAddr>)| {
            let mut cluster = pattern.clone();
            cluster["name"] = json!(name);
            let endpoint = |host: &SocketAddr| {
                let address = json!({"address": host.ip(), "port_value": host.port()});
                json!({"endpoint": {"address": {"socket_address": address}}})
            };
            let endpoints: Vec<Value> = hosts.iter().map(endpoint).collect();
            cluster["load_assignment"] =
                json!({"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]});
            cluster
        };
        *shipped = clusters.iter().map(cluster).collect();
        self
    }

    /// The cluster of this name.
    pub fn cluster(&mut self, name: &str) -> &mut Value {
        let clusters = list(&mut self.0["static_resources"]["clusters"]);
        let found = clusters.iter_mut().find(|cluster| cluster["name"] == name);
        found.unwrap_or_else(|| panic!("the bootstrap has no cluster {name}"))
    }

    /// Adds a cluster exactly as given.
    pub fn with_cluster(mut self, cluster: Value) -> Bootstrap {
        list(&mut self.0["static_resources"]["clusters"]).push(cluster);
        self
    }

    /// Replaces the routes of the first listener; each is as the shipped one except for these members.
    pub fn with_routes(mut self, routes: &[Value]) -> Bootstrap {
        self.set_routes(0, routes);
        self
    }

    /// Adds a listener like the first one, with these routes.
    pub fn with_listener(mut self, routes: &[Value]) -> Bootstrap {
        let listeners = list(&mut self.0["static_resources"]["listeners"]);
        let mut another = listeners[0].clone();
        let number = listeners.len();
        another["name"] = json!(format!("gateway-{number}"));
        listeners.push(another);
        self.set_routes(number, routes);
        self
    }

    fn set_routes(&mut self, listener: usize, routes: &[Value]) {
        let manager = &mut self.0["static_resources"]["listeners"][listener]["filter_chains"][0]["filters"]
            [0]["typed_config"];
        let shipped = list(&mut manager["route_config"]["virtual_hosts"][0]["routes"]);
        let pattern = shipped[0].clone();
        let route = |members: &Value| {
            let mut route = pattern.clone();
            merge(&mut route, members);
            route
        };
        *shipped = routes.iter().map(route).collect();
    }

    fn manager(&mut self) -> &mut Value {
        &mut self.0["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    }

    /// Starts Envoy with this bootstrap and waits until it serves; fails if it does not.
    pub async fn start(self) -> Plain {
        let file = paths::scratch().join(format!("{}.json", unique_name("bootstrap")));
        std::fs::write(&file, self.0.to_string())
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
        let admin_file = paths::scratch().join(unique_name("admin-address"));
        let mut command = supervised::command(&paths::envoy());
        command
            .arg("--config-path")
            .arg(&file)
            .arg("--admin-address-path")
            .arg(&admin_file)
            .args(["--concurrency", &THREADS.to_string()])
            .arg("--disable-hot-restart")
            .args([
                "--log-level",
                "warning",
                "--component-log-level",
                "wasm:info",
            ]);
        let (mut process, _) = Process::spawn(command, "envoy");
        let (admin, listeners) = serves(&mut process, &admin_file).await;
        let Some(first) = listeners.first() else {
            panic!("Envoy has no listener");
        };
        Plain {
            gateway: Gateway::running((*first, admin), THREADS, process),
            listeners,
        }
    }
}

/// Waits until Envoy has its configuration and listens. Returns the addresses of its admin page and its listeners.
async fn serves(process: &mut Process, admin_file: &PathBuf) -> (SocketAddr, Vec<SocketAddr>) {
    let process = std::cell::RefCell::new(process);
    eventually("Envoy serves", GENEROUS, || async {
        let is_running = process.borrow_mut().is_running();
        assert!(is_running, "Envoy ended");
        let admin_text = std::fs::read_to_string(admin_file).map_err(|error| error.to_string())?;
        let admin: SocketAddr = admin_text.trim().parse().map_err(|_| admin_text.clone())?;
        let page = |path| client::try_send(admin, Ask::get(path));
        let ready = page("/ready")
            .await
            .map_err(|failure| failure.to_string())?;
        if ready.status != 200 {
            return Err(ready.text().into_owned());
        }
        let listeners = page("/listeners?format=json").await;
        let listeners = listeners.map_err(|failure| failure.to_string())?.json();
        let statuses = listeners["listener_statuses"].as_array().cloned();
        let addresses = statuses
            .unwrap_or_default()
            .iter()
            .filter_map(address)
            .collect();
        Ok((admin, addresses))
    })
    .await
}

fn address(listener: &Value) -> Option<SocketAddr> {
    let address = &listener["local_address"]["socket_address"];
    let port = u16::try_from(address["port_value"].as_u64()?).ok()?;
    Some(SocketAddr::new(
        address["address"].as_str()?.parse().ok()?,
        port,
    ))
}

/// Merges the members of `more` into `base`, nested objects recursively.
fn merge(base: &mut Value, more: &Value) {
    match (base, more) {
        (Value::Object(base), Value::Object(more)) => {
            for (name, value) in more {
                merge(base.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
        (base, more) => *base = more.clone(),
    }
}

fn list(value: &mut Value) -> &mut Vec<Value> {
    match value {
        Value::Array(list) => list,
        other => panic!("not a list: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_members_are_merged() {
        let mut base = json!({"a": {"b": 1, "c": [1]}, "d": 2});
        merge(&mut base, &json!({"a": {"c": [2], "e": null}}));
        assert_eq!(base, json!({"a": {"b": 1, "c": [2], "e": null}, "d": 2}));
    }
}
