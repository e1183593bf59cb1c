//! Owns the state of a request that outlives a single callback: shared between its context and the root that makes its calls.

use std::cell::{RefCell, RefMut};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use routing::budget::Share;
use routing::ids::Ids;
use routing::route::Dispatch;
use routing::session::{Bodies, ReplayBuffer, Session, Stage, Takeover};

use super::RoutingHeaders;
use super::{InStream, PoolRuntime};
use crate::headers;
use crate::host::Header;

/// A request, shared between its context and the root that makes its calls.
pub struct Stream {
    id: u32,
    ids: Ids,
    /// Whether the client sent the body's length: then the new length must be sent too.
    pub declared_length: bool,
    /// Headers that matter to the router.
    pub routing_headers: RoutingHeaders,
    /// When the request came.
    pub came: Duration,
    session: RefCell<Session>,
    bodies: RefCell<Bodies>,
}

impl Stream {
    /// State of a request that has just come.
    pub fn new(
        id: u32,
        ids: Ids,
        headers: Arc<[Header]>,
        routing_headers: RoutingHeaders,
        came: Duration,
    ) -> Self {
        let is_length = |(name, _): &Header| name == b"content-length";
        Self {
            id,
            ids,
            declared_length: headers.iter().any(is_length),
            routing_headers,
            came,
            session: RefCell::default(),
            bodies: RefCell::new(Bodies::new(headers)),
        }
    }

    /// The request's life. No other borrow of it may be open: callers bind what they need of it, and let go.
    pub fn session(&self) -> RefMut<'_, Session> {
        self.session.borrow_mut()
    }

    /// What is kept of the request. As with [`Self::session`], no other borrow of it may be open.
    pub fn bodies(&self) -> RefMut<'_, Bodies> {
        self.bodies.borrow_mut()
    }

    /// Stage of the request.
    pub fn stage(&self) -> Stage {
        self.session().stage
    }

    /// Changes the stage of the request.
    pub fn set_stage(&self, stage: Stage) {
        self.session().stage = stage;
    }

    /// The id that both legs carry: our own.
    pub fn request_id(&self) -> &str {
        self.ids.own()
    }

    /// The ids that a line of the log begins with: the client's, and our own.
    pub fn ids(&self) -> &str {
        self.ids.for_log()
    }

    /// The proxy's number of the stream.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The request's headers as they came.
    pub fn headers(&self) -> Arc<[Header]> {
        Arc::clone(&self.bodies().headers)
    }

    /// Whether another worker may take the place of one that fails.
    pub fn takeover(&self) -> Takeover {
        self.session().takeover(&self.bodies())
    }

    /// The number of destinations that were tried.
    pub fn tried(&self) -> usize {
        self.session().tried.all().len()
    }

    /// Keeps the body if the request may have to be routed again, and if it is within the `bound` already or the bound has room.
    /// Both legs are made from what is kept, so that the body is read from the proxy once.
    pub fn keep_replay_buffer(&self, runtime: &PoolRuntime, body: Vec<u8>, bound: Option<Share>) {
        let may_recover = self.session().assignment.may_recover();
        if may_recover {
            let bound = bound.or_else(|| runtime.hold_replay_buffer(body.len()));
            self.bodies().replay = bound.map(|bound| ReplayBuffer { body, bound });
        }
    }

    /// Frees the body of a request that was answered: calls under way hold their own share.
    pub fn free_answered(&self) {
        if self.session().is_answered() {
            self.bodies().release();
        }
    }

    /// Notes that the client has begun to read: no other worker can take over any more.
    pub fn answer_begins(&self, runtime: &PoolRuntime) {
        self.bodies().answer_begins();
        self.session().answer_begins(&mut runtime.router_mut());
    }

    /// Copies the request for the clean-up leg, while its client is still being served: more was computed than the client needs.
    pub fn leave_copy(&self, runtime: &PoolRuntime) {
        let bodies = &mut *self.bodies();
        let Some(replay) = bodies.replay.as_ref().filter(|_| bodies.cleanup.is_none()) else {
            return;
        };
        if let Some(bound) = runtime.hold_cleanup_request(replay.body.len()) {
            let body = replay.body.clone();
            bodies.leave(body, bound);
        }
    }

    /// Keeps the request for the clean-up leg, if the budget allows. Enters the stream's context.
    pub fn leave_cleanup_request(self: &Rc<Self>, runtime: &PoolRuntime) {
        InStream::enter(self);
        let replay = self.bodies().replay.take();
        let body = match replay {
            Some(replay) => Ok(replay.body),
            None => runtime.vm.copy_body(),
        };
        let Ok(body) = body else {
            return;
        };
        if let Some(bound) = runtime.hold_cleanup_request(body.len()) {
            self.bodies().leave(body, bound);
        }
    }
}

/// The headers that say where a leg goes: in order, with one retry for each destination after the first. One more would go to the
/// cluster's empty fallback, and replace the worker's own answer.
pub fn destination_headers(dispatch: &Dispatch) -> Vec<(&'static str, String)> {
    let list: Vec<String> = dispatch
        .destinations
        .iter()
        .map(SocketAddr::to_string)
        .collect();
    if list.is_empty() {
        return Vec::new();
    }
    let retries = list.len().saturating_sub(1);
    let mut headers = vec![(headers::DESTINATION, list.join(","))];
    if retries > 0 {
        headers.push((headers::RETRY_ON, headers::BEFORE_SENT.to_owned()));
        headers.push((headers::MAX_RETRIES, retries.to_string()));
    }
    headers
}
