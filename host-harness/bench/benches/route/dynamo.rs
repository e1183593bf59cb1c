//! Owns the measured peer: the selection core of NVIDIA Dynamo's router, called as its own selection service calls it.
//!
//! One route there: the ids are hashed into blocks and sequences, the index returns the workers that hold them, one worker is
//! scored and picked, the request is booked on the worker and in the reservation table, and freed again. The index learns from
//! engines' events, apart from the requests, so that the equivalent of our `learn` is no part of its time. Requests are built
//! outside the measured time, and no worker has an event socket, which would reconnect in the background. All of that is in its
//! favour. The CPU time of all threads counts, since the index may have its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cpu_time::ProcessTime;

use dynamo_kv_router::identity::RoutingPartitionId;
use dynamo_kv_router::indexer::KvIndexerInterface as _;
use dynamo_kv_router::plugins::RouterPluginRegistry;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, RoutingConstraints, StorageTier,
    WorkerWithDpRank, compute_block_hash_for_seq, compute_seq_hash_for_block,
};
use dynamo_kv_router::services::indexer::backend::Indexer;
use dynamo_kv_router::services::indexer::registry::WorkerRegistry;
use dynamo_kv_router::services::selection::{
    DEFAULT_MODEL_NAME, KvEventIngress, KvIndexSource, PromptRequest, SelectAndReserveRequest,
    SelectionService, SelectionServiceBuilder, WorkerRequest,
};
use dynamo_kv_router::{DEFAULT_ROUTING_GROUP, KvRouterConfig, WorkerSelectionPolicy, WorkerType};
use tokio::runtime::Runtime;

use pd_router_bench::situation::{
    BUSY, BUSY_TOKENS, CACHE_BLOCKS, CONVERSATIONS, EXPECTED_TOKENS, Situation, new_turn, stuffing,
};

/// Blocks in one event. Engines send one event per prefill step, a few hundred blocks at most.
const EVENT_BLOCKS: u32 = 200;
/// Requests built in one batch, outside the measured time.
const BATCH: u64 = 64;

/// Number of threads that write to its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexThreads {
    /// As in its own benchmark. Queries and answers go through channels.
    One = 1,
    /// Its default. The index is read where the request is handled.
    Four = 4,
}

/// Dynamo's router in one situation.
pub struct Dynamo {
    runtime: Runtime,
    service: SelectionService,
    situation: Situation,
    prompts: Vec<Vec<u32>>,
    turn: u64,
    events: HashMap<u32, u64>,
}

/// The index as the service would make it, without a source of events.
struct FedByHand;

impl KvEventIngress for FedByHand {
    fn open(
        &self,
        registry: &WorkerRegistry,
        key: &RoutingPartitionId,
        block_size: u32,
    ) -> Indexer {
        registry.get_or_create_indexer(key.clone(), block_size)
    }
}

