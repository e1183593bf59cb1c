//! Owns pd-router's own routing code as a contender: the same calls that the filter makes once it has parsed a body.

use std::time::Duration;

use routing::config::{Config, ConfigError};
use routing::fleet::{Role, Worker, WorkerId};
use routing::route::{Assignment, Report, Router, SelectionRequest};
use serde_json::{Value, json};

use super::engine::Parameters;
use super::router_model::{EngineMetrics, Reservation, RouterModel, WorkerPair};
use super::trace::Request;

/// The one model of all requests.
const MODEL: &str = "replayed";

/// A router in virtual time.
pub struct OwnRouter(Router);

/// The routing code refuses the configuration made from the arguments.
#[derive(Debug, thiserror::Error)]
#[error("policy {policy}: {source}")]
pub struct OwnRouterError {
    policy: &'static str,
    source: ConfigError,
}

impl OwnRouter {
    /// A router with that policy for both roles, over workers that are idle and empty.
    ///
    /// # Errors
    /// When the routing code does not have the policy, or refuses a parameter.
    pub fn new(
        policy: &'static str,
        parameters: &Parameters,
        seed: u64,
    ) -> Result<Self, OwnRouterError> {
        let document = document(policy, parameters).to_string();
        let config = Config::parse(document.as_bytes());
        let mut config = config.map_err(|source| OwnRouterError { policy, source })?;
        Ok(Self(Router::new(
            config.pools.remove(0),
            seed,
            0,
            Duration::ZERO,
        )))
    }
}

/// A pool's configuration: defaults, except for the command line's values. A worker's id is its number.
fn document(policy: &str, parameters: &Parameters) -> Value {
    let workers: Vec<Value> = (0..parameters.workers.total())
        .map(|number| {
            let role = match number < parameters.workers.prefill {
                true => Role::Prefill,
                false => Role::Decode,
            };
            json!({
                "id": number,
                "role": role.name(),
                "address": address(number),
                "model": MODEL,
                "kv_blocks": parameters.kv_blocks,
            })
        })
        .collect();
    json!({ "pools": [{
        "name": "replay",
        "protocol": "nixl",
        "block_tokens": parameters.block_tokens,
        "selection": { "prefill": policy, "decode": policy },
        "discovery": { "static": { "workers": workers } },
    }] })
}

/// A distinct address for each worker, without a listener.
fn address(number: usize) -> String {
    let [.., a, b, c] = number.to_be_bytes();
    format!("10.{a}.{b}.{c}:8000")
}

impl RouterModel for OwnRouter {
    fn reserve(
        &mut self,
        request: &Request,
        now: Duration,
    ) -> Result<Box<dyn Reservation>, String> {
        let ask = SelectionRequest {
            model: MODEL,
            prompt_tokens: request.prompt_tokens,
            blocks: &request.blocks,
            session: request.session.as_deref(),
            // The answer's length is in the trace, but not known to a router.
            ..SelectionRequest::default()
        };
        let assignment = self
            .0
            .reserve(&ask, now)
            .map_err(|refusal| refusal.to_string())?;
        let decode = number(assignment.decode.as_deref());
        Ok(Box::new(BookedAssignment {
            pair: WorkerPair {
                prefill: assignment
                    .prefill
                    .as_deref()
                    .map_or(decode, |worker| number(Some(worker))),
                decode,
            },
            assignment,
        }))
    }

    fn on_engine_metrics(&mut self, engines: &[EngineMetrics], now: Duration) {
        let report = |(id, engine): (u64, &EngineMetrics)| Report {
            worker: WorkerId(id),
            at: now,
            // No engine restarts here.
            started: None,
            waiting: Some(engine.waiting),
            running: Some(engine.running),
            kv_use: Some(engine.kv_use),
            // Set by the configuration, like the block size.
            kv_blocks: None,
            block_tokens: None,
        };
        let reports: Vec<Report> = (0u64..).zip(engines).map(report).collect();
        self.0.apply_reports(&reports);
    }
}

fn number(worker: Option<&Worker>) -> usize {
    worker.map_or(0, |worker| worker.id.0 as usize)
}

/// An assignment, and the workers' numbers.
struct BookedAssignment {
    pair: WorkerPair,
    assignment: Assignment,
}

impl Reservation for BookedAssignment {
    fn pair(&self) -> WorkerPair {
        self.pair
    }

    fn first_token(&mut self, now: Duration) {
        self.assignment.first_token(now);
    }

    fn generated(&mut self, tokens: u64) {
        self.assignment.generated(tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::contender::{ALL, ReplayContender};
    use crate::replay::engine::{Model, START};
    use crate::replay::router_model::WorkerCounts;
    use routing::prefix::Blocks;

    fn parameters() -> Parameters {
        Parameters {
            model: Model::Fcfs,
            workers: WorkerCounts {
                prefill: 2,
                decode: 3,
            },
            kv_blocks: 10,
            block_tokens: 16,
            prefill_rate: 1000.0,
            token_ms: 10.0,
            metrics_interval: None,
        }
    }

    fn request() -> Request {
        Request {
            arrival: Duration::ZERO,
            prompt_tokens: 100,
            output_tokens: 1,
            blocks: Blocks {
                scope: 0,
                sequence: vec![1, 2, 3, 4, 5, 6],
                ..Blocks::default()
            },
            tail: None,
            session: None,
        }
    }

    #[test]
    fn every_policy_chooses_workers_of_each_role() {
        for contender in ALL {
            let ReplayContender::Own(policy) = contender else {
                continue;
            };
            let mut routed = OwnRouter::new(policy, &parameters(), 1).unwrap();
            for _ in 0..20 {
                let reservation = routed.reserve(&request(), START).unwrap();
                let pair = reservation.pair();
                assert!(
                    pair.prefill < 2 && (2..5).contains(&pair.decode),
                    "{policy}: {pair:?}"
                );
            }
        }
    }

    #[test]
    fn a_seat_is_in_the_books_until_it_is_dropped() {
        let mut routed = OwnRouter::new("kv", &parameters(), 1).unwrap();
        let mut reservation = routed.reserve(&request(), START).unwrap();
        assert_eq!(routed.0.total_load().prefills, 1);
        reservation.first_token(START + Duration::from_secs(1));
        let load = routed.0.total_load();
        assert_eq!((load.prefills, load.decodes), (0, 1));
        reservation.generated(1);
        drop(reservation);
        assert!(routed.0.total_load().is_idle());
    }

    #[test]
    fn a_worker_that_others_keep_busy_is_avoided() {
        let mut routed = OwnRouter::new("least_loaded", &parameters(), 1).unwrap();
        let busy = EngineMetrics {
            waiting: 5,
            running: 1,
            kv_use: 0.9,
        };
        let idle = EngineMetrics::default();
        routed.on_engine_metrics(&[busy, idle, busy, idle, busy], START);
        for _ in 0..20 {
            let reservation = routed.reserve(&request(), START).unwrap();
            let (prefill, decode) = (1, 3);
            assert_eq!(reservation.pair(), WorkerPair { prefill, decode });
        }
    }

    #[test]
    fn what_the_routing_code_does_not_have_is_an_error() {
        let error = OwnRouter::new("nonsense", &parameters(), 1)
            .err()
            .unwrap()
            .to_string();
        assert!(error.starts_with("policy nonsense: "), "{error}");
    }
}
