//! Owns what a trusted caller says about where its request goes: pins, a mere query, and constraints.
//!
//! Said in headers (both spellings) or in the body's `nvext`; headers win. Ids are decimal, unsigned, of 64 bits. A header
//! that cannot be read counts as absent, as Dynamo has it.

use std::rc::Rc;

use hashbrown::HashSet;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Refusal;
use super::nvext::Nvext;
use crate::config::KvWeights;
use crate::fleet::{Role, WorkerId};
use crate::rendezvous::Mode;
use crate::selection::cost::Tracking;
use crate::topology::Constraints;

/// The annotation that makes a request a query.
const QUERY: &str = "query_instance_id:";

/// Dynamo's way of saying in a header that a rank is not set.
const UNSET_RANK: u32 = u32::MAX;

/// What the caller says. All of it absent: a normal request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Steering {
    /// Only the names of the workers are asked for.
    pub query: bool,
    /// The prefill worker, for a pair.
    pub prefill: Pin,
    /// The decode worker, for a pair.
    pub decode: Pin,
    /// The worker that answers, where no decode worker is named: it decodes, or runs the request whole.
    pub backend: Option<WorkerId>,
    /// The only workers that may be picked, by their ids, whatever they do; none: all.
    pub allowed: Option<Rc<HashSet<WorkerId>>>,
    /// What the decode worker must and should hold.
    pub constraints: Constraints,
    /// The prompt as token ids, where the caller has them.
    pub token_data: Option<Vec<u32>>,
    /// What the caller knows of the answer to come.
    pub hints: Hints,
    /// What it would have weighed otherwise.
    pub weights: WeightOverride,
}

/// What a caller knows beforehand (`nvext.agent_hints`).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Hints {
    /// Tokens that the answer will have, by its estimate.
    pub expected_tokens: Option<u64>,
    /// Seconds of head start in a queue.
    pub priority: f64,
}

/// What a caller would have weighed otherwise for this request (Dynamo's `RouterConfigOverride`).
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WeightOverride {
    /// What a cached block is worth, in blocks that need not be computed.
    pub overlap_score_credit: Option<f64>,
    /// What prefill counts for; with 0 nothing of it does.
    pub prefill_load_scale: Option<f64>,
    /// The older name of that.
    overlap_score_weight: Option<f64>,
    /// How often dearer workers are picked.
    pub router_temperature: Option<f64>,
    /// Whether prefill counts at all.
    pub track_prefill_tokens: Option<bool>,
    /// Known, and without effect: blocks of requests under way are never taken for shared here.
    assume_kv_reuse: Option<bool>,
    /// Known, and without effect: there is no shared cache here.
    shared_cache_multiplier: Option<f64>,
}

impl WeightOverride {
    /// Reads what the caller says.
    fn read(said: Option<&RawValue>) -> Result<Self, Refusal> {
        let Some(said) = said else {
            return Ok(Self::default());
        };
        let read: Option<Self> = serde_json::from_str(said.get()).ok();
        read.filter(Self::is_sane).ok_or(Refusal::Field {
            name: "nvext.router_config_override",
            problem: "must be an object of overlap_score_credit, prefill_load_scale, router_temperature (numbers from 0), track_prefill_tokens (true or false)",
        })
    }

    /// Whether all of it can be meant.
    fn is_sane(&self) -> bool {
        let given = [
            self.overlap_score_credit,
            self.prefill_load_scale,
            self.overlap_score_weight,
            self.router_temperature,
            self.shared_cache_multiplier,
        ];
        given
            .into_iter()
            .flatten()
            .all(|value| value.is_finite() && value >= 0.0)
    }

    /// The pool's weights, as far as nothing else is said.
    pub fn over(&self, pool: KvWeights) -> KvWeights {
        let scale = self.prefill_load_scale.or(self.overlap_score_weight);
        // With the older name, 0 meant that neither cache nor load counted.
        let legacy_credit = (self.overlap_score_weight == Some(0.0)).then_some(0.0);
        let credit = self.overlap_score_credit.or(legacy_credit);
        KvWeights {
            overlap_score_credit: credit.unwrap_or(pool.overlap_score_credit),
            prefill_load_scale: scale.unwrap_or(pool.prefill_load_scale),
            router_temperature: self.router_temperature.unwrap_or(pool.router_temperature),
            ..pool
        }
    }

    /// Whether prefill counts.
    pub fn tracking(&self) -> Tracking {
        match self.track_prefill_tokens {
            Some(false) => Tracking::DecodeOnly,
            Some(true) | None => Tracking::Prefill,
        }
    }
}

