//! Owns the lifecycle of disaggregation: which (model, namespace) pairs there are, the state of each, and the history that
//! people and metrics want to know.

use hashbrown::{HashMap, HashSet};

use crate::fleet::{Fleet, Role, Worker, WorkerId};
use crate::rendezvous::{Mode, NotServed, Rules, ServingDecision, State, WorkerCounts};

/// Places without a worker that are remembered, so that a model whose workers have all left is not taken for unknown.
const MAX_VACANT: usize = 256;

/// One model in one namespace: where a prefill and a decode worker can meet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelKey {
    /// The model; none: any model that has no place of its own.
    pub model: Option<String>,
    /// Workers of one namespace may exchange KV.
    pub namespace: String,
}

impl ModelKey {
    /// Whether a worker belongs here. One that serves any model belongs to every place of its namespace.
    pub fn holds(&self, worker: &Worker) -> bool {
        self.namespace == worker.namespace && (worker.model.is_none() || worker.model == self.model)
    }
}

/// What is known of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelState {
    /// What exists. Nothing where nobody is here for this place itself: a place that is only remembered lends no worker its name.
    pub census: WorkerCounts,
    /// What follows from it.
    pub state: State,
    /// Whether a worker of this very place takes new requests. Only then the place has a say in who is served.
    is_inhabited: bool,
    was_active: bool,
}

/// A change of state, to be logged once and counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    /// Where.
    pub place: ModelKey,
    /// From which state; none: the place is new.
    pub from: Option<State>,
    /// To which.
    pub to: State,
}

/// Which places are meant.
type Wanted<'w> = &'w dyn Fn(&ModelKey, &ModelState) -> bool;

/// The states of all places.
#[derive(Debug, Default)]
pub struct ModelStates {
    places: HashMap<ModelKey, ModelState>,
    /// The places that are only remembered, each with the number of the update that found nobody there any more.
    left: HashMap<ModelKey, u64>,
    updates: u64,
}

impl ModelStates {
    /// Computes every place's state anew from what exists, and tells what has changed.
    pub fn update(
        &mut self,
        fleet: &Fleet,
        is_bound: impl Fn(WorkerId) -> bool,
        runs_whole: impl Fn(&Worker) -> bool,
    ) -> Vec<Transition> {
        let members = by_place(fleet);
        let mut now: HashSet<ModelKey> = members.keys().cloned().collect();
        now.extend(self.places.keys().cloned());
        let mut transitions = Vec::new();
        for place in now {
            let is_inhabited = members.get(&place).is_some_and(|here| !here.is_empty());
            let census = match is_inhabited {
                true => census(&place, &members, &is_bound, &runs_whole),
                false => WorkerCounts::default(),
            };
            let before = self.places.get(&place).copied();
            let was_active = before.is_some_and(|before| before.was_active);
            let state = State::of(census, was_active);
            if before.map(|before| before.state) != Some(state) {
                transitions.push(Transition {
                    place: place.clone(),
                    from: before.map(|before| before.state),
                    to: state,
                });
            }
            let known = ModelState {
                census,
                state,
                is_inhabited,
                was_active: was_active || state == State::Active,
            };
            self.places.insert(place, known);
        }
        self.note_who_left(&members);
        self.forget_excess();
        transitions.sort_by(|a, b| a.place.cmp(&b.place));
        transitions
    }

    fn note_who_left(&mut self, members: &HashMap<ModelKey, Vec<&Worker>>) {
        self.updates = self.updates.saturating_add(1);
        self.left.retain(|place, _| !members.contains_key(place));
        for place in self.places.keys() {
            if !members.contains_key(place) && !self.left.contains_key(place) {
                self.left.insert(place.clone(), self.updates);
            }
        }
    }

