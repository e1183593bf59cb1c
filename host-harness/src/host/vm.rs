//! Owns one thread's VM: its life from instantiation to a trap and back, and every call into the guest.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;
use wasmtime::{Config, Engine, Instance, InstancePre, Linker, Module, Store, TypedFunc};

use super::abi;
use super::call;
use super::maps::Headers;
use super::shared::{QueueOwner, QueueReady};
use super::state::{CallReply, Command, ContextId, Effect, Guest, HostState, Process, StreamState};
use super::steps::Counting;
use super::ticker::Ticker;
use super::upstream::Upstreams;

/// Minimum time before a crashed VM is built again (FAIL_RELOAD).
const RELOAD_BACKOFF: Duration = Duration::from_millis(500);

/// Why a VM did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// This host cannot run the module.
    #[error("the plugin cannot be loaded: {0}")]
    Load(wasmtime::Error),
    /// The plugin trapped while starting.
    #[error("the plugin trapped while it started: {0}")]
    Trap(wasmtime::Error),
    /// `on_vm_start` or `on_configure` returned false.
    #[error("the plugin refused its configuration (its log says why)")]
    Refused,
}

/// The VM has trapped, in this call or before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmDown;

/// A stream callback's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Continue.
    Continue,
    /// Hold the stream.
    Pause,
}

/// The compiled module, shared by all threads.
pub struct CompiledPlugin {
    module: InstancePre<HostState>,
    process: Arc<Process>,
}

impl CompiledPlugin {
    /// Compiles the module and links the host calls. Takes seconds of CPU for a large module.
    pub fn compile(wasm: &[u8], process: Arc<Process>) -> Result<CompiledPlugin, StartError> {
        let module = compiled(wasm, process.steps.counting()).map_err(StartError::Load)?;
        let mut linker = Linker::new(module.engine());
        abi::link(&mut linker, &module).map_err(StartError::Load)?;
        let module = linker.instantiate_pre(&module).map_err(StartError::Load)?;
        Ok(CompiledPlugin { module, process })
    }
}

/// A module and the bytes it was compiled from.
struct Compiled {
    wasm: Box<[u8]>,
    counting: Counting,
    module: Module,
}

/// The compiled module; reused if a process starts one host after the other.
fn compiled(wasm: &[u8], counting: Counting) -> wasmtime::Result<Module> {
    static LAST: Mutex<Option<Compiled>> = Mutex::new(None);
    // Locked while compiling, so that hosts that start side by side wait for one compilation.
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = &*last
        && *known.wasm == *wasm
        && known.counting == counting
    {
        return Ok(known.module.clone());
    }
    let mut config = Config::new();
    config.wasm_backtrace_max_frames(None);
    config.consume_fuel(counting == Counting::On);
    let module = Module::new(&Engine::new(&config)?, wasm)?;
    *last = Some(Compiled {
        wasm: wasm.into(),
        counting,
        module: module.clone(),
    });
    Ok(module)
}

/// One thread's VM. It stays when the guest inside is replaced.
pub struct Vm {
    this: Weak<Vm>,
    compiled: Arc<CompiledPlugin>,
    state: RefCell<VmState>,
    last_context: Cell<ContextId>,
    generation: Cell<u64>,
    wake: UnboundedSender<QueueReady>,
    ticker: Rc<Ticker>,
    upstreams: Rc<Upstreams>,
}

enum VmState {
    Up(Box<Incarnation>),
    Down { since: Instant },
}

/// A running guest. Its calls end with it.
struct Incarnation {
    store: Store<HostState>,
    exports: Exports,
    calls: JoinSet<()>,
}

/// A callback; `None` if the module lacks it, which means Continue or true.
struct Callback<Params, Answer = ()> {
    name: &'static str,
    function: Option<TypedFunc<Params, Answer>>,
}

/// Declares the callbacks that the module may export, each with its parameters and its answer.
macro_rules! exports {
    ($($name:ident: $params:ty $(=> $answer:ty)?;)*) => {
        /// The callbacks that the module may export.
        struct Exports {
            $($name: Callback<$params $(, $answer)?>,)*
        }

        impl Exports {
            fn find(instance: &Instance, store: &mut Store<HostState>) -> Exports {
                Exports {
                    $($name: export(instance, store, concat!("proxy_on_", stringify!($name))),)*
                }
            }
        }
    };
}

exports! {
    context_create: (u32, u32);
    vm_start: (u32, u32) => u32;
    configure: (u32, u32) => u32;
    tick: u32;
    queue_ready: (u32, u32);
    request_headers: (u32, u32, u32) => u32;
    request_body: (u32, u32, u32) => u32;
    request_trailers: (u32, u32) => u32;
    response_headers: (u32, u32, u32) => u32;
    response_body: (u32, u32, u32) => u32;
    response_trailers: (u32, u32) => u32;
    http_call_response: (u32, u32, u32, u32, u32);
    log: u32;
    done: u32 => u32;
    delete: u32;
}

