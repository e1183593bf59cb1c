//! Owns Envoy's route configuration: the shipped route, copied for each authority with a route of its own.

use serde_json::{Value, json};

use super::{BootstrapError, Settings, list, place};
use crate::host::routes::Route;

/// The metadata namespace in which a route names its pool.
const METADATA: &str = "pd_router";

/// Writes the routes: the template's virtual host leads to the first pool, and a copy of it to each other one.
pub fn set(manager: &mut Value, settings: &Settings) -> Result<(), BootstrapError> {
    let hosts = list(manager, "/route_config/virtual_hosts", "virtual hosts")?;
    let mut copies = Vec::new();
    for (authority, route) in settings.routes.named() {
        let mut host = hosts
            .first()
            .cloned()
            .ok_or(BootstrapError::Lacks("virtual hosts"))?;
        host["name"] = json!(authority);
        host["domains"] = json!([authority]);
        lead(&mut host, route, settings)?;
        copies.push(host);
    }
    for host in hosts.iter_mut() {
        lead(host, settings.routes.others(), settings)?;
    }
    hosts.append(&mut copies);
    place(manager, "/route_config", "routes")?["ignore_port_in_host_matching"] = json!(true);
    Ok(())
}

fn lead(host: &mut Value, to: &Route, settings: &Settings) -> Result<(), BootstrapError> {
    for route in list(host, "/routes", "routes")? {
        *place(route, "/route/cluster", "route to a cluster")? = json!(to.cluster);
        route["request_body_buffer_limit"] = json!(settings.buffer_limit);
        let Some(pool) = &to.pool else {
            continue;
        };
        route["name"] = json!(pool);
        route["metadata"] = json!({"filter_metadata": {METADATA: {"pool": pool}}});
    }
    Ok(())
}
