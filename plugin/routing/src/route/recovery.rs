//! Owns what follows when a decode leg has failed before its client has read anything of an answer: another pair of workers,
//! or another one that runs the request whole, within the pool's budget.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::errand::Errand;
use super::{Plan, Refusal, Router};
use crate::config::Protocol;
use crate::fleet::WorkerId;
use crate::request::Request;

/// How a request would be placed anew.
#[derive(Debug, Clone)]
pub struct Recovery {
    errand: Rc<Errand>,
    way: Way,
    left: u32,
    excluded: Vec<WorkerId>,
}

/// Who is not to be asked again.
#[derive(Debug, Clone, Copy, Default)]
pub struct Failed<'f> {
    /// The workers that failed.
    pub workers: &'f [WorkerId],
    /// The prefill worker whose hand-off a decode worker could not use, if that was it: where there is no other decode worker
    /// the same one is asked again, with a hand-off of another.
    pub prefill: &'f [WorkerId],
    /// Direct mode: the frontends that were asked.
    pub frontends: &'f [SocketAddr],
}

/// How it was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// On a pair.
    Pair,
    /// On one worker.
    Whole,
}

impl Recovery {
    /// For a request that has just been placed for the first time.
    pub(super) fn new(errand: Rc<Errand>, way: Way, times: u32) -> Self {
        Self {
            errand,
            way,
            left: times,
            excluded: Vec::new(),
        }
    }

    /// Whether the pool allows another try.
    pub fn is_allowed(&self) -> bool {
        self.left > 0
    }
}

impl Router {
    /// Places a request again whose decode leg has failed, as `failed` says. `body` is the client's own. None where nothing is
    /// left to try: the failure is the client's answer then.
    pub fn recover(
        &mut self,
        recovery: Recovery,
        failed: &Failed<'_>,
        body: &[u8],
        now: Duration,
    ) -> Option<Plan> {
        self.advance(now);
        let Recovery {
            errand,
            way,
            left,
            excluded,
        } = recovery;
        let left = left.checked_sub(1)?;
        let request = Request::parse(errand.generation, body).ok()?;
        let without = |some: &[WorkerId]| [excluded.as_slice(), some].concat();
        let mut tried = without(failed.workers);
        let mut plan = self.place_again(&errand, way, &tried, &request);
        if plan.is_err() && !failed.prefill.is_empty() {
            // A decode worker may have failed for its prefill's sake.
            tried = without(failed.prefill);
            plan = self.place_again(&errand, way, &tried, &request);
        }
        let mut plan = plan.ok()?;
        if let Plan::Forward(dispatch, _) = &mut plan
            && self.pool.protocol == Protocol::Direct
        {
            dispatch
                .destinations
                .retain(|frontend| !failed.frontends.contains(frontend));
            dispatch.destinations.first()?;
        }
        if let Plan::Forward(_, seat) | Plan::Prefill(_, seat) = &mut plan {
            seat.recovery = Some(Recovery {
                errand,
                way,
                left,
                excluded: tried,
            });
        }
        Some(plan)
    }

    fn place_again(
        &mut self,
        errand: &Errand,
        way: Way,
        excluded: &[WorkerId],
        request: &Request<'_>,
    ) -> Result<Plan, Refusal> {
        let case = errand.case(self, excluded);
        match way {
            Way::Whole => {
                let whole = self.pick_whole(&case)?;
                Ok(self.forward_whole(whole, &case, None, Some(request)))
            }
            Way::Pair => self.place_pair(&case, request),
        }
    }
}
