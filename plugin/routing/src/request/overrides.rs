//! Owns a trusted caller's routing overrides: pins, queries, and constraints.
//!
//! Overrides come in headers (both spellings) or in the body's `nvext`; headers win. Ids are decimal, unsigned, of 64 bits.
//! A header that cannot be read counts as absent, as in Dynamo.

use std::sync::Arc;

use hashbrown::HashSet;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Refusal;
use super::nvext::Nvext;
use crate::fleet::{Role, WorkerId};
use crate::rendezvous::Mode;
use crate::selection::KvWeights;
use crate::selection::cost::Tracking;
use crate::topology::Constraints;

/// The annotation that makes a request a query.
const QUERY: &str = "query_instance_id:";

/// Dynamo's header value for a rank that is not set.
const UNSET_RANK: u32 = u32::MAX;

/// A caller's routing overrides. Without any: a normal request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RoutingOverrides {
    /// Whether only the names of the workers are requested.
    pub query: bool,
    /// The prefill worker, for a pair.
    pub prefill: Pin,
    /// The decode worker, for a pair.
    pub decode: Pin,
    /// The worker that answers, where no decode worker is named: it decodes, or runs the whole request.
    pub backend: Option<WorkerId>,
    /// The only workers that may be picked, by id, whatever their role; none: all.
    pub allowed: Option<Arc<HashSet<WorkerId>>>,
    /// Taints that the decode worker must and should carry.
    pub constraints: Constraints,
    /// The prompt as token ids, where the caller has them.
    pub token_data: Option<Vec<u32>>,
    /// The caller's knowledge of the coming answer.
    pub hints: Hints,
    /// The caller's changes to the weights.
    pub weights: WeightOverride,
}

/// Hints of a caller (`nvext.agent_hints`).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Hints {
    /// Expected tokens of the answer, estimated by the caller.
    pub expected_tokens: Option<u64>,
    /// Seconds of head start in a queue.
    pub priority: f64,
}

/// A caller's weights for this request (Dynamo's `RouterConfigOverride`).
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WeightOverride {
    /// Credit for a cached block, in blocks that need not be computed.
    pub overlap_score_credit: Option<f64>,
    /// Weight of prefill; with 0 prefill does not count.
    pub prefill_load_scale: Option<f64>,
    /// The older name of `prefill_load_scale`.
    overlap_score_weight: Option<f64>,
    /// Temperature of the draw: the higher, the more often workers of higher cost are picked.
    pub router_temperature: Option<f64>,
    /// Whether prefill counts at all.
    pub track_prefill_tokens: Option<bool>,
    /// Accepted without effect: blocks of requests under way never count as shared here.
    assume_kv_reuse: Option<bool>,
    /// Accepted without effect: there is no shared cache here.
    shared_cache_multiplier: Option<f64>,
}

impl WeightOverride {
    /// Reads the caller's weights.
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

    /// Whether all numbers are finite and not negative.
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

    /// The pool's weights with these overrides.
    pub fn over(&self, pool: KvWeights) -> KvWeights {
        let scale = self.prefill_load_scale.or(self.overlap_score_weight);
        // Under the older name, 0 meant that neither cache nor load counted.
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

/// A worker and a rank that the caller names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pin {
    /// The worker.
    pub worker: Option<WorkerId>,
    /// The rank, with or without a worker.
    pub rank: Option<u32>,
}

impl Pin {
    /// This pin, with `backend` where it names no worker.
    pub fn or(self, backend: Option<WorkerId>) -> Self {
        Self {
            worker: self.worker.or(backend),
            rank: self.rank,
        }
    }
}

/// The headers of routing overrides with their fields; of two spellings the first one wins.
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

/// The header in which a gateway in front lists the endpoints that it allows.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";

/// The headers in which a gateway in front overrides the model's name; the first one wins.
pub const MODEL_REWRITE: [&str; 2] = ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"];

/// The headers that name an objective, which gives a priority; the first one wins.
pub const OBJECTIVE: [&str; 2] = [
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
];

/// The headers that name a request's flow: flows of one priority take turns. The first one wins.
pub const FAIRNESS: [&str; 2] = [
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
];

/// The names of all headers with routing overrides.
pub fn header_names() -> impl Iterator<Item = &'static str> {
    let numbers = HEADERS.iter().map(|(name, _)| *name);
    let names = [MODEL_REWRITE, OBJECTIVE, FAIRNESS].into_iter().flatten();
    numbers.chain([SUBSET]).chain(names)
}

/// The value of the first of these headers that is present; none where it is empty.
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

/// The header in which a caller names a worker of `role`, for messages.
pub fn header_for(role: Role) -> &'static str {
    match role {
        Role::Prefill => "x-dynamo-prefill-instance-id",
        Role::Decode | Role::Aggregated => "x-dynamo-worker-instance-id",
    }
}

impl RoutingOverrides {
    /// Reads a trusted caller's overrides from its headers and the body's `nvext`.
    ///
    /// # Errors
    /// [`Refusal::Field`] names a member of `nvext` that cannot be read: a pin that is not understood must not count as none.
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
                .map(|ids| Arc::new(ids.into_iter().map(WorkerId).collect())),
            constraints: said.constraints,
            token_data: said.token_data,
            hints: said.hints,
            weights,
        })
    }

    /// The pin for a role. `backend_instance_id` pins no prefill worker: any may hand over to the backend.
    pub fn pin(&self, role: Role) -> Pin {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode | Role::Aggregated => self.decode_pin(),
        }
    }

    /// The pin for a decode worker, or for the worker that runs the whole request.
    pub fn decode_pin(&self) -> Pin {
        self.decode.or(self.backend)
    }

    /// Whether a worker may be picked.
    pub fn allows(&self, worker: WorkerId) -> bool {
        self.allowed
            .as_ref()
            .is_none_or(|ids| ids.contains(&worker))
    }

    /// The mode of a request with these overrides.
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

    fn read(headers: &[(&str, &str)], nvext: Option<&str>) -> RoutingOverrides {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        RoutingOverrides::read(headers, nvext).unwrap()
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
            assert_eq!(said, RoutingOverrides::default(), "{value}");
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
                RoutingOverrides::read(none.into_iter(), Some(bad)).is_err(),
                "{bad}"
            );
        }
        assert!(RoutingOverrides::read(none.into_iter(), Some("null")).is_ok());
    }
}