/// A worker that the caller names, and a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pin {
    /// The worker.
    pub worker: Option<WorkerId>,
    /// The rank, with or without a worker.
    pub rank: Option<u32>,
}

impl Pin {
    /// The same, where it names nobody for that worker.
    pub fn or(self, backend: Option<WorkerId>) -> Self {
        Self {
            worker: self.worker.or(backend),
            rank: self.rank,
        }
    }
}

/// The headers that steer, each with the field it stands for; of two spellings the first one wins.
const HEADERS: [(&str, Field); 10] = [
    ("x-dynamo-worker-instance-id", Field::Decode),
    ("x-worker-instance-id", Field::Decode),
    ("x-dynamo-prefill-instance-id", Field::Prefill),
    ("x-prefill-instance-id", Field::Prefill),
    ("x-dynamo-dp-rank", Field::Rank),
    ("x-dp-rank", Field::Rank),
    ("x-data-parallel-rank", Field::Rank),
    ("x-dynamo-prefill-dp-rank", Field::PrefillRank),
    ("x-prefill-dp-rank", Field::PrefillRank),
    ("x-dynamo-backend-instance-id", Field::Backend),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Decode,
    Prefill,
    Backend,
    Rank,
    PrefillRank,
}

/// The header by which a gateway in front names the endpoints that it allows.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";

/// The headers by which a gateway in front overrides the model's name; the first one wins.
pub const MODEL_REWRITE: [&str; 2] = ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"];

/// The headers that name an objective, from which a priority follows; the first one wins.
pub const OBJECTIVE: [&str; 2] = [
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
];

/// The headers that name the flow which a request belongs to: flows of one priority take turns. The first one wins.
pub const FAIRNESS: [&str; 2] = [
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
];

/// The names of all headers that steer.
pub fn header_names() -> impl Iterator<Item = &'static str> {
    let numbers = HEADERS.iter().map(|(name, _)| *name);
    let names = [MODEL_REWRITE, OBJECTIVE, FAIRNESS].into_iter().flatten();
    numbers.chain([SUBSET]).chain(names)
}

/// What the first of these headers that is there says; none where it says nothing.
pub fn said<'h>(headers: &'h [(Vec<u8>, Vec<u8>)], names: &[&str]) -> Option<&'h [u8]> {
    let value = |name: &&str| {
        let mut named = headers
            .iter()
            .filter(|(known, _)| known.eq_ignore_ascii_case(name.as_bytes()));
        named.next().map(|(_, value)| value.trim_ascii())
    };
    names
        .iter()
        .find_map(value)
        .filter(|value| !value.is_empty())
}

/// The header that a caller names a worker of `role` with, for messages.
pub fn header_for(role: Role) -> &'static str {
    match role {
        Role::Prefill => "x-dynamo-prefill-instance-id",
        Role::Decode | Role::Aggregated => "x-dynamo-worker-instance-id",
    }
}

impl Steering {
    /// What a trusted caller says in its headers and in the body's `nvext`.
    ///
    /// # Errors
    /// [`Refusal::Field`] names what of `nvext` is there but cannot be read: a pin that is not understood must not be taken for none.
    pub fn read<'h>(
        headers: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone,
        nvext: Option<&str>,
    ) -> Result<Self, Refusal> {
        let said = nvext.map(Nvext::read).transpose()?.unwrap_or_default();
        let weights = WeightOverride::read(said.weights)?;
        let number = |field: Field| {
            let names = HEADERS
                .iter()
                .filter(|(_, stands_for)| *stands_for == field);
            names
                .map(|(name, _)| *name)
                .find_map(|name| header_number(headers.clone(), name))
        };
        let rank_of = |field: Field| {
            let rank = number(field).and_then(|rank| u32::try_from(rank).ok());
            rank.filter(|rank| *rank != UNSET_RANK)
        };
        let rank = rank_of(Field::Rank).or(said.dp_rank);
        let query = said
            .annotations
            .unwrap_or_default()
            .iter()
            .any(|said| said.starts_with(QUERY));
        Ok(Self {
            query,
            prefill: Pin {
                worker: number(Field::Prefill)
                    .or(said.prefill_worker_id)
                    .map(WorkerId),
                rank: rank_of(Field::PrefillRank)
                    .or(said.prefill_dp_rank)
                    .or(rank),
            },
            decode: Pin {
                worker: number(Field::Decode)
                    .or(said.decode_worker_id)
                    .map(WorkerId),
                rank,
            },
            backend: number(Field::Backend)
                .or(said.backend_instance_id)
                .map(WorkerId),
            allowed: said
                .allowed_worker_ids
                .map(|ids| Rc::new(ids.into_iter().map(WorkerId).collect())),
            constraints: said.constraints,
            token_data: said.token_data,
            hints: said.hints,
            weights,
        })
    }

    /// The pin for a prefill worker. `backend_instance_id` is none: whoever answers, any prefill worker may hand over to it.
    pub fn prefill_pin(&self) -> Pin {
        self.prefill
    }

    /// The pin for a decode worker, and for one that runs the request whole.
    pub fn decode_pin(&self) -> Pin {
        self.decode.or(self.backend)
    }

    /// Whether a worker is among those that may be picked.
    pub fn allows(&self, worker: WorkerId) -> bool {
        self.allowed
            .as_ref()
            .is_none_or(|ids| ids.contains(&worker))
    }

    /// The kind of request this makes.
    pub fn mode(&self) -> Mode {
        if self.query {
            return Mode::QueryOnly;
        }
        let pinned =
            self.prefill.worker.is_some() || self.decode.worker.is_some() || self.backend.is_some();
        if pinned {
            Mode::PreRouted
        } else {
            Mode::Normal
        }
    }
}

