//! Owns Dynamo's direct mode: the choice travels in headers, the body stays unchanged, Dynamo runs the legs.
//!
//! Values are decimal unsigned 64-bit ids. Both spellings are sent: 1.2.1 knows only the legacy names, and in later
//! versions the new ones win. A frontend needs both workers or neither: one alone is an error after prefill has run.

use super::HeaderValue;
use super::protocol::{LegOrder, Protocol, ProtocolRules};
use crate::fleet::Target;
use crate::json::{Edits, Object};
use crate::request::{Generation, OVERRIDE_FIELDS, Request};

const DECODE: [&str; 2] = ["x-dynamo-worker-instance-id", "x-worker-instance-id"];
const PREFILL: [&str; 2] = ["x-dynamo-prefill-instance-id", "x-prefill-instance-id"];
const DECODE_RANK: [&str; 2] = ["x-dynamo-dp-rank", "x-dp-rank"];
const PREFILL_RANK: [&str; 2] = ["x-dynamo-prefill-dp-rank", "x-prefill-dp-rank"];

/// NVIDIA Dynamo frontends in `--router-mode direct`.
#[derive(Debug)]
pub struct DirectMode;

impl Protocol for DirectMode {
    fn rules(&self) -> &'static ProtocolRules {
        &ProtocolRules {
            name: "direct",
            order: LegOrder::Backend,
            reaches_workers: false,
            // Dynamo decides: the body is not touched.
            split: &Generation::ALL,
            split_if_configured: &[],
            has_generate_api: false,
            unserved: &[],
            // Dynamo checks the length itself.
            refuses_too_long: false,
        }
    }

    fn pair_headers(&self, prefill: &Target, decode: &Target) -> Vec<HeaderValue> {
        pair(prefill, decode)
    }

    fn worker_headers(&self, worker: &Target) -> Vec<HeaderValue> {
        whole(worker)
    }

    fn without_overrides(&self, request: &Request<'_>) -> Option<Edits> {
        without_overrides(request)
    }
}

/// Headers that name the pair.
fn pair(prefill: &Target, decode: &Target) -> Vec<HeaderValue> {
    let mut headers = whole(decode);
    headers.extend(named(PREFILL, prefill.worker.id.0));
    if let Some(rank) = prefill.rank {
        headers.extend(named(PREFILL_RANK, rank));
    }
    headers
}

/// Headers that name the one worker for the whole request.
fn whole(worker: &Target) -> Vec<HeaderValue> {
    let mut headers: Vec<HeaderValue> = named(DECODE, worker.worker.id.0).collect();
    if let Some(rank) = worker.rank {
        headers.extend(named(DECODE_RANK, rank));
    }
    headers
}

/// Edits that remove an untrusted caller's routing overrides from `nvext`: a query would make Dynamo skip prefill, and a
/// rank could differ from the picked one. Other annotations stay. None where there is nothing to remove.
fn without_overrides(request: &Request<'_>) -> Option<Edits> {
    let mut edits = request.body.edit();
    let mut found = false;
    for nvext in request.body.all("nvext") {
        if let Some(cleaned) = cleaned(nvext.value) {
            edits.replace(nvext, cleaned);
            found = true;
        }
    }
    found.then_some(edits)
}

fn cleaned(nvext: &str) -> Option<String> {
    let object = Object::parse(nvext.as_bytes(), &OVERRIDE_FIELDS).ok()?;
    let mut edits = object.edit();
    let mut found = false;
    for name in OVERRIDE_FIELDS {
        for member in object
            .all(name)
            .filter(|member| name != "annotations" || asks(member.value))
        {
            edits.remove(member);
            found = true;
        }
    }
    let bytes = found.then(|| edits.apply(nvext.as_bytes()))?;
    String::from_utf8(bytes).ok()
}

/// Whether annotations make the request a query, or cannot be read and therefore might.
fn asks(annotations: &str) -> bool {
    let read = serde_json::from_str::<Vec<String>>(annotations);
    read.map_or(annotations != "null", |read| {
        read.iter()
            .any(|said| said.starts_with("query_instance_id"))
    })
}

fn named(names: [&'static str; 2], value: impl ToString) -> impl Iterator<Item = HeaderValue> {
    let value = value.to_string();
    names.into_iter().map(move |name| (name, value.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Role, Worker, WorkerId};
    use std::sync::Arc;

    fn target(id: u64, rank: Option<u32>) -> Target {
        let worker = Worker {
            dp_size: 2,
            ..Worker::new(WorkerId(id), Role::Decode, None)
        };
        Target {
            worker: Arc::new(worker),
            rank,
        }
    }

    fn lines(headers: &[HeaderValue]) -> Vec<String> {
        headers
            .iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect()
    }

    #[test]
    fn both_spellings_and_full_64_bit_ids_are_sent() {
        let headers = pair(
            &target(u64::MAX, None),
            &target(9_431_470_230_267_614_657, None),
        );
        assert_eq!(
            lines(&headers),
            [
                "x-dynamo-worker-instance-id: 9431470230267614657",
                "x-worker-instance-id: 9431470230267614657",
                "x-dynamo-prefill-instance-id: 18446744073709551615",
                "x-prefill-instance-id: 18446744073709551615",
            ]
        );
    }

    #[test]
    fn ranks_of_prefill_and_decode_are_kept_apart() {
        let headers = lines(&pair(&target(1, Some(3)), &target(2, Some(0))));
        for line in [
            "x-dynamo-dp-rank: 0",
            "x-dp-rank: 0",
            "x-dynamo-prefill-dp-rank: 3",
            "x-prefill-dp-rank: 3",
        ] {
            assert!(headers.iter().any(|header| header == line), "{line}");
        }
    }

    #[test]
    fn what_an_untrusted_caller_steers_with_is_taken_out_however_it_is_written() {
        let leg = |body: &str| {
            let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
            without_overrides(&request)
                .map(|edits| String::from_utf8(edits.apply(body.as_bytes())).unwrap())
        };
        let body = |nvext: &str| {
            format!(r#"{{"model":"m", "nvext":{nvext},"messages":[],"seed":9007199254740993}}"#)
        };
        for (nvext, left) in [
            (
                r#"{"annotations":["query\u005finstance_id:"],"x":1}"#,
                r#"{"x":1}"#,
            ),
            (
                r#"{"x":1,"annotations":["query_instance_id:"]}"#,
                r#"{"x":1}"#,
            ),
            (r#"{"dp\u005frank":1}"#, "{}"),
            (
                r#"{"decode_worker_id":1,"prefill_dp_rank":2, "extra_fields":["worker_id"]}"#,
                r#"{"extra_fields":["worker_id"]}"#,
            ),
            (r#"{"annotations":7}"#, "{}"),
        ] {
            assert_eq!(leg(&body(nvext)).unwrap(), body(left), "{nvext}");
        }
        for harmless in [r#"{"annotations":["other"]}"#, "null", "{}", r#""x""#] {
            assert_eq!(leg(&body(harmless)), None, "{harmless}");
        }
    }
}
