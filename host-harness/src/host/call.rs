//! Owns the calls that the plugin makes. They belong to the root context: a client that leaves does not end them, only the VM's
//! end does.

use std::rc::{Rc, Weak};
use std::time::Duration;

use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;

use super::body::Outgoing;
use super::maps::Headers;
use super::state::{CallReply, LocalReply, PreparedCall};
use super::upstream::{Attempts, Upstreams};
use super::vm::Vm;

/// The largest answer that Envoy buffers for a call, in bytes.
const REPLY_LIMIT: usize = 32 * 1024 * 1024;

/// Sends the call and passes the complete answer to the plugin.
pub async fn run(vm: Weak<Vm>, call: Box<PreparedCall>) {
    let Some(upstreams) = vm.upgrade().map(|vm| Rc::clone(vm.upstreams())) else {
        return;
    };
    let token = call.token;
    let attempts = Rc::new(Attempts::default());
    let reply = match call.timeout_ms {
        0 => exchange(upstreams, call, Rc::clone(&attempts)).await,
        limit => {
            let limit = Duration::from_millis(u64::from(limit));
            let exchange = exchange(upstreams, call, Rc::clone(&attempts));
            let answered = tokio::time::timeout(limit, exchange).await;
            answered.unwrap_or_else(|_| local(attempts.timed_out().reply(attempts.count.get())))
        }
    };
    if let Some(vm) = vm.upgrade() {
        // A trap in the callback is handled by the VM.
        let _ = vm.call_answered(token, reply);
    }
}

async fn exchange(
    upstreams: Rc<Upstreams>,
    call: Box<PreparedCall>,
    attempts: Rc<Attempts>,
) -> CallReply {
    let body = Outgoing::new(None);
    let whole = body.push(call.body).and_then(|()| body.end());
    if whole.is_err() {
        return CallReply::default();
    }
    let sent = upstreams.send(call.request, body, Rc::clone(&attempts));
    match sent.await {
        Ok(response) => collect(response).await.unwrap_or_default(),
        Err(failure) => local(failure.reply(attempts.count.get())),
    }
}

/// The complete answer. `None`: broken off, or too large.
async fn collect(response: Response<Incoming>) -> Option<CallReply> {
    let (head, mut incoming) = response.into_parts();
    let mut headers = Headers::default();
    headers.add(b":status", head.status.as_str().as_bytes());
    headers.extend(&head.headers);
    let mut body = BytesMut::new();
    let mut trailers = Headers::default();
    while let Some(frame) = incoming.frame().await {
        match frame.ok()?.into_data() {
            Ok(data) => body.extend_from_slice(&data),
            Err(frame) => trailers = frame.into_trailers().ok()?.iter().collect(),
        }
        if body.len() > REPLY_LIMIT {
            return None;
        }
    }
    Some(CallReply {
        headers: Some(headers),
        body: body.freeze(),
        trailers,
    })
}

/// Envoy's answer to a failed call, the same as to a client.
fn local(reply: LocalReply) -> CallReply {
    let headers = [
        (":status", reply.status.to_string()),
        ("content-length", reply.body.len().to_string()),
        ("content-type", "text/plain".to_owned()),
    ];
    CallReply {
        headers: Some(headers.into_iter().collect()),
        body: reply.body,
        trailers: Headers::default(),
    }
}
