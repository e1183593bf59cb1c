//! Owns listed workers: in the configuration (the static source), or in a polled document.

use xxhash_rust::xxh3::xxh3_64;

use crate::config::ListedWorker;
use crate::fleet::{Capacity, Condition, Worker, WorkerId};

/// The workers of a list.
pub fn workers(list: &[ListedWorker]) -> Vec<Worker> {
    list.iter().map(worker).collect()
}

/// The worker's id: the listed one, else one derived from the address.
pub(super) fn identity(listed: &ListedWorker) -> WorkerId {
    let derived = || {
        let address = listed.address.map(|address| address.to_string());
        xxh3_64(address.unwrap_or_default().as_bytes())
    };
    WorkerId(listed.id.unwrap_or_else(derived))
}

fn worker(listed: &ListedWorker) -> Worker {
    let unnamed = Worker::new(identity(listed), listed.role, listed.address);
    Worker {
        name: listed.name.clone().unwrap_or(unnamed.name),
        model: listed.model.clone(),
        namespace: listed.namespace.clone(),
        dp_size: listed.dp_size,
        set: listed.set.clone(),
        bootstrap_port: listed.bootstrap_port,
        topology: listed.topology.clone(),
        capacity: Capacity {
            kv_blocks: listed.kv_blocks,
            batched_tokens: listed.batched_tokens,
            max_model_len: listed.max_model_len,
        },
        adapters: listed.adapters.clone(),
        condition: match listed.draining {
            true => Condition::Draining,
            false => Condition::Ready,
        },
        ..unnamed
    }
}
