//! Owns the workers, their roles and ranks, as an immutable, versioned [`Fleet`].

pub mod topology;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use topology::Topology;

/// A worker's instance id: a full unsigned 64-bit number, as Dynamo's are. A restarted worker has a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Reads prompts, and hands their KV cache on.
    Prefill,
    /// Writes answers from a KV cache it is handed.
    Decode,
    /// Runs whole requests.
    Aggregated,
}

impl Role {
    /// All roles, for figures that have one value each.
    pub const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Aggregated];

    /// The name used in configuration, metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
        }
    }
}

/// One worker: an engine process with one or more data-parallel ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Identity; a worker that restarts is another worker.
    pub id: WorkerId,
    /// Name for people: the configured name, else the address, else the id.
    pub name: String,
    /// Network address; none for a worker behind a Dynamo frontend.
    pub address: Option<SocketAddr>,
    /// Role.
    pub role: Role,
    /// The model that the worker serves; none: any.
    pub model: Option<String>,
    /// Workers of one namespace may exchange KV.
    pub namespace: String,
    /// Data-parallel ranks, numbered from 0; at least 1.
    pub dp_size: u32,
    /// The worker's set; two sets of one role are ambiguous.
    #[serde(default)]
    pub set: String,
    /// Port of the worker's bootstrap server, where its source has it.
    #[serde(default)]
    pub bootstrap_port: Option<u16>,
    /// The worker's topology domains, and how far its KV may travel.
    #[serde(default)]
    pub topology: Option<Topology>,
    /// Memory and compute limits of one rank.
    #[serde(default)]
    pub capacity: Capacity,
    /// Loaded LoRA adapters, by the names that requests use.
    #[serde(default)]
    pub adapters: Vec<String>,
    /// Fitness for new requests, according to the worker's source.
    #[serde(default)]
    pub condition: Condition,
}

impl Worker {
    /// A worker of one rank, named by its address or, without one, by its id, of which nothing else is known.
    pub fn new(id: WorkerId, role: Role, address: Option<SocketAddr>) -> Self {
        Self {
            id,
            name: address.map_or_else(|| id.to_string(), |address| address.to_string()),
            address,
            role,
            model: None,
            namespace: String::new(),
            dp_size: 1,
            set: String::new(),
            bootstrap_port: None,
            topology: None,
            capacity: Capacity::default(),
            adapters: Vec::new(),
            condition: Condition::default(),
        }
    }
}

/// Fitness for new requests, according to the worker's source. What the worker's answers show is kept by the router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// Fit for new requests.
    #[default]
    Ready,
    /// Not well: passed over while another worker of the same kind is ready.
    Unhealthy,
    /// Gets nothing new, and finishes what it has.
    Draining,
}

impl Condition {
    /// The name used on the status page.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Unhealthy => "unhealthy",
            Self::Draining => "draining",
        }
    }
}

/// Memory and compute limits of one rank, as far as its source has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Capacity {
    /// KV blocks that fit.
    pub kv_blocks: Option<u32>,
    /// Maximum tokens per engine step (vLLM's `max_num_batched_tokens`).
    pub batched_tokens: Option<u64>,
    /// Maximum tokens of a prompt and its answer together (vLLM's `max_model_len`).
    pub max_model_len: Option<u64>,
}

/// One life of a worker: knowledge of the worker ends when any of these fields changes. A restart that changes none of them
/// shows in the engine's own start time, bootstrap port or id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Incarnation {
    /// Instance id.
    pub id: WorkerId,
    /// Network address.
    pub address: Option<SocketAddr>,
    /// Role.
    pub role: Role,
    /// Number of ranks: an engine changes it only by a restart.
    pub dp_size: u32,
}

impl Worker {
    /// The current incarnation.
    pub fn incarnation(&self) -> Incarnation {
        Incarnation {
            id: self.id,
            address: self.address,
            role: self.role,
            dp_size: self.dp_size,
        }
    }

    /// Whether the worker serves `model`; every worker serves a request without a model.
    pub fn serves(&self, model: Option<&str>) -> bool {
        match (&self.model, model) {
            (Some(own), Some(asked)) => own == asked,
            _ => true,
        }
    }

    /// Whether the worker gets nothing new.
    pub fn is_draining(&self) -> bool {
        self.condition == Condition::Draining
    }

    /// What can be picked: each rank of a worker with several, else the worker itself.
    pub fn targets(self: &Arc<Self>) -> impl Iterator<Item = Target> {
        let ranks = if self.dp_size > 1 { self.dp_size } else { 0 };
        let whole = (ranks == 0).then(|| Target::whole(self));
        whole.into_iter().chain((0..ranks).map(|rank| Target {
            worker: Arc::clone(self),
            rank: Some(rank),
        }))
    }
}

