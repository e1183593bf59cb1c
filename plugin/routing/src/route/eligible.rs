//! Owns eligibility for a request, filter by filter: the demands of the model key, of the request and of the workers' own state.

use std::rc::Rc;

use super::choice::Step;
use super::model_workers::{ModelWorkers, RankSlot};
use super::pinned::Pinned;
use super::selection_request::{Admit, SelectionContext};
use super::{Refusal, Router};
use crate::fleet::{Condition, Role, Worker};
use crate::rendezvous::NotServed;
use crate::request::Pin;
use crate::selection::eligibility::{Eligible, Filter};
use crate::topology::{self, Constraints};

/// The workers left of one role.
pub(super) struct Narrowed {
    /// Those that may be picked.
    pub(super) eligible: Eligible,
    /// Those of them that are not too busy; of a worker named by the caller, its ranks.
    pub(super) free: Eligible,
}

impl Router {
    /// Keeps bound workers, where the protocol needs a binding. A peek needs none for a named worker, or if no worker is bound.
    pub(super) fn narrow_to_bound(
        &self,
        all: Eligible,
        members: &[RankSlot],
        pin: Pin,
        step: Step,
    ) -> Result<Eligible, Filter> {
        if self.pool.engine().binder().is_none() {
            return Ok(all);
        }
        let is_bound = |member: &RankSlot| self.bindings.contains_key(&member.target.worker.id);
        let named = |member: &&RankSlot| pin.worker == Some(member.target.worker.id);
        let is_needed = match step {
            Step::Commit if members.iter().any(|m| named(&m) && !is_bound(m)) => {
                return Err(Filter::Binding);
            }
            Step::Commit => true,
            Step::Peek => pin.worker.is_none() && members.iter().any(is_bound),
        };
        match is_needed {
            true => all.narrow(Filter::Binding, |index| {
                members.get(index).is_some_and(is_bound)
            }),
            false => Ok(all),
        }
    }

    /// Keeps workers that have not failed this request already.
    pub(super) fn not_excluded(
        context: &SelectionContext<'_>,
        members: &[RankSlot],
        eligible: Eligible,
    ) -> Result<Eligible, Filter> {
        if context.excluded.is_empty() {
            return Ok(eligible);
        }
        eligible.narrow(Filter::Failed, |index| {
            members
                .get(index)
                .is_some_and(|member| !context.excluded.contains(&member.target.worker.id))
        })
    }

    /// The filters that are the same for all roles and do not apply to a worker that the caller names.
    pub(super) fn narrow_further(
        &self,
        context: &SelectionContext<'_>,
        eligible: Eligible,
        pinned: Pinned,
    ) -> Result<Eligible, Refusal> {
        let members = context.model_workers.of_role(pinned.role);
        let target = |index: usize| members.get(index).map(|member| &member.target);
        let mut left = on_rank(members, pinned.role, pinned.pin, eligible)?;
        if context.model_workers.has_unhealthy {
            let is_ready =
                |index| target(index).is_some_and(|t| t.worker.condition == Condition::Ready);
            left = left.prefer(is_ready);
        }
        let now = self.ledger.now();
        if !self.health.is_clear(now) {
            let held = |index| target(index).map(|t| self.health.held(t.worker.id, now));
            // All of them may have penalties: then those with the least are left.
            let least = left.indexes().filter_map(held).min();
            left = left.prefer(|index| held(index) == least);
        }
        if let Some(adapter) = context
            .demand
            .adapter
            .as_deref()
            .filter(|_| context.model_workers.has_adapters)
        {
            // Any worker can load the adapter, at a cost.
            let has = |index| {
                target(index).is_some_and(|t| t.worker.adapters.iter().any(|own| own == adapter))
            };
            left = left.prefer(has);
        }
        Ok(left)
    }

    /// The decode workers that could be picked, and the caller's pin.
    pub(super) fn decoders(
        context: &SelectionContext<'_>,
        constraints: &Constraints,
    ) -> Result<(Eligible, Pinned), Refusal> {
        let members = context.model_workers.of_role(Role::Decode);
        let pin = context.overrides.decode_pin();
        let eligible = admitted(members, constraints)
            .and_then(|admitted| Self::not_excluded(context, members, admitted))
            .map_err(|filter| match filter {
                Filter::Role | Filter::Taints | Filter::Failed => {
                    Refusal::NotServed(NotServed::NoDecode)
                }
                filter => Refusal::NoneEligible {
                    role: Role::Decode,
                    filter,
                },
            })?;
        let pinned = Pinned::new(
            Role::Decode,
            "decode_worker_id",
            context.overrides.decode,
            pin,
        );
        Ok((eligible, pinned))
    }

    /// Fails if all decode workers that could be picked are too busy: a request that waits for one of them is not compared
    /// with the blocks of the prefill workers, which takes longer for a longer prompt. Other problems are reported later.
    pub(super) fn somebody_decodes(&self, context: &SelectionContext<'_>) -> Result<(), Refusal> {
        let has_threshold = self.pool.admission.has_threshold(Role::Decode);
        if !has_threshold || context.admit == Admit::Anyone {
            return Ok(());
        }
        let found = Self::decoders(context, &context.overrides.constraints)
            .and_then(|(eligible, pinned)| self.narrowed(context, eligible, pinned));
        match found {
            Err(overloaded @ Refusal::Overloaded { .. }) => Err(overloaded),
            _ => Ok(()),
        }
    }

