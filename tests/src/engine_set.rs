//! Owns engines at fixed addresses behind a document of workers: each can be killed, and restarted under a new identity.

use std::net::SocketAddr;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::Proxy;
use crate::engines::{Engine, Role, State, with};
use crate::gateway::{Gateway, GatewayParts};
use crate::wait::{GENEROUS, eventually};
use crate::worker_document::{WorkerDocument, own_loopback};

/// A slot for an engine. Each engine in the slot has a new id and a new name.
pub struct EngineSlot {
    /// Role of the slot's engines.
    pub role: Role,
    /// Address of the slot's engines.
    pub address: SocketAddr,
    /// Bootstrap address of the slot's first engine, if it had one.
    pub bootstrap: Option<SocketAddr>,
    /// An id that none of the slot's engines has; theirs follow it.
    pub first_id: u64,
    listed_as: Role,
    listed: bool,
    options: Vec<String>,
    engine: Option<Engine>,
    number: u64,
    starts: u64,
    past: State,
    more: Value,
}

impl EngineSlot {
    /// Name of the current or last engine.
    pub fn name(&self) -> String {
        format!(
            "{}-{}-{}",
            self.listed_as.as_str(),
            self.number,
            self.starts
        )
    }

    /// Id of the current or last engine.
    pub fn id(&self) -> u64 {
        self.first_id + 2 * self.starts
    }

    /// The current engine; fails if there is none.
    pub fn engine(&self) -> &Engine {
        let engine = self.engine.as_ref();
        engine.unwrap_or_else(|| panic!("no engine runs at {}", self.name()))
    }

    /// Whether the slot has an engine.
    pub fn is_running(&self) -> bool {
        self.engine.is_some()
    }

    /// Counters of all engines that the slot has had, dead ones as last read.
    pub async fn state(&self) -> State {
        match &self.engine {
            Some(engine) => self.past.plus(&engine.state().await),
            None => self.past.clone(),
        }
    }

    /// Ends the engine as `kill -9` does, whatever its state.
    pub async fn kill(&mut self) {
        let Some(mut engine) = self.engine.take() else {
            return;
        };
        let mut last = engine.state().await;
        engine.kill();
        // A dead engine runs nothing.
        last.running = 0;
        self.past = self.past.plus(&last);
    }

    /// Prepares the empty slot for other engines: of this role, listed under that one, with these options and further fields.
    /// The counters of its past engines are gone.
    pub fn refit(&mut self, (role, listed_as): (Role, Role), options: &[&str], more: Value) {
        self.role = role;
        self.listed_as = listed_as;
        self.options = options.iter().map(|&option| option.to_owned()).collect();
        self.past = State::default();
        self.more = more;
    }

    /// Starts another engine in the slot of a killed one.
    pub async fn start(&mut self) {
        let options: Vec<&str> = self.options.iter().map(String::as_str).collect();
        self.starts += 1;
        self.engine = Some(Engine::start_at(self.address, self.role, &options).await);
    }

    fn line(&self) -> Value {
        let line = json!({
            "address": self.address.to_string(),
            "role": self.listed_as.as_str(),
            "model": crate::engines::MODEL,
            "name": self.name(),
            "id": self.id(),
        });
        with(line, self.more.clone())
    }
}

/// Slots for engines of both roles, and the document that lists the taken ones.
pub struct EngineSet {
    /// The document that a gateway polls.
    pub document: WorkerDocument,
    /// Prefill slots.
    pub prefill: Vec<EngineSlot>,
    /// Decode slots.
    pub decode: Vec<EngineSlot>,
    /// Entries of workers without a slot here.
    pub others: Vec<Value>,
    /// Further members of the proxy's clusters, as `pd-harness run --member` takes them.
    pub further_members: Vec<String>,
}

impl EngineSet {
    /// This many empty slots of each role, for engines with these options.
    pub async fn with_slots(prefill: usize, decode: usize, options: &[&str]) -> EngineSet {
        let roles = (Role::Prefill, Role::Decode);
        EngineSet::with_roles(roles, (prefill, decode), options).await
    }

