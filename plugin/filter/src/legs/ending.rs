//! Owns the end of a stream: its bookings are released, and what its workers hold for it is cleaned up.

use std::rc::Rc;

use routing::session::Stage;

use super::{cleanup, effects};
use crate::telemetry::Ended;
use crate::vm::{PoolRuntime, Stream};

/// Ends the stream: the client has left, or was answered. Frees what the stream holds, and cleans up what its workers hold
/// for it. Called in the stream's own context.
pub fn settle(runtime: &PoolRuntime, stream: &Rc<Stream>) {
    let stage = stream.session().end();
    runtime.vm.receiving.end(stream.id());
    let handed = stream.session().handed.take();
    if let Some(handed) = handed {
        effects::handed_off(runtime, stream, handed);
    }
    match stage {
        Stage::Prefilling | Stage::Recovering => stream.leave_cleanup_request(runtime),
        Stage::Waiting(waiter) => runtime.waits_no_more(waiter),
        _ => {}
    }
    cleanup::abort_at_the_end(runtime, stream);
    tell_of_end(runtime, stream, stage);
    {
        let assignment = &mut stream.session().assignment;
        assignment.release();
        runtime.router_mut().request_ended(assignment);
    }
    stream.bodies().end();
    runtime.watch_no_more(stream);
    runtime.telemetry.stream_closed();
}

fn tell_of_end(runtime: &PoolRuntime, stream: &Stream, stage: Stage) {
    let session = stream.session();
    let response = &session.response;
    // An answer that was held back did not reach the client.
    let is_answered = stage == Stage::Answered || response.has_begun();
    runtime.metrics.ended(&Ended {
        facts: &session.assignment.facts,
        output_tokens: response.tokens(),
        code: if is_answered {
            response.status_class()
        } else {
            0
        },
    });
    if let Some(time) = response.time_between_tokens(|| runtime.vm.now()) {
        runtime.metrics.between_tokens(time);
    }
}