impl Vm {
    /// A thread's VM without a guest yet.
    pub fn new(compiled: Arc<CompiledPlugin>, wake: UnboundedSender<QueueReady>) -> Rc<Vm> {
        Rc::new_cyclic(|this| Vm {
            this: this.clone(),
            compiled,
            state: RefCell::new(VmState::Down {
                since: Instant::now(),
            }),
            last_context: Cell::new(0),
            generation: Cell::new(0),
            wake,
            ticker: Rc::new(Ticker::default()),
            upstreams: Rc::new(Upstreams::default()),
        })
    }

    /// The thread's timer.
    pub fn ticker(&self) -> &Rc<Ticker> {
        &self.ticker
    }

    /// The thread's connections.
    pub fn upstreams(&self) -> &Rc<Upstreams> {
        &self.upstreams
    }

    /// State shared by all threads.
    pub fn process(&self) -> &Arc<Process> {
        &self.compiled.process
    }

    /// Builds a new guest and configures it.
    pub fn start(&self) -> Result<(), StartError> {
        self.generation.set(self.generation.get() + 1);
        let root = self.next_context();
        let owner = QueueOwner {
            generation: self.generation.get(),
            wake: self.wake.clone(),
        };
        let process = Arc::clone(&self.compiled.process);
        let config_size = u32::try_from(process.plugin_config.len()).unwrap_or(u32::MAX);
        let state = HostState::new(process, owner, root);
        let mut incarnation = Incarnation::load(&self.compiled, state)?;
        let accepted = incarnation
            .configure(root, config_size)
            .map_err(StartError::Trap)?;
        if !accepted {
            return Err(StartError::Refused);
        }
        let effects = std::mem::take(&mut incarnation.store.data_mut().effects);
        *self.state.borrow_mut() = VmState::Up(Box::new(incarnation));
        self.perform(effects);
        Ok(())
    }

    /// Ensures that there is a guest; after a trap, builds a new one once the back-off is over.
    pub fn ensure_up(&self) -> Result<(), VmDown> {
        let since = match &*self.state.borrow() {
            VmState::Up(_) => return Ok(()),
            VmState::Down { since } => *since,
        };
        if since.elapsed() < RELOAD_BACKOFF {
            return Err(VmDown);
        }
        match self.start() {
            Ok(()) => {
                tracing::warn!("the plugin runs again in a fresh VM");
                Ok(())
            }
            Err(error) => {
                tracing::error!(%error, "the plugin could not be loaded again");
                *self.state.borrow_mut() = VmState::Down {
                    since: Instant::now(),
                };
                Err(VmDown)
            }
        }
    }

    /// Creates a stream context.
    pub fn open_stream(&self, stream: StreamState) -> Result<ContextId, VmDown> {
        let context = self.next_context();
        let root = match &mut *self.state.borrow_mut() {
            VmState::Up(up) => {
                let state = up.store.data_mut();
                state.streams.insert(context, stream);
                state.root
            }
            VmState::Down { .. } => return Err(VmDown),
        };
        self.call(context, |up| {
            up.run(|exports| &exports.context_create, (context, root))
        })?;
        Ok(context)
    }

    /// Ends a stream: log, done, delete, in this order. For a plugin that is not done yet, the delete comes later.
    pub fn close_stream(&self, context: ContextId) -> Result<(), VmDown> {
        let _ = self.stream(context, |stream| stream.logging = true);
        self.call(context, |up| up.run(|exports| &exports.log, context))?;
        let done = self.call(context, |up| up.ask(|exports| &exports.done, context))?;
        if done.unwrap_or(1) != 0 {
            self.delete(context)?;
        }
        Ok(())
    }

    /// Reads or changes the host's state of a stream. `None`: the stream has ended.
    pub fn stream<T>(
        &self,
        context: ContextId,
        act: impl FnOnce(&mut StreamState) -> T,
    ) -> Option<T> {
        match &mut *self.state.borrow_mut() {
            VmState::Up(up) => up.store.data_mut().streams.get_mut(&context).map(act),
            VmState::Down { .. } => None,
        }
    }

    /// `proxy_on_request_headers`.
    pub fn request_headers(&self, context: ContextId, end: bool) -> Result<Action, VmDown> {
        let count = self.count(context, |stream| stream.request_headers.headers());
        let call = (context, count, u32::from(end));
        self.decide(context, |exports| &exports.request_headers, call)
    }

