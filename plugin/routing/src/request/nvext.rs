//! Owns the reading of routing overrides in `nvext`: member by member, so that errors name the member.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Refusal;
use super::overrides::Hints;
use crate::json::{JsonError, Object};
use crate::topology::Constraints;

/// Fields of `nvext` that are routing overrides; ranks are among them, since the headers name none for a worker with only one.
pub const OVERRIDE_FIELDS: [&str; 7] = [
    "annotations",
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "allowed_worker_ids",
];

const ID: &str = "must be an unsigned number of 64 bits";
const RANK: &str = "must be an unsigned number of 32 bits";

/// A routing override, and the message where it cannot be read.
struct Known {
    key: &'static str,
    name: &'static str,
    problem: &'static str,
}

macro_rules! known {
    ($($constant:ident: $prefix:literal, $key:literal, $problem:expr;)*) => {
        $(const $constant: Known = Known {
            key: $key,
            name: concat!($prefix, $key),
            problem: $problem,
        };)*
    };
}

known! {
    ANNOTATIONS: "nvext.", "annotations", "must be a list of strings";
    BACKEND: "nvext.", "backend_instance_id", ID;
    PREFILL: "nvext.", "prefill_worker_id", ID;
    DECODE: "nvext.", "decode_worker_id", ID;
    DP_RANK: "nvext.", "dp_rank", RANK;
    PREFILL_RANK: "nvext.", "prefill_dp_rank", RANK;
    ALLOWED: "nvext.", "allowed_worker_ids", "must be a list of unsigned numbers of 64 bits";
    CONSTRAINTS: "nvext.", "routing_constraints", "must be an object";
    TOKENS: "nvext.", "token_data", "must be a list of unsigned numbers of 32 bits";
    HINTS: "nvext.", "agent_hints", "must be an object";
    WEIGHTS: "nvext.", "router_config_override", "must be an object";
    REQUIRED: "nvext.routing_constraints.", "required_taints", "must be a list of strings";
    PREFERRED: "nvext.routing_constraints.", "preferred_taints", "must be an object of numbers";
    EXPECTED: "nvext.agent_hints.", "osl", "must be an unsigned number of 64 bits";
    PRIORITY: "nvext.agent_hints.", "priority", "must be a number";
    LATENCY: "nvext.agent_hints.", "latency_sensitivity", "must be a number";
}

/// The routing overrides in `nvext`. Other fields belong to the backend.
#[derive(Debug, Default)]
pub(super) struct Nvext<'a> {
    pub(super) annotations: Option<Vec<String>>,
    pub(super) backend_instance_id: Option<u64>,
    pub(super) prefill_worker_id: Option<u64>,
    pub(super) decode_worker_id: Option<u64>,
    pub(super) dp_rank: Option<u32>,
    pub(super) prefill_dp_rank: Option<u32>,
    pub(super) allowed_worker_ids: Option<Vec<u64>>,
    pub(super) constraints: Constraints,
    pub(super) token_data: Option<Vec<u32>>,
    pub(super) hints: Hints,
    pub(super) weights: Option<&'a RawValue>,
}

impl<'a> Nvext<'a> {
    /// Reads the overrides; null means none.
    ///
    /// # Errors
    /// [`Refusal::Field`] names the member that cannot be read.
    pub(super) fn read(text: &'a str) -> Result<Self, Refusal> {
        let known = [
            &ANNOTATIONS,
            &BACKEND,
            &PREFILL,
            &DECODE,
            &DP_RANK,
            &PREFILL_RANK,
            &ALLOWED,
            &CONSTRAINTS,
            &TOKENS,
            &HINTS,
            &WEIGHTS,
        ];
        let Some(said) = object("nvext", text, &known)? else {
            return Ok(Self::default());
        };
        Ok(Self {
            annotations: value(&said, &ANNOTATIONS)?,
            backend_instance_id: value(&said, &BACKEND)?,
            prefill_worker_id: value(&said, &PREFILL)?,
            decode_worker_id: value(&said, &DECODE)?,
            dp_rank: value(&said, &DP_RANK)?,
            prefill_dp_rank: value(&said, &PREFILL_RANK)?,
            allowed_worker_ids: value(&said, &ALLOWED)?,
            constraints: constraints(&said)?,
            token_data: value(&said, &TOKENS)?,
            hints: hints(&said)?,
            weights: value(&said, &WEIGHTS)?,
        })
    }
}

fn constraints(nvext: &Object<'_>) -> Result<Constraints, Refusal> {
    let Some(said) = inner(nvext, &CONSTRAINTS, &[&REQUIRED, &PREFERRED])? else {
        return Ok(Constraints::default());
    };
    Ok(Constraints {
        required_taints: value(&said, &REQUIRED)?.unwrap_or_default(),
        preferred_taints: value(&said, &PREFERRED)?.unwrap_or_default(),
    })
}

