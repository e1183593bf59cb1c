//! Owns Envoy's bootstrap: writes this run's addresses, clusters and plugin into the shipped one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use routing::config::Config;
use routing::request::overrides;
use serde_json::{Value, json};

mod clusters;
mod routes;

use self::clusters::address;
use crate::host::clusters::ClusterKind;
use crate::host::routes::Routes;

/// Values to write.
pub struct Settings<'a> {
    /// Address for clients.
    pub listen: SocketAddr,
    /// Address of Envoy's admin pages.
    pub admin: SocketAddr,
    /// The filter, by a path independent of the working directory.
    pub plugin: &'a Path,
    /// The filter's configuration.
    pub plugin_config: &'a str,
    /// The clusters, with the source of each one's hosts.
    pub clusters: &'a BTreeMap<String, ClusterKind>,
    /// Routes of the requests.
    pub routes: &'a Routes,
    /// Bytes of the largest request body.
    pub buffer_limit: usize,
    /// Whether callers' routing overrides reach the filter.
    pub callers: Callers,
}

/// Trust in the gateway's callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callers {
    /// Some pool trusts them: the filter must see the overrides, and decides itself whether to use them.
    Trusted,
    /// No pool trusts them.
    Untrusted,
}

impl Callers {
    /// By a plugin configuration.
    pub fn of(config: &Config) -> Self {
        match config.pools.iter().any(|pool| pool.trust_clients) {
            true => Self::Trusted,
            false => Self::Untrusted,
        }
    }
}

/// Why a bootstrap could not be filled in.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// Not YAML.
    #[error("the bootstrap is not YAML: {0}")]
    Yaml(#[from] serde_yaml_ng::Error),
    /// The template lacks a required place.
    #[error("the bootstrap has no {0}")]
    Lacks(&'static str),
}

const MANAGER: &str = "HttpConnectionManager";
const WASM: &str = "envoy.extensions.filters.http.wasm.v3.Wasm";

/// The template with the settings. With a path for a unix socket the admin page listens there, and has only these pages:
/// `/clusters`, `/ready`, `/stats`, and `/listeners`, from which this program learns Envoy's addresses.
///
/// # Errors
/// When the template is not YAML, or not a bootstrap with one listener, a wasm filter and at least one cluster.
pub fn render(
    template: &str,
    settings: &Settings,
    admin_pipe: Option<&Path>,
) -> Result<Value, BootstrapError> {
    let mut bootstrap: Value = serde_yaml_ng::from_str(template)?;
    set_admin(&mut bootstrap, settings, admin_pipe)?;
    // Further listeners only forward the admin page, which this program does itself.
    list(&mut bootstrap, "/static_resources/listeners", "listener")?.truncate(1);
    *place(
        &mut bootstrap,
        "/static_resources/listeners/0/address",
        "listener",
    )? = address(settings.listen);
    let manager = connection_manager(&mut bootstrap)?;
    routes::set(manager, settings)?;
    set_plugin(manager, settings)?;
    if settings.callers == Callers::Trusted {
        let_steering_in(manager)?;
    }
    clusters::set(&mut bootstrap, settings, admin_pipe)?;
    Ok(bootstrap)
}

fn set_admin(
    bootstrap: &mut Value,
    settings: &Settings,
    pipe: Option<&Path>,
) -> Result<(), BootstrapError> {
    let admin = place(bootstrap, "/admin", "admin page")?;
    let Some(pipe) = pipe else {
        admin["address"] = address(settings.admin);
        if let Some(admin) = admin.as_object_mut() {
            admin.remove("allow_paths");
        }
        return Ok(());
    };
    admin["address"] = json!({"pipe": {"path": pipe, "mode": 0o600}});
    let pages = ["/clusters", "/ready", "/stats", "/listeners"];
    admin["allow_paths"] = json!(pages.map(|page| json!({"prefix": page})));
    Ok(())
}

fn connection_manager(bootstrap: &mut Value) -> Result<&mut Value, BootstrapError> {
    let chain = "/static_resources/listeners/0/filter_chains/0/filters";
    list(bootstrap, chain, "filter chain")?
        .iter_mut()
        .filter_map(|filter| filter.get_mut("typed_config"))
        .find(|config| is_a(config, MANAGER))
        .ok_or(BootstrapError::Lacks("HTTP connection manager"))
}

fn set_plugin(manager: &mut Value, settings: &Settings) -> Result<(), BootstrapError> {
    let filter = list(manager, "/http_filters", "HTTP filters")?
        .iter_mut()
        .filter_map(|filter| filter.get_mut("typed_config"))
        .find(|config| is_a(config, WASM))
        .ok_or(BootstrapError::Lacks("wasm filter"))?;
    *place(filter, "/config/vm_config/code", "code of the wasm filter")? =
        json!({"local": {"filename": settings.plugin}});
    *place(
        filter,
        "/config/configuration/value",
        "configuration of the wasm filter",
    )? = json!(settings.plugin_config);
    Ok(())
}

/// Removes the routing overrides from the headers that are stripped from every request.
fn let_steering_in(manager: &mut Value) -> Result<(), BootstrapError> {
    let steers = |mutation: &Value| {
        let name = mutation["remove"].as_str();
        name.is_some_and(|name| overrides::header_names().any(|header| header == name))
    };
    for extension in list(
        manager,
        "/early_header_mutation_extensions",
        "early header mutations",
    )? {
        list(
            extension,
            "/typed_config/mutations",
            "list of early header mutations",
        )?
        .retain(|mutation| !steers(mutation));
    }
    Ok(())
}

fn is_a(config: &Value, kind: &str) -> bool {
    config["@type"]
        .as_str()
        .is_some_and(|name| name.ends_with(kind))
}

fn place<'a>(
    value: &'a mut Value,
    pointer: &str,
    name: &'static str,
) -> Result<&'a mut Value, BootstrapError> {
    value
        .pointer_mut(pointer)
        .ok_or(BootstrapError::Lacks(name))
}