fn header_number<'h>(
    mut headers: impl Iterator<Item = (&'h [u8], &'h [u8])>,
    wanted: &str,
) -> Option<u64> {
    let (_, value) = headers.find(|(name, _)| name.eq_ignore_ascii_case(wanted.as_bytes()))?;
    std::str::from_utf8(value).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: &[(&str, &str)], nvext: Option<&str>) -> Steering {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        Steering::read(headers, nvext).unwrap()
    }

    #[test]
    fn both_spellings_are_read_the_new_one_wins_and_headers_win_over_nvext() {
        let max = u64::MAX.to_string();
        let said = read(
            &[
                ("x-worker-instance-id", "1"),
                ("X-Dynamo-Worker-Instance-Id", &max),
                ("x-prefill-instance-id", " 7 "),
                ("x-dp-rank", "3"),
                ("x-prefill-dp-rank", "5"),
            ],
            Some(r#"{"decode_worker_id":4,"prefill_worker_id":8,"dp_rank":1,"other":[1]}"#),
        );
        assert_eq!(
            said.decode,
            Pin {
                worker: Some(WorkerId(u64::MAX)),
                rank: Some(3)
            }
        );
        assert_eq!(
            said.prefill,
            Pin {
                worker: Some(WorkerId(7)),
                rank: Some(5)
            }
        );
        assert_eq!(said.mode(), Mode::PreRouted);
    }

    #[test]
    fn what_cannot_be_read_in_a_header_counts_as_absent() {
        for value in ["", "-1", "0x10", "abc", "18446744073709551616", "1.0"] {
            let said = read(&[("x-worker-instance-id", value)], None);
            assert_eq!(said, Steering::default(), "{value}");
        }
        assert_eq!(read(&[("x-dp-rank", "4294967295")], None).decode.rank, None);
    }

    #[test]
    fn the_prefill_rank_falls_back_to_the_common_one() {
        let said = read(&[], Some(r#"{"dp_rank":2}"#));
        assert_eq!((said.prefill.rank, said.decode.rank), (Some(2), Some(2)));
        let said = read(&[], Some(r#"{"prefill_dp_rank":2}"#));
        assert_eq!((said.prefill.rank, said.decode.rank), (Some(2), None));
    }

    #[test]
    fn a_query_needs_the_colon() {
        assert_eq!(
            read(&[], Some(r#"{"annotations":["query_instance_id:"]}"#)).mode(),
            Mode::QueryOnly
        );
        assert_eq!(
            read(&[], Some(r#"{"annotations":["query_instance_id:decode"]}"#)).mode(),
            Mode::QueryOnly
        );
        assert_eq!(
            read(&[], Some(r#"{"annotations":["query_instance_id"]}"#)).mode(),
            Mode::Normal
        );
    }

    #[test]
    fn a_pin_that_is_not_understood_is_an_error() {
        let none: [(&[u8], &[u8]); 0] = [];
        for bad in [
            r#""x""#,
            r#"{"decode_worker_id":-1}"#,
            r#"{"decode_worker_id":"7"}"#,
            r#"{"annotations":"q"}"#,
        ] {
            assert!(
                Steering::read(none.into_iter(), Some(bad)).is_err(),
                "{bad}"
            );
        }
        assert!(Steering::read(none.into_iter(), Some("null")).is_ok());
    }
}
