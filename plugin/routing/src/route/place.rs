//! Owns where a request goes: one model in one namespace, drawn among those that would serve it.

use super::{PinProblem, Refusal, Router};
use crate::prefill_router::{Place, PlaceState};
use crate::rendezvous::{NotServed, Verdict};
use crate::request::Steering;
use crate::selection::Random;

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
        if let [only] = served.as_slice() {
            return Ok((only.0.clone(), verdict(&only.1)));
        }
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
