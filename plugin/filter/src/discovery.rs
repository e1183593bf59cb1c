//! Owns the polling of a pool's source of workers by the leading VM, and the health of that source.

use std::rc::Rc;
use std::time::Duration;

use routing::discovery::{
    self, Believed, Poll, PollAnswer, PolledWorkers, Source, SourceUpdate, Staleness,
};
use routing::excerpt::{self, excerpt};
use routing::fleet::{Fleet, Worker};

use crate::host::{self, Map};
use crate::legs::calls;
use crate::shared::{self, SourceHealth};
use crate::vm::PoolRuntime;

/// Polls a source while this VM leads.
#[derive(Default)]
pub struct Poller {
    leading: Option<Leading>,
    /// A poll under way whose answer is no longer wanted.
    abandoned: Option<u32>,
}

/// State of a leader.
struct Leading {
    source: Box<dyn Source>,
    polled: PolledWorkers,
    staleness: Staleness,
    call: Option<u32>,
    due: Duration,
    /// Index of the destination that is polled next.
    place: usize,
    /// Health that was last published.
    published: Option<SourceHealth>,
}

impl Poller {
    /// Polls if this VM leads and a poll is due. Called in each round.
    pub fn tick(&mut self, runtime: &PoolRuntime) {
        if !runtime.vm.leads() {
            self.rest();
            return;
        }
        if self.leading.is_none() {
            self.leading = Leading::over(runtime);
        }
        let Some(leading) = &mut self.leading else {
            return;
        };
        if leading.call.is_none() && leading.is_due(runtime.now()) {
            leading.ask(runtime);
        }
        leading.look_at_silence(runtime);
    }

    /// Stops polling: another VM leads, or another configuration acts. A late answer is out of date.
    pub fn rest(&mut self) {
        if let Some(leading) = self.leading.take() {
            self.abandoned = leading.call.or(self.abandoned);
        }
    }

    /// Handles the answer to a poll; false if the token is another call's.
    pub fn answered(&mut self, token: u32, has_headers: bool, runtime: &Rc<PoolRuntime>) -> bool {
        if self
            .abandoned
            .take_if(|abandoned| *abandoned == token)
            .is_some()
        {
            return true;
        }
        let is_mine = |leading: &&mut Leading| leading.call == Some(token);
        let Some(leading) = self.leading.as_mut().filter(is_mine) else {
            return false;
        };
        leading.call = None;
        if !runtime.acts() {
            return true;
        }
        match read_answer(has_headers, leading.source.as_mut()) {
            Ok(update) => leading.good(runtime, update),
            Err(problem) => leading.failed(runtime, &problem),
        }
        true
    }
}

impl Leading {
    /// A new leader starts from the fleet that all VMs have adopted. `None` if there is nothing to poll.
    fn over(runtime: &PoolRuntime) -> Option<Self> {
        let router = runtime.router();
        let source = discovery::source(&runtime.pool)?;
        let keep_ms = runtime.pool.discovery.keep_stale_ms();
        let known = router.fleet().workers().map(|worker| (**worker).clone());
        Some(Self {
            source,
            polled: PolledWorkers::starting_from(known.collect()),
            staleness: Staleness::new(keep_ms, runtime.now()),
            call: None,
            due: Duration::ZERO,
            place: 0,
            published: None,
        })
    }

    fn is_due(&self, now: Duration) -> bool {
        now >= self.due
    }

    fn ask(&mut self, runtime: &PoolRuntime) {
        let Some(poll) = self.source.poll() else {
            return;
        };
        let interval = Duration::from_millis(poll.interval_ms);
        self.due = runtime.now().saturating_add(interval);
        match call(&poll, self.place) {
            Ok(token) => self.call = Some(token),
            Err(status) => self.failed(runtime, &format!("the call failed: {status:?}")),
        }
    }

