//! Owns the Envoys against which pd-router is measured: the shipped bootstrap with a lesser filter or none in pd-router's place,
//! and round robin instead of a named destination.

use std::net::SocketAddr;

use pd_harness_common::loopback::ANYWHERE;
use serde_json::{Value, json};

use super::contender::LesserFilter;
use super::running_contender::{BUFFER_LIMIT, ContenderError, ContenderFiles, balanced};
use crate::host::routes::{Route, Routes};
use crate::run::gateway::{AmendedConfig, Gateway};
use crate::run::{Callers, EnvoyLog, Settings};

/// Replacement of pd-router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterReplacement {
    /// No filter.
    Nothing,
    /// A lesser filter.
    Filter(LesserFilter),
}

/// Starts an Envoy that balances between these hosts.
///
/// # Errors
/// When Envoy does not become ready.
pub async fn start(
    replacement: FilterReplacement,
    hosts: Vec<SocketAddr>,
    threads: u16,
    parts: &ContenderFiles,
) -> Result<Gateway, ContenderError> {
    let (configuration, amend): (_, fn(&mut Value)) = match replacement {
        FilterReplacement::Nothing => ("", without_filter),
        FilterReplacement::Filter(lesser) => (lesser.configuration(), balance),
    };
    let routes = Routes::all(Route {
        cluster: "decode".to_owned(),
        pool: None,
    });
    let amended = AmendedConfig {
        concurrency: threads,
        log: EnvoyLog::Errors,
        amend,
    };
    let settings = Settings {
        listen: ANYWHERE,
        admin: ANYWHERE,
        plugin: &std::path::absolute(&parts.lesser)?,
        plugin_config: configuration,
        clusters: &balanced(hosts),
        routes: &routes,
        buffer_limit: BUFFER_LIMIT,
        callers: Callers::Untrusted,
    };
    Ok(Gateway::start_amended(&parts.files, settings, amended).await?)
}

fn without_filter(bootstrap: &mut Value) {
    balance(bootstrap);
    let filters = bootstrap.pointer_mut(
        "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters",
    );
    if let Some(filters) = filters.and_then(Value::as_array_mut) {
        filters.retain(|filter| filter["name"] != "pd_router");
    }
}

fn balance(bootstrap: &mut Value) {
    let clusters = bootstrap.pointer_mut("/static_resources/clusters");
    for cluster in clusters.and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(cluster) = cluster.as_object_mut() {
            cluster.remove("load_balancing_policy");
            cluster.insert("lb_policy".to_owned(), json!("ROUND_ROBIN"));
        }
    }
}
