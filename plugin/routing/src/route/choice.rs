//! Owns who is picked: the place first, then a pair of workers in it, or one that runs the request whole.

use std::rc::Rc;

use super::{PinProblem, Refusal, Router, runs_whole};
use crate::config::Protocol;
use crate::fleet::{Fleet, Role, Target, Worker, WorkerId};
use crate::handoff::sglang::Bootstrap;
use crate::load::Ledger;
use crate::prefill_router::{Place, PlaceState};
use crate::rendezvous::{NotServed, Verdict};
use crate::request::steering::header_for;
use crate::request::{Pin, Steering};
use crate::selection::{Policy, Random};
use crate::topology::{self, Constraints};

/// A prefill and a decode worker that may exchange KV, and who else could decode.
#[derive(Debug)]
pub struct Pair {
    pub(super) prefill: Target,
    pub(super) decode: Target,
    pub(super) others: Vec<Target>,
}

/// A worker that runs a whole request, and who else could.
#[derive(Debug)]
pub struct Whole {
    pub(super) decode: Target,
    pub(super) others: Vec<Target>,
}

/// How a pair is to hand over. That there is nobody is not among the answers: it was the place's to say.
#[derive(Debug)]
pub enum Resolution {
    /// Both legs at once: where the KV will be is known already.
    Resolved {
        /// The workers.
        pair: Pair,
        /// The prefill worker's bootstrap server.
        bootstrap: Bootstrap,
    },
    /// Prefill first, on just that worker: its answer brings the hand-off.
    NoBootstrapEndpoint {
        /// The workers.
        pair: Pair,
    },
    /// Refused at once: too many prompt tokens wait already. Never a reason to go to a worker all the same.
    Backpressure {
        /// Tokens that wait.
        queued_tokens: u64,
        /// Tokens that may.
        allowed_tokens: u64,
    },
}

/// Whether a choice moves the cursors on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Only looked at.
    Peek,
    /// Taken.
    Commit,
}

impl Router {
    /// The place that a request goes to, and what it gets there. Of several that would serve it one is drawn, by the number
    /// of their workers.
    pub(super) fn choose_place(
        &mut self,
        model: Option<&str>,
        steering: &Steering,
    ) -> Result<(Place, Verdict), Refusal> {
        let mode = steering.mode();
        let absent = self.absent_policy();
        let mut places: Vec<(Place, PlaceState)> = self
            .places
            .of_model(model)
            .into_iter()
            .map(|(place, state)| (place.clone(), *state))
            .collect();
        // In the map's order the draw would not be the same for the same seed.
        places.sort_by(|a, b| a.0.cmp(&b.0));
        self.keep_pinned(&mut places, steering)?;

        let verdict = |state: &PlaceState| state.verdict(mode, absent);
        let served: Vec<&(Place, PlaceState)> = places
            .iter()
            .filter(|(_, state)| !matches!(verdict(state), Verdict::Refused(_)))
            .collect();
        let weights: Vec<u64> = served
            .iter()
            .map(|(place, _)| self.count_workers(place))
            .collect();
        if let Some(index) = weighted(&weights, &mut self.random)
            && let Some((place, state)) = served.get(index)
        {
            return Ok((place.clone(), verdict(state)));
        }
        let reasons = places.iter().filter_map(|(_, state)| match verdict(state) {
            Verdict::Refused(reason) => Some(reason),
            Verdict::Pair | Verdict::Whole => None,
        });
        Err(Refusal::NotServed(
            reasons.min().unwrap_or(NotServed::Vacant),
        ))
    }

    /// A worker that is named must exist; then only its places count.
    fn keep_pinned(
        &self,
        places: &mut Vec<(Place, PlaceState)>,
        steering: &Steering,
    ) -> Result<(), Refusal> {
        for (field, id) in [
            ("prefill_worker_id", steering.prefill.worker),
            ("decode_worker_id", steering.decode.worker),
            ("backend_instance_id", steering.backend),
        ] {
            let Some(id) = id else {
                continue;
            };
            let problem = |problem| Refusal::Pin { field, id, problem };
            let worker = self
                .fleet
                .get(id)
                .ok_or_else(|| problem(PinProblem::Unknown))?;
            places.retain(|(place, _)| place.holds(worker));
            if places.is_empty() {
                return Err(problem(PinProblem::Elsewhere));
            }
        }
        Ok(())
    }

