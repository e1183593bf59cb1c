//! Owns Dynamo's direct mode: the choice travels in headers, the body is not touched, Dynamo runs the legs.
//!
//! Values are decimal unsigned 64-bit ids. Both spellings are sent: 1.2.1 knows only the legacy names, and later versions
//! let the new ones win. A frontend wants both workers or neither: one alone is an error after prefill has run.

use super::HeaderValue;
use crate::fleet::Target;
use crate::json::{Edits, Object};
use crate::request::Request;

const DECODE: [&str; 2] = ["x-dynamo-worker-instance-id", "x-worker-instance-id"];
const PREFILL: [&str; 2] = ["x-dynamo-prefill-instance-id", "x-prefill-instance-id"];
const DECODE_RANK: [&str; 2] = ["x-dynamo-dp-rank", "x-dp-rank"];
const PREFILL_RANK: [&str; 2] = ["x-dynamo-prefill-dp-rank", "x-prefill-dp-rank"];

/// Headers that name the pair.
pub fn pair(prefill: &Target, decode: &Target) -> Vec<HeaderValue> {
    let mut headers = whole(decode);
    headers.extend(named(PREFILL, prefill.worker.id.0));
    if let Some(rank) = prefill.rank {
        headers.extend(named(PREFILL_RANK, rank));
    }
    headers
}

/// Headers that name a worker which runs the whole request.
pub fn whole(worker: &Target) -> Vec<HeaderValue> {
    let mut headers: Vec<HeaderValue> = named(DECODE, worker.worker.id.0).collect();
    if let Some(rank) = worker.rank {
        headers.extend(named(DECODE_RANK, rank));
    }
    headers
}

/// Edits that take the annotations out of `nvext` where one of them makes the request a mere query: heard from a caller who
/// is not trusted, it would make Dynamo skip prefill. None where there is nothing to take out.
pub fn without_query(request: &Request<'_>) -> Option<Edits> {
    let nvext = request.body.get("nvext")?;
    if !nvext.value.contains("query_instance_id") {
        return None;
    }
    let inner = Object::parse(nvext.value.as_bytes(), &["annotations"]).ok()?;
    let mut inside = inner.edit();
    inner
        .all("annotations")
        .for_each(|member| inside.remove(member));
    let cleaned = String::from_utf8(inside.apply(nvext.value.as_bytes())).ok()?;
    let mut edits = request.body.edit();
    request
        .body
        .all("nvext")
        .for_each(|member| edits.replace(member, cleaned.clone()));
    Some(edits)
}

fn named(names: [&'static str; 2], value: impl ToString) -> impl Iterator<Item = HeaderValue> {
    let value = value.to_string();
    names.into_iter().map(move |name| (name, value.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Role, Worker, WorkerId};
    use std::rc::Rc;

    fn target(id: u64, rank: Option<u32>) -> Target {
        let worker = Worker {
            id: WorkerId(id),
            name: id.to_string(),
            address: None,
            role: Role::Decode,
            model: None,
            namespace: String::new(),
            dp_size: 2,
            set: String::new(),
            bootstrap_port: None,
            topology: None,
        };
        Target {
            worker: Rc::new(worker),
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
}