    /// The same, with another role for the engines listed as decode.
    pub async fn with_roles(
        (prefill, decode): (Role, Role),
        counts: (usize, usize),
        options: &[&str],
    ) -> EngineSet {
        let slot = |role, listed_as, number: usize| async move {
            let anywhere = SocketAddr::from((own_loopback(), 0));
            // The first engine finds a free port.
            let first = Engine::start_at(anywhere, role, options).await;
            EngineSlot {
                role,
                address: first.address,
                bootstrap: first.bootstrap,
                // Above 2^63: neither a signed number nor a float holds this value.
                first_id: u64::MAX - (number as u64 + 1) * 1_000_000,
                listed_as,
                listed: false,
                options: options.iter().map(|&option| option.to_owned()).collect(),
                engine: None,
                number: number as u64,
                starts: 0,
                past: State::default(),
                more: json!({}),
            }
        };
        let slots = |role, listed_as, first: usize, count: usize| {
            join_all((first..first + count).map(move |number| slot(role, listed_as, number)))
        };
        EngineSet {
            document: WorkerDocument::start().await,
            prefill: slots(prefill, Role::Prefill, 0, counts.0).await,
            decode: slots(decode, Role::Decode, counts.0, counts.1).await,
            others: Vec::new(),
            further_members: Vec::new(),
        }
    }

    /// Keeps each slot's first bootstrap port for its later engines, and lists it.
    pub fn keep_bootstrap_ports(&mut self) {
        for slot in &mut self.prefill {
            let Some(bootstrap) = slot.bootstrap else {
                continue;
            };
            let port = bootstrap.port();
            slot.options
                .extend(["--bootstrap-port".to_owned(), port.to_string()]);
            let more = std::mem::take(&mut slot.more);
            slot.more = with(more, json!({"bootstrap_port": port}));
        }
    }

    /// A gateway that discovers its workers through the document, with these further fields of the pool.
    pub async fn gateway(&self, proxy: Proxy, pool: Value) -> Gateway {
        let members = self.members();
        Gateway::start(proxy, &self.document.config(pool), &arguments(&members)).await
    }

    /// The same with one worker thread.
    pub async fn gateway_on_one_thread(&self, proxy: Proxy, pool: Value) -> Gateway {
        self.gateway_of(proxy, &GatewayParts::on_threads(1), pool)
            .await
    }

    /// The same with other parts.
    pub async fn gateway_of(&self, proxy: Proxy, build: &GatewayParts, pool: Value) -> Gateway {
        let members = self.members();
        let config = self.document.config(pool);
        Gateway::build(proxy, build, &config, &arguments(&members)).await
    }

    /// All slots as members of the proxy's clusters.
    pub fn members(&self) -> Vec<String> {
        [("prefill", &self.prefill), ("decode", &self.decode)]
            .into_iter()
            .flat_map(|(cluster, slots)| {
                slots
                    .iter()
                    .map(move |slot| format!("{cluster}={}", slot.address))
            })
            .chain(self.further_members.iter().cloned())
            .collect()
    }

