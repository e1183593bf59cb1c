//! Owns a fleet of gateways that share nothing but their engines.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::chooser::{Chooser, Held, Status};
use super::contender::Contender;
use super::engine::{Parameters, START};
use super::routed::RoutedError;
use super::trace::Request;

/// Distance of the gateways' seeds, so that no gateway repeats the random numbers of another, nor those of the balancer.
const BETWEEN_SEEDS: u64 = 0x9e37_79b9_7f4a_7c15;

/// Gateways, each with its own router, and the load balancer in front of them.
pub struct Gateways {
    each: Vec<Box<dyn Chooser>>,
    balancer: StdRng,
    interval: Option<Duration>,
    /// Number of reports delivered so far.
    heard: u32,
}

impl Gateways {
    /// This many gateways; at least one.
    ///
    /// # Errors
    /// When the routing code refuses the parameters.
    pub fn new(
        contender: Contender,
        count: u16,
        parameters: &Parameters,
        seed: u64,
    ) -> Result<Self, RoutedError> {
        let seed_of = |number: u64| seed.wrapping_add(number.wrapping_mul(BETWEEN_SEEDS));
        let each = (0..u64::from(count.max(1)))
            .map(|number| contender.chooser(parameters, seed_of(number)));
        Ok(Self {
            each: each.collect::<Result<_, _>>()?,
            balancer: StdRng::seed_from_u64(seed_of(u64::MAX)),
            interval: parameters.metrics_interval,
            heard: 0,
        })
    }

    fn count(&self) -> u32 {
        u32::try_from(self.each.len()).unwrap_or(u32::MAX)
    }
}

impl Chooser for Gateways {
    fn reserve(&mut self, request: &Request, now: Duration) -> Result<Box<dyn Held>, String> {
        let gateway = self.balancer.random_range(0..self.each.len());
        self.each[gateway].reserve(request, now)
    }

    /// Each gateway once per interval, staggered at equal steps, like gateways that started at different times.
    fn listens(&self) -> Option<Duration> {
        let step = self.interval? / self.count();
        Some(START + step * (self.heard + 1))
    }

    fn hear(&mut self, engines: &[Status], now: Duration) {
        let gateway = (self.heard % self.count()) as usize;
        self.heard += 1;
        self.each[gateway].hear(engines, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::chooser::{Place, Shape};
    use crate::replay::engine::Model;
    use routing::prefix::Blocks;
    use std::cell::RefCell;
    use std::rc::Rc;

    /// Calls by gateway.
    type Told = Rc<RefCell<Vec<(u16, Option<Duration>)>>>;

    struct Gateway(u16, Told);

    struct Nothing;

    impl Held for Nothing {
        fn place(&self) -> Place {
            Place {
                prefill: 0,
                decode: 0,
            }
        }

        fn first_token(&mut self, _now: Duration) {}

        fn generated(&mut self, _tokens: u64) {}
    }

    impl Chooser for Gateway {
        fn reserve(&mut self, _request: &Request, _now: Duration) -> Result<Box<dyn Held>, String> {
            self.1.borrow_mut().push((self.0, None));
            Ok(Box::new(Nothing))
        }

        fn hear(&mut self, _engines: &[Status], now: Duration) {
            self.1.borrow_mut().push((self.0, Some(now)));
        }
    }

    fn gateways(count: u16, interval: Option<Duration>) -> (Gateways, Told) {
        let told = Told::default();
        let each = (0..count).map(|number| {
            let gateway: Box<dyn Chooser> = Box::new(Gateway(number, Rc::clone(&told)));
            gateway
        });
        let gateways = Gateways {
            each: each.collect(),
            balancer: StdRng::seed_from_u64(1),
            interval,
            heard: 0,
        };
        (gateways, told)
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
        let (mut gateways, told) = gateways(4, None);
        for _ in 0..4000 {
            gateways.reserve(&request(), START).unwrap();
        }
        assert_eq!(gateways.listens(), None);
        for number in 0..4 {
            let dealt = told.borrow().iter().filter(|told| told.0 == number).count();
            assert!((900..1100).contains(&dealt), "{number}: {dealt}");
        }
    }

    #[test]
    fn each_hears_once_an_interval() {
        let (mut gateways, told) = gateways(4, Some(Duration::from_secs(1)));
        while let Some(at) = gateways
            .listens()
            .filter(|at| *at <= START + Duration::from_secs(2))
        {
            gateways.hear(&[], at);
        }
        let expected = (1..=8u16).map(|step| {
            let at = START + Duration::from_millis(250) * step.into();
            ((step - 1) % 4, Some(at))
        });
        assert_eq!(*told.borrow(), expected.collect::<Vec<_>>());
    }

    #[test]
    fn one_gateway_chooses_as_if_there_were_none_before_it() {
        let parameters = Parameters {
            model: Model::Fcfs,
            shape: Shape {
                prefill: 3,
                decode: 3,
            },
            kv_blocks: 10,
            block_tokens: 16,
            prefill_rate: 1000.0,
            token_ms: 10.0,
            metrics_interval: None,
        };
        let policy = Contender::Own("random");
        let mut alone = policy.chooser(&parameters, 7).unwrap();
        let mut gateways = Gateways::new(policy, 1, &parameters, 7).unwrap();
        for _ in 0..50 {
            let places = [
                alone.reserve(&request(), START).unwrap().place(),
                gateways.reserve(&request(), START).unwrap().place(),
            ];
            assert_eq!(places[0], places[1]);
        }
    }
}