    fn count_workers(&self, place: &Place) -> u64 {
        self.fleet
            .workers()
            .filter(|worker| place.holds(worker))
            .count() as u64
    }

    /// Decides how the request is handed over, and picks and books nothing if it is not.
    pub(super) fn resolve(
        &mut self,
        place: &Place,
        steering: &Steering,
        prompt_tokens: u64,
    ) -> Result<Resolution, Refusal> {
        if let Some(backpressure) = self.backpressure(place, prompt_tokens) {
            return Ok(backpressure);
        }
        let pair = self.pick_pair(place, steering)?;
        if self.pool.protocol != Protocol::Sglang {
            return Ok(Resolution::NoBootstrapEndpoint { pair });
        }
        match self.bindings.get(&pair.prefill.worker.id).cloned() {
            Some(bootstrap) => Ok(Resolution::Resolved { pair, bootstrap }),
            // Only bound workers are eligible.
            None => Err(Refusal::NotServed(NotServed::Pending)),
        }
    }

    fn backpressure(&self, place: &Place, prompt_tokens: u64) -> Option<Resolution> {
        let allowed_tokens = self.pool.prefill.max_queued_tokens?;
        let prefills = self
            .fleet
            .of_role(Role::Prefill)
            .filter(|worker| place.holds(worker));
        let queued_tokens: u64 = prefills
            .map(|worker| self.ledger.worker_load(worker.id).prefill_tokens)
            .sum();
        (queued_tokens.saturating_add(prompt_tokens) > allowed_tokens && queued_tokens > 0)
            .then_some(Resolution::Backpressure {
                queued_tokens,
                allowed_tokens,
            })
    }

    /// Picks a pair for good.
    pub(super) fn pick_pair(
        &mut self,
        place: &Place,
        steering: &Steering,
    ) -> Result<Pair, Refusal> {
        self.choose_pair(place, steering, Step::Commit)
    }

    /// The pair that would be picked; nothing moves.
    pub(super) fn look_at_pair(
        &mut self,
        place: &Place,
        steering: &Steering,
    ) -> Result<(Target, Target), Refusal> {
        let pair = self.choose_pair(place, steering, Step::Peek)?;
        Ok((pair.prefill, pair.decode))
    }

    fn choose_pair(
        &mut self,
        place: &Place,
        steering: &Steering,
        step: Step,
    ) -> Result<Pair, Refusal> {
        let decode = self.named_decode(place, steering);
        let prefill = self.choose_prefill(place, steering, &[], decode.as_ref(), step)?;
        let (decode, others) = self.choose_decode(place, steering, &prefill.worker)?;
        // Only now: a request that is refused for want of the other worker takes nobody's turn.
        if step == Step::Commit {
            self.take_turn(Role::Prefill, steering.prefill_pin(), &prefill);
            self.take_turn(Role::Decode, steering.decode_pin(), &decode);
        }
        Ok(Pair {
            prefill,
            decode,
            others,
        })
    }

    /// The decode worker that the caller names, where it is one: only a prefill worker that may hand over to it will do.
    fn named_decode(&self, place: &Place, steering: &Steering) -> Option<Rc<Worker>> {
        let worker = self.fleet.get(steering.decode_pin().worker?)?;
        (worker.role == Role::Decode && place.holds(worker)).then(|| Rc::clone(worker))
    }

    /// Moves the cursor on. One who names a worker takes nobody's turn.
    fn take_turn(&mut self, role: Role, pin: Pin, taken: &Target) {
        if pin.worker.is_some() {
            return;
        }
        match role {
            Role::Prefill => self.prefill_policy.commit(taken.key()),
            Role::Decode | Role::Aggregated => self.decode_policy.commit(taken.key()),
        }
    }

