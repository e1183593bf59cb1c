//! Owns one request's callbacks: turns them into calls on `routing`, and the answers into host calls.

use std::rc::Rc;
use std::sync::Arc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;
use routing::ids::Ids;
use routing::request::{Head, Kind};
use routing::route::{Plan, Refusal};
use routing::session::Stage;
use routing::uploads::UploadProgress;

use crate::endpoints;
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::legs::ending;
use crate::planning::{self, Next};
use crate::registration::RegistrationRequest;
use crate::response::Reading;
use crate::vm::{InStream, PoolRuntime, Pools, RoutingHeaders, Stream};

/// The filter's context of one stream.
pub struct StreamContext {
    id: u32,
    pools: Rc<Pools>,
    /// The pool that the stream's route belongs to, once that is known.
    runtime: Rc<PoolRuntime>,
    stream: Option<Rc<Stream>>,
    /// A request to the registry, if the stream is one.
    registration: Option<RegistrationRequest>,
    /// State of the response.
    reading: Reading,
}

impl StreamContext {
    /// The context of a stream that has just begun.
    pub fn new(id: u32, pools: Rc<Pools>, runtime: Rc<PoolRuntime>) -> Self {
        Self {
            id,
            pools,
            runtime,
            stream: None,
            registration: None,
            reading: Reading::default(),
        }
    }

    /// Opens a request: removes headers that a client must not set, and sets the request id.
    fn open(&self, received: &Arc<[Header]>) -> Result<Rc<Stream>, HostError> {
        let overrides = received
            .iter()
            .filter(|(name, _)| headers::is_reserved(name));
        for (name, _) in overrides {
            host::remove_header(Map::Request, name)?;
        }
        let own = self.give_id()?;
        let ids = Ids::new(find(received, headers::REQUEST_ID), own);
        self.runtime.telemetry.stream_opened();
        let came = self.runtime.tell_time();
        let routing_headers = self.routing_headers(received);
        let headers = Arc::clone(received);
        Ok(Rc::new(Stream::new(
            self.id,
            ids,
            headers,
            routing_headers,
            came,
        )))
    }

    /// The headers that matter to the router; routing overrides only from trusted callers.
    fn routing_headers(&self, received: &[Header]) -> RoutingHeaders {
        let is_trusted = self.runtime.router().pool().trust_clients;
        let overrides = received
            .iter()
            .filter(|(name, _)| is_trusted && headers::is_reserved(name));
        let value = |name: &str| find(received, name).map(<[u8]>::to_vec);
        let mut named = self.runtime.session_headers.iter();
        RoutingHeaders {
            overrides: overrides.cloned().collect(),
            session: named.find_map(|name| value(name)),
            tenant: value(headers::TENANT),
        }
    }

    /// Sets a request id of our own for the engines, which may key hand-offs by it: a client may send its own id twice.
    fn give_id(&self) -> Result<String, HostError> {
        let id = self.runtime.new_id();
        host::set_header(Map::Request, headers::REQUEST_ID, id.as_bytes())?;
        Ok(id)
    }

    /// Acts on the head of an opened request.
    fn begin(&self, stream: &InStream, head: Head<'_>, has_body: bool) -> Action {
        let kind = self.runtime.router().kind(head);
        let generation = match kind {
            Ok(Kind::Generation(generation)) => generation,
            Ok(Kind::Plain) => return self.forward_unread(stream),
            Err(refusal) => {
                let next = planning::carry_out(&self.runtime, stream, Err(refusal), Vec::new());
                return action(next);
            }
        };
        self.speak_json(stream);
        stream.set_stage(match head.is_encoded() {
            true => Stage::ReadingEncoded,
            false => Stage::Reading(generation),
        });
        match has_body {
            true => self.expect_body(stream),
            false => self.route(stream),
        }
    }

    /// Forwards to one worker, without reading the body.
    fn forward_unread(&self, stream: &InStream) -> Action {
        let outcome = {
            let subset = stream.routing_headers.subset(stream);
            self.runtime.router_mut().plain(subset.as_ref())
        };
        let plan = outcome.map(|(dispatch, assignment)| Plan::Forward(dispatch, assignment));
        action(planning::carry_out(&self.runtime, stream, plan, Vec::new()))
    }

