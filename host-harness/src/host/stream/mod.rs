//! Owns one request from its headers to its log line: waits for the next event and calls the plugin.

mod client;
mod request;
mod response;

use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;

use self::client::{Client, ClientChange};
use self::request::RequestSide;
use self::response::ResponseSide;
use super::body::ChannelBody;
use super::state::{Command, ContextId, Process, StreamInfo, StreamState};
use super::upstream::{Attempts, Failure};
use super::vm::{Vm, VmDown};

/// Time for which the rest of a request is still read after the answer, so that the client can read the answer.
const DELAYED_CLOSE: Duration = Duration::from_secs(1);

/// Origin of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestOrigin {
    /// The client's address.
    pub source: SocketAddr,
    /// Number of the client's connection.
    pub connection: u64,
    /// The local address of the connection.
    pub local: SocketAddr,
}

/// The stream cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Halt {
    /// The VM trapped while this stream was in it.
    VmFailed,
    /// The client left.
    ClientGone,
    /// The client's connection must break; code details and flags give the reason.
    Abort(&'static str, i64),
}

impl From<VmDown> for Halt {
    fn from(_: VmDown) -> Halt {
        Halt::VmFailed
    }
}

type Step = Result<(), Halt>;

type Sending = Pin<Box<dyn Future<Output = Result<Response<Incoming>, Failure>>>>;

/// Source of the response.
enum Source {
    /// Nothing was sent upstream.
    None,
    /// Response headers are awaited.
    Sending(Sending),
    /// The response body is being read.
    Body(Incoming),
}

enum Event {
    Command(Option<Command>),
    ClientGone,
    ClientRoom,
    UpstreamRoom,
    Head(Result<Response<Incoming>, Failure>),
    Response(Option<Result<Frame<Bytes>, hyper::Error>>),
    Request(Option<Result<Frame<Bytes>, hyper::Error>>),
}

/// One stream. It runs as a separate task; the client's connection only holds the other end of [`Client`].
struct Stream {
    vm: Rc<Vm>,
    process: Arc<Process>,
    id: ContextId,
    mailbox: UnboundedReceiver<Command>,
    request: RequestSide,
    source: Source,
    response: ResponseSide,
    client: Client,
    attempts: Rc<Attempts>,
}

/// Serves one request on this thread. Ends when the plugin's context is deleted.
pub async fn serve(
    vm: Rc<Vm>,
    origin: RequestOrigin,
    request: Request<Incoming>,
    head: oneshot::Sender<Response<ChannelBody>>,
) {
    let (parts, body) = request.into_parts();
    let headers = request::intake(&parts, origin);
    let mut client = Client::new(head, parts.method.as_str().as_bytes());
    let authority = headers.get(b":authority").unwrap_or_default();
    let info = StreamInfo {
        source: origin.source,
        connection: origin.connection,
        route: Arc::clone(vm.process().routes.of(authority)),
        request_id: headers.get(b"x-request-id").unwrap_or_default().to_vec(),
        upstream: None,
        attempts: 0,
        code_details: String::new(),
        flags: 0,
        response_code: None,
    };
    let (mailbox, commands) = unbounded_channel();
    let opened = vm
        .ensure_up()
        .and_then(|()| vm.open_stream(StreamState::new(mailbox, headers, info)));
    let Ok(id) = opened else {
        response::refuse(&mut client);
        client.finish();
        return drain(body).await;
    };
    let stream = Stream {
        process: Arc::clone(vm.process()),
        vm,
        id,
        mailbox: commands,
        request: RequestSide::new(body, parts.version),
        source: Source::None,
        response: ResponseSide::default(),
        client,
        attempts: Rc::default(),
    };
    stream.run().await;
}

impl Stream {
    async fn run(mut self) {
        if let Err(halt) = self.drive().await {
            self.halt(halt);
        }
        self.source = Source::None;
        self.note_attempts();
        // After a trap of the VM there is no context left to end.
        let _ = self.vm.close_stream(self.id);
        self.client.finish();
        if let Some(body) = self.request.body {
            drain(body).await;
        }
    }

