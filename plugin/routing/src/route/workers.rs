//! Owns the workers of a pool and what is known of them: the fleet, its adapters, the bindings and reports of its workers,
//! and the state of each model key.

use std::mem::take;
use std::net::SocketAddr;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Refusal;
use super::binding::Bindings;
use super::model_workers::{ModelWorkers, runs_whole};
use super::reports::Reports;
use crate::config::{OnEmpty, Pool};
use crate::fleet::{Fleet, Role, TargetKey, Worker, WorkerId};
use crate::load::{Ledger, PrefillRate, ThreadLoad};
use crate::model_state::{ModelKey, ModelStates, Transition};
use crate::rendezvous::NotServed;

/// The workers of a pool.
#[derive(Debug, Default)]
pub(super) struct Workers {
    fleet: Fleet,
    /// Number of fleets adopted so far.
    adopted: u64,
    /// Adapters by name, each with its base model.
    adapters: HashMap<String, Option<String>>,
    bindings: Bindings,
    reports: Reports,
    states: ModelStates,
    transitions: Vec<Transition>,
    /// The workers of each model key, listed on first use.
    lists: HashMap<ModelKey, Arc<ModelWorkers>>,
}

impl Workers {
    pub(super) fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    pub(super) fn adopted(&self) -> u64 {
        self.adopted
    }

    pub(super) fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    pub(super) fn bindings_mut(&mut self) -> &mut Bindings {
        &mut self.bindings
    }

    pub(super) fn reports(&self) -> &Reports {
        &self.reports
    }

    /// The reports, and the fleet that they come from.
    pub(super) fn reports_mut(&mut self) -> (&mut Reports, &Fleet) {
        (&mut self.reports, &self.fleet)
    }

    pub(super) fn states(&self) -> &ModelStates {
        &self.states
    }

    /// Adopts another fleet, and returns the workers whose incarnations have ended.
    pub(super) fn adopt(&mut self, fleet: Fleet) -> Vec<WorkerId> {
        let known = self.fleet.workers();
        let ended = known.filter(|worker| !fleet.lives(&worker.incarnation()));
        let ended = ended.map(|worker| worker.id).collect();
        self.adopted = self.adopted.wrapping_add(1);
        self.adapters = adapters(&fleet);
        self.fleet = fleet;
        ended
    }

    /// Forgets what was learned of workers that do not stay.
    pub(super) fn keep(&mut self, staying: &Fleet) {
        self.reports.keep(staying);
        self.bindings.keep(staying);
    }

    /// Removes the binding of a worker that may have restarted, if only the worker itself can supply it: until bound again,
    /// the worker is sent no request.
    pub(super) fn unbind(&mut self, id: WorkerId, pool: &Pool) {
        let worker = self.fleet.get(id);
        if worker.is_some_and(|worker| self.bindings.unbind(worker, pool)) {
            self.update_states(pool);
        }
    }

    /// Recomputes the state of every model key.
    pub(super) fn update_states(&mut self, pool: &Pool) {
        let needs_binding = pool.engine().binder().is_some();
        let changed = self.states.update(
            &self.fleet,
            |id| !needs_binding || self.bindings.get(id).is_some(),
            |worker| runs_whole(pool, worker),
        );
        self.transitions.extend(changed);
    }

    pub(super) fn take_transitions(&mut self) -> Vec<Transition> {
        take(&mut self.transitions)
    }

    /// The workers of a model key, listed on first use.
    pub(super) fn list(
        &mut self,
        key: &ModelKey,
        pool: &Pool,
        ledger: &mut Ledger,
    ) -> Arc<ModelWorkers> {
        if let Some(list) = self.lists.get(key) {
            return Arc::clone(list);
        }
        let list = Arc::new(ModelWorkers::of(
            key,
            &self.fleet,
            pool,
            &self.reports,
            ledger,
        ));
        self.lists.insert(key.clone(), Arc::clone(&list));
        list
    }

    /// Drops the lists of workers after a change of the fleet or of a capacity.
    pub(super) fn clear_lists(&mut self) {
        self.lists.clear();
    }