    /// `proxy_on_request_body`.
    pub fn request_body(
        &self,
        context: ContextId,
        size: usize,
        end: bool,
    ) -> Result<Action, VmDown> {
        let call = (context, clamp(size), u32::from(end));
        self.decide(context, |exports| &exports.request_body, call)
    }

    /// `proxy_on_request_trailers`.
    pub fn request_trailers(&self, context: ContextId) -> Result<Action, VmDown> {
        let count = self.count(context, |stream| stream.request_trailers.headers());
        self.decide(
            context,
            |exports| &exports.request_trailers,
            (context, count),
        )
    }

    /// `proxy_on_response_headers`.
    pub fn response_headers(&self, context: ContextId, end: bool) -> Result<Action, VmDown> {
        let count = self.count(context, |stream| stream.response_headers.headers());
        let call = (context, count, u32::from(end));
        self.decide(context, |exports| &exports.response_headers, call)
    }

    /// `proxy_on_response_body`.
    pub fn response_body(
        &self,
        context: ContextId,
        size: usize,
        end: bool,
    ) -> Result<Action, VmDown> {
        let call = (context, clamp(size), u32::from(end));
        self.decide(context, |exports| &exports.response_body, call)
    }

    /// `proxy_on_response_trailers`.
    pub fn response_trailers(&self, context: ContextId) -> Result<Action, VmDown> {
        let count = self.count(context, |stream| stream.response_trailers.headers());
        self.decide(
            context,
            |exports| &exports.response_trailers,
            (context, count),
        )
    }

    /// `proxy_on_tick` on the root context.
    pub fn tick(&self) -> Result<(), VmDown> {
        let root = self.root()?;
        self.call(root, |up| up.run(|exports| &exports.tick, root))
    }

    /// `proxy_on_queue_ready` on the root context, unless the VM that registered the queue is gone.
    pub fn queue_ready(&self, ready: QueueReady) -> Result<(), VmDown> {
        if ready.generation != self.generation.get() {
            return Ok(());
        }
        let root = self.root()?;
        self.call(root, |up| {
            up.run(|exports| &exports.queue_ready, (root, ready.queue))
        })
    }

    /// `proxy_on_http_call_response` on the root context.
    pub fn call_answered(&self, token: u32, reply: CallReply) -> Result<(), VmDown> {
        let root = self.root()?;
        self.call(root, |up| {
            let headers = reply.headers.as_ref().map_or(0, Headers::len);
            let (body, trailers) = (clamp(reply.body.len()), clamp(reply.trailers.len()));
            let state = up.store.data_mut();
            if reply.headers.is_none() {
                state.status = (11, "reset");
            }
            state.call_reply = Some(reply);
            let call = (root, token, clamp(headers), body, trailers);
            let outcome = up.run(|exports| &exports.http_call_response, call);
            up.store.data_mut().call_reply = None;
            outcome
        })
    }

    fn delete(&self, context: ContextId) -> Result<(), VmDown> {
        self.call(context, |up| up.run(|exports| &exports.delete, context))?;
        if let VmState::Up(up) = &mut *self.state.borrow_mut() {
            up.store.data_mut().streams.remove(&context);
        }
        Ok(())
    }

    fn decide<P: wasmtime::WasmParams>(
        &self,
        context: ContextId,
        callback: impl FnOnce(&Exports) -> &Callback<P, u32>,
        params: P,
    ) -> Result<Action, VmDown> {
        match self.call(context, |up| up.ask(callback, params))? {
            None | Some(0) => Ok(Action::Continue),
            Some(_) => Ok(Action::Pause),
        }
    }

    /// One call into the guest; its effects are applied after it has returned.
    fn call<T>(
        &self,
        context: ContextId,
        run: impl FnOnce(&mut Incarnation) -> wasmtime::Result<T>,
    ) -> Result<T, VmDown> {
        let (outcome, effects) = {
            let mut state = self.state.borrow_mut();
            let VmState::Up(up) = &mut *state else {
                return Err(VmDown);
            };
            if !up.store.data().knows(context) {
                return Err(VmDown);
            }
            up.store.data_mut().enter(context);
            let outcome = run(up);
            (outcome, std::mem::take(&mut up.store.data_mut().effects))
        };
        match outcome {
            Ok(answer) => {
                self.perform(effects);
                Ok(answer)
            }
            Err(error) => {
                self.fall(context, &error);
                Err(VmDown)
            }
        }
    }

