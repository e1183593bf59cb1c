//! Owns the course of one scenario: engines and a gateway, clients, the script, the wait for rest, the verdict.

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use routing::config::{Config, ConfigError};
use routing::fleet::Role;
use tokio::time::{sleep, sleep_until};

use super::client::Clients;
use super::fleet::{EngineTotals, Fleet, FleetError};
use super::judge::{ClientOutcomes, FaultEffect, Rules, ScenarioVerdict, SettledState, judge};
use super::memory::IdleMemory;
use super::metrics::MetricsPage;
use super::pool;
use super::scenario::{ClientMix, EngineAction, PoolSettings, Scenario};
use crate::engine::Dialect;
use crate::http::{self, HttpError};
use crate::run::RunError;
use crate::run::fleet::Members;
use crate::run::gateway::{Addresses, Gateway, GatewayConfig};

/// Length of one pass of a script; a longer run repeats it.
const ROUND: Duration = Duration::from_secs(6);
/// Interval at which the gateway's metrics are checked.
const LOOK: Duration = Duration::from_millis(50);
/// Ticks of the progress bar per second.
pub const TICKS: u32 = 10;

/// Limit of the wait for rest: longer than all deadlines and leases.
const REST_LIMIT: Duration = Duration::from_secs(15);
const REST_LOOK: Duration = Duration::from_millis(100);
/// Consecutive checks that must find rest and equal counts: each worker thread publishes its metrics at its own tick.
const CALM_LOOKS: usize = 4;

/// Limit of the wait for readiness.
const READY_LIMIT: Duration = Duration::from_secs(20);
/// One connection reaches one thread of the gateway; this many reach all.
const CONNECTIONS: usize = 8;

/// Settings shared by all scenarios of a run.
pub struct PlaySettings {
    /// Protocol of the fleet.
    pub dialect: Dialect,
    /// How long clients send requests.
    pub lasts: Duration,
    /// The gateway in front of the fleet.
    pub gateway: GatewayConfig,
}

/// Why a scenario could not be played.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    /// The engines are not in the state that the script requires.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// The filter refuses the configuration.
    #[error("the filter's configuration: {0}")]
    Config(#[from] ConfigError),
    /// The gateway did not start, or died.
    #[error(transparent)]
    Gateway(#[from] RunError),
    /// The gateway does not report its state.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The source cannot describe these workers.
    #[error(
        "{scenario} cannot tell where each worker's bootstrap server is: another --dialect can"
    )]
    UnsupportedSource {
        /// The scenario.
        scenario: &'static str,
    },
    /// The gateway does not report readiness.
    #[error("the gateway was not ready after {} s: {why}", READY_LIMIT.as_secs())]
    NotReady {
        /// Its last answer.
        why: HttpError,
    },
}

/// Plays a scenario.
///
/// # Errors
/// When it could not be played; a bad outcome is no error.
pub async fn play(
    scenario: &Scenario,
    settings: &PlaySettings,
    bar: &ProgressBar,
) -> Result<ScenarioVerdict, PlayError> {
    let mut fleet =
        Fleet::start(scenario.size, scenario.dialect.unwrap_or(settings.dialect)).await?;
    let document = fleet.plugin_config(scenario.pool);
    let config = Config::parse(&document)?;
    let members = Members::of(&config);
    let gateway_config = GatewayConfig {
        buffer_limit: pool::buffer_limit(scenario.pool),
        ..settings.gateway.clone()
    };
    let mut gateway = Gateway::start(&gateway_config, document, &members).await?;
    until_ready(gateway.addresses().listen).await?;
    let at_rest = IdleMemory::of(&gateway).filter(|_| scenario.pool.bounds_memory());
    let run = ScenarioRun {
        scenario,
        lasts: settings.lasts,
        at: gateway.addresses(),
        injected: Cell::default(),
        ejected_after: Cell::default(),
    };
    let outcome = tokio::select! {
        outcome = run.play(&mut fleet) => outcome,
        error = gateway.ended() => Err(error.into()),
        never = run.watch() => match never {},
        never = tick(bar, settings.lasts) => match never {},
    };
    let peak = at_rest.map(|at_rest| at_rest.peak(&config, gateway_config.concurrency));
    gateway.stop().await;
    let (seen, aftermath) = outcome?;
    let aftermath = SettledState { peak, ..aftermath };
    let rules = Rules {
        leaks: scenario.leaks,
        demand: scenario.demand,
    };
    let verdict = judge(&seen, &fleet.health, rules, aftermath);
    fleet.stop().await;
    Ok(verdict)
}

