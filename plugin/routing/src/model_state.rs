//! Owns the lifecycle of disaggregation: the known (model, namespace) pairs, the state of each, and the history that people
//! and metrics want to know.

use hashbrown::{HashMap, HashSet};

use crate::fleet::{Fleet, Role, Worker, WorkerId};
use crate::rendezvous::{Mode, NotServed, Rules, ServingDecision, State, WorkerCounts};

/// Model keys without a worker that are remembered, so that a model whose workers have all left does not count as unknown.
const MAX_VACANT: usize = 256;

/// One model in one namespace: where a prefill and a decode worker can meet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelKey {
    /// The model; none: any model without a model key of its own.
    pub model: Option<String>,
    /// Workers of one namespace may exchange KV.
    pub namespace: String,
}

impl ModelKey {
    /// Whether a worker belongs to this model key. A worker that serves any model belongs to every model key of its namespace.
    pub fn holds(&self, worker: &Worker) -> bool {
        self.namespace == worker.namespace && (worker.model.is_none() || worker.model == self.model)
    }
}

/// State of one model key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelState {
    /// Worker counts. All zero where no worker of this very model key takes new requests: workers of any model do not count
    /// then.
    pub counts: WorkerCounts,
    /// State that follows from the counts.
    pub state: State,
    /// Whether a worker of this very model key takes new requests. Only then does the model key decide how requests are served.
    is_inhabited: bool,
    was_active: bool,
}

/// A change of state, to be logged once and counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    /// Model key whose state changed.
    pub key: ModelKey,
    /// Former state; none: the model key is new.
    pub from: Option<State>,
    /// New state.
    pub to: State,
}

/// Selects model keys.
type Wanted<'w> = &'w dyn Fn(&ModelKey, &ModelState) -> bool;

/// The states of all model keys.
#[derive(Debug, Default)]
pub struct ModelStates {
    states: HashMap<ModelKey, ModelState>,
    /// The model keys that are only remembered, each with the number of the update that first found no worker for the key.
    left: HashMap<ModelKey, u64>,
    updates: u64,
}

impl ModelStates {
    /// Recomputes every model key's state from the fleet and returns the changes.
    pub fn update(
        &mut self,
        fleet: &Fleet,
        is_bound: impl Fn(WorkerId) -> bool,
        runs_whole: impl Fn(&Worker) -> bool,
    ) -> Vec<Transition> {
        let members = by_key(fleet);
        let mut now: HashSet<ModelKey> = members.keys().cloned().collect();
        now.extend(self.states.keys().cloned());
        let mut transitions = Vec::new();
        for key in now {
            let is_inhabited = members.get(&key).is_some_and(|here| !here.is_empty());
            let counts = match is_inhabited {
                true => counts(&key, &members, &is_bound, &runs_whole),
                false => WorkerCounts::default(),
            };
            let before = self.states.get(&key).copied();
            let was_active = before.is_some_and(|before| before.was_active);
            let state = State::of(counts, was_active);
            if before.map(|before| before.state) != Some(state) {
                transitions.push(Transition {
                    key: key.clone(),
                    from: before.map(|before| before.state),
                    to: state,
                });
            }
            let known = ModelState {
                counts,
                state,
                is_inhabited,
                was_active: was_active || state == State::Active,
            };
            self.states.insert(key, known);
        }
        self.note_departed(&members);
        self.forget_excess();
        transitions.sort_by(|a, b| a.key.cmp(&b.key));
        transitions
    }

    fn note_departed(&mut self, members: &HashMap<ModelKey, Vec<&Worker>>) {
        self.updates = self.updates.saturating_add(1);
        self.left.retain(|key, _| !members.contains_key(key));
        for key in self.states.keys() {
            if !members.contains_key(key) && !self.left.contains_key(key) {
                self.left.insert(key.clone(), self.updates);
            }
        }
    }

    /// Bounds the model keys without workers; the ones left most recently stay.
    fn forget_excess(&mut self) {
        if self.left.len() <= MAX_VACANT {
            return;
        }
        let mut left: Vec<(u64, ModelKey)> =
            self.left.drain().map(|(p, since)| (since, p)).collect();
        left.sort_by(|(a, first), (b, second)| b.cmp(a).then_with(|| first.cmp(second)));
        for (_, forgotten) in left.split_off(MAX_VACANT) {
            self.states.remove(&forgotten);
        }
        self.left = left.into_iter().map(|(since, p)| (p, since)).collect();
    }

