//! Owns the Dynamo source: the instances in a frontend's `GET /health`.
//!
//! Only rows of the endpoint `generate` are workers; others repeat the ids. A row has a namespace and a component, but no
//! model or role: the configuration maps those. Instance ids are full unsigned 64-bit numbers, new at every start.

use serde::Deserialize;

use super::{Poll, PollAnswer, Source, SourceError, SourceUpdate, bounded};
use crate::config::{DynamoDiscovery, Pool};
use crate::fleet::{Worker, WorkerId};

/// A Dynamo frontend, polled at `/health`.
#[derive(Debug)]
pub struct Dynamo {
    mapping: DynamoDiscovery,
    poll: Poll,
}

impl Dynamo {
    pub fn new(mapping: &DynamoDiscovery, pool: &Pool) -> Self {
        Self {
            poll: Poll {
                cluster: pool.clusters.decode.clone(),
                destinations: pool.frontends.clone(),
                path: "/health".to_owned(),
                headers: Vec::new(),
                interval_ms: mapping.interval_ms,
                timeout_ms: mapping.timeout_ms,
            },
            mapping: mapping.clone(),
        }
    }
}

impl Source for Dynamo {
    fn poll(&self) -> Option<Poll> {
        Some(self.poll.clone())
    }

    fn read_answer(&mut self, answer: &PollAnswer<'_>) -> Result<SourceUpdate, SourceError> {
        answer.check_length()?;
        match answer.status {
            200 => Ok(SourceUpdate::Workers(
                bounded(parse(answer.body, &self.mapping)?)?,
                Vec::new(),
            )),
            status => Err(SourceError::Status(status)),
        }
    }
}

#[derive(Deserialize)]
struct Health {
    instances: Vec<Instance>,
}

#[derive(Deserialize)]
struct Instance {
    namespace: String,
    component: String,
    endpoint: String,
    instance_id: u64,
}

/// The workers in a health answer, ordered by id.
///
/// # Errors
/// When the answer cannot be read; an empty list is no error.
pub fn parse(body: &[u8], mapping: &DynamoDiscovery) -> Result<Vec<Worker>, SourceError> {
    let health: Health = serde_json::from_slice(body).map_err(SourceError::Dynamo)?;
    let mut workers: Vec<Worker> = health
        .instances
        .into_iter()
        .filter(|instance| instance.endpoint == "generate")
        .filter_map(|instance| worker(instance, mapping))
        .collect();
    workers.sort_by_key(|worker| worker.id);
    workers.dedup_by_key(|worker| worker.id);
    Ok(workers)
}

fn worker(instance: Instance, mapping: &DynamoDiscovery) -> Option<Worker> {
    let model = mapping.models.get(&instance.namespace)?;
    let role = *mapping.roles.get(&instance.component)?;
    let id = WorkerId(instance.instance_id);
    Some(Worker {
        model: Some(model.clone()),
        namespace: instance.namespace,
        // One component is one set: a second component of the same role is another set.
        set: instance.component,
        ..Worker::new(id, role, None)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Role;
    use std::collections::BTreeMap;

    fn mapping() -> DynamoDiscovery {
        DynamoDiscovery {
            models: BTreeMap::from([("dynamo".into(), "tiny".into())]),
            roles: BTreeMap::from([
                ("prefill".into(), Role::Prefill),
                ("backend".into(), Role::Decode),
            ]),
            interval_ms: 1000,
            timeout_ms: 1000,
            keep_stale_ms: None,
        }
    }

    #[test]
    fn reads_generate_rows_with_full_64_bit_ids() {
        let body = br#"{"status":"healthy","endpoints":["dyn://dynamo.backend.generate"],"instances":[
            {"component":"backend","endpoint":"generate","namespace":"dynamo","instance_id":17027154285309405691,
             "transport":{"tcp":"127.0.0.1:45889/95b0/dynamo/backend/generate"},"device_type":"cuda"},
            {"component":"prefill","endpoint":"worker_kv_query_source_1ff5","namespace":"dynamo","instance_id":2777843430480054051},
            {"component":"prefill","endpoint":"generate","namespace":"dynamo","instance_id":2777843430480054051},
            {"component":"encoder","endpoint":"generate","namespace":"dynamo","instance_id":5},
            {"component":"backend","endpoint":"generate","namespace":"other","instance_id":6}]}"#;
        let workers = parse(body, &mapping()).unwrap();
        let seen: Vec<_> = workers.iter().map(|w| (w.id.0, w.role)).collect();
        assert_eq!(
            seen,
            [
                (2777843430480054051, Role::Prefill),
                (17027154285309405691, Role::Decode)
            ]
        );
        assert!(workers.iter().all(|w| w.model.as_deref() == Some("tiny")));
    }

    #[test]
    fn an_empty_list_is_an_answer_and_anything_else_is_not() {
        assert_eq!(parse(br#"{"instances":[]}"#, &mapping()).unwrap(), []);
        for bad in [
            &b""[..],
            b"ok",
            b"{}",
            b"[]",
            br#"{"instances":[{"instance_id":-1}]}"#,
            b"\xff",
        ] {
            assert!(parse(bad, &mapping()).is_err(), "{bad:?}");
        }
    }
}