    fn good(&mut self, runtime: &PoolRuntime, update: SourceUpdate) {
        if self.staleness.is_stale() {
            log::info!("pool {}: discovery answers again", runtime.pool.name);
        }
        self.staleness.good(runtime.now());
        self.tell(runtime, None);
        let SourceUpdate::Workers(workers, warnings) = update else {
            return;
        };
        for warning in warnings {
            log::warn!("pool {}: {warning}", runtime.pool.name);
        }
        if let Believed::Changed(workers) = self.polled.accept(workers) {
            publish(runtime, workers);
        }
    }

    /// Handles a failed poll: the fleet stays, the next address is polled. Logged once, not at every poll.
    fn failed(&mut self, runtime: &PoolRuntime, problem: &str) {
        self.place = self.place.wrapping_add(1);
        self.staleness.failed(runtime.now());
        if self.staleness.failures() == 1 {
            log::warn!(
                "pool {}: the fleet stays as it is, since discovery got no answer: {problem}",
                runtime.pool.name
            );
        }
        self.tell(runtime, Some(problem));
    }

    /// Expires the fleet of a source that has been silent for too long.
    fn look_at_silence(&mut self, runtime: &PoolRuntime) {
        if !self.staleness.gives_up(runtime.now()) {
            return;
        }
        log::error!(
            "pool {}: discovery has given no answer for too long, its workers are given up",
            runtime.pool.name
        );
        if let Believed::Changed(workers) = self.polled.expire() {
            publish(runtime, workers);
        }
        if let Some(source) = discovery::source(&runtime.pool) {
            self.source = source;
        }
        self.tell(runtime, Some("given up"));
    }

    /// Publishes the source's health to the other VMs, if it has changed.
    fn tell(&mut self, runtime: &PoolRuntime, problem: Option<&str>) {
        let now = SourceHealth {
            stale: self.staleness.is_stale(),
            given_up: self.staleness.is_given_up(),
            since_ms: match (self.staleness.last_good(), &self.published) {
                (Some(last), _) if self.staleness.is_stale() => {
                    runtime.vm.clock.on_the_wall(last).as_millis() as u64
                }
                (_, published) => published.as_ref().map_or(0, |published| published.since_ms),
            },
            problem: problem.map(str::to_owned),
        };
        if self.published.as_ref() != Some(&now) {
            shared::publish_source(&runtime.pool.name, &now);
            self.published = Some(now);
        }
    }
}

/// Publishes workers as the current fleet.
pub fn publish(runtime: &PoolRuntime, workers: Vec<Worker>) {
    let version = runtime.router().fleet().version().saturating_add(1);
    let fleet = Fleet::new(version, workers);
    let count = fleet.workers().count();
    log::info!(
        "pool {}: fleet {version} has {count} workers",
        runtime.pool.name
    );
    shared::publish_fleet(&runtime.pool.name, runtime.pool.discovery.name(), &fleet);
    runtime.adopt_published();
    runtime.tell_of_changes();
}

/// Polls the destination at index `place`, modulo the number of destinations; without any, the cluster picks.
fn call(poll: &Poll, place: usize) -> Result<u32, host::Status> {
    let at = place.checked_rem(poll.destinations.len()).unwrap_or(0);
    let destination = poll.destinations.get(at).copied();
    let timeout = Duration::from_millis(poll.timeout_ms);
    calls::get(
        &poll.cluster,
        destination,
        &poll.path,
        &poll.headers,
        timeout,
    )
}

fn read_answer(has_headers: bool, source: &mut dyn Source) -> Result<SourceUpdate, String> {
    if !has_headers {
        return Err("the answer broke off".to_owned());
    }
    let status = host::header(Map::CallResponse, ":status").unwrap_or_default();
    let status = std::str::from_utf8(&status).unwrap_or_default();
    let etag = host::header(Map::CallResponse, "etag");
    let body = host::call_response(discovery::MAX_ANSWER).unwrap_or_default();
    let answer = PollAnswer {
        status: status.parse().unwrap_or(0),
        etag: etag.as_deref(),
        body: &body,
    };
    let update = source.read_answer(&answer);
    update.map_err(|error| excerpt(error, excerpt::MESSAGE))
}
