//! Owns the end of a stream: its bookings are released, and what its workers hold for it is cleaned up.

use std::rc::Rc;

use super::effects;
use crate::host;
use crate::vm::{PoolRuntime, Stream};

/// Ends the stream: the client has left, or was answered. Frees what the stream holds, and cleans up what its workers hold
/// for it. Called in the stream's own context.
pub fn settle(runtime: &PoolRuntime, stream: &Rc<Stream>) {
    runtime.vm.receiving.end(stream.id());
    effects::step(runtime, stream, |session, with| {
        session.stream_ended(with, is_broken_off)
    });
    runtime.watch_no_more(stream);
    runtime.telemetry.stream_closed();
}

/// Whether the worker has broken the answer off: the proxy has reset the stream then, or answered 503 `broken_off` where the
/// client had read nothing.
fn is_broken_off() -> bool {
    let details = host::property(&["response", "code_details"]).unwrap_or_default();
    details.starts_with(b"upstream_reset_after_response_started")
}
