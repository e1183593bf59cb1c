//! Owns the lifecycle of disaggregation: which (model, namespace) pairs there are, the state of each, and the history that
//! people and metrics want to know.

use hashbrown::{HashMap, HashSet};

use crate::fleet::{Fleet, Role, Worker, WorkerId};
use crate::rendezvous::{Census, Mode, NotServed, Rules, State, Verdict};

/// Places without a worker that are remembered, so that a model whose workers have all left is not taken for unknown.
const MAX_VACANT: usize = 256;

/// One model in one namespace: where a prefill and a decode worker can meet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The model; none: any model that has no place of its own.
    pub model: Option<String>,
    /// Workers of one namespace may exchange KV.
    pub namespace: String,
}

impl Place {
    /// Whether a worker belongs here. One that serves any model belongs to every place of its namespace.
    pub fn holds(&self, worker: &Worker) -> bool {
        self.namespace == worker.namespace && (worker.model.is_none() || worker.model == self.model)
    }
}

/// What is known of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaceState {
    /// What exists.
    pub census: Census,
    /// What follows from it.
    pub state: State,
    was_active: bool,
}

/// A change of state, to be logged once and counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    /// Where.
    pub place: Place,
    /// From which state; none: the place is new.
    pub from: Option<State>,
    /// To which.
    pub to: State,
}

/// The states of all places.
#[derive(Debug, Default)]
pub struct PrefillRouters {
    places: HashMap<Place, PlaceState>,
}

impl PrefillRouters {
    /// Computes every place's state anew from what exists, and tells what has changed.
    pub fn update(
        &mut self,
        fleet: &Fleet,
        is_bound: impl Fn(WorkerId) -> bool,
        runs_whole: impl Fn(&Worker) -> bool,
    ) -> Vec<Transition> {
        let members = by_place(fleet);
        let mut now: HashSet<Place> = members.keys().cloned().collect();
        now.extend(self.places.keys().cloned());
        let mut transitions = Vec::new();
        for place in now {
            let census = census(&place, &members, &is_bound, &runs_whole);
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
            let was_active = was_active || state == State::Active;
            self.places.insert(
                place,
                PlaceState {
                    census,
                    state,
                    was_active,
                },
            );
        }
        self.forget_excess();
        transitions.sort_by(|a, b| a.place.cmp(&b.place));
        transitions
    }

    /// Places that nobody is at are remembered only up to a bound.
    fn forget_excess(&mut self) {
        let is_empty =
            |place: &PlaceState| place.state == State::Vacant && place.census.whole_workers == 0;
        let mut vacant: Vec<Place> = self
            .places
            .iter()
            .filter(|(_, s)| is_empty(s))
            .map(|(p, _)| p.clone())
            .collect();
        vacant.sort();
        for place in vacant.iter().skip(MAX_VACANT) {
            self.places.remove(place);
        }
    }

    /// All places and their states.
    pub fn places(&self) -> impl Iterator<Item = (&Place, &PlaceState)> + Clone {
        self.places.iter()
    }

    /// The places that serve a model: its own, else those that serve any model. Without a model, all.
    pub fn of_model(&self, model: Option<&str>) -> Vec<(&Place, &PlaceState)> {
        let Some(model) = model else {
            return self.places.iter().collect();
        };
        let of = |wanted: Option<&str>| {
            let places = self
                .places
                .iter()
                .filter(|(place, _)| place.model.as_deref() == wanted);
            places.collect::<Vec<_>>()
        };
        let own = of(Some(model));
        if own.is_empty() { of(None) } else { own }
    }
}

impl PlaceState {
    /// What a request gets here.
    pub fn verdict(
        &self,
        mode: Mode,
        on_prefill_absent: crate::config::OnPrefillAbsent,
    ) -> Verdict {
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
            Verdict::Refused(reason) => Err(reason),
            Verdict::Pair | Verdict::Whole => Ok(()),
        }
    }
}

/// The workers by the place that they make. One that serves any model makes a place of its own, and belongs to the others of
/// its namespace too.
fn by_place(fleet: &Fleet) -> HashMap<Place, Vec<&Worker>> {
    let mut members: HashMap<Place, Vec<&Worker>> = HashMap::new();
    for worker in fleet.workers() {
        let place = Place {
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
    place: &Place,
    members: &HashMap<Place, Vec<&Worker>>,
    is_bound: &impl Fn(WorkerId) -> bool,
    runs_whole: &impl Fn(&Worker) -> bool,
) -> Census {
    let any_model = Place {
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
    Census {
        prefill_sets: sets(Role::Prefill),
        decode_sets: sets(Role::Decode),
        bound_prefills: of_role(Role::Prefill)
            .filter(|worker| is_bound(worker.id))
            .count(),
        whole_workers: here.iter().filter(|worker| runs_whole(worker)).count(),
    }
}
