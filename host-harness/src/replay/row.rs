//! Owns the runs of one contender with a number of gateways: one for each seed, and their mean.

use super::contender::ReplayContender;
use super::engine::{Parameters, ReplayOutcome, replay};
use super::figures::PolicyFigures;
use super::gateways::Gateways;
use super::own_router::OwnRouterError;
use super::seeds::Seeds;
use super::trace::Trace;

/// Result of a contender.
#[derive(Debug)]
pub struct ReplayRow {
    /// The contender.
    pub contender: ReplayContender,
    /// Number of gateways.
    pub gateways: u16,
    /// The mean over all seeds.
    pub figures: PolicyFigures,
    /// Each seed's figures.
    pub runs: Vec<(u64, PolicyFigures)>,
    /// Outcome under the first seed, for plots.
    pub shown: ReplayOutcome,
}

impl ReplayRow {
    /// Runs a contender once for each seed. `arrived` is called at each request.
    ///
    /// # Errors
    /// When the routing code refuses the parameters.
    pub fn run(
        contender: ReplayContender,
        gateways: u16,
        trace: &Trace,
        parameters: &Parameters,
        seeds: &Seeds,
        arrived: &mut dyn FnMut(),
    ) -> Result<Self, OwnRouterError> {
        let mut runs = Vec::new();
        let mut shown = ReplayOutcome::default();
        for seed in seeds.all() {
            let mut router = Gateways::new(contender, gateways, parameters, seed)?;
            let outcome = replay(trace, parameters, &mut router, arrived);
            runs.push((
                seed,
                PolicyFigures::of(&outcome, parameters.workers.prefill),
            ));
            if seed == seeds.first() {
                shown = outcome;
            }
        }
        let all: Vec<PolicyFigures> = runs.iter().map(|(_, figures)| figures.clone()).collect();
        Ok(Self {
            contender,
            gateways,
            figures: PolicyFigures::mean(&all),
            runs,
            shown,
        })
    }
}
