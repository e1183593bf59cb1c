//! What the host keeps for a VM between and during guest calls: its streams, their maps and buffers, and the effects
//! that wait until the guest has returned.

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

/// What all threads of one host share.
pub struct Process {
    /// Shared data and queues.
    pub shared: Shared,
    /// The plugin's metrics.
    pub metrics: Metrics,
    /// Where requests and calls may go.
    pub clusters: Clusters,
    /// Which way requests take.
    pub routes: Routes,
    /// The plugin's configuration document.
    pub plugin_config: Vec<u8>,
    /// Bytes of one body that may be buffered.
    pub buffer_limit: usize,
    /// Numbers the client connections.
    pub connections: AtomicU64,
    /// What events cost the plugin.
    pub steps: Steps,
}

/// What a stream is told by the host calls made for it. It acts after the guest has returned.
#[derive(Debug)]
pub enum Command {
    /// Let the paused request go on.
    ContinueRequest,
    /// Let the paused response go on.
    ContinueResponse,
    /// Answer with this.
    Reply(LocalReply),
    /// Reset the stream.
    Reset,
    /// The VM trapped while another stream or the root context was in it.
    VmDown,
}

/// A response that the host or the plugin makes up.
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

/// What a guest call asked for beyond its own stream's answer.
pub enum Effect {
    /// Tell a stream.
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
    /// What the plugin knows the call by.
    pub token: u32,
    /// What is sent, and to whom.
    pub request: OutgoingRequest,
    /// The body.
    pub body: Bytes,
    /// The time that the whole call may take, in milliseconds; zero is no limit.
    pub timeout_ms: u32,
}

/// The answer to a call, whole. A reset after the headers has none.
#[derive(Default)]
pub struct CallReply {
    /// Headers, with `:status`; none if the call was reset.
    pub headers: Option<Headers>,
    /// The whole body.
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
    /// What all threads share.
    pub process: Arc<Process>,
    /// Known once the module is instantiated.
    pub guest: Option<Guest>,
    /// The cap of linear memory.
    pub limits: StoreLimits,
    /// Whom a queue registered here wakes.
    pub queue_owner: QueueOwner,
    /// The root context.
    pub root: ContextId,
    /// The context that the guest was called for.
    pub current: ContextId,
    /// The context that the guest chose to act for.
    pub effective: Option<ContextId>,
    /// The streams in this VM.
    pub streams: HashMap<ContextId, StreamState>,
    /// The answer being delivered, during its callback only.
    pub call_reply: Option<CallReply>,
    /// What `get_status` says: the last failed call's code and message. It stays, as in Envoy.
    pub status: (u32, &'static str),
    /// What waits for the end of the guest call.
    pub effects: Vec<Effect>,
    last_token: u32,
}

impl HostState {
    /// The state of a fresh VM.
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
            last_token: 0,
        }
    }

    /// The guest is about to be called for `context`.
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

    /// Tells the target stream something after the guest call. Nothing happens for a root context, as in Envoy.
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

/// One header map of a stream and whether the plugin can see it.
#[derive(Default)]
pub enum MapSlot {
    /// It has not come yet.
    #[default]
    Absent,
    /// It can be read and changed.
    Open(Headers),
    /// It went on without a pause: readable only when the stream is logged.
    Released(Headers),
}

impl MapSlot {
    /// The headers, whether the plugin sees them or not.
    pub fn headers(&self) -> Option<&Headers> {
        match self {
            MapSlot::Absent => None,
            MapSlot::Open(headers) | MapSlot::Released(headers) => Some(headers),
        }
    }

    /// The headers if the plugin may change them.
    pub fn open(&mut self) -> Option<&mut Headers> {
        match self {
            MapSlot::Open(headers) => Some(headers),
            MapSlot::Absent | MapSlot::Released(_) => None,
        }
    }

    /// The plugin said Continue from the headers callback: the map is out of its reach.
    pub fn release(&mut self) {
        if let MapSlot::Open(headers) = std::mem::take(self) {
            *self = MapSlot::Released(headers);
        }
    }
}

/// One body of a stream as far as it is in the plugin's reach.
#[derive(Default)]
pub struct BodySlot {
    /// What is buffered, the chunk of the current callback included.
    pub bytes: BytesMut,
    /// True during the body callback and while the plugin buffers.
    pub open: bool,
}

impl BodySlot {
    /// Adds a chunk for the coming callback; gives the size that the plugin will be told.
    pub fn append(&mut self, chunk: &[u8]) -> usize {
        self.open = true;
        self.bytes.extend_from_slice(chunk);
        self.bytes.len()
    }

    /// Takes everything; the plugin no longer sees it.
    pub fn take(&mut self) -> Bytes {
        self.open = false;
        self.bytes.split().freeze()
    }
}

/// Facts about a stream that properties tell.
#[derive(Clone, Debug)]
pub struct StreamInfo {
    /// The client's address.
    pub source: SocketAddr,
    /// The number of the client's connection.
    pub connection: u64,
    /// The route that the request takes.
    pub route: Arc<Route>,
    /// The value of x-request-id.
    pub request_id: Vec<u8>,
    /// The last upstream host tried.
    pub upstream: Option<SocketAddr>,
    /// How many hosts were tried.
    pub attempts: u64,
    /// Envoy's response code details.
    pub code_details: String,
    /// Envoy's response flags.
    pub flags: i64,
    /// The status that the client got.
    pub response_code: Option<u16>,
}

/// One request in the VM.
pub struct StreamState {
    /// Where the stream's task listens.
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
    /// What properties tell.
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

    /// A map as the plugin may read it now.
    pub fn readable<'a>(&self, slot: &'a MapSlot) -> Option<&'a Headers> {
        match slot {
            MapSlot::Open(headers) => Some(headers),
            MapSlot::Released(headers) if self.logging => Some(headers),
            MapSlot::Absent | MapSlot::Released(_) => None,
        }
    }
}
