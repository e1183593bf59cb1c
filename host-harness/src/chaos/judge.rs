//! Owns the judgement of a scenario: the outcomes of all its requests, and the rules that these break. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::asks::Fit;
use super::churn::Churned;
use super::health::HealthRecord;
use super::memory::Peak;
use super::reply::{Ending, NO_HINT};
use super::scenario::{Demand, Leaks};

/// One request that its client did not abandon.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Time of sending.
    pub sent: Instant,
    /// End of the answer.
    pub ended: Instant,
    /// Outcome.
    pub ending: Ending,
    /// Whether an engine could serve the request.
    pub fit: Fit,
    /// Behaviour of the client.
    pub conduct: Conduct,
}

/// Behaviour of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conduct {
    /// The client sent its request at once, read its answer as it came, and stayed to the end.
    Good,
    /// At least one of these does not hold: a failure may be the client's own fault.
    Bad,
}

/// Rules by which a scenario is judged.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// How exactly the filter can know the lost hand-offs.
    pub leaks: Leaks,
    /// The worst outcome that a client must accept.
    pub demand: Demand,
}

/// The clients' outcomes.
#[derive(Debug, Default)]
pub struct ClientOutcomes {
    /// Requests that their clients did not abandon.
    pub exchanges: Vec<Exchange>,
    /// Requests that their clients abandoned on purpose.
    pub left: u64,
}

/// Findings after all clients have ended and the system is at rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SettledState {
    /// Time from the first fault to the first ejection, in the role where one is due.
    pub ejected_after: Option<Duration>,
    /// Hand-offs issued by engines and never fetched.
    pub kv_leaked: u64,
    /// Hand-offs that the filter counts as lost.
    pub kv_leaked_counted: u64,
    /// Hand-offs whose fate the filter does not know.
    pub kv_unknown: u64,
    /// Answers broken off after they had begun, at the gateway at least, by the filter's count.
    pub resets_counted: u64,
    /// Decode legs that the filter replaced: each may have been reset as late before its first byte, so that it stays unknown
    /// whether it had fetched its blocks.
    pub replaced: u64,
    /// Charges that are still booked.
    pub bookings_left: u64,
    /// Peak of the gateway's memory, if it is subject to rules.
    pub peak: Option<Peak>,
    /// Whether any request met what was done to the engines.
    pub effect: FaultEffect,
    /// Ejections in roles where no worker may be ejected.
    pub wrongly_ejected: u64,
}

/// Whether the faults had any effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FaultEffect {
    /// Some request met a fault, or there was no fault to meet.
    #[default]
    Felt,
    /// No request met a fault although there were some, or the clients' behaviour had no effect on the gateway: nothing was
    /// tested.
    Unfelt,
}

/// Result of a scenario. `sent` is the sum of `answered`, `engine_status`, `reset`, `refused` and `failed`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ScenarioFigures {
    /// Requests, without those that their clients abandoned.
    pub sent: u64,
    /// Complete answers with every token right.
    pub answered: u64,
    /// An engine's own errors, passed on unchanged.
    pub engine_status: u64,
    /// Answers that broke after decode's headers, seen as an error by the client.
    pub reset: u64,
    /// Requests refused by the gateway because of their bodies.
    pub refused: u64,
    /// All other requests.
    pub failed: u64,
    /// Failures while a prefill and a decode engine were healthy, from the request to its end.
    pub failed_with_healthy_pair: u64,
    /// Milliseconds; `None` if no ejection was due, or none occurred.
    pub ejected_after_ms: Option<u64>,
    /// Hand-offs issued by engines and never fetched.
    pub kv_leaked: u64,
    /// Hand-offs that the filter counts as lost.
    pub kv_leaked_counted: u64,
    /// Hand-offs whose fate the filter does not know.
    pub kv_unknown: u64,
    /// Charges that are still booked.
    pub bookings_left: u64,
    /// Ejections in roles where no worker may be ejected.
    pub wrongly_ejected: u64,
    /// Requests that no engine can serve; included in the failures.
    pub poison: u64,
    /// Requests that their clients abandoned on purpose.
    pub left: u64,
    /// Peak memory of the gateway's process above its memory at rest, in bytes; `None` where memory is not judged.
    /// `allowed_bytes` is what its budgets allow.
    pub peak_bytes: Option<u64>,
    /// Bytes.
    pub allowed_bytes: Option<u64>,
    /// Events of the workers, in churn.
    #[serde(flatten)]
    pub churned: Option<Churned>,
    /// The engines' own errors by status.
    pub engine_statuses: BTreeMap<u16, u64>,
    /// The failures by reason.
    pub failures: BTreeMap<String, u64>,
}