    /// Prepares for a body. A request whose declared length is over the limit is refused at once.
    fn expect_body(&self, stream: &InStream) -> Action {
        let headers = stream.headers();
        let length =
            find(&headers, "content-length").and_then(|length| std::str::from_utf8(length).ok());
        if !self.is_too_long(
            stream,
            length.and_then(|length| length.parse().ok()).unwrap_or(0),
        ) {
            self.pools.vm.receiving.begin(&self.runtime, stream);
        }
        Action::Pause
    }

    /// Whether a body of `bytes` is longer than allowed: such a request is refused here.
    fn is_too_long(&self, stream: &InStream, bytes: usize) -> bool {
        let allowed_bytes = self.pools.config.limits.body_bytes;
        if bytes > allowed_bytes {
            self.pools.vm.receiving.end(stream.id());
            stream.refuse(&self.runtime, &Refusal::TooLarge { allowed_bytes });
        }
        bytes > allowed_bytes
    }

    /// Sets the content type of a gRPC request to JSON: otherwise the proxy would send its own errors as successes.
    fn speak_json(&self, stream: &InStream) {
        let (name, json) = headers::CONTENT_TYPE;
        let headers = stream.headers();
        let said = find(&headers, name).unwrap_or_default();
        if headers::is_grpc(said)
            && let Err(error) = host::set_header(Map::Request, name, json.as_bytes())
        {
            log::error!("[{}] it stays gRPC: {error}", stream.ids());
        }
    }

    /// Routes a request whose body is complete.
    fn route(&self, stream: &InStream) -> Action {
        self.pools.vm.receiving.end(stream.id());
        let now = self.runtime.tell_time();
        self.pools.vm.refresh(&self.pools.config.sharing, now);
        let next = match stream.stage() {
            Stage::Reading(generation) => planning::plan(&self.runtime, stream, generation),
            _ => self.plan_encoded(stream),
        };
        action(next)
    }

    /// Routes a request whose body is encoded.
    fn plan_encoded(&self, stream: &InStream) -> Next {
        let body = match planning::read_body(&self.runtime, stream) {
            Ok(body) => body,
            Err(error) => return planning::unreadable(&self.runtime, stream, &error),
        };
        let outcome = {
            let mut router = self.runtime.router_mut();
            router.advance(self.runtime.now());
            let subset = stream.routing_headers.subset(stream);
            router.plan_encoded(&body, subset.as_ref())
        };
        planning::carry_out(&self.runtime, stream, outcome, body)
    }

    /// Starts a request to the registry.
    fn receive(&mut self, registration: RegistrationRequest, end_of_stream: bool) -> Action {
        let reply = match registration.early_answer(&self.pools) {
            None if end_of_stream => Some(registration.answer(&self.pools, &[])),
            early => early,
        };
        match reply {
            Some(reply) => endpoints::reply(&reply),
            None => self.registration = Some(registration),
        }
        Action::Pause
    }

    /// Handles a piece of the body of a request to the registry.
    fn receive_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        let is_over = end_of_stream || RegistrationRequest::is_too_long(size);
        if let Some(registration) = self.registration.take_if(|_| is_over) {
            let body = host::buffer(Buffer::Request).unwrap_or_default();
            endpoints::reply(&registration.answer(&self.pools, &body));
        }
        Action::Pause
    }

    /// The stream, in one of its callbacks.
    fn stream(&self) -> Option<InStream> {
        self.stream.as_ref().map(InStream::of_callback)
    }

    fn settle(&mut self) {
        if let Some(stream) = self.stream.take() {
            ending::settle(&self.runtime, &stream);
            planning::call_waiting(&self.runtime);
        }
    }
}

impl Context for StreamContext {}