    /// All model keys and their states.
    pub fn states(&self) -> impl Iterator<Item = (&ModelKey, &ModelState)> + Clone {
        self.states.iter()
    }

    /// The model keys that serve a model: its own, else those that serve any model. Without a model, all. Keys that are
    /// only remembered are returned only where no other matches, so that the model does not count as unknown.
    pub fn of_model(&self, model: Option<&str>) -> Vec<(&ModelKey, &ModelState)> {
        let is_own = |key: &ModelKey| model.is_none() || key.model.as_deref() == model;
        let is_any = |key: &ModelKey| key.model.is_none();
        let tiers: [Wanted<'_>; 4] = [
            &|key, state| is_own(key) && state.is_inhabited,
            &|key, state| is_any(key) && state.is_inhabited,
            &|key, _| is_own(key),
            &|key, _| is_any(key),
        ];
        let mut found = tiers.into_iter().map(|tier| self.of(tier));
        found.find(|states| !states.is_empty()).unwrap_or_default()
    }

    fn of(&self, is_wanted: Wanted<'_>) -> Vec<(&ModelKey, &ModelState)> {
        let states = self.states.iter();
        states
            .filter(|(key, state)| is_wanted(key, state))
            .collect()
    }
}

impl ModelState {
    /// Whether a worker of this very model key takes new requests. If not, the key is only remembered, or all its workers
    /// drain.
    pub fn is_inhabited(&self) -> bool {
        self.is_inhabited
    }

    /// How a request of this model key is served.
    pub fn decision(
        &self,
        mode: Mode,
        on_prefill_absent: crate::rendezvous::OnPrefillAbsent,
    ) -> ServingDecision {
        let rules = Rules {
            on_prefill_absent,
            whole_workers: self.counts.whole_workers > 0,
        };
        self.state.decision(mode, rules)
    }

    /// Whether a normal request would be served now; otherwise the reason.
    ///
    /// # Errors
    /// The reason that a request would get.
    pub fn can_serve_requests(
        &self,
        on_prefill_absent: crate::rendezvous::OnPrefillAbsent,
    ) -> Result<(), NotServed> {
        match self.decision(Mode::Normal, on_prefill_absent) {
            ServingDecision::Refused(reason) => Err(reason),
            ServingDecision::Pair | ServingDecision::Whole => Ok(()),
        }
    }
}

/// The workers grouped by their own model key. A worker that serves any model has a model key of its own, and counts for
/// the others of its namespace too.
fn by_key(fleet: &Fleet) -> HashMap<ModelKey, Vec<&Worker>> {
    let mut members: HashMap<ModelKey, Vec<&Worker>> = HashMap::new();
    for worker in fleet.workers() {
        let key = ModelKey {
            model: worker.model.clone(),
            namespace: worker.namespace.clone(),
        };
        let here = members.entry(key).or_default();
        // Draining workers cannot be picked: where all drain, the model key counts as empty.
        if !worker.is_draining() {
            here.push(worker);
        }
    }
    members
}

fn counts(
    key: &ModelKey,
    members: &HashMap<ModelKey, Vec<&Worker>>,
    is_bound: &impl Fn(WorkerId) -> bool,
    runs_whole: &impl Fn(&Worker) -> bool,
) -> WorkerCounts {
    let any_model = ModelKey {
        model: None,
        namespace: key.namespace.clone(),
    };
    let of_any_model = match key.model {
        Some(_) => members.get(&any_model),
        None => None,
    };
    let lists = members.get(key).into_iter().chain(of_any_model);
    let here: Vec<&Worker> = lists.flatten().copied().collect();
    let of_role = |role: Role| here.iter().filter(move |worker| worker.role == role);
    let sets = |role: Role| {
        let sets: HashSet<&str> = of_role(role).map(|worker| worker.set.as_str()).collect();
        sets.len()
    };
    WorkerCounts {
        prefill_sets: sets(Role::Prefill),
        decode_sets: sets(Role::Decode),
        bound_prefills: of_role(Role::Prefill)
            .filter(|worker| is_bound(worker.id))
            .count(),
        whole_workers: here.iter().filter(|worker| runs_whole(worker)).count(),
    }
}
