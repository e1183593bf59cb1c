//! Owns the host's state of a VM between and during guest calls: its streams, their maps and buffers, and the effects that wait
//! until the guest has returned.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc::UnboundedSender;
use wasmtime::{Memory, StoreLimits, StoreLimitsBuilder, TypedFunc};

use super::clusters::Clusters;
use super::maps::Headers;
use super::metrics::Metrics;
use super::routes::{Route, Routes};
use super::shared::{QueueOwner, Shared};
use super::steps::Steps;
use super::upstream::OutgoingRequest;

/// The id of a root or stream context, unique within its thread.
pub type ContextId = u32;

/// The name and root id of the one plugin, as in the Envoy bootstrap.
pub const PLUGIN_NAME: &str = "pd";

/// Linear memory per VM, in bytes: Envoy's cap.
const MEMORY_LIMIT: usize = 1 << 30;

/// State shared by all threads of one host.
pub struct Process {
    /// Shared data and queues.
    pub shared: Shared,
    /// The plugin's metrics.
    pub metrics: Metrics,
    /// The proxy's clusters.
    pub clusters: Clusters,
    /// The proxy's routes.
    pub routes: Routes,
    /// The plugin's configuration document.
    pub plugin_config: Vec<u8>,
    /// Bytes of one body that may be buffered.
    pub buffer_limit: usize,
    /// Counter that numbers the client connections.
    pub connections: AtomicU64,
    /// The plugin's steps per event.
    pub steps: Steps,
}

/// A command to a stream from a host call. Applied after the guest has returned.
#[derive(Debug)]
pub enum Command {
    /// Resume the paused request.
    ContinueRequest,
    /// Resume the paused response.
    ContinueResponse,
    /// Answer with this.
    Reply(LocalReply),
    /// Reset the stream.
    Reset,
    /// The VM trapped while another stream or the root context was in it.
    VmDown,
}

/// A response made by the host or the plugin.
#[derive(Debug, Default)]
pub struct LocalReply {
    /// HTTP status.
    pub status: u16,
    /// Envoy's response code details.
    pub details: String,
    /// Envoy's response flags.
    pub flags: i64,
    /// Headers beside status, content-length and content-type.
    pub headers: Headers,
    /// The body.
    pub body: Bytes,
}

/// An effect of a guest call beyond its return value.
pub enum Effect {
    /// Send a command to a stream.
    Stream(ContextId, Command),
    /// Send a call that the root context owns.
    Call(Box<PreparedCall>),
    /// Tick with this period in milliseconds; zero stops.
    Tick(u32),
    /// A context whose `on_done` said "not yet" is done now.
    Done(ContextId),
}

/// A call that passed the checks and is sent once the guest has returned.
pub struct PreparedCall {
    /// The plugin's id of the call.
    pub token: u32,
    /// The request and its hosts.
    pub request: OutgoingRequest,
    /// The body.
    pub body: Bytes,
    /// Time limit of the complete call in milliseconds; zero: none.
    pub timeout_ms: u32,
}

/// The complete answer to a call. A reset after the headers has none.
#[derive(Default)]
pub struct CallReply {
    /// Headers, with `:status`; none if the call was reset.
    pub headers: Option<Headers>,
    /// The complete body.
    pub body: Bytes,
    /// Trailers, if any came.
    pub trailers: Headers,
}

/// The guest's memory and its allocator.
#[derive(Clone)]
pub struct Guest {
    /// The exported memory.
    pub memory: Memory,
    /// `malloc` or `proxy_on_memory_allocate`.
    pub allocate: TypedFunc<u32, u32>,
}

/// The data of one store.
pub struct HostState {
    /// State shared by all threads.
    pub process: Arc<Process>,
    /// Set once the module is instantiated.
    pub guest: Option<Guest>,
    /// The cap of linear memory.
    pub limits: StoreLimits,
    /// Receiver of the notices of queues registered here.
    pub queue_owner: QueueOwner,
    /// The root context.
    pub root: ContextId,
    /// The context for which the guest was called.
    pub current: ContextId,
    /// The context that the guest selected to act for.
    pub effective: Option<ContextId>,
    /// The streams in this VM.
    pub streams: HashMap<ContextId, StreamState>,
    /// The answer being delivered, during its callback only.
    pub call_reply: Option<CallReply>,
    /// The value of `get_status`: the last failed call's code and message. It stays, as in Envoy.
    pub status: (u32, &'static str),
    /// Effects that wait for the end of the guest call.
    pub effects: Vec<Effect>,
    /// Host calls of the guest so far.
    pub host_calls: u64,
    last_token: u32,
}

impl HostState {
    /// The state of a new VM.
    pub fn new(process: Arc<Process>, queue_owner: QueueOwner, root: ContextId) -> HostState {
        HostState {
            process,
            guest: None,
            limits: StoreLimitsBuilder::new().memory_size(MEMORY_LIMIT).build(),
            queue_owner,
            root,
            current: root,
            effective: None,
            streams: HashMap::new(),
            call_reply: None,
            status: (0, ""),
            effects: Vec::new(),
            host_calls: 0,
            last_token: 0,
        }
    }

    /// Enters a guest call for `context`.
    pub fn enter(&mut self, context: ContextId) {
        self.current = context;
        self.effective = None;
    }

