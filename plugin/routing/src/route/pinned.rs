//! Owns pins: whether the worker that a caller names is available, and on which rank, and what becomes of a stale pin.

use super::chooser::Chooser;
use super::model_workers::RankSlot;
use super::{PinProblem, Refusal};
use crate::config::{OnStalePin, Pool};
use crate::fleet::{Fleet, Role, Worker, WorkerId};
use crate::load::Ledger;
use crate::request::{Pin, RoutingOverrides};
use crate::selection::eligibility::Eligible;

/// A pin, with its field and role.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pinned {
    pub(super) field: &'static str,
    pub(super) role: Role,
    pub(super) pin: Pin,
}

impl Pinned {
    /// The pin for `role`. Its field is the role's own if that named the worker, else the one that stands for both.
    pub(super) fn of(role: Role, overrides: &RoutingOverrides) -> Self {
        let (own_field, own) = match role {
            Role::Prefill => ("prefill_worker_id", overrides.prefill),
            Role::Decode | Role::Aggregated => ("decode_worker_id", overrides.decode),
        };
        let field = match own.worker {
            Some(_) => own_field,
            None => "backend_instance_id",
        };
        let pin = overrides.pin(role);
        Self { field, role, pin }
    }

    /// The eligible ranks of the named worker: the pinned one, or all.
    pub(super) fn ranks(
        &self,
        id: WorkerId,
        members: &[RankSlot],
        eligible: &Eligible,
        fleet: &Fleet,
    ) -> Result<Eligible, Refusal> {
        let problem = |problem| Refusal::Pin {
            field: self.field,
            id,
            problem,
        };
        let worker = fleet.get(id).ok_or_else(|| problem(PinProblem::Unknown))?;
        self.check_rank(worker).map_err(problem)?;
        let is_it = |index: &usize| {
            let target = members.get(*index).map(|member| &member.target);
            target.is_some_and(|target| {
                let rank = target.rank.unwrap_or(0);
                target.worker.id == id && self.pin.rank.is_none_or(|pinned| pinned == rank)
            })
        };
        let ranks: Vec<usize> = eligible.indexes().filter(is_it).collect();
        match ranks.is_empty() {
            false => Ok(Eligible::Some(ranks)),
            true => Err(problem(match worker.role == self.role {
                true if worker.is_draining() => PinProblem::Draining,
                true => PinProblem::NotEligible,
                false => PinProblem::WrongRole { is: worker.role },
            })),
        }
    }

    fn check_rank(&self, worker: &Worker) -> Result<(), PinProblem> {
        match self.pin.rank.filter(|rank| *rank >= worker.dp_size) {
            None => Ok(()),
            Some(rank) => Err(PinProblem::RankOutOfRange {
                rank,
                dp_size: worker.dp_size,
            }),
        }
    }

    /// The least loaded of these ranks: fewest prompt tokens for prefill, fewest blocks for decode. No cursor moves.
    pub(super) fn least_busy(
        &self,
        members: &[RankSlot],
        ranks: &Eligible,
        ledger: &Ledger,
    ) -> Option<usize> {
        let work = |index: &usize| {
            let load = members
                .get(*index)
                .map(|member| ledger.load_in_all(member.target.key()))
                .unwrap_or_default();
            match self.role {
                Role::Prefill => (load.prefill_tokens, load.prefills),
                Role::Decode => (load.decode_blocks, load.decodes),
                Role::Aggregated => (
                    load.prefills.saturating_add(load.decodes),
                    load.prefill_tokens,
                ),
            }
        };
        ranks.indexes().min_by_key(work)
    }

    /// Checks the prefill pin of a request that runs aggregated, without a prefill worker: a worker that could not prefill
    /// is refused as it is for a pair. One worker named for both roles means the aggregated one.
    pub(super) fn check_unused(overrides: &RoutingOverrides, fleet: &Fleet) -> Result<(), Refusal> {
        let pinned = Self {
            field: "prefill_worker_id",
            role: Role::Prefill,
            pin: overrides.prefill,
        };
        let Some(id) = pinned.pin.worker else {
            return Ok(());
        };
        let Some(worker) = fleet.get(id) else {
            return Ok(());
        };
        let is_both = overrides.decode_pin().worker == Some(id);
        let checked = match worker.role {
            Role::Prefill => pinned.check_rank(worker),
            _ if is_both => pinned.check_rank(worker),
            is => Err(PinProblem::WrongRole { is }),
        };
        checked.map_err(|problem| Refusal::Pin {
            field: pinned.field,
            id,
            problem,
        })
    }
}

/// Drops stale pins, whose worker has left or takes no new requests, if the pool goes on without them: an outer picker is
/// always a moment behind.
///
/// # Errors
/// If the pool does not, or if a worker must be named: the same request may succeed with another worker.
pub(super) fn drop_stale(
    overrides: &mut RoutingOverrides,
    fleet: &Fleet,
    pool: &Pool,
    chooser: &Chooser,
) -> Result<(), Refusal> {
    if fleet.workers().next().is_none() {
        // With an empty fleet no pin is stale.
        return Ok(());
    }
    let is_stale = |field, role, named: Option<WorkerId>| {
        let Some(id) = named else {
            return Ok(false);
        };
        let problem = match fleet.get(id) {
            None => PinProblem::Unknown,
            Some(worker) if worker.is_draining() => PinProblem::Draining,
            Some(_) => return Ok(false),
        };
        match pool.stale_pin() {
            OnStalePin::Ignore if !chooser.policy(role).needs_pin() => Ok(true),
            OnStalePin::Ignore | OnStalePin::Reject => Err(Refusal::Pin { field, id, problem }),
        }
    };
    let RoutingOverrides {
        prefill,
        decode,
        backend,
        ..
    } = overrides;
    let common_rank = decode.rank;
    if is_stale("prefill_worker_id", Role::Prefill, prefill.worker)? {
        *prefill = Pin::default();
    }
    let mut is_dropped = false;
    if is_stale("decode_worker_id", Role::Decode, decode.worker)? {
        decode.worker = None;
        is_dropped = true;
    }
    if is_stale("backend_instance_id", Role::Decode, *backend)? {
        *backend = None;
        is_dropped = true;
    }
    // The rank belonged to that worker; prefill has it too if it had none of its own.
    if is_dropped && decode.or(*backend).worker.is_none() {
        decode.rank = None;
        if prefill.worker.is_none() && prefill.rank == common_rank {
            prefill.rank = None;
        }
    }
    Ok(())
}