/// The type of a future that never completes.
pub enum Never {}

struct ScenarioRun<'a> {
    scenario: &'a Scenario,
    lasts: Duration,
    at: Addresses,
    /// Time of the first fault.
    injected: Cell<Option<Instant>>,
    ejected_after: Cell<Option<Duration>>,
}

impl ScenarioRun<'_> {
    async fn play(&self, fleet: &mut Fleet) -> Result<(ClientOutcomes, SettledState), PlayError> {
        for step in self.scenario.script.iter().filter(|step| step.at == 0.0) {
            self.perform(step.action, fleet).await?;
        }
        let clients = Clients::start(self.at.listen, self.scenario.mix);
        self.follow_script(fleet).await?;
        let seen = clients.stop().await;
        let (totals, metrics) = until_at_rest(self.at.admin, &*fleet).await?;
        let aftermath = SettledState {
            ejected_after: self.ejected_after.get(),
            effect: self.effect(fleet, &metrics),
            wrongly_ejected: self.wrongly_ejected(&metrics),
            ..counted(totals, &metrics)
        };
        Ok((seen, aftermath))
    }

    /// Whether any request met what engines or clients did.
    fn effect(&self, fleet: &Fleet, metrics: &MetricsPage) -> FaultEffect {
        let Scenario { mix, pool, .. } = self.scenario;
        let is_felt = match (mix, pool) {
            (ClientMix::Patient | ClientMix::WithPoison | ClientMix::WithLeavers, _) => {
                let none_met = self.scenario.injects() && fleet.met.is_empty();
                !none_met && fleet.met.values().all(|hits| *hits > 0)
            }
            // Slow readers that hold up no sender test nothing.
            (ClientMix::WithSlowReaders | ClientMix::SlowReaders, _) => metrics.silences() > 0,
            (ClientMix::WithTricklers, PoolSettings::HastyBodies) => {
                metrics.refused("body_timeout") > 0
            }
            (ClientMix::WithTricklers, _) => metrics.refused("bodies_in_flight") > 0,
            // Prefills whose clients have left were cleaned up, and at some time no further body fitted.
            (ClientMix::WithLongPrompts, PoolSettings::LongBodies) => {
                metrics.clean_ups() > 0 && metrics.refused("bodies_in_flight") > 0
            }
            (ClientMix::WithLongPrompts, _) => metrics.refused("body_too_large") > 0,
        };
        match is_felt {
            true => FaultEffect::Felt,
            false => FaultEffect::Unfelt,
        }
    }

    fn wrongly_ejected(&self, metrics: &MetricsPage) -> u64 {
        let spared = self.scenario.spares.iter();
        spared.map(|role| metrics.ejections(*role)).sum()
    }

    async fn follow_script(&self, fleet: &mut Fleet) -> Result<(), PlayError> {
        let begin = tokio::time::Instant::now();
        let rounds = (self.lasts.as_secs() / ROUND.as_secs()).max(1);
        let round = self.lasts.div_f64(rounds as f64);
        for number in 0..rounds {
            for step in self.scenario.script {
                sleep_until(begin + round.mul_f64(number as f64 + step.at)).await;
                self.perform(step.action, fleet).await?;
            }
        }
        sleep_until(begin + self.lasts).await;
        Ok(())
    }

    async fn perform(&self, action: EngineAction, fleet: &mut Fleet) -> Result<(), PlayError> {
        if self.injected.get().is_none() {
            self.injected.set(Some(Instant::now()));
        }
        Ok(fleet.perform(action).await?)
    }

    /// Records when the first worker of the faulty role is ejected after the first fault.
    async fn watch(&self) -> Never {
        let mut before = 0;
        loop {
            sleep(LOOK).await;
            let (Some(role), None) = (self.scenario.ejects, self.ejected_after.get()) else {
                continue;
            };
            let injected = self.injected.get();
            let Ok(now) = self.ejections(role).await else {
                continue;
            };
            match injected {
                Some(injected) if now > before => self.ejected_after.set(Some(injected.elapsed())),
                Some(_) => {}
                None => before = now,
            }
        }
    }

    async fn ejections(&self, role: Role) -> Result<u64, HttpError> {
        let metrics = MetricsPage::fetch(self.at.admin).await?;
        Ok(metrics.ejections(role))
    }
}