/// Result of a scenario, with the broken rules in words.
#[derive(Debug)]
pub struct ScenarioVerdict {
    /// The counts.
    pub figures: ScenarioFigures,
    /// Broken rules.
    pub broken: Vec<String>,
}

/// Judges a scenario.
pub fn judge(
    seen: &ClientOutcomes,
    health: &HealthRecord,
    rules: Rules,
    aftermath: SettledState,
) -> ScenarioVerdict {
    let mut figures = ScenarioFigures {
        sent: seen.exchanges.len() as u64,
        ejected_after_ms: aftermath.ejected_after.map(milliseconds),
        kv_leaked: aftermath.kv_leaked,
        kv_leaked_counted: aftermath.kv_leaked_counted,
        kv_unknown: aftermath.kv_unknown,
        bookings_left: aftermath.bookings_left,
        wrongly_ejected: aftermath.wrongly_ejected,
        left: seen.left,
        peak_bytes: aftermath.peak.map(|peak| peak.held),
        allowed_bytes: aftermath.peak.map(|peak| peak.allowed),
        ..ScenarioFigures::default()
    };
    let mut deceits = BTreeMap::new();
    let mut unseen = unseen_resets(seen, aftermath.resets_counted);
    for exchange in &seen.exchanges {
        match &exchange.ending {
            Ending::Deceived(how) => *deceits.entry(how.clone()).or_insert(0) += 1,
            Ending::Unbegun(_) if unseen > 0 && rules.demand.bears_resets() => {
                unseen -= 1;
                figures.reset += 1;
                continue;
            }
            _ => {}
        }
        figures.add(exchange, health, rules.demand);
    }
    let mut broken = broken_rules(&figures, &deceits, rules.leaks, aftermath.replaced);
    broken.extend(unhelpful(seen, rules.demand));
    let immune =
        |exchange: &&Exchange| exchange.fit == Fit::Poison && exchange.ending == Ending::Answered;
    if seen.exchanges.iter().any(|exchange| immune(&exchange)) {
        broken.push("poison was answered: nothing was tested".to_owned());
    }
    if aftermath.effect == FaultEffect::Unfelt {
        broken.push("no request met the fault: nothing was tested".to_owned());
    }
    broken.extend(aftermath.peak.and_then(too_much));
    if rules.demand == Demand::AnswerToGood {
        broken.extend(wronged(seen));
    }
    ScenarioVerdict { figures, broken }
}

fn too_much(peak: Peak) -> Option<String> {
    let Peak { held, allowed } = peak;
    (held > allowed).then(|| {
        format!("the gateway held {held} bytes more than at rest, and its budgets allow {allowed}")
    })
}

/// Outcomes of the well-behaved clients that were not answered.
fn wronged(seen: &ClientOutcomes) -> Option<String> {
    let is_wronged = |exchange: &&Exchange| {
        exchange.conduct == Conduct::Good && exchange.ending != Ending::Answered
    };
    let wronged: Vec<_> = seen.exchanges.iter().filter(is_wronged).collect();
    let first = wronged.first()?;
    Some(format!(
        "{} requests of clients that behaved well were not answered, the first: {:?}",
        wronged.len(),
        first.ending
    ))
}

/// Resets counted by the filter beyond those that clients saw after a begun answer: the headers were held back, and the client
/// saw its connection break without an answer.
fn unseen_resets(seen: &ClientOutcomes, counted: u64) -> u64 {
    let begun = |exchange: &&Exchange| exchange.ending == Ending::Reset;
    let seen = seen.exchanges.iter().filter(begun).count() as u64;
    counted.saturating_sub(seen)
}

/// A worker that has reported to be full is avoided for a second at most, and its clients are asked to retry then; half a second
/// more for what was under way when it recovered.
const BACK_OFF: Duration = Duration::from_millis(1_500);