fn list<'a>(
    value: &'a mut Value,
    pointer: &str,
    name: &'static str,
) -> Result<&'a mut Vec<Value>, BootstrapError> {
    place(value, pointer, name)?
        .as_array_mut()
        .ok_or(BootstrapError::Lacks(name))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::host::names::Name;
    use crate::host::routes::Route;
    use clusters::load_assignment;

    const SHIPPED: &str = include_str!("../../../../envoy/bootstrap.yaml");
    const BY_CLUSTERS: &str = include_str!("../../../../envoy/bootstrap-clusters.yaml");
    const MANAGER_AT: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn route(cluster: &str, pool: &str) -> Route {
        Route {
            cluster: cluster.to_owned(),
            pool: Some(pool.to_owned()),
        }
    }

    fn routes() -> Routes {
        Routes::all(route("decode", "first"))
    }

    fn settings<'a>(
        clusters: &'a BTreeMap<String, ClusterKind>,
        routes: &'a Routes,
    ) -> Settings<'a> {
        Settings {
            listen: at(1),
            admin: at(2),
            plugin: Path::new("p"),
            plugin_config: "",
            clusters,
            routes,
            buffer_limit: 7,
            callers: Callers::Untrusted,
        }
    }

    fn rendered() -> Value {
        let clusters = BTreeMap::from([
            ("decode".to_owned(), ClusterKind::Static(vec![at(4), at(5)])),
            ("elsewhere".to_owned(), ClusterKind::Static(vec![])),
        ]);
        let routes = routes();
        let settings = Settings {
            listen: at(1),
            admin: at(2),
            plugin: Path::new("/somewhere/plugin.wasm"),
            plugin_config: "{\"pools\": []}",
            clusters: &clusters,
            routes: &routes,
            buffer_limit: 7,
            callers: Callers::Untrusted,
        };
        render(SHIPPED, &settings, None).unwrap()
    }

    #[test]
    fn the_settings_are_in_their_places() {
        let bootstrap = rendered();
        let manager = bootstrap.pointer(MANAGER_AT).unwrap();
        let plugin = &manager["http_filters"][0]["typed_config"]["config"];
        let route = &manager["route_config"]["virtual_hosts"][0]["routes"][0];
        assert_eq!(
            bootstrap["admin"]["address"]["socket_address"]["port_value"],
            2
        );
        assert_eq!(
            bootstrap["static_resources"]["listeners"][0]["address"],
            address(at(1))
        );
        assert_eq!(
            plugin["vm_config"]["code"]["local"]["filename"],
            "/somewhere/plugin.wasm"
        );
        assert_eq!(plugin["configuration"]["value"], "{\"pools\": []}");
        assert_eq!(route["request_body_buffer_limit"], 7);
        assert_eq!(route["route"]["cluster"], "decode");
    }

    #[test]
    fn what_trusted_callers_say_reaches_the_filter_and_a_destination_never_does() {
        let names = |callers: Callers| {
            let (clusters, routes) = (BTreeMap::new(), routes());
            let settings = Settings {
                listen: at(1),
                admin: at(2),
                plugin: Path::new("p"),
                plugin_config: "",
                clusters: &clusters,
                routes: &routes,
                buffer_limit: 7,
                callers,
            };
            let bootstrap = render(SHIPPED, &settings, None).unwrap();
            let manager = bootstrap.pointer(MANAGER_AT).unwrap();
            let extension = &manager["early_header_mutation_extensions"][0];
            let mutations = extension["typed_config"]["mutations"].as_array().unwrap();
            let names: Vec<String> = mutations
                .iter()
                .filter_map(|m| Some(m["remove"].as_str()?.to_owned()))
                .collect();
            names
        };
        let (trusted, untrusted) = (names(Callers::Trusted), names(Callers::Untrusted));
        for header in overrides::header_names() {
            assert!(
                untrusted.iter().any(|name| name == header),
                "{header} is not stripped"
            );
            assert!(!trusted.iter().any(|name| name == header));
        }
        assert!(
            trusted
                .iter()
                .any(|name| name == "x-gateway-destination-endpoint")
        );
    }

    #[test]
    fn there_are_the_asked_clusters_and_no_others_and_all_are_strict() {
        let bootstrap = rendered();
        let clusters = bootstrap["static_resources"]["clusters"]
            .as_array()
            .unwrap();
        let names: Vec<_> = clusters.iter().map(|cluster| &cluster["name"]).collect();
        assert_eq!(names, ["decode", "elsewhere"]);
        assert_eq!(
            clusters[0]["load_assignment"],
            load_assignment("decode", &[at(4), at(5)])
        );
        assert_eq!(
            clusters[1]["load_assignment"],
            load_assignment("elsewhere", &[])
        );
        for cluster in clusters {
            let policy = &cluster["load_balancing_policy"]["policies"][0]["typed_extension_config"];
            assert_eq!(
                policy["name"],
                "envoy.load_balancing_policies.override_host"
            );
            assert_eq!(
                cluster["circuit_breakers"]["thresholds"][0]["max_retries"],
                100_000
            );
        }
    }

    #[test]
    fn the_shipped_configuration_is_one_the_filter_takes_and_its_clusters_hold_the_same_workers() {
        let shipped: Value = serde_yaml_ng::from_str(SHIPPED).unwrap();
        let manager = shipped.pointer(MANAGER_AT).unwrap();
        let plugin = &manager["http_filters"][0]["typed_config"]["config"];
        let document = plugin["configuration"]["value"].as_str().unwrap();
        let config = Config::parse(document.as_bytes()).unwrap();
        assert!(
            !config.response_headers && !config.status,
            "a demonstration's switches are off"
        );

        let members = super::super::fleet::Members::of(&config);
        for cluster in shipped["static_resources"]["clusters"].as_array().unwrap() {
            let name = cluster["name"].as_str().unwrap();
            let ClusterKind::Static(hosts) = &members.clusters[name] else {
                panic!("{name} is not static");
            };
            assert_eq!(cluster["load_assignment"], load_assignment(name, hosts));
        }
    }

    #[test]
    fn the_one_that_reads_envoys_clusters_has_those_that_it_speaks_of_and_can_be_filled_in() {
        let shipped: Value = serde_yaml_ng::from_str(BY_CLUSTERS).unwrap();
        let manager = shipped.pointer(MANAGER_AT).unwrap();
        let plugin = &manager["http_filters"][0]["typed_config"]["config"];
        let document = plugin["configuration"]["value"].as_str().unwrap();
        let config = Config::parse(document.as_bytes()).unwrap();
        let members = super::super::fleet::Members::of(&config);
        let clusters = shipped["static_resources"]["clusters"].as_array().unwrap();
        let names: BTreeSet<_> = clusters
            .iter()
            .filter_map(|one| one["name"].as_str())
            .collect();
        let spoken_of: BTreeSet<_> = members.clusters.keys().map(String::as_str).collect();
        assert_eq!(names, spoken_of);
        let settings = Settings {
            listen: at(1),
            admin: at(2),
            plugin: Path::new("p"),
            plugin_config: document,
            clusters: &members.clusters,
            routes: &members.routes,
            buffer_limit: 7,
            callers: members.callers,
        };
        let bootstrap = render(BY_CLUSTERS, &settings, Some(Path::new("/a.sock"))).unwrap();
        let listeners = bootstrap["static_resources"]["listeners"].as_array();
        assert_eq!(listeners.map(Vec::len), Some(1));
        let decode = &bootstrap["static_resources"]["clusters"][0];
        assert_eq!(
            (&decode["name"], &decode["type"]),
            (&json!("decode"), &json!("STATIC"))
        );
        assert!(decode["cluster_type"].is_null());
    }

    #[test]
    fn every_kind_of_cluster_keeps_breakers_and_stripping() {
        let name = Name {
            host: "w.test".to_owned(),
            port: 80,
            server: Some(at(53)),
        };
        let clusters = BTreeMap::from([
            (
                "by_file".to_owned(),
                ClusterKind::Eds("/a/file.json".into()),
            ),
            ("by_name".to_owned(), ClusterKind::Dns(name)),
            ("decode".to_owned(), ClusterKind::OriginalDst),
            ("own".to_owned(), ClusterKind::Admin),
        ]);
        let routes = routes();
        let settings = settings(&clusters, &routes);
        let bootstrap = render(SHIPPED, &settings, Some(Path::new("/run/a.sock"))).unwrap();
        assert_eq!(bootstrap["admin"]["address"]["pipe"]["path"], "/run/a.sock");
        assert!(bootstrap["node"]["id"].is_string());
        let clusters = &bootstrap["static_resources"]["clusters"];
        let at = |number: usize| &clusters[number];
        for number in 0..3 {
            let breakers = &at(number)["circuit_breakers"]["thresholds"][0];
            assert_eq!(breakers["max_requests"], 100_000, "{number}");
            assert!(at(number)["typed_extension_protocol_options"].is_object());
            assert_eq!(at(number)["load_balancing_policy"].is_null(), number == 2);
        }
        let file = at(0).pointer("/eds_cluster_config/eds_config/path_config_source/path");
        assert_eq!(file, Some(&json!("/a/file.json")));
        assert!(at(0)["load_assignment"].is_null());
        assert!(at(1)["type"].is_null());
        assert_eq!(at(2)["original_dst_lb_config"]["use_http_header"], true);
        let pipe = "/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address/pipe/path";
        assert_eq!(at(3).pointer(pipe), Some(&json!("/run/a.sock")));
    }

    #[test]
    fn each_authority_has_a_route_that_names_its_pool() {
        let mut routes = routes();
        routes.add("b.test", route("b-decode", "second"));
        let nameless = Route {
            cluster: "decode".to_owned(),
            pool: None,
        };
        routes.add("c.test", nameless);
        let clusters = BTreeMap::new();
        let settings = settings(&clusters, &routes);
        let bootstrap = render(SHIPPED, &settings, None).unwrap();
        let hosts = bootstrap.pointer(MANAGER_AT).unwrap();
        let hosts = &hosts["route_config"]["virtual_hosts"];
        let found: Vec<_> = (0..3)
            .map(|host| {
                let route = &hosts[host]["routes"][0];
                json!([
                    hosts[host]["domains"][0],
                    route["name"],
                    route["route"]["cluster"],
                    route["metadata"]["filter_metadata"]["pd_router"]["pool"]
                ])
            })
            .collect();
        let expected = [
            json!(["*", "first", "decode", "first"]),
            json!(["b.test", "second", "b-decode", "second"]),
            json!(["c.test", null, "decode", null]),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_bootstrap_without_the_filter_is_refused_by_name() {
        let routes = routes();
        let without = SHIPPED.replace("http.wasm.v3.Wasm", "http.other.v3.Other");
        let clusters = BTreeMap::new();
        let settings = settings(&clusters, &routes);
        let error = render(&without, &settings, None).unwrap_err();
        assert_eq!(error.to_string(), "the bootstrap has no wasm filter");
    }
}
