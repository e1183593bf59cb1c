//! Owns the decisions taken in place of an endpoint picker: the priority of a request's objective, its flow, the name of its
//! model, and its destination while the pool has no workers.

use xxhash_rust::xxh3::xxh3_64;

use super::{Assignment, Dispatch, Fallback, Plan, Refusal, Router};
use crate::config::OnEmpty;
use crate::request::overrides::{self, FAIRNESS, MODEL_REWRITE, OBJECTIVE};
use crate::request::rename::{self, Renamed};
use crate::selection::eligibility::Subset;

type Headers<'h> = &'h [(Vec<u8>, Vec<u8>)];

impl Router {
    /// The request's body with the model name given by the pool's rewrites, or by the gateway in front; none if unchanged.
    /// `headers` are the routing overrides of a trusted caller.
    pub fn rename(&mut self, body: &[u8], headers: Headers<'_>) -> Option<Renamed> {
        let wanted = overrides::said(headers, &MODEL_REWRITE);
        let wanted = wanted.and_then(|name| std::str::from_utf8(name).ok());
        rename::rename(body, wanted, &self.pool.model_rewrites, &mut self.random)
    }

    /// The priority of the objective that a request names; 0 without one, or if the pool does not have it.
    pub(super) fn objective(&self, headers: Headers<'_>) -> i32 {
        let name = overrides::said(headers, &OBJECTIVE);
        let name = name.and_then(|name| std::str::from_utf8(name).ok());
        let known = name.and_then(|name| self.pool.objectives.get(name));
        known.copied().unwrap_or_default()
    }

    /// Whether requests pass through, since the pool has no workers at all.
    pub(super) fn is_open(&self) -> bool {
        self.pool.on_empty == OnEmpty::Pass && self.fleet.workers().next().is_none()
    }

    /// In an open pool, a request goes to the host that the cluster picks, unless the gateway limits the endpoints.
    pub(super) fn or_anywhere(
        &self,
        outcome: Result<(Dispatch, Assignment), Refusal>,
        subset: Option<&Subset>,
    ) -> Result<(Dispatch, Assignment), Refusal> {
        match outcome {
            Err(refusal) if refusal.is_emptiness() && subset.is_none() && self.is_open() => {
                let assignment = Assignment {
                    fallback: Some(Fallback::FleetEmpty),
                    ..Assignment::default()
                };
                Ok((Dispatch::anywhere(), assignment))
            }
            other => other,
        }
    }

    /// The same for a request that generates text.
    pub(super) fn or_forward_anywhere(
        &self,
        outcome: Result<Plan, Refusal>,
        subset: Option<&Subset>,
    ) -> Result<Plan, Refusal> {
        match outcome {
            Err(refusal) => {
                let forwarded = self.or_anywhere(Err(refusal), subset)?;
                Ok(Plan::Forward(forwarded.0, forwarded.1))
            }
            plan => plan,
        }
    }
}

/// The flow that a request names, as a number; 0 without one.
pub(super) fn flow(headers: Headers<'_>) -> u64 {
    overrides::said(headers, &FAIRNESS).map_or(0, |flow| xxh3_64(flow).max(1))
}
