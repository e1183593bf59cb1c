//! Owns the making of calls on the root, and the way from an answer to the leg that waits for it.

use std::net::SocketAddr;
use std::time::Duration;

use routing::config::Pool;
use routing::engine_metrics::MAX_TEXT;
use routing::route::{CallEnd, Dispatch, MAX_CALL_ANSWER};

use super::{cleanup, prefill, recovery};
use crate::headers;
use crate::host::{self, Header, Map};
use crate::vm::{Call, PoolRuntime, RootTask, destination_headers};

/// Runs the waiting tasks. Called on the root, when its queue has a message.
pub fn start_waiting(runtime: &PoolRuntime, queue: u32) {
    while host::dequeue(queue).is_some() {}
    loop {
        let task = runtime.calls.borrow_mut().next_task();
        match task {
            Some(RootTask::Prefill(job)) => prefill::start(runtime, *job),
            Some(RootTask::Recover(client, failure, end)) => {
                runtime.tell_time();
                recovery::recover(runtime, &client, failure, end);
            }
            Some(RootTask::CleanUp(client, leg, prefill)) => {
                cleanup::start(runtime, &client, &leg, &prefill);
            }
            None => break,
        }
    }
}

/// Handles the answer to a call; false if the token is another call's.
pub fn answered(runtime: &PoolRuntime, token: u32, has_headers: bool) -> bool {
    let call = runtime.calls.borrow_mut().take(token);
    let Some(call) = call else {
        return false;
    };
    let body = match has_headers {
        true => host::call_response(MAX_CALL_ANSWER).unwrap_or_default(),
        false => Vec::new(),
    };
    let answer = match has_headers {
        true => CallEnd::whole(call_status(), &body),
        false => CallEnd::Broken,
    };
    runtime.advance();
    match call {
        Call::Prefill(job) => prefill::answered(runtime, *job, answer),
        Call::Decode(call) => recovery::answered(runtime, call, answer),
        Call::CleanUp(leg) => cleanup::answered(runtime, &leg, answer),
        // An abort's answer has no consequence.
        Call::Abort => {}
    }
    true
}

/// The status of the answer; 502 if it cannot be read.
fn call_status() -> u16 {
    let status = host::header(Map::CallResponse, ":status");
    status
        .and_then(|value| std::str::from_utf8(&value).ok()?.parse().ok())
        .unwrap_or(502)
}

/// The headers of an answer that go to the client together with its body.
pub fn headers_for_client() -> Vec<Header> {
    let connection = host::header(Map::CallResponse, "connection").unwrap_or_default();
    let all = host::headers(Map::CallResponse).unwrap_or_default();
    let theirs = all
        .into_iter()
        .filter(|(name, _)| headers::is_a_clients_too(name, &connection));
    theirs.collect()
}

/// Calls a worker with a leg that is not forwarded: the client's headers and body, changed as the leg says. Changes the effective
/// context.
///
/// # Errors
/// The outcome of a call that was not made.
pub fn call_decode(
    runtime: &PoolRuntime,
    dispatch: &Dispatch,
    request: &ClientRequest<'_>,
    timeout: Duration,
) -> Result<u32, CallEnd<'static>> {
    let mut own = dispatch.headers.clone();
    own.extend(destination_headers(dispatch));
    own.push((headers::REQUEST_ID, request.id.to_owned()));
    let sent = head(&runtime.pool, request.headers, &own);
    let edited = dispatch
        .edits
        .as_ref()
        .map(|edits| edits.apply(request.body));
    let cluster = runtime.router().pool().clusters.decode.clone();
    // The root makes the call: the client's context may be gone when the answer comes.
    host::enter_context(runtime.root_id).map_err(|_| CallEnd::NotSent)?;
    let body = edited.as_deref().unwrap_or(request.body);
    host::call(&cluster, sent, Some(body), timeout).map_err(not_made)
}

/// Outcome of a call that the proxy would not make. `BadArgument`: an argument that must be text is not; all other statuses are
/// about the destination.
pub fn not_made(status: host::Status) -> CallEnd<'static> {
    match status {
        host::Status::BadArgument => CallEnd::Unsendable,
        _ => CallEnd::NotSent,
    }
}

/// Makes a `GET` call: to the cluster's member `destination` or, without one, to a member that the cluster picks. Called on the
/// root.
///
/// # Errors
/// If the proxy would not make the call.
pub fn get(
    cluster: &str,
    destination: Option<SocketAddr>,
    path: &str,
    further: &[(&'static str, String)],
    timeout: Duration,
) -> Result<u32, host::Status> {
    let destination = destination.map(|address| address.to_string());
    let authority = destination.as_deref().unwrap_or(cluster);
    let mut sent = vec![
        (":method", "GET"),
        (":path", path),
        (":authority", authority),
    ];
    let further = further.iter();
    sent.extend(further.map(|(name, value)| (*name, value.as_str())));
    let named = destination.as_deref();
    sent.extend(named.map(|address| (headers::DESTINATION, address)));
    host::call(cluster, sent, None, timeout)
}

/// The body of a worker's answer, at most one byte longer than [`MAX_TEXT`]; `None` unless the status is 200.
pub fn good_answer(has_headers: bool) -> Option<Vec<u8>> {
    let is_good = has_headers && call_status() == 200;
    is_good.then(|| host::call_response(MAX_TEXT).unwrap_or_default())
}

/// A client's request.
pub struct ClientRequest<'a> {
    /// The request id.
    pub id: &'a str,
    /// Headers as the client sent them.
    pub headers: &'a [Header],
    /// Body as the client sent it.
    pub body: &'a [u8],
}

/// The headers of a call made for a client: those of the client's that are forwarded, and our `own`, which replace them.
pub fn head<'h>(
    pool: &'h Pool,
    clients: &'h [Header],
    own: &'h [(&'static str, String)],
) -> Vec<(&'h str, &'h str)> {
    let is_own = |name: &str| own.iter().any(|(set, _)| *set == name);
    let along = clients
        .iter()
        .filter_map(as_text)
        .filter(|(name, _)| headers::goes_along(name.as_bytes(), &pool.call_headers))
        .filter(|(name, _)| !is_own(name));
    let own = own.iter().map(|(name, value)| (*name, value.as_str()));
    along.chain(own).chain([headers::CONTENT_TYPE]).collect()
}

/// The SDK's calls carry text only: a header that is not text is left out.
fn as_text((name, value): &Header) -> Option<(&str, &str)> {
    Some((
        std::str::from_utf8(name).ok()?,
        std::str::from_utf8(value).ok()?,
    ))
}