    /// Another prefill worker, for a decode worker that has been picked already.
    pub(super) fn choose_next_prefill(
        &mut self,
        place: &Place,
        steering: &Steering,
        tried: &[WorkerId],
        decode: &Rc<Worker>,
    ) -> Option<Target> {
        let next = self
            .choose_prefill(place, steering, tried, Some(decode), Step::Commit)
            .ok()?;
        self.take_turn(Role::Prefill, steering.prefill_pin(), &next);
        Some(next)
    }

    /// A prefill worker: bound (to be named to a mere query it need not be, where none is), not tried, and with somebody to
    /// hand over to; where decode has been picked already, to just that worker.
    fn choose_prefill(
        &mut self,
        place: &Place,
        steering: &Steering,
        tried: &[WorkerId],
        decode: Option<&Rc<Worker>>,
        step: Step,
    ) -> Result<Target, Refusal> {
        let pin = steering.prefill_pin();
        let here: Vec<Rc<Worker>> = self
            .fleet
            .workers()
            .filter(|worker| place.holds(worker))
            .cloned()
            .collect();
        let prefills = here
            .iter()
            .filter(|worker| worker.role == Role::Prefill && !tried.contains(&worker.id));
        let is_bound = |worker: &Worker| {
            self.pool.protocol != Protocol::Sglang || self.bindings.contains_key(&worker.id)
        };
        let named = |worker: &&Rc<Worker>| pin.worker == Some(worker.id);
        if step == Step::Commit && prefills.clone().any(|w| named(&w) && !is_bound(w)) {
            return Err(Refusal::NotServed(NotServed::Pending));
        }
        let needs_binding = step == Step::Commit
            || (pin.worker.is_none() && prefills.clone().any(|worker| is_bound(worker)));
        let mut unreachable = None;
        let mut targets = Vec::new();
        for worker in prefills.filter(|worker| !needs_binding || is_bound(worker)) {
            match hands_over_to(worker, &here, &steering.constraints, decode) {
                Ok(true) => targets.extend(worker.targets()),
                Ok(false) => {
                    unreachable.get_or_insert(Refusal::Topology {
                        problem: format!(
                            "no decode worker is where worker {} may transfer to",
                            worker.name
                        ),
                    });
                }
                Err(error) => {
                    unreachable.get_or_insert(Refusal::Topology {
                        problem: error.to_string(),
                    });
                }
            }
        }
        let pinned = Pinned {
            field: field_of("prefill_worker_id", steering.prefill),
            role: Role::Prefill,
            pin,
        };
        let absent = unreachable.unwrap_or(Refusal::NotServed(NotServed::NotActivated));
        let index = self.choose(&targets, pinned)?.ok_or(absent)?;
        take(targets, index)
            .map(|(prefill, _)| prefill)
            .ok_or(Refusal::NotServed(NotServed::NotActivated))
    }

    fn choose_decode(
        &mut self,
        place: &Place,
        steering: &Steering,
        prefill: &Worker,
    ) -> Result<(Target, Vec<Target>), Refusal> {
        let constraints = self.constraints(place, steering, prefill)?;
        let decodes = self
            .fleet
            .of_role(Role::Decode)
            .filter(|worker| place.holds(worker));
        let admitted = decodes.filter(|worker| constraints.admit(worker));
        let targets = preferred_first(admitted.cloned().collect(), &constraints);
        let pinned = Pinned {
            field: field_of("decode_worker_id", steering.decode),
            role: Role::Decode,
            pin: steering.decode_pin(),
        };
        let chosen = self.choose(&targets.first, pinned)?;
        let (targets, index) = match chosen {
            Some(index) => (targets, index),
            None => return Err(Refusal::NotServed(NotServed::NoDecode)),
        };
        let (decode, mut others) =
            take(targets.first, index).ok_or(Refusal::NotServed(NotServed::NoDecode))?;
        others.extend(targets.rest);
        if steering.decode_pin().worker.is_some() {
            // One who names a worker means that worker.
            others.clear();
        }
        Ok((decode, others))
    }

