//! Owns the findings: measured figures beside their targets.

mod effort;
mod endurance;

use super::numbers::short;
use super::select::{MissingFigure, in_words};
use crate::bench::results::{Load, Results};

/// One finding of a benchmark.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// Number of the finding, such as `1a`.
    pub number: &'static str,
    /// What is measured.
    pub what: String,
    /// The target.
    pub target: String,
    /// The result; empty if not measured.
    pub measured: String,
    /// Whether the result meets the target.
    pub verdict: Verdict,
}

/// Whether a target is reached.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Met.
    Reached,
    /// Not met: by how much.
    Missed(String),
    /// Unknown: why.
    NotMeasured(String),
}

/// All findings, by number.
pub fn all(results: &Results) -> Vec<Finding> {
    let mut all = effort::all(&results.rows);
    all.extend(endurance::memory(&results.memory));
    all.extend(endurance::trace(&results.trace));
    all
}

/// One line per finding, the result first, since the description is long.
pub fn in_lines(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let Finding {
            number,
            what,
            target,
            measured,
            verdict,
        } = finding;
        let verdict = match verdict {
            Verdict::Reached => format!("reached: {measured}"),
            Verdict::Missed(by) => format!("MISSED {by}: {measured}"),
            Verdict::NotMeasured(why) => format!("not measured: {why}"),
        };
        text += &format!("{number:3} {what}, {target}\n    {verdict}\n");
    }
    text
}

/// A finding to be judged: number, quantity, target.
struct FindingSpec {
    number: &'static str,
    what: String,
    target: String,
}

/// The result and its verdict, or why it is unknown.
type Judged = Result<(String, Verdict), MissingFigure>;

impl FindingSpec {
    fn finding(&self, judged: Judged) -> Finding {
        let (measured, verdict) = match judged {
            Ok(judged) => judged,
            Err(why) => (String::new(), Verdict::NotMeasured(why.words())),
        };
        Finding {
            number: self.number,
            what: self.what.clone(),
            target: self.target.clone(),
            measured,
            verdict,
        }
    }

    /// A finding for each of several named circumstances, so that none is chosen after the fact. Circumstances without a
    /// measurement are dropped if another one is complete.
    fn findings<T>(
        &self,
        each: &[T],
        words: impl Fn(&T) -> String,
        judge: impl Fn(&T) -> Judged,
    ) -> Vec<Finding> {
        let judged = || each.iter().map(|one| (one, judge(one)));
        let complete: Vec<_> = judged()
            .filter(|(_, judged)| !matches!(judged, Err(MissingFigure::Absent(_))))
            .collect();
        match complete.len() {
            0 => {
                let why = judged().find_map(|(_, judged)| judged.err());
                let none = || MissingFigure::Absent("there is no such row".to_owned());
                vec![self.finding(Err(why.unwrap_or_else(none)))]
            }
            1 => complete
                .into_iter()
                .map(|(_, judged)| self.finding(judged))
                .collect(),
            _ => {
                let named = complete.into_iter().map(|(one, judged)| Finding {
                    what: format!("{} ({})", self.what, words(one)),
                    ..self.finding(judged)
                });
                named.collect()
            }
        }
    }

    fn under(&self, loads: &[&Load], judge: impl Fn(&Load) -> Judged) -> Vec<Finding> {
        self.findings(loads, |load| in_words(load), |load| judge(load))
    }
}

/// Limit of a figure.
#[derive(Debug, Clone, Copy)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

impl Limit {
    /// Verdict on a figure, with its unit.
    ///
    /// # Errors
    /// When the figure is no number: its inputs are zero.
    fn verdict(self, value: f64, unit: &str) -> Result<Verdict, MissingFigure> {
        if !value.is_finite() {
            return Err(MissingFigure::Unfit(
                "what was measured is no number".to_owned(),
            ));
        }
        let beyond = match self {
            Self::AtMost(most) => value - most,
            Self::AtLeast(least) => least - value,
        };
        Ok(match beyond {
            ..=0.0 => Verdict::Reached,
            _ => Verdict::Missed(format!("by {}{unit}", difference(beyond))),
        })
    }
}

/// A difference, never rounded to zero.
fn difference(value: f64) -> String {
    match value {
        ..0.005 => "less than 0.01".to_owned(),
        _ => short(value),
    }
}

#[cfg(test)]
mod tests;
