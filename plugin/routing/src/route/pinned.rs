//! Owns the worker that a caller names: whether it can be had, and on which rank.

use super::roster::Member;
use super::{PinProblem, Refusal};
use crate::fleet::{Fleet, Role, WorkerId};
use crate::load::Ledger;
use crate::request::Pin;
use crate::selection::eligibility::Eligible;

/// A pin, and what it is a pin for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pinned {
    pub(super) field: &'static str,
    pub(super) role: Role,
    pub(super) pin: Pin,
}

impl Pinned {
    /// A pin for `role`. The field that named the worker is the phase's own, else the one that stands for it.
    pub(super) fn new(role: Role, own_field: &'static str, own: Pin, pin: Pin) -> Self {
        let field = match own.worker {
            Some(_) => own_field,
            None => "backend_instance_id",
        };
        Self { field, role, pin }
    }

    /// The named worker among those eligible: on the named rank, else on the least busy one. No cursor moves.
    pub(super) fn find(
        &self,
        id: WorkerId,
        members: &[Member],
        eligible: &Eligible,
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
        let of_worker = eligible
            .indexes()
            .filter_map(|index| Some((index, &members.get(index)?.target)))
            .filter(|(_, target)| target.worker.id == id);
        let on_rank = of_worker.filter(|(_, target)| {
            self.pin
                .rank
                .is_none_or(|rank| target.rank.unwrap_or(0) == rank)
        });
        let least = on_rank.min_by_key(|(_, target)| {
            let load = ledger.load_in_all(target.key());
            load.prefills.saturating_add(load.decodes)
        });
        least.map(|(index, _)| index).ok_or_else(|| {
            problem(match worker.role == self.role {
                true if worker.is_draining() => PinProblem::Draining,
                true => PinProblem::NotEligible,
                false => PinProblem::WrongRole { is: worker.role },
            })
        })
    }
}