impl Dynamo {
    /// A router whose workers are all of one kind: its core selects for one role at a time.
    pub fn put_in(situation: &Situation, threads: IndexThreads) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let service = runtime
            .block_on(service(situation, threads))
            .expect("a selection service");
        let mut dynamo = Self {
            runtime,
            service,
            situation: *situation,
            prompts: (0..CONVERSATIONS)
                .map(|conversation| situation.prompt(conversation))
                .collect(),
            turn: 0,
            events: HashMap::new(),
        };
        dynamo.fill_caches();
        dynamo.make_busy();
        dynamo
    }

    /// Routes `times` requests in sequence and returns the time.
    pub fn route(&mut self, times: u64) -> Duration {
        let mut taken = Duration::ZERO;
        let mut left = times;
        while left > 0 {
            let batch: Vec<_> = (0..left.min(BATCH)).map(|_| self.next_request()).collect();
            left -= batch.len() as u64;
            let core = self.service.core();
            taken += self.runtime.block_on(async {
                let start = ProcessTime::now();
                for (id, request) in batch {
                    core.select_and_reserve(request).await.expect("a selection");
                    core.free_reservation(&id).await.expect("a reservation");
                }
                start.elapsed()
            });
        }
        taken
    }

    fn next_request(&mut self) -> (String, SelectAndReserveRequest) {
        self.turn += 1;
        let mut ids = self.prompts[(self.turn % u64::from(CONVERSATIONS)) as usize].clone();
        ids[self.situation.fork() as usize] = new_turn(self.turn);
        let id = format!("turn-{}", self.turn);
        let request = request(id.clone(), ids, None);
        (id, request)
    }

    /// Fills each cache: the prefixes of the conversations that it holds, then other blocks up to its capacity.
    fn fill_caches(&mut self) {
        let mut room = vec![CACHE_BLOCKS; self.situation.caches() as usize];
        for conversation in 0..CONVERSATIONS {
            let blocks = self.beginning(conversation);
            for cache in self.situation.holders_of(conversation) {
                room[cache as usize] = room[cache as usize].saturating_sub(blocks.len() as u32);
                self.store(cache, blocks.clone());
            }
        }
        for (cache, room) in (0u32..).zip(room) {
            for first in (0..room).step_by(EVENT_BLOCKS as usize) {
                let names = first..room.min(first + EVENT_BLOCKS);
                self.store(
                    cache,
                    names
                        .map(|block| stored(stuffing(cache, block), stuffing(!cache, block)))
                        .collect(),
                );
            }
        }
        let indexer = self.indexer();
        self.runtime.block_on(async {
            match &indexer {
                Indexer::Single { primary, .. } => drop(primary.flush().await),
                Indexer::Concurrent { primary, .. } => primary.flush().await,
                Indexer::Remote { .. } | Indexer::None => panic!("the index is elsewhere"),
            }
        });
    }

    fn make_busy(&mut self) {
        for cache in 0..self.situation.caches() {
            for nth in 0..BUSY {
                let id = format!("busy-{cache}-{nth}");
                let ids = (0..BUSY_TOKENS)
                    .map(|token| stuffing(cache, nth * BUSY_TOKENS + token) as u32)
                    .collect();
                let worker = WorkerWithDpRank::new(worker_id(cache), 0);
                let request = request(id.clone(), ids, Some(worker));
                let core = self.service.core();
                self.runtime.block_on(async {
                    core.select_and_reserve(request).await.expect("a selection");
                    if nth >= BUSY / 2 {
                        core.prefill_complete(&id).await.expect("a reservation");
                    }
                });
            }
        }
    }

    fn beginning(&self, conversation: u32) -> Vec<KvCacheStoredBlockData> {
        let ids = &self.prompts[conversation as usize][..self.situation.fork() as usize];
        let tokens = compute_block_hash_for_seq(
            ids,
            self.situation.block_tokens,
            BlockHashOptions::default(),
        );
        let sequence = compute_seq_hash_for_block(&tokens);
        tokens
            .iter()
            .zip(sequence)
            .map(|(tokens, sequence)| stored(sequence, tokens.0))
            .collect()
    }

    fn store(&mut self, cache: u32, blocks: Vec<KvCacheStoredBlockData>) {
        if blocks.is_empty() {
            return;
        }
        let event_id = self.events.entry(cache).or_default();
        *event_id += 1;
        let event = KvCacheEvent {
            event_id: *event_id,
            data: KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: None,
                start_position: None,
                blocks,
            }),
            dp_rank: 0,
        };
        let event = RouterEvent::with_storage_tier(worker_id(cache), event, StorageTier::Device);
        self.runtime
            .block_on(self.indexer().apply_event_routed(event))
            .expect("the index takes it");
    }

    fn indexer(&self) -> Indexer {
        let partition = self.service.core().partition(&partition());
        partition.expect("a partition").indexer().clone()
    }
}

async fn service(situation: &Situation, threads: IndexThreads) -> Result<SelectionService, String> {
    let registry =
        RouterPluginRegistry::default().with_default_factory(Arc::new(|config, role, _| {
            WorkerSelectionPolicy::reference(config.clone(), role.default_selector_label())
        }));
    let service =
        SelectionServiceBuilder::new(KvRouterConfig::default(), WorkerType::Aggregated, registry)
            .indexer_threads(threads as usize)
            .kv_index(KvIndexSource::Owned(Arc::new(FedByHand)))
            .build()
            .await
            .map_err(|error| error.to_string())?;
    for cache in 0..situation.caches() {
        let worker = WorkerRequest {
            worker_id: worker_id(cache),
            endpoint: Some(format!("http://worker-{cache}:8000")),
            block_size: Some(situation.block_tokens),
            total_kv_blocks: Some(CACHE_BLOCKS.into()),
            ..WorkerRequest::default()
        };
        service
            .upsert_worker(worker)
            .await
            .map_err(|error| error.to_string())?;
    }
    Ok(service)
}

fn request(id: String, ids: Vec<u32>, pin: Option<WorkerWithDpRank>) -> SelectAndReserveRequest {
    SelectAndReserveRequest {
        model_name: DEFAULT_MODEL_NAME.to_owned(),
        routing_group: DEFAULT_ROUTING_GROUP.to_owned(),
        selection_id: Some(id),
        prompt: PromptRequest {
            token_ids: Some(ids),
            ..PromptRequest::default()
        },
        router_config_override: None,
        expected_output_tokens: Some(EXPECTED_TOKENS),
        priority_jump: None,
        strict_priority: None,
        session_id: None,
        session_context: None,
        affinity_target: None,
        pinned_worker: pin,
        allowed_worker_ids: None,
        routing_constraints: RoutingConstraints::default(),
    }
}

fn stored(sequence: u64, tokens: u64) -> KvCacheStoredBlockData {
    KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(sequence),
        tokens_hash: LocalBlockHash(tokens),
        mm_extra_info: None,
    }
}

fn partition() -> RoutingPartitionId {
    RoutingPartitionId::new(DEFAULT_MODEL_NAME, DEFAULT_ROUTING_GROUP)
}

/// Ids begin at 1, as in Dynamo's own benchmark.
fn worker_id(cache: u32) -> u64 {
    u64::from(cache) + 1
}
