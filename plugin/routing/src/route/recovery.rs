//! Owns what follows when a decode leg has failed before its client has read anything of an answer: another pair of workers,
//! or another one that runs the request whole, within the pool's budget.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::errand::Errand;
use super::{Plan, Refusal, Router};
use crate::config::{DecodeLeg, Protocol};
use crate::fleet::WorkerId;
use crate::request::Request;

/// How a request would be placed anew.
#[derive(Debug, Clone)]
pub struct Recovery {
    errand: Rc<Errand>,
    way: Way,
    budget: Budget,
    excluded: Vec<WorkerId>,
}

/// How often a request may be placed again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Budget {
    /// After a leg that an engine may have worked on.
    recoveries: u32,
    /// After one that reached nobody.
    attempts: u32,
}

impl Budget {
    /// What the pool allows. A pool that wants no recoveries keeps no bodies, without which nothing is placed again.
    pub(super) fn of(leg: &DecodeLeg) -> Self {
        let attempts = match leg.recoveries {
            0 => 0,
            _ => leg.attempts.saturating_sub(1),
        };
        Self {
            recoveries: leg.recoveries,
            attempts,
        }
    }

    fn is_left(self) -> bool {
        self.recoveries > 0 || self.attempts > 0
    }

    /// What is left of it after such a failure. What cost nothing is charged to the recoveries only when nothing else is left.
    fn charged(self, cost: Cost) -> Option<Self> {
        let Self {
            recoveries,
            attempts,
        } = self;
        if cost == Cost::Nothing
            && let Some(attempts) = attempts.checked_sub(1)
        {
            return Some(Self {
                recoveries,
                attempts,
            });
        }
        let recoveries = recoveries.checked_sub(1)?;
        Some(Self {
            recoveries,
            attempts,
        })
    }
}

/// What a failed leg may have cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Cost {
    /// An engine may have worked on it: it counts against `decode.recoveries`.
    #[default]
    Work,
    /// No worker took the connection, or the one that had it is gone: it counts against `decode.attempts`.
    Nothing,
}

/// Who is not to be asked again.
#[derive(Debug, Clone, Copy, Default)]
pub struct Failed<'f> {
    /// The workers that failed, or may have.
    pub workers: &'f [WorkerId],
    /// Who is left out in their place where nobody else is left: of several that may have failed the one that is likeliest to, or
    /// the prefill worker whose hand-off a decode worker could not use. Nobody: then nothing is left to try.
    pub otherwise: &'f [WorkerId],
    /// Direct mode: the frontends that were asked.
    pub frontends: &'f [SocketAddr],
    /// What the leg may have cost.
    pub cost: Cost,
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
    pub(super) fn new(errand: Rc<Errand>, way: Way, budget: Budget) -> Self {
        Self {
            errand,
            way,
            budget,
            excluded: Vec::new(),
        }
    }

    /// Whether the pool allows another try.
    pub fn is_allowed(&self) -> bool {
        self.budget.is_left()
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
            budget,
            excluded,
        } = recovery;
        let budget = budget.charged(failed.cost)?;
        let request = Request::parse(errand.generation, body).ok()?;
        let without = |some: &[WorkerId]| [excluded.as_slice(), some].concat();
        let mut tried = without(failed.workers);
        let mut plan = self.place_again(&errand, way, &tried, &request);
        if plan.is_err() && !failed.otherwise.is_empty() {
            tried = without(failed.otherwise);
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
                budget,
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