    async fn drive(&mut self) -> Step {
        self.start_request()?;
        while !self.response.finished {
            match self.next_event().await {
                Event::Command(Some(command)) => self.obey(command)?,
                Event::Command(None) => return Err(Halt::VmFailed),
                Event::ClientGone => return Err(Halt::ClientGone),
                Event::ClientRoom => self.client.pump(),
                Event::UpstreamRoom => {}
                Event::Head(head) => self.on_head(head)?,
                Event::Response(frame) => self.on_response_frame(frame)?,
                Event::Request(frame) => self.on_request_frame(frame)?,
            }
        }
        Ok(())
    }

    async fn next_event(&mut self) -> Event {
        let Stream {
            mailbox,
            request,
            source,
            client,
            ..
        } = self;
        let behind = client.is_behind();
        let reading = request.body.is_some() && request.has_room();
        let lagging = request.body.is_some() && !request.has_room();
        tokio::select! {
            biased;
            command = mailbox.recv() => Event::Command(command),
            event = next_of(source), if !behind => event,
            frame = next_frame(&mut request.body), if reading => Event::Request(frame),
            () = request.outgoing.drained(), if lagging => Event::UpstreamRoom,
            change = client.next_change() => match change {
                ClientChange::Gone => Event::ClientGone,
                ClientChange::Room => Event::ClientRoom,
            },
        }
    }

    /// Applies a host call's command. A command for a phase that is over does nothing.
    fn obey(&mut self, command: Command) -> Step {
        match command {
            Command::ContinueRequest => self.continue_request(),
            Command::ContinueResponse => self.continue_response(),
            Command::Reply(reply) => self.local_reply(reply),
            Command::Reset => Err(Halt::Abort("", 0)),
            Command::VmDown => Err(Halt::Abort("wasm_fail_stream", 0)),
        }
    }

    /// Applies the host calls of the guest call that has just returned. A reply or a reset overrides the call's own return value:
    /// it is applied at once, and `None` is returned. Otherwise the commands to apply afterwards are returned.
    fn after_call(&mut self) -> Result<Option<VecDeque<Command>>, Halt> {
        let mut commands = VecDeque::new();
        while let Ok(command) = self.mailbox.try_recv() {
            match command {
                Command::ContinueRequest | Command::ContinueResponse => {
                    commands.push_back(command);
                }
                Command::Reply(_) | Command::Reset | Command::VmDown => {
                    self.obey(command)?;
                    return Ok(None);
                }
            }
        }
        Ok(Some(commands))
    }

    fn halt(&mut self, halt: Halt) {
        match halt {
            Halt::VmFailed if !self.client.has_head() => response::refuse(&mut self.client),
            Halt::VmFailed => self.client.abort(),
            Halt::ClientGone => {
                self.note("downstream_remote_disconnect", 0x4000);
                self.client.abort();
            }
            Halt::Abort(details, flags) => {
                self.note(details, flags);
                self.client.abort();
            }
        }
    }

    fn note(&mut self, details: &str, flags: i64) {
        let _ = self.vm.stream(self.id, |stream| {
            if !details.is_empty() {
                details.clone_into(&mut stream.info.code_details);
            }
            stream.info.flags |= flags;
        });
    }

    /// Records the upstream host for the properties, even without an answer.
    fn note_attempts(&mut self) {
        let (count, last) = (self.attempts.count.get(), self.attempts.last());
        let _ = self.vm.stream(self.id, |stream| {
            stream.info.attempts = count;
            stream.info.upstream = last;
        });
    }
}

async fn next_of(source: &mut Source) -> Event {
    match source {
        Source::None => std::future::pending().await,
        Source::Sending(sending) => Event::Head(sending.await),
        Source::Body(body) => Event::Response(body.frame().await),
    }
}

async fn next_frame(body: &mut Option<Incoming>) -> Option<Result<Frame<Bytes>, hyper::Error>> {
    match body {
        Some(body) => body.frame().await,
        None => None,
    }
}

/// Reads the rest of the request for a moment: closing at once would lose the answer for the client.
async fn drain(mut body: Incoming) {
    let rest = async { while let Some(Ok(_)) = body.frame().await {} };
    let _ = tokio::time::timeout(DELAYED_CLOSE, rest).await;
}