    /// The slots of this role.
    pub fn slots(&self, role: Role) -> &[EngineSlot] {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode | Role::Aggregated => &self.decode,
        }
    }

    /// The slots of this role.
    pub fn slots_mut(&mut self, role: Role) -> &mut [EngineSlot] {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode | Role::Aggregated => &mut self.decode,
        }
    }

    /// The names of this role's engines.
    pub fn names(&self, role: Role) -> Vec<String> {
        self.slots(role).iter().map(EngineSlot::name).collect()
    }

    /// Lists this role's engines with further fields from now on.
    pub fn describe(&mut self, role: Role, fields: impl Fn(usize) -> Value) {
        for (at, slot) in self.slots_mut(role).iter_mut().enumerate() {
            slot.more = fields(at);
        }
    }

    /// Kills all engines of this role.
    pub async fn kill(&mut self, role: Role) {
        join_all(self.slots_mut(role).iter_mut().map(EngineSlot::kill)).await;
    }

    /// Starts an engine in every slot of this role.
    pub async fn start(&mut self, role: Role) {
        join_all(self.slots_mut(role).iter_mut().map(EngineSlot::start)).await;
    }

    /// Starts an engine in this role's first slots.
    pub async fn start_first(&mut self, role: Role, count: usize) {
        let slots = self.slots_mut(role).iter_mut().take(count);
        join_all(slots.map(EngineSlot::start)).await;
    }

    /// Lists the running engines with their current identities, and no others; returns their names.
    pub fn list_running(&mut self) -> Vec<String> {
        let mut names = Vec::new();
        for slot in self.prefill.iter_mut().chain(&mut self.decode) {
            slot.listed = slot.is_running();
            if slot.listed {
                names.push(slot.name());
            }
        }
        self.publish();
        names
    }

    /// Lists all engines of this role with their current identities.
    pub fn list(&mut self, role: Role) {
        self.set_listed(role, |_| true);
    }

    /// Removes all engines of this role from the document.
    pub fn unlist(&mut self, role: Role) {
        self.set_listed(role, |_| false);
    }

    /// Lists one engine of this role as draining, or as no longer draining.
    pub fn set_draining(&mut self, role: Role, at: usize, draining: bool) {
        let slot = &mut self.slots_mut(role)[at];
        let more = std::mem::take(&mut slot.more);
        slot.more = with(more, json!({"draining": draining}));
        self.publish();
    }

    /// Lists the engine of this slot under another id and name, without a restart.
    pub fn rename(&mut self, role: Role, at: usize, id: u64, name: &str) {
        let slot = &mut self.slots_mut(role)[at];
        let more = std::mem::take(&mut slot.more);
        slot.more = with(more, json!({"id": id, "name": name}));
        self.publish();
    }

    /// Lists one engine of this role with its current identity.
    pub fn list_one(&mut self, role: Role, at: usize) {
        self.slots_mut(role)[at].listed = true;
        self.publish();
    }

    /// Removes one engine of this role from the document.
    pub fn unlist_one(&mut self, role: Role, at: usize) {
        self.slots_mut(role)[at].listed = false;
        self.publish();
    }

    /// Starts all engines of this role and lists them.
    pub async fn start_and_list(&mut self, role: Role) {
        self.start(role).await;
        self.list(role);
    }

    /// Removes all engines of this role from the document and kills them.
    pub async fn remove(&mut self, role: Role) {
        self.unlist(role);
        self.kill(role).await;
    }

    /// Counters of all engines of this role, dead ones included.
    pub async fn total(&self, role: Role) -> State {
        let states = join_all(self.slots(role).iter().map(EngineSlot::state)).await;
        states
            .iter()
            .fold(State::default(), |sum, one| sum.plus(one))
    }

    /// Waits until no engine of this role runs a request.
    pub async fn is_idle(&self, role: Role) {
        eventually("they are idle", GENEROUS, || async {
            let state = self.total(role).await;
            if state.running == 0 {
                return Ok(());
            }
            Err(format!("{state:?}"))
        })
        .await;
    }

    fn set_listed(&mut self, role: Role, listed: impl Fn(&EngineSlot) -> bool) {
        for slot in self.slots_mut(role) {
            slot.listed = listed(slot);
        }
        self.publish();
    }

    fn publish(&self) {
        let slots = self.prefill.iter().chain(&self.decode);
        let lines = slots.filter(|slot| slot.listed).map(EngineSlot::line);
        let lines: Vec<Value> = lines.chain(self.others.iter().cloned()).collect();
        self.document.publish(&lines);
    }
}

/// The members as arguments of a gateway's command line.
fn arguments(members: &[String]) -> Vec<&str> {
    let arguments = members.iter().flat_map(|member| ["--member", member]);
    arguments.collect()
}
