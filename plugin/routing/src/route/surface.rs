//! Owns the decisions by a request's line and headers alone: whether it is forwarded at all, and as what.

use super::{Plan, Refusal, Router};
use crate::request::{Generation, Head, Kind};
use crate::selection::eligibility::Subset;

impl Router {
    /// The kind of a request.
    ///
    /// # Errors
    /// [`Refusal::UnknownPath`] if the pool does not forward its path.
    pub fn kind(&self, head: Head<'_>) -> Result<Kind, Refusal> {
        match self.pool.forwards(head.path) {
            true => Ok(head.kind()),
            false => Err(Refusal::UnknownPath),
        }
    }

    /// Plans a request without a body, from which nothing is generated: on an unknown path, any worker may answer.
    ///
    /// # Errors
    /// If there is no worker, and if the path demands a body and no worker runs requests aggregated.
    pub(super) fn plan_empty(
        &mut self,
        generation: Generation,
        subset: Option<&Subset>,
    ) -> Result<Plan, Refusal> {
        match generation {
            Generation::Other => {
                let plain = self.plain(subset);
                plain.map(|(dispatch, assignment)| Plan::Forward(dispatch, assignment))
            }
            _ => {
                let missing = Refusal::Field {
                    name: "body",
                    problem: "is missing; a JSON object is required",
                };
                self.plan_unread(missing, subset)
            }
        }
    }
}