/// Time from which a pair must have been healthy for a failure to be the gateway's fault.
fn since(exchange: &Exchange, why: &str) -> Instant {
    match why.ends_with("overloaded") {
        true => exchange.sent.checked_sub(BACK_OFF),
        false => None,
    }
    .unwrap_or(exchange.sent)
}

/// Outcomes of the clients that would accept a refusal with `retry-after`, and got not even that.
fn unhelpful(seen: &ClientOutcomes, demand: Demand) -> Option<String> {
    let unhelped = |ending: &&Ending| match ending {
        Ending::Answered | Ending::EngineStatus(429 | 503) => false,
        Ending::Failed(why) => {
            !(why.starts_with("429") || why.starts_with("503")) || why.ends_with(NO_HINT)
        }
        _ => true,
    };
    let mut endings = seen.exchanges.iter().map(|exchange| &exchange.ending);
    let first = endings.find(unhelped)?;
    (demand == Demand::AnswerOrLater)
        .then(|| format!("neither an answer nor a refusal that says when to come again: {first:?}"))
}

impl ScenarioFigures {
    fn add(&mut self, exchange: &Exchange, health: &HealthRecord, demand: Demand) {
        self.poison += u64::from(exchange.fit == Fit::Poison);
        match &exchange.ending {
            Ending::Answered => self.answered += 1,
            Ending::Reset => self.reset += 1,
            Ending::Refused(_) => self.refused += 1,
            Ending::EngineStatus(status) => {
                self.engine_status += 1;
                *self.engine_statuses.entry(*status).or_default() += 1;
            }
            Ending::Failed(why) | Ending::Unbegun(why) | Ending::Deceived(why) => {
                self.failed += 1;
                *self.failures.entry(why.clone()).or_default() += 1;
            }
        }
        let since = match &exchange.ending {
            Ending::Failed(why) | Ending::Unbegun(why) | Ending::Deceived(why) => {
                since(exchange, why)
            }
            Ending::Reset | Ending::EngineStatus(_) if demand == Demand::Answer => exchange.sent,
            Ending::Answered | Ending::Reset | Ending::Refused(_) | Ending::EngineStatus(_) => {
                return;
            }
        };
        if exchange.fit == Fit::Sound && health.had_a_pair(since, exchange.ended) {
            self.failed_with_healthy_pair += 1;
        }
    }
}

fn broken_rules(
    figures: &ScenarioFigures,
    deceits: &BTreeMap<String, u64>,
    leaks: Leaks,
    replaced: u64,
) -> Vec<String> {
    let ScenarioFigures {
        answered,
        failed_with_healthy_pair,
        kv_leaked,
        kv_leaked_counted,
        kv_unknown,
        bookings_left,
        wrongly_ejected,
        reset,
        engine_statuses,
        failures,
        ..
    } = figures;
    let in_question = kv_leaked_counted.saturating_add(*kv_unknown);
    let mut broken: Vec<String> = deceits
        .iter()
        .map(|(how, times)| format!("an end that was no error to its client, {times} times: {how}"))
        .collect();
    let mut breaks = |is_so: bool, words: String| {
        if is_so {
            broken.push(words);
        }
    };
    breaks(*answered == 0, "not one request was answered".to_owned());
    breaks(
        *failed_with_healthy_pair > 0,
        format!(
            "{failed_with_healthy_pair} failed while a prefill and a decode worker were well, of all that failed: {failures:?}; engines' own {engine_statuses:?}; {reset} resets"
        ),
    );
    breaks(
        *wrongly_ejected > 0,
        format!("{wrongly_ejected} ejections of workers that were well"),
    );
    breaks(
        *bookings_left > 0,
        format!("{bookings_left} bookings were left"),
    );
    breaks(
        kv_leaked_counted > kv_leaked,
        format!("{kv_leaked_counted} hand-offs were said to be lost, and only {kv_leaked} were"),
    );
    breaks(
        leaks != Leaks::OutOfSight && in_question < *kv_leaked,
        format!(
            "{kv_leaked} hand-offs were lost, and only {kv_leaked_counted} known and {kv_unknown} in doubt"
        ),
    );
    breaks(
        leaks == Leaks::Exact && in_question > kv_leaked.saturating_add(replaced),
        format!(
            "{in_question} hand-offs were counted as lost or in doubt, though only {kv_leaked} were lost and no more than {replaced} could be in doubt"
        ),
    );
    broken
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