    /// The context that host calls act on.
    pub fn target(&self) -> ContextId {
        self.effective.unwrap_or(self.current)
    }

    /// The stream that host calls act on, if it is one.
    pub fn target_stream(&mut self) -> Option<&mut StreamState> {
        let target = self.target();
        self.streams.get_mut(&target)
    }

    /// True if `context` exists.
    pub fn knows(&self, context: ContextId) -> bool {
        context == self.root || self.streams.contains_key(&context)
    }

    /// Sends a command to the target stream, applied after the guest call. A root context has no stream, so nothing happens, as
    /// in Envoy.
    pub fn command(&mut self, command: Command) {
        let target = self.target();
        if self.streams.contains_key(&target) {
            self.effects.push(Effect::Stream(target, command));
        }
    }

    /// A token for a new call.
    pub fn next_token(&mut self) -> u32 {
        self.last_token = self.last_token.checked_add(1).unwrap_or(1);
        self.last_token
    }
}

/// One header map of a stream, and its visibility to the plugin.
#[derive(Default)]
pub enum MapSlot {
    /// Not received yet.
    #[default]
    Absent,
    /// Readable and changeable.
    Open(Headers),
    /// Passed on without a pause: readable only when the stream is logged.
    Released(Headers),
}

impl MapSlot {
    /// The headers, visible to the plugin or not.
    pub fn headers(&self) -> Option<&Headers> {
        match self {
            MapSlot::Absent => None,
            MapSlot::Open(headers) | MapSlot::Released(headers) => Some(headers),
        }
    }

    /// The headers, if the plugin may change them.
    pub fn open(&mut self) -> Option<&mut Headers> {
        match self {
            MapSlot::Open(headers) => Some(headers),
            MapSlot::Absent | MapSlot::Released(_) => None,
        }
    }

    /// Ends the plugin's access, after Continue from the headers callback.
    pub fn release(&mut self) {
        if let MapSlot::Open(headers) = std::mem::take(self) {
            *self = MapSlot::Released(headers);
        }
    }
}

/// The part of a stream's body that is in the plugin's reach.
#[derive(Default)]
pub struct BodySlot {
    /// Buffered bytes, the chunk of the current callback included.
    pub bytes: BytesMut,
    /// True during the body callback and while the plugin buffers.
    pub open: bool,
}

impl BodySlot {
    /// Adds a chunk for the coming callback; returns the size reported to the plugin.
    pub fn append(&mut self, chunk: &[u8]) -> usize {
        self.open = true;
        self.bytes.extend_from_slice(chunk);
        self.bytes.len()
    }

    /// Takes all bytes out of the plugin's reach.
    pub fn take(&mut self) -> Bytes {
        self.open = false;
        self.bytes.split().freeze()
    }
}

/// Facts about a stream, readable as properties.
#[derive(Clone, Debug)]
pub struct StreamInfo {
    /// The client's address.
    pub source: SocketAddr,
    /// The number of the client's connection.
    pub connection: u64,
    /// The route of the request.
    pub route: Arc<Route>,
    /// The value of x-request-id.
    pub request_id: Vec<u8>,
    /// The last upstream host tried.
    pub upstream: Option<SocketAddr>,
    /// Number of hosts tried.
    pub attempts: u64,
    /// Envoy's response code details.
    pub code_details: String,
    /// Envoy's response flags.
    pub flags: i64,
    /// The status sent to the client.
    pub response_code: Option<u16>,
}

/// One stream in the VM.
pub struct StreamState {
    /// The command channel of the stream's task.
    pub mailbox: UnboundedSender<Command>,
    /// Request headers with pseudo-headers.
    pub request_headers: MapSlot,
    /// Request trailers.
    pub request_trailers: MapSlot,
    /// Response headers with `:status`.
    pub response_headers: MapSlot,
    /// Response trailers.
    pub response_trailers: MapSlot,
    /// The request body.
    pub request_body: BodySlot,
    /// The response body.
    pub response_body: BodySlot,
    /// True from `on_log` on: every map can be read.
    pub logging: bool,
    /// Values of the properties.
    pub info: StreamInfo,
    /// Values set by `set_property`.
    pub properties: HashMap<Vec<u8>, Vec<u8>>,
}

impl StreamState {
    /// A stream whose headers have come.
    pub fn new(
        mailbox: UnboundedSender<Command>,
        headers: Headers,
        info: StreamInfo,
    ) -> StreamState {
        StreamState {
            mailbox,
            request_headers: MapSlot::Open(headers),
            request_trailers: MapSlot::Absent,
            response_headers: MapSlot::Absent,
            response_trailers: MapSlot::Absent,
            request_body: BodySlot::default(),
            response_body: BodySlot::default(),
            logging: false,
            info,
            properties: HashMap::new(),
        }
    }

    /// A map, if the plugin may read it now.
    pub fn readable<'a>(&self, slot: &'a MapSlot) -> Option<&'a Headers> {
        match slot {
            MapSlot::Open(headers) => Some(headers),
            MapSlot::Released(headers) if self.logging => Some(headers),
            MapSlot::Absent | MapSlot::Released(_) => None,
        }
    }
}