    /// Handles a trap: notifies the guest's streams, ends its calls and ticks.
    fn fall(&self, context: ContextId, error: &wasmtime::Error) {
        tracing::error!(context, "the plugin trapped: {error:#}");
        let down = VmState::Down {
            since: Instant::now(),
        };
        let VmState::Up(mut up) = self.state.replace(down) else {
            return;
        };
        self.ticker.set(0);
        for (_, stream) in up.store.data_mut().streams.drain() {
            let _ = stream.mailbox.send(Command::VmDown);
        }
    }

    fn perform(&self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Stream(context, command) => {
                    // A stream whose task has ended gets no more commands, as in Envoy.
                    let _ = self.stream(context, |stream| stream.mailbox.send(command));
                }
                Effect::Call(prepared) => {
                    let calling = call::run(self.this.clone(), prepared);
                    if let VmState::Up(up) = &mut *self.state.borrow_mut() {
                        while up.calls.try_join_next().is_some() {}
                        up.calls.spawn_local(calling);
                    }
                }
                Effect::Tick(period) => self.ticker.set(period),
                Effect::Done(context) => {
                    let logged = self.stream(context, |stream| stream.logging);
                    if logged == Some(true) {
                        let _ = self.delete(context);
                    }
                }
            }
        }
    }

    fn count(
        &self,
        context: ContextId,
        headers: impl FnOnce(&StreamState) -> Option<&Headers>,
    ) -> u32 {
        let count = self.stream(context, |stream| headers(stream).map_or(0, Headers::len));
        clamp(count.unwrap_or(0))
    }

    fn root(&self) -> Result<ContextId, VmDown> {
        match &*self.state.borrow() {
            VmState::Up(up) => Ok(up.store.data().root),
            VmState::Down { .. } => Err(VmDown),
        }
    }

    fn next_context(&self) -> ContextId {
        self.last_context.set(self.last_context.get() + 1);
        self.last_context.get()
    }
}

/// Limits a size to the guest's 32 bits.
fn clamp(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

impl Incarnation {
    fn load(compiled: &CompiledPlugin, state: HostState) -> Result<Incarnation, StartError> {
        let mut store = Store::new(compiled.module.module().engine(), state);
        store.limiter(|state| &mut state.limits);
        let steps = &compiled.process.steps;
        let instance = steps
            .count("instantiate", &mut store, |store| {
                compiled.module.instantiate(store)
            })
            .map_err(StartError::Load)?;
        let memory = instance.get_memory(&mut store, "memory");
        let allocate = instance
            .get_typed_func(&mut store, "malloc")
            .or_else(|_| instance.get_typed_func(&mut store, "proxy_on_memory_allocate"));
        store.data_mut().guest = memory
            .zip(allocate.ok())
            .map(|(memory, allocate)| Guest { memory, allocate });
        let exports = Exports::find(&instance, &mut store);
        for entry in ["_initialize", "_start"] {
            if let Ok(entry) = instance.get_typed_func::<(), ()>(&mut store, entry) {
                steps
                    .count("initialize", &mut store, |store| entry.call(store, ()))
                    .map_err(StartError::Trap)?;
                break;
            }
        }
        Ok(Incarnation {
            store,
            exports,
            calls: JoinSet::new(),
        })
    }

    fn configure(&mut self, root: ContextId, size: u32) -> wasmtime::Result<bool> {
        self.run(|exports| &exports.context_create, (root, 0))?;
        let started = self.ask(|exports| &exports.vm_start, (root, 0))?;
        if started == Some(0) {
            return Ok(false);
        }
        self.store.data_mut().enter(root);
        let accepted = self.ask(|exports| &exports.configure, (root, size))?;
        Ok(accepted != Some(0))
    }

    fn run<P: wasmtime::WasmParams>(
        &mut self,
        callback: impl FnOnce(&Exports) -> &Callback<P>,
        params: P,
    ) -> wasmtime::Result<()> {
        self.ask(callback, params).map(Option::unwrap_or_default)
    }

    fn ask<P: wasmtime::WasmParams, R: wasmtime::WasmResults>(
        &mut self,
        callback: impl FnOnce(&Exports) -> &Callback<P, R>,
        params: P,
    ) -> wasmtime::Result<Option<R>> {
        let Callback { name, function } = callback(&self.exports);
        let Some(function) = function else {
            return Ok(None);
        };
        let process = Arc::clone(&self.store.data().process);
        let call = |store: &mut Store<HostState>| function.call(store, params);
        process.steps.count(name, &mut self.store, call).map(Some)
    }
}

fn export<P: wasmtime::WasmParams, R: wasmtime::WasmResults>(
    instance: &Instance,
    store: &mut Store<HostState>,
    name: &'static str,
) -> Callback<P, R> {
    let function = instance.get_typed_func(store, name).ok();
    Callback { name, function }
}