    /// What the transfer from `prefill`, and the request itself, demand of the decode worker.
    fn constraints(
        &self,
        place: &Place,
        steering: &Steering,
        prefill: &Worker,
    ) -> Result<Constraints, Refusal> {
        let here = self
            .fleet
            .workers()
            .filter(|worker| place.holds(worker))
            .map(|worker| &**worker);
        match topology::constraints(prefill, here) {
            Ok(derived) => Ok(steering.constraints.clone().merged(derived)),
            Err(error) => Err(Refusal::Topology {
                problem: error.to_string(),
            }),
        }
    }

    /// Another decode worker, where the one that was picked has left before its leg was dispatched.
    pub(super) fn replace_decode(
        &mut self,
        place: &Place,
        steering: &Steering,
        prefill: &Worker,
    ) -> Result<(Target, Vec<Target>), Refusal> {
        let (decode, others) = self.choose_decode(place, steering, prefill)?;
        self.take_turn(Role::Decode, steering.decode_pin(), &decode);
        Ok((decode, others))
    }

    /// A worker that runs the request whole.
    pub(super) fn pick_whole(
        &mut self,
        place: &Place,
        steering: &Steering,
    ) -> Result<Whole, Refusal> {
        let workers = self.fleet.workers().filter(|worker| place.holds(worker));
        let able = workers
            .filter(|worker| runs_whole(&self.pool, worker) && steering.constraints.admit(worker));
        let targets = preferred_first(able.cloned().collect(), &steering.constraints);
        let pinned = Pinned {
            field: field_of("decode_worker_id", steering.decode),
            role: Role::Aggregated,
            pin: steering.decode_pin(),
        };
        let index = self
            .choose(&targets.first, pinned)?
            .ok_or(Refusal::NotServed(NotServed::NotActivated))?;
        let (decode, mut others) =
            take(targets.first, index).ok_or(Refusal::NotServed(NotServed::NotActivated))?;
        if !steering.query {
            self.take_turn(Role::Aggregated, steering.decode_pin(), &decode);
        }
        others.extend(targets.rest);
        if steering.decode_pin().worker.is_some() {
            others.clear();
        }
        Ok(Whole { decode, others })
    }

    /// The index of the pinned target, or of the one that the role's policy picks; none where there is nobody. No cursor
    /// moves.
    fn choose(&mut self, targets: &[Target], pinned: Pinned) -> Result<Option<usize>, Refusal> {
        if let Some(id) = pinned.pin.worker {
            return pinned
                .find(id, targets, &self.fleet, &self.ledger)
                .map(Some);
        }
        let candidates = pinned.of_rank(targets)?;
        let policy: &mut dyn Policy = match pinned.role {
            Role::Prefill => self.prefill_policy.as_mut(),
            Role::Decode | Role::Aggregated => self.decode_policy.as_mut(),
        };
        if policy.needs_pin() && !candidates.is_empty() {
            return Err(Refusal::WorkerIdRequired {
                role: pinned.role,
                header: header_for(pinned.role),
            });
        }
        let Some(picked) = policy
            .peek(&candidates, &mut self.random)
            .and_then(|index| candidates.get(index))
        else {
            return Ok(None);
        };
        Ok(targets
            .iter()
            .position(|target| target.key() == picked.key()))
    }
}

/// A pin, and what it is a pin for.
struct Pinned {
    field: &'static str,
    role: Role,
    pin: Pin,
}