    /// The workers of one role left by the filters that do not depend on the prompt.
    pub(super) fn narrowed(
        &self,
        context: &SelectionContext<'_>,
        eligible: Eligible,
        pinned: Pinned,
    ) -> Result<Narrowed, Refusal> {
        let members = context.model_workers.of_role(pinned.role);
        let eligible = allowed(context, pinned.role, eligible)?;
        if let Some(id) = pinned.pin.worker {
            let ranks = pinned.ranks(id, members, &eligible, &self.fleet)?;
            let free = self.not_busy(context, ranks, pinned.role)?;
            return Ok(Narrowed { eligible, free });
        }
        let eligible = self.narrow_further(context, eligible, pinned)?;
        let free = self.not_busy(context, eligible.clone(), pinned.role)?;
        Ok(Narrowed { eligible, free })
    }

    /// Keeps workers that are not busier than the role's threshold.
    pub(super) fn not_busy(
        &self,
        context: &SelectionContext<'_>,
        eligible: Eligible,
        role: Role,
    ) -> Result<Eligible, Refusal> {
        let admission = &self.pool.admission;
        if !admission.has_threshold(role) || context.admit == Admit::Anyone {
            return Ok(eligible);
        }
        let members = context.model_workers.of_role(role);
        let snapshots = self.ledger.snapshots(None);
        let is_free = |index: usize| {
            members.get(index).is_some_and(|member| {
                !admission.is_busy(role, &snapshots.of(member.slot, 1.0), member.capacity)
            })
        };
        eligible
            .narrow(Filter::Overload, is_free)
            .map_err(|_| Refusal::Overloaded { role })
    }
}

/// Whether any constraint applies to a pair.
pub(super) fn is_restricted(context: &SelectionContext<'_>) -> bool {
    context.model_workers.has_topology || !context.overrides.constraints.required_taints.is_empty()
}

/// The constraints on the decode worker from the transfer from `prefill`, and from the request itself.
pub(super) fn constraints(
    context: &SelectionContext<'_>,
    prefill: &Worker,
) -> Result<Constraints, Refusal> {
    if !context.model_workers.has_topology {
        return Ok(context.overrides.constraints.clone());
    }
    let here = context.model_workers.workers.iter().map(|worker| &**worker);
    match topology::constraints(prefill, here) {
        Ok(derived) => Ok(context.overrides.constraints.clone().merged(derived)),
        Err(error) => Err(Refusal::Topology {
            problem: error.to_string(),
        }),
    }
}

/// Keeps workers that the gateway and the caller allow: a worker named by the caller must be among them too.
pub(super) fn allowed(
    context: &SelectionContext<'_>,
    role: Role,
    eligible: Eligible,
) -> Result<Eligible, Refusal> {
    let members = context.model_workers.of_role(role);
    let worker = |index: usize| members.get(index).map(|member| &member.target.worker);
    let mut left = Ok(eligible);
    if let Some(subset) = &context.demand.subset {
        let holds = |index| worker(index).is_some_and(|worker| subset.holds(worker.address));
        left = left.and_then(|left| left.narrow(Filter::Subset, holds));
    }
    if let Some(ids) = &context.overrides.allowed {
        let holds = |index| worker(index).is_some_and(|worker| ids.contains(&worker.id));
        left = left.and_then(|left| left.narrow(Filter::Allowed, holds));
    }
    left.map_err(|filter| Refusal::NoneEligible { role, filter })
}

/// Keeps the entries on the requested rank.
pub(super) fn on_rank(
    members: &[RankSlot],
    role: Role,
    pin: Pin,
    eligible: Eligible,
) -> Result<Eligible, Refusal> {
    let Some(rank) = pin.rank else {
        return Ok(eligible);
    };
    let has_it = |index: usize| {
        let member = members.get(index);
        member.is_some_and(|member| member.target.rank.unwrap_or(0) == rank)
    };
    eligible
        .narrow(Filter::Rank, has_it)
        .map_err(|_| Refusal::RankOutOfRange { role, rank })
}

/// Keeps workers with all required taints.
pub(super) fn admitted(
    members: &[RankSlot],
    constraints: &Constraints,
) -> Result<Eligible, Filter> {
    let all = Eligible::all(members.len())?;
    if constraints.required_taints.is_empty() {
        return Ok(all);
    }
    all.narrow(Filter::Taints, |index| {
        members
            .get(index)
            .is_some_and(|member| constraints.admit(&member.target.worker))
    })
}

/// Whether a prefill worker may hand over to the picked decode worker, or without one to any of this model key; the error
/// gives the reason.
pub(super) fn hands_over(
    prefill: &Rc<Worker>,
    context: &SelectionContext<'_>,
    decode: Option<&Rc<Worker>>,
) -> Result<(), String> {
    let ModelWorkers { workers, .. } = &*context.model_workers;
    let derived = topology::constraints(prefill, workers.iter().map(|worker| &**worker))
        .map_err(|error| error.to_string())?;
    let demanded = context.overrides.constraints.clone().merged(derived);
    let is_allowed = |worker: &Worker| {
        let subset = context.demand.subset.as_ref();
        subset.is_none_or(|subset| subset.holds(worker.address))
            && context.overrides.allows(worker.id)
    };
    let found = match decode {
        Some(decode) => demanded.admit(decode),
        None => workers.iter().any(|worker| {
            worker.role == Role::Decode && demanded.admit(worker) && is_allowed(worker)
        }),
    };
    match found {
        true => Ok(()),
        false => Err(format!(
            "no decode worker is where worker {} may transfer to",
            prefill.name
        )),
    }
}

pub(super) fn most_preferred(
    members: &[RankSlot],
    eligible: Eligible,
    wanted: &Constraints,
) -> Eligible {
    let preference = |index: usize| {
        let member = members.get(index);
        member.map_or(f64::NEG_INFINITY, |m| wanted.preference(&m.target.worker))
    };
    let most = eligible
        .indexes()
        .map(preference)
        .fold(f64::NEG_INFINITY, f64::max);
    eligible.prefer(|index| preference(index) >= most)
}