    /// Places that nobody is at are remembered only up to a bound, those that were left last.
    fn forget_excess(&mut self) {
        if self.left.len() <= MAX_VACANT {
            return;
        }
        let mut left: Vec<(u64, ModelKey)> =
            self.left.drain().map(|(p, since)| (since, p)).collect();
        left.sort_by(|(a, first), (b, second)| b.cmp(a).then_with(|| first.cmp(second)));
        for (_, forgotten) in left.split_off(MAX_VACANT) {
            self.places.remove(&forgotten);
        }
        self.left = left.into_iter().map(|(since, p)| (p, since)).collect();
    }

    /// All places and their states.
    pub fn places(&self) -> impl Iterator<Item = (&ModelKey, &ModelState)> + Clone {
        self.places.iter()
    }

    /// The places that serve a model: its own, else those that serve any model. Without a model, all. Those that are only
    /// remembered have no say in that: they are told where nobody else is, so that the model is not taken for unknown.
    pub fn of_model(&self, model: Option<&str>) -> Vec<(&ModelKey, &ModelState)> {
        let is_own = |place: &ModelKey| model.is_none() || place.model.as_deref() == model;
        let is_any = |place: &ModelKey| place.model.is_none();
        let tiers: [Wanted<'_>; 4] = [
            &|place, state| is_own(place) && state.is_inhabited,
            &|place, state| is_any(place) && state.is_inhabited,
            &|place, _| is_own(place),
            &|place, _| is_any(place),
        ];
        let mut found = tiers.into_iter().map(|tier| self.of(tier));
        found.find(|places| !places.is_empty()).unwrap_or_default()
    }

    fn of(&self, is_wanted: Wanted<'_>) -> Vec<(&ModelKey, &ModelState)> {
        let places = self.places.iter();
        places
            .filter(|(place, state)| is_wanted(place, state))
            .collect()
    }
}

impl ModelState {
    /// Whether a worker of this very place takes new requests; else it is only remembered, or all who are there drain.
    pub fn is_inhabited(&self) -> bool {
        self.is_inhabited
    }

    /// What a request gets here.
    pub fn verdict(
        &self,
        mode: Mode,
        on_prefill_absent: crate::config::OnPrefillAbsent,
    ) -> ServingDecision {
        let rules = Rules {
            on_prefill_absent,
            whole_workers: self.census.whole_workers > 0,
        };
        self.state.verdict(mode, rules)
    }

    /// Whether a normal request would be served now; why not, else.
    ///
    /// # Errors
    /// The reason that a request would be told.
    pub fn can_serve_requests(
        &self,
        on_prefill_absent: crate::config::OnPrefillAbsent,
    ) -> Result<(), NotServed> {
        match self.verdict(Mode::Normal, on_prefill_absent) {
            ServingDecision::Refused(reason) => Err(reason),
            ServingDecision::Pair | ServingDecision::Whole => Ok(()),
        }
    }
}

/// The workers by the place that they make. One that serves any model makes a place of its own, and belongs to the others of
/// its namespace too.
fn by_place(fleet: &Fleet) -> HashMap<ModelKey, Vec<&Worker>> {
    let mut members: HashMap<ModelKey, Vec<&Worker>> = HashMap::new();
    for worker in fleet.workers() {
        let place = ModelKey {
            model: worker.model.clone(),
            namespace: worker.namespace.clone(),
        };
        let here = members.entry(place).or_default();
        // Who drains can be picked by nobody: where all do, it is as if nobody were there.
        if !worker.is_draining() {
            here.push(worker);
        }
    }
    members
}

fn census(
    place: &ModelKey,
    members: &HashMap<ModelKey, Vec<&Worker>>,
    is_bound: &impl Fn(WorkerId) -> bool,
    runs_whole: &impl Fn(&Worker) -> bool,
) -> WorkerCounts {
    let any_model = ModelKey {
        model: None,
        namespace: place.namespace.clone(),
    };
    let of_any_model = match place.model {
        Some(_) => members.get(&any_model),
        None => None,
    };
    let lists = members.get(place).into_iter().chain(of_any_model);
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