fn hints(nvext: &Object<'_>) -> Result<Hints, Refusal> {
    let Some(said) = inner(nvext, &HINTS, &[&EXPECTED, &PRIORITY, &LATENCY])? else {
        return Ok(Hints::default());
    };
    let priority: Option<f64> = value(&said, &PRIORITY)?;
    let jump = priority.or(value(&said, &LATENCY)?).unwrap_or(0.0);
    Ok(Hints {
        expected_tokens: value(&said, &EXPECTED)?,
        priority: if jump.is_finite() { jump.max(0.0) } else { 0.0 },
    })
}

/// An object inside `nvext`; none where missing or null.
fn inner<'a>(
    nvext: &Object<'a>,
    member: &Known,
    known: &[&Known],
) -> Result<Option<Object<'a>>, Refusal> {
    match nvext.get(member.key) {
        Some(found) => object(member.name, found.value, known),
        None => Ok(None),
    }
}

fn object<'a>(
    name: &'static str,
    text: &'a str,
    known: &[&Known],
) -> Result<Option<Object<'a>>, Refusal> {
    if text == "null" {
        return Ok(None);
    }
    let keys: Vec<&str> = known.iter().map(|known| known.key).collect();
    let read = Object::parse(text.as_bytes(), &keys);
    read.map(Some).map_err(|error| Refusal::Field {
        name,
        problem: match error {
            JsonError::TooManyRepeats => "repeats a member too often",
            JsonError::NotAnObject | JsonError::Syntax(_) => "must be an object",
        },
    })
}

/// The last value of duplicate members counts, as in the body itself; null means none.
fn value<'a, T: Deserialize<'a>>(said: &Object<'a>, known: &Known) -> Result<Option<T>, Refusal> {
    let Some(member) = said.get(known.key) else {
        return Ok(None);
    };
    serde_json::from_str(member.value).map_err(|_| Refusal::Field {
        name: known.name,
        problem: known.problem,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::RoutingOverrides;

    #[test]
    fn what_cannot_be_read_in_nvext_is_named() {
        let none: [(&[u8], &[u8]); 0] = [];
        for (bad, field) in [
            (r#"3"#, "nvext"),
            (
                r#"{"agent_hints":{"priority":"x"}}"#,
                "nvext.agent_hints.priority",
            ),
            (
                r#"{"agent_hints":{"latency_sensitivity":[]}}"#,
                "nvext.agent_hints.latency_sensitivity",
            ),
            (r#"{"agent_hints":{"osl":-1}}"#, "nvext.agent_hints.osl"),
            (r#"{"agent_hints":3}"#, "nvext.agent_hints"),
            (r#"{"token_data":[4294967296]}"#, "nvext.token_data"),
            (r#"{"allowed_worker_ids":[-1]}"#, "nvext.allowed_worker_ids"),
            (r#"{"annotations":"q"}"#, "nvext.annotations"),
            (r#"{"backend_instance_id":-1}"#, "nvext.backend_instance_id"),
            (r#"{"prefill_worker_id":1.5}"#, "nvext.prefill_worker_id"),
            (r#"{"decode_worker_id":"7"}"#, "nvext.decode_worker_id"),
            (r#"{"dp_rank":4294967296}"#, "nvext.dp_rank"),
            (r#"{"prefill_dp_rank":{}}"#, "nvext.prefill_dp_rank"),
            (r#"{"routing_constraints":[]}"#, "nvext.routing_constraints"),
            (
                r#"{"routing_constraints":{"required_taints":[1]}}"#,
                "nvext.routing_constraints.required_taints",
            ),
            (
                r#"{"routing_constraints":{"preferred_taints":{"a":"b"}}}"#,
                "nvext.routing_constraints.preferred_taints",
            ),
            (
                r#"{"router_config_override":3}"#,
                "nvext.router_config_override",
            ),
        ] {
            let refusal = RoutingOverrides::read(none.into_iter(), Some(bad)).unwrap_err();
            assert!(
                matches!(refusal, Refusal::Field { name, .. } if name == field),
                "{bad}: {refusal}"
            );
        }
    }

    #[test]
    fn of_two_members_of_nvext_the_last_one_counts() {
        let said = Nvext::read(
            r#"{"prefill_worker_id":"x","prefill_worker_id":2,"agent_hints":{"osl":-1,"osl":7,"priority":1,"priority":3}}"#,
        )
        .unwrap();
        assert_eq!(said.prefill_worker_id, Some(2));
        assert_eq!(
            (said.hints.expected_tokens, said.hints.priority),
            (Some(7), 3.0)
        );
    }
}
