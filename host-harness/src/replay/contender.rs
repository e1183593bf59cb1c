//! Owns the list of contenders: the policies of pd-router, and the models of other routers.

use std::str::FromStr;

use super::engine::Parameters;
use super::own_router::{OwnRouter, OwnRouterError};
use super::peers::{LeastRequests, SglangThreshold};
use super::router_model::RouterModel;

/// A contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayContender {
    /// pd-router's own code, with the policy of that name for both roles.
    Own(&'static str),
    /// The threshold policy of SGLang's router.
    SglangThreshold,
    /// Plain least requests.
    LeastRequests,
}

/// All contenders in the order of display. The policy `direct` is absent: it requires each request to name its workers.
pub const ALL: [ReplayContender; 9] = [
    ReplayContender::Own("kv"),
    ReplayContender::Own("round_robin"),
    ReplayContender::Own("random"),
    ReplayContender::Own("power_of_two"),
    ReplayContender::Own("least_loaded"),
    ReplayContender::Own("prefix_hash"),
    ReplayContender::Own("session"),
    ReplayContender::SglangThreshold,
    ReplayContender::LeastRequests,
];

impl ReplayContender {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Own(policy) => policy,
            Self::SglangThreshold => "sglang_threshold",
            Self::LeastRequests => "least_requests",
        }
    }

    /// A new instance.
    ///
    /// # Errors
    /// When the routing code refuses the parameters.
    pub fn router(
        self,
        parameters: &Parameters,
        seed: u64,
    ) -> Result<Box<dyn RouterModel>, OwnRouterError> {
        let (workers, block_tokens) = (parameters.workers, parameters.block_tokens);
        Ok(match self {
            Self::Own(policy) => Box::new(OwnRouter::new(policy, parameters, seed)?),
            Self::SglangThreshold => Box::new(SglangThreshold::new(workers, block_tokens, seed)),
            Self::LeastRequests => Box::new(LeastRequests::new(workers, seed)),
        })
    }
}

/// The selected contenders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyChoice {
    /// One of them.
    One(ReplayContender),
    /// All, to be compared.
    All,
}

impl PolicyChoice {
    /// The selected contenders.
    pub fn contenders(&self) -> &[ReplayContender] {
        match self {
            Self::One(contender) => std::slice::from_ref(contender),
            Self::All => &ALL,
        }
    }
}

/// No contender has this name.
#[derive(Debug, thiserror::Error)]
#[error("there are {}, and `all` for all of them", names().join(", "))]
pub struct NoContender;

fn names() -> Vec<&'static str> {
    ALL.map(ReplayContender::name).to_vec()
}

impl FromStr for PolicyChoice {
    type Err = NoContender;

    fn from_str(text: &str) -> Result<Self, NoContender> {
        if text == "all" {
            return Ok(Self::All);
        }
        let found = ALL.into_iter().find(|contender| contender.name() == text);
        found.map(Self::One).ok_or(NoContender)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contenders_are_known_by_name() {
        for contender in ALL {
            let choice: PolicyChoice = contender.name().parse().unwrap();
            assert_eq!(choice.contenders(), [contender]);
        }
        assert_eq!("all".parse::<PolicyChoice>().unwrap().contenders(), ALL);
        let error = "direct".parse::<PolicyChoice>().unwrap_err().to_string();
        assert!(error.contains("kv, round_robin"), "{error}");
    }
}
