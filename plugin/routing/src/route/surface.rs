//! Owns what of a request is decided by its line and headers alone: whether it is forwarded at all, and as what.

use super::{Plan, Refusal, Router};
use crate::request::{Generation, Head, Kind};
use crate::selection::eligibility::Subset;

impl Router {
    /// What kind of request this is.
    ///
    /// # Errors
    /// [`Refusal::UnknownPath`] where the pool does not forward its path.
    pub fn kind(&self, head: Head<'_>) -> Result<Kind, Refusal> {
        match self.pool.forwards(head.path) {
            true => Ok(head.kind()),
            false => Err(Refusal::UnknownPath),
        }
    }

    /// A request without a body. From nothing nothing is generated: where the path is not known any worker may say what it means.
    ///
    /// # Errors
    /// When there is no worker, and where the path is one that demands a body and no worker runs whole requests.
    pub(super) fn plan_empty(
        &mut self,
        generation: Generation,
        subset: Option<&Subset>,
    ) -> Result<Plan, Refusal> {
        match generation {
            Generation::Other => {
                let plain = self.plain(subset);
                plain.map(|(dispatch, seat)| Plan::Forward(dispatch, seat))
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