/// A source of the counts of all engines.
pub trait TotalsSource {
    /// Addresses of the running engines.
    fn running(&self) -> impl Iterator<Item = SocketAddr>;

    /// Unfetched hand-offs of the killed engines.
    fn lost(&self) -> u64;

    /// Counts of all engines.
    ///
    /// # Errors
    /// When a running engine does not answer.
    async fn totals(&self) -> Result<EngineTotals, HttpError> {
        let mut totals = EngineTotals {
            requests: 0,
            unfetched: self.lost(),
        };
        for engine in self.running() {
            let state = http::get_json(engine, "/__state").await?;
            let of_engine = EngineTotals::of(&state);
            totals.requests += of_engine.requests;
            totals.unfetched += of_engine.unfetched;
        }
        Ok(totals)
    }
}

/// Waits until every thread of the gateway reports readiness.
///
/// # Errors
/// When the limit is exceeded.
pub async fn until_ready(gateway: SocketAddr) -> Result<(), PlayError> {
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        match all_threads_ready(gateway).await {
            Ok(()) => return Ok(()),
            Err(why) if Instant::now() > deadline => return Err(PlayError::NotReady { why }),
            Err(_) => sleep(LOOK).await,
        }
    }
}

/// Waits until no engine has a request, nothing is booked, and all counts are stable, or until the limit.
///
/// # Errors
/// When the gateway or an engine does not report its state.
pub async fn until_at_rest(
    admin: SocketAddr,
    engines: &impl TotalsSource,
) -> Result<(EngineTotals, MetricsPage), PlayError> {
    let deadline = Instant::now() + REST_LIMIT;
    let (mut calm, mut before) = (0, None);
    loop {
        sleep(REST_LOOK).await;
        let metrics = MetricsPage::fetch(admin).await?;
        let totals = engines.totals().await?;
        let rests = totals.requests + metrics.bookings() + metrics.streams() == 0;
        let counted = (metrics.leaked_handoffs(), metrics.unknown_handoffs());
        let counts = Some((totals.unfetched, counted));
        calm = match rests && counts == before {
            true => calm + 1,
            false => 0,
        };
        before = counts;
        if calm == CALM_LOOKS || Instant::now() > deadline {
            return Ok((totals, metrics));
        }
    }
}

/// What the engines and the filter count at rest.
pub fn counted(engines: EngineTotals, metrics: &MetricsPage) -> SettledState {
    SettledState {
        kv_leaked: engines.unfetched,
        kv_leaked_counted: metrics.leaked_handoffs(),
        kv_unknown: metrics.unknown_handoffs(),
        resets_counted: metrics.resets(),
        replaced: metrics.recoveries(),
        bookings_left: metrics.bookings(),
        ..SettledState::default()
    }
}

async fn all_threads_ready(gateway: SocketAddr) -> Result<(), HttpError> {
    for _ in 0..CONNECTIONS {
        http::get(gateway, "/pd-router/ready").await?;
    }
    Ok(())
}

/// Advances the progress bar over the length of a scenario.
pub async fn tick(bar: &ProgressBar, lasts: Duration) -> Never {
    for _ in 0..ticks(lasts) {
        sleep(Duration::from_secs(1) / TICKS).await;
        bar.inc(1);
    }
    std::future::pending().await
}

/// Ticks of the progress bar in this time.
pub fn ticks(lasts: Duration) -> u64 {
    lasts.as_secs() * u64::from(TICKS)
}
