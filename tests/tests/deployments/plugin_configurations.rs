//! The plugin accepts every plugin configuration in the repository's files.

use routing::config::{Config, Discovery, ProtocolName};
use serde_json::Value;

use crate::files::{bootstraps, document, objects};

const STRING: &str = "type.googleapis.com/google.protobuf.StringValue";

/// The plugin configurations in an Envoy configuration: the strings given to a Wasm extension.
fn strings_within<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| strings_within(item, found)),
        Value::Object(fields) => {
            if fields.get("@type").and_then(Value::as_str) == Some(STRING) {
                found.extend(fields.get("value").and_then(Value::as_str));
            }
            fields
                .values()
                .for_each(|field| strings_within(field, found));
        }
        _ => {}
    }
}

/// Origin of each configuration, and the configuration.
fn all() -> Vec<(String, Config)> {
    let mut texts = Vec::new();
    for file in bootstraps() {
        let content = document(&file);
        let mut found = Vec::new();
        strings_within(&content, &mut found);
        assert_eq!(found.len(), 1, "{file}: {} configurations", found.len());
        texts.extend(
            found
                .into_iter()
                .map(|text| (file.clone(), text.to_owned())),
        );
    }
    for object in objects() {
        let mut found = Vec::new();
        strings_within(&object.content, &mut found);
        let policies = object.content["spec"]["wasm"].as_array();
        let given = policies
            .into_iter()
            .flatten()
            .map(|wasm| wasm["config"].to_string());
        let title = object.title();
        texts.extend(
            found
                .into_iter()
                .map(|text| (title.clone(), text.to_owned())),
        );
        texts.extend(given.map(|text| (title.clone(), text)));
    }
    texts
        .into_iter()
        .map(|(title, text)| {
            let read = Config::parse(text.as_bytes());
            let config = read.unwrap_or_else(|error| panic!("{title}: {error}"));
            (title, config)
        })
        .collect()
}

#[test]
fn every_configuration_is_one_that_the_plugin_takes() {
    let all = all();
    assert!(all.len() >= 10, "only {} configurations", all.len());
    let of_folder = |folder: &str| {
        let found = all
            .iter()
            .find(|(title, _)| title.starts_with(&format!("envoy/{folder}/")));
        let (_, config) = found.unwrap_or_else(|| panic!("envoy/{folder} has no configuration"));
        config.pools[0].protocol
    };
    for (folder, protocol) in [
        ("vllm", ProtocolName::Nixl),
        ("sglang", ProtocolName::Sglang),
        ("trtllm", ProtocolName::Trtllm),
        ("llm-d", ProtocolName::Llmd),
        ("dynamo", ProtocolName::Direct),
        ("inference-pool", ProtocolName::Aggregated),
        ("envoy-gateway", ProtocolName::Nixl),
        ("istio", ProtocolName::Nixl),
    ] {
        assert_eq!(of_folder(folder), protocol, "envoy/{folder}");
    }
}

/// The clusters named in a bootstrap's plugin configuration are clusters of that bootstrap.
#[test]
fn every_cluster_that_a_bootstraps_configuration_names_is_there() {
    for file in bootstraps() {
        let bootstrap = document(&file);
        let clusters = bootstrap["static_resources"]["clusters"].as_array();
        let there: Vec<&str> = clusters
            .into_iter()
            .flatten()
            .filter_map(|cluster| cluster["name"].as_str())
            .collect();
        for (_, config) in all().into_iter().filter(|(title, _)| *title == file) {
            for pool in config.pools {
                let mut named = vec![pool.clusters.decode.clone()];
                if let Discovery::EnvoyClusters(source) = &pool.discovery {
                    named.push(source.cluster.clone());
                    named.extend(source.members.keys().cloned());
                }
                for name in named {
                    assert!(there.contains(&name.as_str()), "{file}: {name}");
                }
            }
        }
    }
}
