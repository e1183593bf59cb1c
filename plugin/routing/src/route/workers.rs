//! Owns what follows from a change of the fleet: what is kept of each worker, its bookings, and the state of each model key.

use std::rc::Rc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use super::model_workers::ModelWorkers;
use super::selection_request::{Admit, Demand, SelectionContext};
use super::{Router, capacity, runs_whole};
use crate::fleet::{Fleet, TargetKey, Worker, WorkerId};
use crate::load::Load;
use crate::model_state::ModelKey;
use crate::request::RoutingOverrides;

/// The adapters of the workers. A name that is also a model's is the model.
fn adapters(fleet: &Fleet) -> HashMap<String, Option<String>> {
    let models: HashSet<&String> = fleet
        .workers()
        .filter_map(|worker| worker.model.as_ref())
        .collect();
    let all = fleet.workers().flat_map(|worker| {
        let pair = |name: &String| (name.clone(), worker.model.clone());
        worker.adapters.iter().map(pair)
    });
    all.filter(|(name, _)| !models.contains(name)).collect()
}

/// A rank's entry in the prefix index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Opened {
    pub(super) slot: usize,
    capacity: Option<u32>,
}

impl Router {
    /// Advances the router's clock to `now`, since 1970. To be called before anything that depends on time: a choice, an
    /// answer, a tick.
    pub fn advance(&mut self, now: Duration) {
        let patience = Duration::from_millis(self.pool.booking_expiry_ms);
        self.ledger.advance(now, patience);
        self.health.expire(self.ledger.now());
        self.expire_reports();
    }

    /// This VM's bookings on a worker, over all its ranks.
    pub fn worker_load(&self, worker: &Rc<Worker>) -> Load {
        self.ledger.worker_load(worker)
    }

    /// The load of a worker over all its ranks, from all sources: this VM, the other VMs as last received, and the engine's
    /// external load.
    pub fn worker_load_in_all(&self, worker: &Rc<Worker>) -> Load {
        self.ledger.worker_load_in_all(worker)
    }

    /// KV blocks that a worker is estimated to hold, over all its ranks.
    pub fn remembered_blocks(&self, worker: &Rc<Worker>) -> usize {
        let ranks = worker.targets();
        let held = ranks.filter_map(|target| {
            let opened = self.opened.get(&target.key())?;
            Some(self.prefixes.held(opened.slot))
        });
        held.sum()
    }

    /// Forgets the blocks of a worker that has presumably lost its cache.
    pub(super) fn forget_cache(&mut self, worker: &Rc<Worker>) {
        for target in worker.targets() {
            if let Some(opened) = self.opened.get(&target.key()) {
                self.prefixes.forget(opened.slot);
                self.prefixes.open(opened.slot, opened.capacity);
            }
        }
    }

    /// The selection context of one request for one model key.
    pub(super) fn context<'a>(
        &mut self,
        key: &'a ModelKey,
        overrides: &'a RoutingOverrides,
        demand: &'a Demand,
    ) -> SelectionContext<'a> {
        SelectionContext {
            key,
            model_workers: self.model_workers(key),
            overrides,
            demand,
            admit: Admit::WhoIsFree,
            excluded: &[],
            trail: None,
        }
    }

    /// The workers of a model key, listed on first use.
    fn model_workers(&mut self, key: &ModelKey) -> Rc<ModelWorkers> {
        if let Some(model_workers) = self.models_workers.get(key) {
            return Rc::clone(model_workers);
        }
        let Self {
            fleet,
            pool,
            reports,
            ledger,
            ..
        } = self;
        let model_workers = Rc::new(ModelWorkers::of(key, fleet, pool, reports, ledger));
        self.models_workers
            .insert(key.clone(), Rc::clone(&model_workers));
        model_workers
    }

    /// Adopts another fleet as a whole.
    pub fn adopt(&mut self, fleet: Fleet) {
        let known = self.fleet.workers();
        let ended: Vec<WorkerId> = known
            .filter(|worker| !fleet.lives(&worker.incarnation()))
            .map(|worker| worker.id)
            .collect();
        self.adopted = self.adopted.wrapping_add(1);
        self.adapters = adapters(&fleet);
        self.fleet = fleet;
        self.forget(&ended);
        self.settle();
    }

    /// Forgets all that was learned of these ended incarnations, even if their ids live on; no other place does so. `settle`
    /// must follow.
    pub(super) fn forget(&mut self, ended: &[WorkerId]) {
        if ended.is_empty() {
            return;
        }
        let staying = self.fleet.without(ended);
        self.prefill_policy.keep(&staying);
        self.decode_policy.keep(&staying);
        self.health.keep(&staying, self.ledger.now());
        self.reports.keep(&staying);
        self.noted.keep(|id| staying.contains(id));
        self.bindings.retain(|id, _| staying.contains(*id));
        let Self {
            opened, prefixes, ..
        } = self;
        opened.retain(|key, known| {
            let stays = staying.contains(key.worker);
            if !stays {
                prefixes.forget(known.slot);
            }
            stays
        });
        let ids_live_on = ended.iter().filter(|id| self.fleet.contains(**id));
        let ids_live_on: Vec<WorkerId> = ids_live_on.copied().collect();
        self.ledger.retire(&ids_live_on);
    }

    /// Recomputes what follows from the fleet and from what is known of its workers.
    pub(super) fn settle(&mut self) {
        self.models_workers.clear();
        self.open_ranks();
        self.bind_what_is_known();
        // Of new workers, only the load of their peers is known.
        self.believe();
        self.recompute();
    }

    /// Starts over with a worker whose engine is another process than before.
    pub(super) fn begins_anew(&mut self, worker: WorkerId) {
        self.forget(&[worker]);
        self.settle();
    }

    /// Forgets the blocks of workers that left, and opens slots for new ones. Workers with a changed capacity keep their
    /// blocks, as far as they fit.
    pub(super) fn open_ranks(&mut self) {
        let Self {
            opened,
            prefixes,
            fleet,
            ledger,
            pool,
            reports,
            ..
        } = self;
        let wanted: HashMap<TargetKey, Option<u32>> = fleet
            .workers()
            .flat_map(|worker| {
                let capacity = capacity(pool, reports, worker).kv_blocks;
                worker.targets().map(move |target| (target.key(), capacity))
            })
            .collect();
        opened.retain(|key, known| {
            let stays = wanted.contains_key(key);
            if !stays {
                prefixes.forget(known.slot);
            }
            stays
        });
        ledger.keep(fleet);
        for (key, capacity) in wanted {
            let now = Opened {
                slot: ledger.slot(key),
                capacity,
            };
            if opened.insert(key, now) != Some(now) {
                prefixes.open(now.slot, capacity);
            }
        }
    }

    pub(super) fn recompute(&mut self) {
        let Self {
            model_states,
            fleet,
            bindings,
            pool,
            ..
        } = self;
        let needs_binding = pool.engine().binder().is_some();
        let changed = model_states.update(
            fleet,
            |id| !needs_binding || bindings.contains_key(&id),
            |worker| runs_whole(pool, worker),
        );
        self.transitions.extend(changed);
    }
}
