//! Owns the root context: configuration, the tick, and the answers to calls that belong to no stream.

use std::cell::Cell;
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;
use routing::config::{BootstrapSource, Config, Pool, Protocol};

use crate::bindings::Asker;
use crate::calls;
use crate::context::StreamContext;
use crate::discovery::{Poller, TICK};
use crate::gateway::Gateway;
use crate::host::{self, Buffer};
use crate::planning;
use crate::prefill_call;
use crate::recovery;
use crate::shared::Lease;

thread_local! {
    /// The root that was configured last in this VM. After an update the old one goes on ticking until its streams have
    /// drained; only the newest may poll.
    static NEWEST: Cell<u32> = const { Cell::new(0) };
}

/// A root context.
pub struct Root {
    id: u32,
    gateway: Option<Rc<Gateway>>,
    poller: Option<Poller>,
    asker: Option<Asker>,
    /// Decides who tells of changes where nobody polls.
    lease: Lease,
}

impl Root {
    /// A root that is yet to be configured.
    pub fn new(id: u32) -> Self {
        Self {
            id,
            gateway: None,
            poller: None,
            asker: None,
            lease: Lease::new(),
        }
    }

    fn configure(&mut self) -> Result<(), String> {
        let document = host::buffer(Buffer::Configuration).map_err(|error| error.to_string())?;
        let config = Config::parse(&document).map_err(|error| error.to_string())?;
        let Some(pool) = config.pools.first().cloned() else {
            return Err("pools: exactly one pool is required".to_owned());
        };
        self.poller = Poller::new(&pool);
        self.asker = must_ask(&pool).then(Asker::default);
        host::set_tick(TICK).map_err(|error| error.to_string())?;
        proxy_wasm::set_log_level(host::log_level());
        let seed = host::now_ns() ^ u64::from(self.id).rotate_left(32);
        self.gateway = Some(Rc::new(Gateway::new(self.id, config, pool, seed)));
        NEWEST.set(self.id);
        Ok(())
    }
}

/// Whether prefill workers must be asked where their KV is fetched.
fn must_ask(pool: &Pool) -> bool {
    match pool.protocol {
        Protocol::Mooncake => true,
        Protocol::Sglang => pool.bootstrap == BootstrapSource::Ask,
        _ => false,
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
        let Some(gateway) = &self.gateway else {
            return;
        };
        // Without headers the answer broke off. The gRPC status that then says so stays behind for later calls, so
        // only the count of headers is believed.
        let has_headers = headers > 0;
        let polled = self
            .poller
            .as_mut()
            .is_some_and(|poller| poller.answered(token, has_headers, gateway));
        let told = !polled
            && self
                .asker
                .as_mut()
                .is_some_and(|asker| asker.answered(token, has_headers, gateway));
        if !polled && !told && !calls::answered(gateway, token, has_headers) {
            log::error!("an answer came to call {token}, which nobody made");
        }
        planning::call_waiting(gateway);
    }
}

impl RootContext for Root {
    /// Reads the configuration. Leaves no trace outside this VM: it may only be on trial.
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
        if NEWEST.get() != self.id {
            return;
        }
        let Some(gateway) = &self.gateway else {
            return;
        };
        proxy_wasm::set_log_level(host::log_level());
        gateway.advance();
        planning::refuse_late(gateway);
        prefill_call::hedge_late(gateway);
        recovery::see_to_late(gateway);
        gateway.tell_of_health();
        if let Some(poller) = &mut self.poller {
            poller.tick(gateway);
        }
        if let Some(asker) = &mut self.asker {
            if self.poller.is_none() {
                gateway.set_leading(self.lease.tick(gateway.serves()));
            }
            asker.tick(gateway);
        }
        // The fleet may have changed.
        planning::call_waiting(gateway);
    }

    fn on_queue_ready(&mut self, queue: u32) {
        if let Some(gateway) = &self.gateway {
            calls::start_waiting(gateway, queue);
        }
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        let gateway = Rc::clone(self.gateway.as_ref()?);
        Some(Box::new(StreamContext::new(id, gateway)))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
