//! Owns the judgement of a scenario: what became of all its requests, and which rules that breaks. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::asks::Fit;
use super::churn::Churned;
use super::memory::Peak;
use super::reply::{Ending, NO_HINT};
use super::scenario::{Demand, Leaks};
use super::wellbeing::Wellbeing;

/// One request that its client did not leave.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// When it was sent.
    pub sent: Instant,
    /// When its answer ended.
    pub ended: Instant,
    /// What became of it.
    pub ending: Ending,
    /// Whether an engine could serve it.
    pub fit: Fit,
    /// How its client behaved.
    pub conduct: Conduct,
}

/// How a client behaved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conduct {
    /// It sent its request at once, read its answer as it came, and stayed to the end.
    Good,
    /// Something of that was not so: what goes wrong may be its own doing.
    Bad,
}

/// By what a scenario is judged.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// How exactly the filter can know what was lost.
    pub leaks: Leaks,
    /// What a client may be content with.
    pub demand: Demand,
}

/// What the clients saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// Requests that their clients did not leave.
    pub exchanges: Vec<Exchange>,
    /// Requests that their clients left on purpose.
    pub left: u64,
}

/// What is found when all clients have ended and things came to rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aftermath {
    /// From the first fault to the first ejection in the role where one is due.
    pub ejected_after: Option<Duration>,
    /// Hand-offs that engines issued and nobody fetched.
    pub kv_leaked: u64,
    /// Those that the filter knows to be lost.
    pub kv_leaked_counted: u64,
    /// Those of which it does not know.
    pub kv_unknown: u64,
    /// Answers that had begun, at the gateway at least, and were broken off, by the filter's count.
    pub resets_counted: u64,
    /// Decode legs that the filter replaced: each may have been reset before its first byte, as one that was late, so that nobody
    /// can tell whether it had fetched its blocks.
    pub replaced: u64,
    /// Charges that are still booked.
    pub bookings_left: u64,
    /// The gateway's memory, where there are rules for it.
    pub peak: Option<Peak>,
    /// Whether what was done to the engines was met by any request.
    pub bite: Bite,
    /// Ejections in roles of which no worker may be ejected.
    pub wrongly_ejected: u64,
}

/// Whether what was done did anything at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bite {
    /// Some request met a fault, or there was none to be met.
    #[default]
    Felt,
    /// There were faults, and no request met one, or the gateway met nothing of what clients did: nothing was tested.
    Unfelt,
}

/// What a scenario came to. `sent` is the sum of `answered`, `engine_status`, `reset`, `refused` and `failed`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Figures {
    /// Requests, without those that their clients left.
    pub sent: u64,
    /// Whole answers, every token right.
    pub answered: u64,
    /// An engine's own errors, passed on as they were.
    pub engine_status: u64,
    /// Answers that died after decode's headers, seen as an error by the client.
    pub reset: u64,
    /// Refused by the gateway over their bodies.
    pub refused: u64,
    /// All others.
    pub failed: u64,
    /// Those of them at a time when a prefill and a decode engine were well, from the request to its end.
    pub failed_with_healthy_pair: u64,
    /// Milliseconds; `None` where nothing was to be ejected, or nothing was.
    pub ejected_after_ms: Option<u64>,
    /// Hand-offs.
    pub kv_leaked: u64,
    /// Hand-offs.
    pub kv_leaked_counted: u64,
    /// Hand-offs.
    pub kv_unknown: u64,
    /// Charges.
    pub bookings_left: u64,
    /// Ejections in roles of which no worker may be ejected.
    pub wrongly_ejected: u64,
    /// Requests that no engine can serve; they are among the failures.
    pub poison: u64,
    /// Requests that their clients left on purpose.
    pub left: u64,
    /// Bytes that the gateway's process held at its peak beyond those at rest, and bytes that its budgets allow; `None` where that is
    /// not asked.
    pub peak_bytes: Option<u64>,
    /// Bytes.
    pub allowed_bytes: Option<u64>,
    /// What befell the workers, where they come and go.
    #[serde(flatten)]
    pub churned: Option<Churned>,
    /// The engines' own errors by status.
    pub engine_statuses: BTreeMap<u16, u64>,
    /// The failures by reason.
    pub failures: BTreeMap<String, u64>,
}

/// What a scenario came to, and the rules that this breaks, in words.
#[derive(Debug)]
pub struct Verdict {
    /// The counts.
    pub figures: Figures,
    /// Broken rules.
    pub broken: Vec<String>,
}

/// Judges a scenario.
pub fn judge(seen: &Seen, wellbeing: &Wellbeing, rules: Rules, aftermath: Aftermath) -> Verdict {
    let mut figures = Figures {
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
        ..Figures::default()
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
        figures.add(exchange, wellbeing, rules.demand);
    }
    let mut broken = broken_rules(&figures, &deceits, rules.leaks, aftermath.replaced);
    broken.extend(unhelpful(seen, rules.demand));
    let immune =
        |exchange: &&Exchange| exchange.fit == Fit::Poison && exchange.ending == Ending::Answered;
    if seen.exchanges.iter().any(|exchange| immune(&exchange)) {
        broken.push("poison was answered: nothing was tested".to_owned());
    }
    if aftermath.bite == Bite::Unfelt {
        broken.push("no request met the fault: nothing was tested".to_owned());
    }
    broken.extend(aftermath.peak.and_then(too_much));
    if rules.demand == Demand::AnswerToGood {
        broken.extend(wronged(seen));
    }
    Verdict { figures, broken }
}

fn too_much(peak: Peak) -> Option<String> {
    let Peak { held, allowed } = peak;
    (held > allowed).then(|| {
        format!("the gateway held {held} bytes more than at rest, and its budgets allow {allowed}")
    })
}

/// What those got who behaved well and were not answered.
fn wronged(seen: &Seen) -> Option<String> {
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

/// Resets that the filter counted beside those whose clients had read the beginning: the headers that had come were held
/// back, and the client saw its connection break without an answer.
fn unseen_resets(seen: &Seen, counted: u64) -> u64 {
    let begun = |exchange: &&Exchange| exchange.ending == Ending::Reset;
    let seen = seen.exchanges.iter().filter(begun).count() as u64;
    counted.saturating_sub(seen)
}

/// A worker that has said that it is full is left alone for a second at most, and its clients are asked to come back then; half a
/// second more for what was under way when it became well.
const BACK_OFF: Duration = Duration::from_millis(1_500);

/// From when on a pair must have been well for a failure to be the gateway's.
fn since(exchange: &Exchange, why: &str) -> Instant {
    match why.ends_with("overloaded") {
        true => exchange.sent.checked_sub(BACK_OFF),
        false => None,
    }
    .unwrap_or(exchange.sent)
}

/// What those got who could be content with a refusal that says when to come again, and did not even get that.
fn unhelpful(seen: &Seen, demand: Demand) -> Option<String> {
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

impl Figures {
    fn add(&mut self, exchange: &Exchange, wellbeing: &Wellbeing, demand: Demand) {
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
        if exchange.fit == Fit::Sound && wellbeing.had_a_pair(since, exchange.ended) {
            self.failed_with_healthy_pair += 1;
        }
    }
}

fn broken_rules(
    figures: &Figures,
    deceits: &BTreeMap<String, u64>,
    leaks: Leaks,
    replaced: u64,
) -> Vec<String> {
    let Figures {
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