    /// All ranks, each with its capacity in KV blocks.
    pub(super) fn ranks(&self, pool: &Pool) -> HashMap<TargetKey, Option<u32>> {
        let ranks = self.fleet.workers().flat_map(|worker| {
            let capacity = self.reports.capacity(worker, pool).kv_blocks;
            worker.targets().map(move |target| (target.key(), capacity))
        });
        ranks.collect()
    }

    /// This VM's bookings on every worker rank that has any, with the estimated tokens left now.
    pub(super) fn shares(&self, ledger: &Ledger) -> Vec<ThreadLoad> {
        if ledger.total().is_idle() {
            return Vec::new();
        }
        let mut rates: Vec<(Option<PrefillRate>, f64)> = Vec::new();
        // A decode worker reads prompts only if it runs requests aggregated, and is then listed for that role.
        for role in [Role::Prefill, Role::Aggregated] {
            for list in self.lists.values() {
                let rates_of_role = list.rates(role, ledger);
                let slowness = rates_of_role.slowness.iter();
                for (member, slowness) in list.of_role(role).iter().zip(slowness) {
                    if member.slot >= rates.len() {
                        rates.resize(member.slot.saturating_add(1), (None, 1.0));
                    }
                    if let Some(place) = rates.get_mut(member.slot) {
                        *place = (rates_of_role.common, f64::from(*slowness));
                    }
                }
            }
        }
        ledger.shares(|slot| rates.get(slot).copied().unwrap_or((None, 1.0)))
    }

    /// Whether requests pass through, since the pool has no workers at all.
    pub(super) fn is_open(&self, pool: &Pool) -> bool {
        pool.on_empty == OnEmpty::Pass && self.fleet.workers().next().is_none()
    }

    /// The base model of an adapter, if known.
    pub(super) fn base_of(&self, adapter: &str) -> Option<&str> {
        self.adapters.get(adapter)?.as_deref()
    }

    /// The adapters whose base model is known, each with it.
    pub(super) fn adapters(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.adapters.iter();
        all.filter_map(|(name, base)| Some((name.as_str(), base.as_deref()?)))
    }

    /// The requested model, and the adapter if the name is one's.
    pub(super) fn model_of(
        &self,
        name: &str,
        pool: &Pool,
    ) -> Result<(String, Option<Arc<str>>), Refusal> {
        let adapter = self.adapters.contains_key(name).then(|| Arc::from(name));
        let model = self.base_of(name).unwrap_or(name).to_owned();
        if self.is_open(pool) || self.states.states().next().is_none() {
            return Err(Refusal::NoFleet);
        }
        match self.states.of_model(Some(&model)).is_empty() {
            true => Err(Refusal::UnknownModel { model }),
            false => Ok((model, adapter)),
        }
    }

    /// Whether a model's normal request would be served now: if any model key serves it; else the reason nearest to being
    /// served.
    pub(super) fn can_serve(&self, model: &str, pool: &Pool) -> Result<(), Refusal> {
        let (model, _) = self.model_of(model, pool)?;
        let absent = pool.prefill_absent();
        let mut nearest = NotServed::Vacant;
        for (_, state) in self.states.of_model(Some(&model)) {
            match state.can_serve_requests(absent) {
                Ok(()) => return Ok(()),
                Err(reason) => nearest = nearest.min(reason),
            }
        }
        Err(Refusal::NotServed(nearest))
    }

    /// The decode or aggregated worker at an address.
    pub(super) fn decoder_at(&self, address: SocketAddr) -> Option<&Arc<Worker>> {
        self.fleet.at(address, &[Role::Decode, Role::Aggregated])
    }
}

/// The adapters of the workers. A name that is also a model's is the model.
fn adapters(fleet: &Fleet) -> HashMap<String, Option<String>> {
    let models = fleet.workers().filter_map(|worker| worker.model.as_ref());
    let models: HashSet<&String> = models.collect();
    let all = fleet.workers().flat_map(|worker| {
        let pair = |name: &String| (name.clone(), worker.model.clone());
        worker.adapters.iter().map(pair)
    });
    all.filter(|(name, _)| !models.contains(name)).collect()
}
