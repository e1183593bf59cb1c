//! Envoy accepts every bootstrap, and each is a variant of the first ones in necessary points only.

use serde_json::{Value, json};

use crate::files::{bootstraps, document, documents, read, yaml_files};
use crate::judge::is_taken;

const REFERENCE: &str = "envoy/bootstrap-clusters.yaml";

fn in_folders() -> Vec<String> {
    let mut found = bootstraps();
    found.retain(|path| path.matches('/').count() == 2);
    found
}

#[test]
fn envoy_takes_every_bootstrap() {
    let all = bootstraps();
    assert!(all.len() >= 8, "only {all:?}");
    for file in all {
        is_taken(&file, &read(&file));
    }
}

/// All YAML, the manifests too.
#[test]
fn every_file_can_be_read() {
    let files = yaml_files();
    assert!(files.len() > 20, "only {files:?}");
    for file in files {
        assert!(!documents(&file).is_empty(), "{file} is empty");
    }
}

/// The gateway's listener without a folder's own parts: its address, the plugin's location and configuration, and whether
/// a gateway in front may name a subset.
fn listener(bootstrap: &Value, name: &str) -> Value {
    let listeners = bootstrap.pointer("/static_resources/listeners");
    let listeners = listeners.and_then(Value::as_array).cloned();
    let found = listeners
        .unwrap_or_default()
        .into_iter()
        .find(|listener| listener["name"] == name);
    let mut found = found.unwrap_or_else(|| panic!("there is no listener {name}"));
    found["address"] = Value::Null;
    let manager = &mut found["filter_chains"][0]["filters"][0]["typed_config"];
    if name == "gateway" {
        let wasm = &mut manager["http_filters"][0]["typed_config"]["config"];
        assert_eq!(wasm["allow_on_headers_stop_iteration"], json!(true));
        wasm["configuration"] = Value::Null;
        wasm["vm_config"]["code"] = Value::Null;
        let stripped =
            &mut manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"];
        if let Some(stripped) = stripped.as_array_mut() {
            stripped.retain(|header| header["remove"] != "x-gateway-destination-endpoint-subset");
        }
    }
    found
}

fn cluster<'a>(bootstrap: &'a Value, name: &str) -> Option<&'a Value> {
    let clusters = bootstrap
        .pointer("/static_resources/clusters")?
        .as_array()?;
    clusters.iter().find(|cluster| cluster["name"] == name)
}

/// The clusters of these names select hosts as strictly as that of the bootstraps for plain Envoy.
///
/// # Panics
/// If a cluster is missing or less strict.
pub fn are_as_strict(bootstrap: &Value, names: [&str; 2]) {
    let reference = document(REFERENCE);
    let expected = cluster(&reference, "decode").expect("the reference has a decode cluster");
    for name in names {
        let found = cluster(bootstrap, name);
        let found = found.unwrap_or_else(|| panic!("there is no cluster {name}"));
        for part in ["load_balancing_policy", "typed_extension_protocol_options"] {
            assert_eq!(found[part], expected[part], "{name}: {part}");
        }
    }
}

#[test]
fn the_folders_bootstraps_differ_from_the_first_one_in_nothing_but_what_they_must() {
    let reference = document(REFERENCE);
    let files = in_folders();
    assert!(files.len() >= 6, "only {files:?}");
    for file in files {
        let bootstrap = document(&file);
        for part in ["admin", "stats_config", "overload_manager"] {
            assert_eq!(bootstrap[part], reference[part], "{file}: {part}");
        }
        for name in ["gateway", "admin_pages"] {
            let expected = listener(&reference, name);
            assert_eq!(listener(&bootstrap, name), expected, "{file}: {name}");
        }
        let admin = "envoy_admin";
        assert_eq!(
            cluster(&bootstrap, admin),
            cluster(&reference, admin),
            "{file}"
        );
    }
}

/// Required settings of every cluster of workers.
#[test]
fn the_folders_clusters_reach_whom_the_filter_names_and_nobody_else() {
    let reference = document(REFERENCE);
    let expected = cluster(&reference, "decode").expect("the reference has a decode cluster");
    for file in in_folders() {
        let bootstrap = document(&file);
        let workers = ["prefill", "decode"].map(|name| cluster(&bootstrap, name));
        assert!(workers[1].is_some(), "{file} has no decode cluster");
        for worker in workers.into_iter().flatten() {
            for part in [
                "load_balancing_policy",
                "circuit_breakers",
                "typed_extension_protocol_options",
                "connect_timeout",
            ] {
                let name = &worker["name"];
                assert_eq!(worker[part], expected[part], "{file}: {name}: {part}");
            }
        }
    }
}
