//! Owns the static source: workers written down in the configuration.

use xxhash_rust::xxh3::xxh3_64;

use crate::config::{StaticDiscovery, StaticWorker};
use crate::fleet::{Worker, WorkerId};

/// The workers of a static list.
pub fn workers(list: &StaticDiscovery) -> Vec<Worker> {
    list.workers.iter().map(worker).collect()
}

fn worker(listed: &StaticWorker) -> Worker {
    let address = listed.address.map(|address| address.to_string());
    let id = listed
        .id
        .unwrap_or_else(|| xxh3_64(address.as_deref().unwrap_or_default().as_bytes()));
    let name = listed.name.clone().or(address);
    Worker {
        id: WorkerId(id),
        name: name.unwrap_or_else(|| id.to_string()),
        address: listed.address,
        role: listed.role,
        model: listed.model.clone(),
        namespace: listed.namespace.clone(),
        dp_size: listed.dp_size,
    }
}
