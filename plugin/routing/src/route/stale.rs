//! Owns stale pins, whose worker has left or takes no new requests: an outer picker is always a moment behind.

use super::{PinProblem, Refusal, Router};
use crate::config::OnStalePin;
use crate::fleet::{Role, WorkerId};
use crate::request::{Pin, RoutingOverrides};

impl Router {
    /// Drops stale pins, if the pool goes on without them.
    ///
    /// # Errors
    /// If the pool does not, or if a worker must be named: the same request may succeed with another worker.
    pub(super) fn drop_stale_pins(&self, overrides: &mut RoutingOverrides) -> Result<(), Refusal> {
        if self.fleet.workers().next().is_none() {
            // With an empty fleet no pin is stale.
            return Ok(());
        }
        let RoutingOverrides {
            prefill,
            decode,
            backend,
            ..
        } = overrides;
        let common_rank = decode.rank;
        if self.is_stale("prefill_worker_id", Role::Prefill, prefill.worker)? {
            *prefill = Pin::default();
        }
        let mut is_dropped = false;
        if self.is_stale("decode_worker_id", Role::Decode, decode.worker)? {
            decode.worker = None;
            is_dropped = true;
        }
        if self.is_stale("backend_instance_id", Role::Decode, *backend)? {
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

    /// Whether a named worker is unavailable, and the request goes on without it.
    fn is_stale(
        &self,
        field: &'static str,
        role: Role,
        named: Option<WorkerId>,
    ) -> Result<bool, Refusal> {
        let Some(id) = named else {
            return Ok(false);
        };
        let problem = match self.fleet.get(id) {
            None => PinProblem::Unknown,
            Some(worker) if worker.is_draining() => PinProblem::Draining,
            Some(_) => return Ok(false),
        };
        let policy = match role {
            Role::Prefill => &self.prefill_policy,
            Role::Decode | Role::Aggregated => &self.decode_policy,
        };
        match self.pool.stale_pin() {
            OnStalePin::Ignore if !policy.needs_pin() => Ok(true),
            OnStalePin::Ignore | OnStalePin::Reject => Err(Refusal::Pin { field, id, problem }),
        }
    }
}