/// What selection picks: a worker, and the rank on it where the worker has several.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The data-parallel rank; none where the worker has only one.
    pub rank: Option<u32>,
}

impl Target {
    /// The whole worker, without a rank.
    pub fn whole(worker: &Arc<Worker>) -> Self {
        Self {
            worker: Arc::clone(worker),
            rank: None,
        }
    }

    /// Identity in bookings and cursors.
    pub fn key(&self) -> TargetKey {
        TargetKey {
            worker: self.worker.id,
            rank: self.rank.unwrap_or(0),
        }
    }
}

/// The identity of a [`Target`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetKey {
    /// The worker.
    pub worker: WorkerId,
    /// The rank; 0 where the worker has only one.
    pub rank: u32,
}

/// All workers known at one moment. Never changed, only replaced by a fleet of another version.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Fleet {
    version: u64,
    workers: Vec<Arc<Worker>>,
    /// Position in `workers` by id.
    index: HashMap<WorkerId, usize>,
}

/// A fleet as it is published to other threads.
#[derive(Debug, Serialize, Deserialize)]
struct Published {
    version: u64,
    workers: Vec<Worker>,
}

/// Why published bytes are not a fleet.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// Not what [`Fleet::encode`] wrote.
    #[error("published fleet: {0}")]
    Format(#[from] serde_json::Error),
}

impl Fleet {
    /// A fleet of these workers. Where an id occurs twice, the first worker counts.
    pub fn new(version: u64, workers: Vec<Worker>) -> Self {
        let mut fleet = Self {
            version,
            workers: Vec::with_capacity(workers.len()),
            index: HashMap::with_capacity(workers.len()),
        };
        for worker in workers {
            if fleet.contains(worker.id) {
                continue;
            }
            fleet.index.insert(worker.id, fleet.workers.len());
            fleet.workers.push(Arc::new(worker));
        }
        fleet
    }

    /// Grows with every change that is published.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// All workers.
    pub fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> + Clone {
        self.workers.iter()
    }

    /// The workers of one role.
    pub fn of_role(&self, role: Role) -> impl Iterator<Item = &Arc<Worker>> + Clone {
        self.workers
            .iter()
            .filter(move |worker| worker.role == role)
    }

    /// Workers that may be picked: all that do not drain.
    pub fn open(&self) -> impl Iterator<Item = &Arc<Worker>> + Clone {
        self.workers.iter().filter(|worker| !worker.is_draining())
    }

    /// Whether `id` is a worker of this fleet.
    pub fn contains(&self, id: WorkerId) -> bool {
        self.index.contains_key(&id)
    }

    /// The worker with this id.
    pub fn get(&self, id: WorkerId) -> Option<&Arc<Worker>> {
        self.workers.get(*self.index.get(&id)?)
    }

    /// Whether a worker is still in the given incarnation.
    pub fn lives(&self, life: &Incarnation) -> bool {
        self.alive(life).is_some()
    }

    /// The worker, if it is still in the given incarnation.
    pub fn alive(&self, life: &Incarnation) -> Option<&Arc<Worker>> {
        let worker = self.get(life.id)?;
        (worker.incarnation() == *life).then_some(worker)
    }

    /// This fleet without some of its workers.
    pub fn without(&self, some: &[WorkerId]) -> Self {
        let staying = self.workers().filter(|worker| !some.contains(&worker.id));
        let mut fleet = Self {
            version: self.version,
            workers: staying.cloned().collect(),
            index: HashMap::new(),
        };
        let places = fleet.workers.iter().map(|worker| worker.id).zip(0..);
        fleet.index = places.collect();
        fleet
    }

    /// The worker reached at `address` in one of `roles`, if any.
    pub fn at(&self, address: SocketAddr, roles: &[Role]) -> Option<&Arc<Worker>> {
        self.workers
            .iter()
            .find(|worker| worker.address == Some(address) && roles.contains(&worker.role))
    }

    /// The encoding in which other threads adopt a fleet.
    pub fn encode(&self) -> Vec<u8> {
        let published = Published {
            version: self.version,
            workers: self
                .workers
                .iter()
                .map(|worker| Worker::clone(worker))
                .collect(),
        };
        // Strings and numbers only: serialising them to memory cannot fail.
        serde_json::to_vec(&published).unwrap_or_default()
    }

    /// Reads what [`Fleet::encode`] wrote.
    ///
    /// # Errors
    /// When the bytes are something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, FleetError> {
        let published: Published = serde_json::from_slice(bytes)?;
        Ok(Self::new(published.version, published.workers))
    }
}
