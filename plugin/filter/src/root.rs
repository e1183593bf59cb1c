//! Owns the root context: configuration, the tick, and the answers to calls that belong to no stream.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;
use routing::config::Config;
use routing::route::queries_workers;

use crate::bindings::Asker;
use crate::context::StreamContext;
use crate::discovery::Poller;
use crate::host::{self, Buffer};
use crate::journal;
use crate::legs::calls;
use crate::legs::prefill;
use crate::legs::recovery;
use crate::planning;
use crate::registration::Registrar;
use crate::scrape::Scraper;
use crate::vm::PoolRuntime;
use crate::vm::Pools;
use crate::vm::TickKind;

/// Interval of a round, the slow tick: deadlines, fleet version, polls. Rounded up to whole ticks.
const ROUND: Duration = Duration::from_millis(100);

/// A root context.
pub struct Root {
    id: u32,
    configured: Option<ConfiguredRoot>,
    /// Ticks until the next round.
    until_round: Cell<u32>,
}

/// State of a configured root.
struct ConfiguredRoot {
    pools: Rc<Pools>,
    tasks: Vec<BackgroundTasks>,
    /// Ticks in one round.
    ticks_per_round: u32,
    /// Length of a round.
    round: Duration,
}

/// Periodic work of the root for one pool: discovery, registration, metrics of engines, questions to workers.
struct BackgroundTasks {
    runtime: Rc<PoolRuntime>,
    poller: Poller,
    registrar: Option<Registrar>,
    scraper: Option<Scraper>,
    asker: Option<Asker>,
}

impl BackgroundTasks {
    fn of(runtime: &Rc<PoolRuntime>) -> Self {
        let pool = &runtime.pool;
        Self {
            runtime: Rc::clone(runtime),
            poller: Poller::default(),
            registrar: Registrar::new(runtime),
            scraper: Scraper::new(pool),
            asker: queries_workers(pool).then(Asker::default),
        }
    }

    /// Handles the answer to a call; false if the token is another call's.
    fn answered(&mut self, token: u32, has_headers: bool) -> bool {
        let runtime = &self.runtime;
        let is_taken = self.poller.answered(token, has_headers, runtime)
            || self
                .scraper
                .as_mut()
                .is_some_and(|scraper| scraper.answered(token, has_headers, runtime))
            || self
                .asker
                .as_mut()
                .is_some_and(|asker| asker.answered(token, has_headers, runtime))
            || calls::answered(runtime, token, has_headers);
        if is_taken {
            planning::call_waiting(runtime);
        }
        is_taken
    }

    /// Does what is due in each round for the pool, if this pool runtime acts for it.
    fn run_periodic(&mut self, round: Duration) {
        let runtime = &self.runtime;
        if !runtime.acts() {
            self.poller.rest();
            return;
        }
        // An earlier caller may have left a stream's context in effect, and a call made there would end with that stream.
        if host::enter_context(runtime.root_id).is_err() {
            return;
        }
        runtime.adopt_published();
        self.poller.tick(runtime);
        if let Some(registrar) = &mut self.registrar {
            registrar.tick(runtime, round);
        }
        if let Some(scraper) = &mut self.scraper {
            scraper.tick(runtime);
            runtime.apply_reports();
        }
        if let Some(asker) = &mut self.asker {
            asker.tick(runtime);
        }
        runtime.tell_of_changes();
        runtime.tell_of_health();
        runtime.tell_of_handoffs();
        planning::refuse_late(runtime);
        // The fleet may have changed.
        planning::call_waiting(runtime);
    }
}

impl Root {
    /// A root that is not configured yet.
    pub fn new(id: u32) -> Self {
        Self {
            id,
            configured: None,
            until_round: Cell::new(0),
        }
    }

