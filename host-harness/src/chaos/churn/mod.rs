//! Owns churn: workers join, drain, leave, die and return at random, a source announces them to the gateway, and clients send
//! requests.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use pd_harness_common::loopback;
use routing::config::Config;
use serde::Serialize;
use tokio::time::sleep;

use super::client::Clients;
use super::health::HealthRecord;
use super::judge::{ClientOutcomes, Rules, ScenarioVerdict, SettledState, judge};
use super::play::{PlayError, PlaySettings, counted, tick, until_at_rest, until_ready};
use super::pool;
use super::scenario::{ClientMix, Demand, FleetSize, Leaks};
use crate::run::fleet::Members;
use crate::run::gateway::{Addresses, Gateway};

mod churn_fleet;
mod publisher;
mod source;

use churn_fleet::ChurnFleet;
pub use source::Source;

/// Interval at which the gateway polls a source.
const INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time from the source's announcement of a removal until the worker gets no new request.
const GRACE: Duration = INTERVAL.saturating_add(Duration::from_millis(500));
/// Interval at which the workers are checked.
const LOOK: Duration = Duration::from_millis(50);

/// Events of the workers, and requests that reached workers after their removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Churned {
    /// Workers that joined at a new address.
    pub joined: u64,
    /// Workers that joined at the address of an earlier one.
    pub returned: u64,
    /// Workers that drained and were then removed.
    pub drained: u64,
    /// Workers that were removed without draining, and ran on.
    pub removed: u64,
    /// Workers that died, and stayed listed for a while.
    pub died: u64,
    /// Requests that reached a worker later than an interval and 500 ms after its removal.
    pub removed_worker_requests: u64,
    /// Requests that reached a worker later than that after it was listed as draining; they had been assigned to it before.
    pub draining_worker_requests: u64,
}

/// Plays churn once.
///
/// # Errors
/// When it could not be played; a bad outcome is no error.
pub async fn play(
    source: Source,
    settings: &PlaySettings,
    seed: u64,
    bar: &ProgressBar,
) -> Result<ScenarioVerdict, PlayError> {
    source.check(settings.dialect)?;
    let mut fleet =
        ChurnFleet::start(source, settings.dialect, loopback::own().into(), seed).await?;
    let document =
        pool::plugin_config_over(settings.dialect, fleet.discovery(), source.destinations());
    let mut members = Members::of(&Config::parse(&document)?);
    fleet.add_to(&mut members);
    let mut gateway = Gateway::start(&settings.gateway, document, &members).await?;
    let at = gateway.addresses();
    let outcome = tokio::select! {
        outcome = course(&mut fleet, at, settings.lasts) => outcome,
        error = gateway.ended() => Err(error.into()),
        never = tick(bar, settings.lasts) => match never {},
    };
    gateway.stop().await;
    let (seen, aftermath, left) = outcome?;
    let churned = fleet.stop().await;
    Ok(verdict(&seen, aftermath, churned, left))
}

/// State of the gateway and the workers after all clients have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct UnfinishedWork {
    streams: u64,
    requests: u64,
}

async fn course(
    fleet: &mut ChurnFleet,
    at: Addresses,
    lasts: Duration,
) -> Result<(ClientOutcomes, SettledState, UnfinishedWork), PlayError> {
    fleet.announce_to(at.listen).await?;
    tokio::select! {
        ready = until_ready(at.listen) => ready?,
        error = fleet.stay() => return Err(error.into()),
    }
    let clients = Clients::start(at.listen, ClientMix::Patient);
    let end = Instant::now() + lasts;
    while Instant::now() < end {
        fleet.step().await?;
        sleep(LOOK).await;
    }
    let ending = clients.stop();
    let seen = tokio::select! {
        seen = ending => seen,
        error = fleet.stay() => return Err(error.into()),
    };
    let (totals, metrics) = until_at_rest(at.admin, &*fleet).await?;
    let aftermath = counted(totals, &metrics);
    let left = UnfinishedWork {
        streams: metrics.streams(),
        requests: totals.requests,
    };
    Ok((seen, aftermath, left))
}

fn verdict(
    seen: &ClientOutcomes,
    aftermath: SettledState,
    churned: Churned,
    left: UnfinishedWork,
) -> ScenarioVerdict {
    // Two workers of each role are healthy at every moment: no failure is excused.
    let always = HealthRecord::new(FleetSize {
        prefill: 1,
        decode: 1,
    });
    let rules = Rules {
        leaks: Leaks::AtLeast,
        demand: Demand::Honesty,
    };
    let mut verdict = judge(seen, &always, rules, aftermath);
    verdict.figures.churned = Some(churned);
    let Churned {
        removed_worker_requests,
        ..
    } = churned;
    let mut breaks = |is_so: bool, words: String| {
        if is_so {
            verdict.broken.push(words);
        }
    };
    breaks(
        removed_worker_requests > 0,
        format!("{removed_worker_requests} requests reached workers that had been removed"),
    );
    breaks(
        left.streams > 0,
        format!("{} streams were left", left.streams),
    );
    breaks(
        left.requests > 0,
        format!("{} requests were left in workers", left.requests),
    );
    breaks(
        churned.died + churned.removed + churned.drained == 0,
        "no worker left: nothing was tested".to_owned(),
    );
    verdict
}