impl HttpContext for StreamContext {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        let Ok(received) = host::headers(Map::Request) else {
            return Action::Continue;
        };
        let received: Arc<[Header]> = received.into();
        let path = find(&received, ":path").unwrap_or_default();
        let head = Head {
            method: find(&received, ":method").unwrap_or_default(),
            path,
            encoding: find(&received, "content-encoding"),
        };
        self.pools.activate();
        self.pools.vm.request_came();
        if !received.iter().all(headers::is_sendable) {
            self.pools.vm.telemetry.refused(Refusal::Unsendable.code());
            endpoints::refuse(&Refusal::Unsendable);
            return Action::Pause;
        }
        #[cfg(feature = "trap")]
        crate::trap::step_on(&received);
        if let Some(registration) = RegistrationRequest::of(&self.pools, head, &received) {
            return self.receive(registration, end_of_stream);
        }
        let runtime = self.pools.of_route();
        if let Some(runtime) = runtime {
            runtime.request_came();
        }
        if endpoints::answer(&self.pools, runtime, head) {
            return Action::Pause;
        }
        let Some(runtime) = runtime else {
            self.pools.vm.telemetry.refused(Refusal::NoPool.code());
            endpoints::refuse(&Refusal::NoPool);
            return Action::Pause;
        };
        self.runtime = Rc::clone(runtime);
        let stream = match self.open(&received) {
            Ok(stream) => stream,
            Err(error) => {
                log::error!("a request's headers could not be changed: {error}");
                return Action::Continue;
            }
        };
        self.stream = Some(Rc::clone(&stream));
        self.begin(&InStream::of_callback(&stream), head, !end_of_stream)
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        let Some(stream) = self.stream() else {
            return self.receive_body(size, end_of_stream);
        };
        match stream.stage() {
            Stage::Reading(_) | Stage::ReadingEncoded => {}
            Stage::Forwarded => return Action::Continue,
            _ => {
                return Action::Pause;
            }
        }
        if self.is_too_long(&stream, size) {
            return Action::Pause;
        }
        let progress = match end_of_stream {
            true => UploadProgress::Complete,
            false => UploadProgress::Incomplete,
        };
        let receiving = &self.pools.vm.receiving;
        if !receiving.hold(&self.runtime, &stream, size, progress) {
            receiving.end(stream.id());
            stream.refuse(&self.runtime, &Refusal::Busy);
            return Action::Pause;
        }
        match end_of_stream {
            true => self.route(&stream),
            false => Action::Pause,
        }
    }

    /// A request with trailers ends here: its body callbacks never report the end of the stream.
    fn on_http_request_trailers(&mut self, _count: usize) -> Action {
        let Some(stream) = self.stream() else {
            return self.receive_body(0, true);
        };
        stream.session().has_trailers = true;
        match stream.stage() {
            Stage::Reading(_) | Stage::ReadingEncoded => self.route(&stream),
            Stage::Forwarded => Action::Continue,
            _ => Action::Pause,
        }
    }

    fn on_http_response_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        match self.stream() {
            Some(stream) => self.reading.headers(&self.runtime, &stream, end_of_stream),
            None => Action::Continue,
        }
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        match self.stream() {
            Some(stream) => self
                .reading
                .body(&self.runtime, &stream, size, end_of_stream),
            None => Action::Continue,
        }
    }

    /// A response with trailers ends here: its body callbacks never report the end of the stream.
    fn on_http_response_trailers(&mut self, _count: usize) -> Action {
        match self.stream() {
            Some(stream) => self.reading.trailers(&self.runtime, &stream),
            None => Action::Continue,
        }
    }

    fn on_log(&mut self) {
        self.settle();
    }
}

impl Drop for StreamContext {
    /// Runs on every way a stream can end, even where `on_log` did not.
    fn drop(&mut self) {
        self.settle();
    }
}

fn action(next: Next) -> Action {
    match next {
        Next::GoesOn => Action::Continue,
        Next::Stays => Action::Pause,
    }
}

/// The first value of a header.
fn find<'h>(headers: &'h [Header], name: &str) -> Option<&'h [u8]> {
    headers
        .iter()
        .find(|(known, _)| known.as_slice() == name.as_bytes())
        .map(|(_, value)| value.as_slice())
}
