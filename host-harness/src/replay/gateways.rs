//! Owns a fleet of gateways that share nothing but their engines.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::contender::ReplayContender;
use super::engine::{Parameters, START};
use super::own_router::OwnRouterError;
use super::router_model::{EngineMetrics, Reservation, RouterModel};
use super::trace::Request;

/// Distance of the gateways' seeds, so that no gateway repeats the random numbers of another, nor those of the balancer.
const BETWEEN_SEEDS: u64 = 0x9e37_79b9_7f4a_7c15;

/// Gateways, each with its own router, and the load balancer in front of them.
pub struct Gateways {
    each: Vec<Box<dyn RouterModel>>,
    balancer: StdRng,
    interval: Option<Duration>,
    /// Number of reports delivered so far.
    reports: u32,
}

impl Gateways {
    /// This many gateways; at least one.
    ///
    /// # Errors
    /// When the routing code refuses the parameters.
    pub fn new(
        contender: ReplayContender,
        count: u16,
        parameters: &Parameters,
        seed: u64,
    ) -> Result<Self, OwnRouterError> {
        let seed_of = |number: u64| seed.wrapping_add(number.wrapping_mul(BETWEEN_SEEDS));
        let each = (0..u64::from(count.max(1)))
            .map(|number| contender.router(parameters, seed_of(number)));
        Ok(Self {
            each: each.collect::<Result<_, _>>()?,
            balancer: StdRng::seed_from_u64(seed_of(u64::MAX)),
            interval: parameters.metrics_interval,
            reports: 0,
        })
    }

    fn count(&self) -> u32 {
        u32::try_from(self.each.len()).unwrap_or(u32::MAX)
    }
}

impl RouterModel for Gateways {
    fn reserve(
        &mut self,
        request: &Request,
        now: Duration,
    ) -> Result<Box<dyn Reservation>, String> {
        let gateway = self.balancer.random_range(0..self.each.len());
        self.each[gateway].reserve(request, now)
    }

    /// Each gateway once per interval, staggered at equal steps, like gateways that started at different times.
    fn next_report(&self) -> Option<Duration> {
        let step = self.interval? / self.count();
        Some(START + step * (self.reports + 1))
    }

    fn on_engine_metrics(&mut self, engines: &[EngineMetrics], now: Duration) {
        let gateway = (self.reports % self.count()) as usize;
        self.reports += 1;
        self.each[gateway].on_engine_metrics(engines, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::engine::Model;
    use crate::replay::router_model::{WorkerCounts, WorkerPair};
    use routing::prefix::Blocks;
    use std::cell::RefCell;
    use std::rc::Rc;

    /// Calls by gateway.
    type Calls = Rc<RefCell<Vec<(u16, Option<Duration>)>>>;

    struct Gateway(u16, Calls);

    struct Nothing;

    impl Reservation for Nothing {
        fn pair(&self) -> WorkerPair {
            WorkerPair {
                prefill: 0,
                decode: 0,
            }
        }

        fn first_token(&mut self, _now: Duration) {}

        fn generated(&mut self, _tokens: u64) {}
    }

    impl RouterModel for Gateway {
        fn reserve(
            &mut self,
            _request: &Request,
            _now: Duration,
        ) -> Result<Box<dyn Reservation>, String> {
            self.1.borrow_mut().push((self.0, None));
            Ok(Box::new(Nothing))
        }

        fn on_engine_metrics(&mut self, _engines: &[EngineMetrics], now: Duration) {
            self.1.borrow_mut().push((self.0, Some(now)));
        }
    }

    fn gateways(count: u16, interval: Option<Duration>) -> (Gateways, Calls) {
        let calls = Calls::default();
        let each = (0..count).map(|number| {
            let gateway: Box<dyn RouterModel> = Box::new(Gateway(number, Rc::clone(&calls)));
            gateway
        });
        let gateways = Gateways {
            each: each.collect(),
            balancer: StdRng::seed_from_u64(1),
            interval,
            reports: 0,
        };
        (gateways, calls)
    }

    fn request() -> Request {
        Request {
            arrival: Duration::ZERO,
            prompt_tokens: 100,
            output_tokens: 1,
            blocks: Blocks {
                scope: 0,
                sequence: vec![1],
                ..Blocks::default()
            },
            tail: None,
            session: Some(b"one conversation".to_vec()),
        }
    }

    #[test]
    fn requests_are_dealt_evenly_whatever_they_ask() {
        let (mut gateways, calls) = gateways(4, None);
        for _ in 0..4000 {
            gateways.reserve(&request(), START).unwrap();
        }
        assert_eq!(gateways.next_report(), None);
        for number in 0..4 {
            let dealt = calls
                .borrow()
                .iter()
                .filter(|call| call.0 == number)
                .count();
            assert!((900..1100).contains(&dealt), "{number}: {dealt}");
        }
    }

    #[test]
    fn each_hears_once_an_interval() {
        let (mut gateways, calls) = gateways(4, Some(Duration::from_secs(1)));
        while let Some(at) = gateways
            .next_report()
            .filter(|at| *at <= START + Duration::from_secs(2))
        {
            gateways.on_engine_metrics(&[], at);
        }
        let expected = (1..=8u16).map(|step| {
            let at = START + Duration::from_millis(250) * step.into();
            ((step - 1) % 4, Some(at))
        });
        assert_eq!(*calls.borrow(), expected.collect::<Vec<_>>());
    }

    #[test]
    fn one_gateway_chooses_as_if_there_were_none_before_it() {
        let parameters = Parameters {
            model: Model::Fcfs,
            workers: WorkerCounts {
                prefill: 3,
                decode: 3,
            },
            kv_blocks: 10,
            block_tokens: 16,
            prefill_rate: 1000.0,
            token_ms: 10.0,
            metrics_interval: None,
        };
        let policy = ReplayContender::Own("random");
        let mut alone = policy.router(&parameters, 7).unwrap();
        let mut gateways = Gateways::new(policy, 1, &parameters, 7).unwrap();
        for _ in 0..50 {
            let pairs = [
                alone.reserve(&request(), START).unwrap().pair(),
                gateways.reserve(&request(), START).unwrap().pair(),
            ];
            assert_eq!(pairs[0], pairs[1]);
        }
    }
}
