//! Owns the requests whose bodies this VM is receiving: refuses those whose body is late, and those whose memory another body
//! needs more.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::route::Refusal;
use routing::uploads::{UploadProgress, Uploads};

use super::Stream;
use super::{InStream, PoolRuntime};

/// The requests whose bodies are being received.
#[derive(Default)]
pub struct Receiving {
    uploads: RefCell<Uploads>,
    requests: RefCell<HashMap<u32, Request>>,
}

/// A request whose body is being received.
struct Request {
    stream: Rc<Stream>,
    runtime: Rc<PoolRuntime>,
}

impl Receiving {
    /// Notes that a body is to come.
    pub fn begin(&self, runtime: &Rc<PoolRuntime>, stream: &Rc<Stream>) {
        let request = Request {
            stream: Rc::clone(stream),
            runtime: Rc::clone(runtime),
        };
        self.requests.borrow_mut().insert(stream.id(), request);
        self.uploads.borrow_mut().begin(stream.id(), stream.came);
    }

    /// Forgets a body that is complete, refused, or gone with its stream.
    pub fn end(&self, stream: u32) {
        self.uploads.borrow_mut().end(stream);
        self.requests.borrow_mut().remove(&stream);
    }

    /// Holds `bytes` of a body in total, in place of other bodies if necessary. False if there is no room.
    pub fn hold(
        &self,
        runtime: &PoolRuntime,
        stream: &Rc<Stream>,
        bytes: usize,
        progress: UploadProgress,
    ) -> bool {
        stream.bodies().share = None;
        self.uploads.borrow_mut().received(stream.id(), bytes);
        let held = runtime.hold_body(bytes).or_else(|| {
            self.make_way(runtime, stream, bytes, progress)?;
            runtime.hold_body(bytes)
        });
        let is_held = held.is_some();
        stream.bodies().share = held.map(Arc::new);
        is_held
    }

    fn make_way(
        &self,
        runtime: &PoolRuntime,
        stream: &Rc<Stream>,
        bytes: usize,
        progress: UploadProgress,
    ) -> Option<()> {
        let lacking = runtime.lacks_for_bodies(bytes);
        let now = runtime.tell_time();
        let ways = self
            .uploads
            .borrow()
            .make_way(stream.id(), lacking, progress, now)?;
        for other in ways {
            self.refuse(other, &Refusal::Busy);
        }
        InStream::enter(stream).map(|_| ())
    }

    /// Refuses the requests of a pool runtime whose bodies are late. Called in each round, after the pool runtime has read the
    /// clock. Changes the effective context.
    pub fn refuse_late(&self, runtime: &Rc<PoolRuntime>) {
        let deadline_ms = runtime.config.limits.body_timeout_ms;
        let limit = Duration::from_millis(deadline_ms);
        let late = self.uploads.borrow().late(runtime.now(), limit);
        for stream in late {
            let is_its = |request: &Request| Rc::ptr_eq(&request.runtime, runtime);
            let is_due = self.requests.borrow().get(&stream).is_some_and(is_its);
            if is_due {
                self.refuse(stream, &Refusal::BodyTimeout { deadline_ms });
            }
        }
    }

    fn refuse(&self, stream: u32, refusal: &Refusal) {
        let request = self.requests.borrow_mut().remove(&stream);
        self.uploads.borrow_mut().end(stream);
        let Some(Request { stream, runtime }) = request else {
            return;
        };
        stream.bodies().share = None;
        if let Some(stream) = InStream::enter(&stream) {
            log::info!("[{}] refused: {refusal}", stream.ids());
            stream.refuse(&runtime, refusal);
        }
    }
}