impl Pinned {
    /// The named worker among the targets: on the named rank, else on the least busy one. No cursor moves.
    fn find(
        &self,
        id: WorkerId,
        targets: &[Target],
        fleet: &Fleet,
        ledger: &Ledger,
    ) -> Result<usize, Refusal> {
        let problem = |problem| Refusal::Pin {
            field: self.field,
            id,
            problem,
        };
        let worker = fleet.get(id).ok_or_else(|| problem(PinProblem::Unknown))?;
        if let Some(rank) = self.pin.rank.filter(|rank| *rank >= worker.dp_size) {
            return Err(problem(PinProblem::RankOutOfRange {
                rank,
                dp_size: worker.dp_size,
            }));
        }
        let of_worker = targets
            .iter()
            .enumerate()
            .filter(|(_, target)| target.worker.id == id);
        let on_rank = of_worker.filter(|(_, target)| {
            self.pin
                .rank
                .is_none_or(|rank| target.rank.unwrap_or(0) == rank)
        });
        let least = on_rank.min_by_key(|(_, target)| {
            let load = ledger.load(target.key());
            load.prefills.saturating_add(load.decodes)
        });
        least.map(|(index, _)| index).ok_or_else(|| {
            problem(match worker.role == self.role {
                true => PinProblem::NotEligible,
                false => PinProblem::WrongRole { is: worker.role },
            })
        })
    }

    /// Where a rank is named without a worker, only targets on that rank count.
    fn of_rank(&self, targets: &[Target]) -> Result<Vec<Target>, Refusal> {
        let Some(rank) = self.pin.rank else {
            return Ok(targets.to_vec());
        };
        let on_rank: Vec<Target> = targets
            .iter()
            .filter(|target| target.rank.unwrap_or(0) == rank)
            .cloned()
            .collect();
        match on_rank.is_empty() && !targets.is_empty() {
            true => Err(Refusal::RankOutOfRange {
                role: self.role,
                rank,
            }),
            false => Ok(on_rank),
        }
    }
}

/// The field that named a worker: the phase's own, else the one that stands for it.
fn field_of(own: &'static str, pin: Pin) -> &'static str {
    match pin.worker {
        Some(_) => own,
        None => "backend_instance_id",
    }
}

/// Whether a prefill worker may hand over to the decode worker that has been picked, or to any that is here.
fn hands_over_to(
    prefill: &Rc<Worker>,
    here: &[Rc<Worker>],
    asked: &Constraints,
    decode: Option<&Rc<Worker>>,
) -> Result<bool, topology::TopologyError> {
    let derived = topology::constraints(prefill, here.iter().map(|worker| &**worker))?;
    let demanded = asked.clone().merged(derived);
    Ok(match decode {
        Some(decode) => demanded.admit(decode),
        None => here
            .iter()
            .any(|worker| worker.role == Role::Decode && demanded.admit(worker)),
    })
}

/// Targets that are preferred most, and the rest.
struct Preferred {
    first: Vec<Target>,
    rest: Vec<Target>,
}

fn preferred_first(workers: Vec<Rc<Worker>>, constraints: &Constraints) -> Preferred {
    let most = workers
        .iter()
        .map(|worker| constraints.preference(worker))
        .fold(f64::NEG_INFINITY, f64::max);
    let (first, rest): (Vec<_>, Vec<_>) = workers
        .iter()
        .partition(|worker| constraints.preference(worker) >= most);
    let targets =
        |workers: Vec<&Rc<Worker>>| workers.into_iter().flat_map(Worker::targets).collect();
    Preferred {
        first: targets(first),
        rest: targets(rest),
    }
}

/// The one at `index`, and the others.
fn take(mut targets: Vec<Target>, index: usize) -> Option<(Target, Vec<Target>)> {
    if index >= targets.len() {
        return None;
    }
    let taken = targets.swap_remove(index);
    Some((taken, targets))
}

/// An index drawn by weight; none where there is no weight.
fn weighted(weights: &[u64], random: &mut Random) -> Option<usize> {
    let total: u64 = weights.iter().sum();
    if total == 0 {
        return None;
    }
    let mut drawn = random.u64(0..total);
    weights.iter().position(|weight| match drawn < *weight {
        true => true,
        false => {
            drawn -= *weight;
            false
        }
    })
}
