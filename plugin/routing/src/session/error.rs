//! Owns what follows from an answer to the forwarded request that is no success.

use std::net::SocketAddr;

use super::effect::{Effect, StepContext};
use super::{Failure, LegEnd, Session, Takeover, after_error};
use crate::outcome::{Came, of_words};
use crate::refusal::Refusal;
use crate::route::Router;

/// Who has answered with an error.
#[derive(Debug, Clone, Copy)]
pub enum ErrorOrigin<'d> {
    /// The worker.
    Worker,
    /// The proxy, in place of a worker.
    Proxy {
        /// The proxy's words for what has happened.
        details: &'d [u8],
        /// The destination that was tried last; none if none was.
        last: Option<SocketAddr>,
    },
}

/// What follows from an error.
#[derive(Debug)]
#[must_use = "the request's next step"]
pub enum AfterError {
    /// Another worker is asked.
    Recover(Failure, LegEnd),
    /// The client gets the error as it came.
    Pass(Vec<Effect<'static>>),
    /// The client gets this refusal in place of the proxy's words.
    Rewrite(Refusal),
}

impl Session {
    /// What follows from the headers of an answer with this `status`, which is no success.
    pub fn error_came(
        &mut self,
        with: &mut StepContext<'_>,
        status: u16,
        origin: ErrorOrigin<'_>,
    ) -> AfterError {
        let after = match origin {
            ErrorOrigin::Worker => self.worker_failed(with, status),
            ErrorOrigin::Proxy { details, last } if status >= 500 => {
                self.unanswered(with, status, last, details)
            }
            ErrorOrigin::Proxy { .. } => AfterError::Pass(Vec::new()),
        };
        if !matches!(after, AfterError::Recover(..)) {
            // An error says nothing about the worker's speed.
            self.assignment.release();
            self.response.pass_held();
        }
        after
    }

    /// A worker's success has turned out to be none before the client has read anything: how the leg has failed.
    pub fn success_failed(&mut self, with: &mut StepContext<'_>, came: Came) -> (Failure, LegEnd) {
        (Failure::of_answer(came), self.leg_ended(with.router, came))
    }

    fn worker_failed(&mut self, with: &mut StepContext<'_>, status: u16) -> AfterError {
        let end = self.leg_ended(with.router, Came::Status(status));
        let takeover = self.takeover(with.bodies);
        match after_error(&end, status, &self.assignment, takeover) {
            Some(failure) => AfterError::Recover(failure, end),
            None => AfterError::Pass(self.give_up_handoff(with.router)),
        }
    }

    /// No worker has answered: destinations before the `last` one took no connection, and the proxy's `details` say what became
    /// of that.
    fn unanswered(
        &mut self,
        with: &mut StepContext<'_>,
        status: u16,
        last: Option<SocketAddr>,
        details: &[u8],
    ) -> AfterError {
        if let Some(last) = last
            && with.router.pool().rules().reaches_workers
        {
            with.router.took_no_connection(self.tried.before(last));
            with.router.served_by(&mut self.assignment, last);
        }
        // Destinations behind it in the list have not been tried.
        self.tried.reached(last);
        let unknown = match last {
            Some(_) => Came::Cut,
            None => Came::NotSent,
        };
        let came = of_words(details).unwrap_or(unknown);
        let end = self.leg_ended(with.router, came);
        match self.takeover(with.bodies) {
            Takeover::Possible => AfterError::Recover(Failure::of_no_answer(came), end),
            // An answer without a body has no room for words.
            Takeover::Impossible if status == 503 && !self.response.has_ended() => {
                AfterError::Rewrite(self.nobody_reached(with.router))
            }
            Takeover::Impossible => AfterError::Pass(Vec::new()),
        }
    }

    fn nobody_reached(&self, router: &Router) -> Refusal {
        let what = match router.pool().rules().reaches_workers {
            false => "frontend",
            true => "decode worker",
        };
        Refusal::Unreachable {
            what,
            tried: self.tried.all().len(),
        }
    }
}
