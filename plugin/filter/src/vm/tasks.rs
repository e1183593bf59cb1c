//! Owns the tasks of one root context that wait, and its calls under way by token.
//!
//! A call belongs to the root context, and so must its answer: the SDK drops the answer to a call made from a stream that is
//! gone, and with it the only knowledge of the KV blocks that a worker holds. So a stream puts its task into a list, wakes the
//! root through a shared queue that only this VM listens to, and the root makes the call.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::budget::Share;
use routing::fleet::Worker;
use routing::route::{CleanUpLeg, PrefillPhase};
use routing::session::{CleanupRequest, Failure, LegEnd};

use super::{PoolRuntime, Stream};
use crate::host::{self, HostError};
use crate::shared;

/// A stream's task for the root.
pub enum RootTask {
    /// Call the prefill worker.
    Prefill(Box<Job>),
    /// Replace a decode leg that failed before the client read anything.
    Recover(Rc<Stream>, Failure, LegEnd),
    /// Fetch and drop the blocks that the prefill worker has computed.
    CleanUp(Rc<Stream>, Box<CleanUpLeg>, Arc<Worker>),
}

/// A call that has been made.
pub enum Call {
    /// A prefill leg.
    Prefill(Box<Job>),
    /// A decode leg in place of one that failed.
    Decode(DecodeCall),
    /// A clean-up leg, for blocks that a client has left behind.
    CleanUp(CleanUpCall),
    /// An abort: the worker drops its work for a request.
    Abort,
}

/// The tasks and calls of one root context.
#[derive(Default)]
pub struct Calls {
    queue: Option<u32>,
    waiting: VecDeque<RootTask>,
    running: HashMap<u32, Call>,
}

impl Calls {
    /// The queue that wakes the root, registered at first use: registering leaves a trace in the proxy, and a configuration may
    /// only be on trial.
    fn queue(&mut self) -> Result<u32, HostError> {
        if let Some(queue) = self.queue {
            return Ok(queue);
        }
        let queue =
            host::register_queue(&format!("pd_router.calls.{:x}", shared::unique_number()))?;
        self.queue = Some(queue);
        Ok(queue)
    }

    /// Hands a task to the root. Called from a stream's own callback.
    ///
    /// # Errors
    /// If the host would not carry the message: the task is dropped.
    pub fn submit(&mut self, task: RootTask) -> Result<(), HostError> {
        let queue = self.queue()?;
        host::enqueue(queue, b"")?;
        self.waiting.push_back(task);
        Ok(())
    }

    /// Takes the next task. Called on the root.
    pub fn next_task(&mut self) -> Option<RootTask> {
        self.waiting.pop_front()
    }

    /// Notes a call that has been made.
    pub fn run(&mut self, token: u32, call: Call) {
        self.running.insert(token, call);
    }

    /// Takes the call that has been answered; `None` if the token is another call's.
    pub fn take(&mut self, token: u32) -> Option<Call> {
        self.running.remove(&token)
    }

    /// The prefill calls under way.
    pub fn prefills(&self) -> impl Iterator<Item = &Job> {
        self.running.values().filter_map(|call| match call {
            Call::Prefill(job) => Some(&**job),
            Call::Decode(_) | Call::CleanUp(_) | Call::Abort => None,
        })
    }
}

/// A prefill leg and its client's stream.
pub struct Job {
    /// The leg.
    pub phase: PrefillPhase,
    /// The client's stream.
    pub client: Rc<Stream>,
    /// The client's attempt that the leg belongs to.
    pub attempt: u32,
    /// When the leg was created.
    pub since: Duration,
    /// The body's bytes count until the call has ended.
    _share: Option<Arc<Share>>,
}

impl Job {
    /// A leg for the client's present attempt.
    pub fn new(runtime: &PoolRuntime, phase: PrefillPhase, client: &Rc<Stream>) -> Self {
        Self {
            phase,
            client: Rc::clone(client),
            attempt: client.session().attempt(),
            since: runtime.now(),
            _share: client.bodies().share.clone(),
        }
    }
}

/// A call in place of a decode leg.
pub struct DecodeCall {
    /// The client's stream.
    pub client: Rc<Stream>,
    /// The client's attempt that the call belongs to.
    pub attempt: u32,
    /// How the leg that it replaces failed.
    pub failure: Failure,
    /// The body's bytes count until the call has ended.
    _share: Option<Arc<Share>>,
}

impl DecodeCall {
    /// A call for the client's present attempt.
    pub fn new(client: &Rc<Stream>, failure: Failure) -> Self {
        Self {
            client: Rc::clone(client),
            attempt: client.session().attempt(),
            failure,
            _share: client.bodies().share.clone(),
        }
    }
}

/// A clean-up leg under way.
pub struct CleanUpCall {
    /// Blocks that the leg frees.
    pub blocks: u64,
    /// Ids that its log line begins with.
    pub ids: String,
    /// The request's bytes count until the call has ended: the proxy holds them.
    _request: Option<CleanupRequest>,
}

impl CleanUpCall {
    /// A call that frees `blocks`, and carries the client's `request` if it has a body.
    pub fn new(client: &Stream, blocks: u64, request: Option<CleanupRequest>) -> Self {
        Self {
            blocks,
            ids: client.ids().to_owned(),
            _request: request,
        }
    }
}