    fn configure(&mut self) -> Result<(), String> {
        let document = host::buffer(Buffer::Configuration).map_err(|error| error.to_string())?;
        let config = Config::parse(&document).map_err(|error| error.to_string())?;
        let tick = Duration::from_millis(config.sharing.interval_ms);
        host::set_tick(tick).map_err(|error| error.to_string())?;
        journal::follow_host();
        let ticks_per_round = ROUND.as_millis().div_ceil(tick.as_millis().max(1));
        let ticks_per_round = u32::try_from(ticks_per_round).unwrap_or(1);
        let pools = Rc::new(Pools::new(self.id, config));
        self.configured = Some(ConfiguredRoot {
            tasks: pools.all().iter().map(BackgroundTasks::of).collect(),
            ticks_per_round,
            round: tick.saturating_mul(ticks_per_round),
            pools,
        });
        Ok(())
    }
}

impl ConfiguredRoot {
    fn tick(&mut self, root: u32, tick_kind: TickKind) {
        self.pools.activate();
        if tick_kind == TickKind::Begins {
            self.run_periodic(root);
        }
        let vm = &self.pools.vm;
        if vm.is_driven_by(root) {
            vm.sync_threads(&self.pools.config.sharing, tick_kind);
        }
    }

    fn run_periodic(&mut self, root: u32) {
        journal::follow_host();
        for runtime in self.pools.all() {
            runtime.advance();
        }
        let vm = Rc::clone(&self.pools.vm);
        if vm.is_driven_by(root) {
            vm.run_for_lead();
            #[cfg(feature = "trap")]
            crate::trap::spring(&vm);
        }
        for runtime in self.pools.all() {
            vm.receiving.refuse_late(runtime);
        }
        for tasks in &mut self.tasks {
            tasks.run_periodic(self.round);
        }
        // A root of an older configuration goes on serving its own streams.
        for runtime in self.pools.all() {
            prefill::hedge_late(runtime);
            recovery::see_to_due(runtime);
            recovery::see_to_left(runtime);
        }
        if vm.is_driven_by(root) {
            vm.tell_of_fleets();
        }
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if let Some(configured) = &self.configured {
            configured
                .pools
                .vm
                .deregister(self.id, configured.pools.all());
        }
    }
}

impl Context for Root {
    fn on_http_call_response(
        &mut self,
        token: u32,
        headers: usize,
        _body: usize,
        _trailers: usize,
    ) {
        let Some(configured) = &mut self.configured else {
            return;
        };
        // Without headers the answer broke off. The gRPC status that then says so stays behind for later calls, so only the count
        // of headers is trusted.
        let has_headers = headers > 0;
        let mut tasks = configured.tasks.iter_mut();
        if !tasks.any(|tasks| tasks.answered(token, has_headers)) {
            log::error!("an answer came to call {token}, which nobody made");
        }
    }
}

impl RootContext for Root {
    /// Reads the configuration. Leaves no trace outside this VM: the configuration may only be on trial.
    fn on_configure(&mut self, _size: usize) -> bool {
        match self.configure() {
            Ok(()) => true,
            Err(problem) => {
                log::error!("configuration refused: {problem}");
                false
            }
        }
    }

    fn on_tick(&mut self) {
        let Some(configured) = &mut self.configured else {
            return;
        };
        let left = self.until_round.get();
        self.until_round.set(match left {
            0 => configured.ticks_per_round.saturating_sub(1),
            more => more.saturating_sub(1),
        });
        let tick_kind = match left {
            0 => TickKind::Begins,
            _ => TickKind::GoesOn,
        };
        configured.tick(self.id, tick_kind);
    }

    fn on_queue_ready(&mut self, queue: u32) {
        if let Some(configured) = &self.configured {
            for runtime in configured.pools.all() {
                calls::start_waiting(runtime, queue);
            }
        }
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        let pools = Rc::clone(&self.configured.as_ref()?.pools);
        let first = Rc::clone(pools.all().first()?);
        Some(Box::new(StreamContext::new(id, pools, first)))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
