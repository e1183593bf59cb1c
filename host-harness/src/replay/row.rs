//! Owns the runs of one contender with a number of gateways: one for each seed, and their mean.

use super::contender::Contender;
use super::engine::{Outcome, Parameters, replay};
use super::figures::Figures;
use super::gateways::Gateways;
use super::routed::RoutedError;
use super::seeds::Seeds;
use super::trace::Trace;

/// Result of a contender.
#[derive(Debug)]
pub struct Row {
    /// The contender.
    pub contender: Contender,
    /// Number of gateways.
    pub gateways: u16,
    /// The mean over all seeds.
    pub figures: Figures,
    /// Each seed's figures.
    pub runs: Vec<(u64, Figures)>,
    /// Outcome under the first seed, for plots.
    pub shown: Outcome,
}

impl Row {
    /// Runs a contender once for each seed. `arrived` is called at each request.
    ///
    /// # Errors
    /// When the routing code refuses the parameters.
    pub fn run(
        contender: Contender,
        gateways: u16,
        trace: &Trace,
        parameters: &Parameters,
        seeds: &Seeds,
        arrived: &mut dyn FnMut(),
    ) -> Result<Self, RoutedError> {
        let mut runs = Vec::new();
        let mut shown = Outcome::default();
        for seed in seeds.all() {
            let mut chooser = Gateways::new(contender, gateways, parameters, seed)?;
            let outcome = replay(trace, parameters, &mut chooser, arrived);
            runs.push((seed, Figures::of(&outcome, parameters.shape.prefill)));
            if seed == seeds.first() {
                shown = outcome;
            }
        }
        let all: Vec<Figures> = runs.iter().map(|(_, figures)| figures.clone()).collect();
        Ok(Self {
            contender,
            gateways,
            figures: Figures::mean(&all),
            runs,
            shown,
        })
    }
}
