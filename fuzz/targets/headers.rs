//! Owns the target of a request's line and headers: method, path, routing overrides, the subset, session and tenant.
#![no_main]

use fuzz::{Callers, Choices, input, protocols, router};
use libfuzzer_sys::fuzz_target;
use routing::answer::Form;
use routing::request::overrides::header_names;
use routing::request::{Generation, Head, Kind};
use routing::route::{Explain, Plan, PlanInput};
use routing::selection::eligibility::Subset;

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let callers = choices.one(&[Callers::Strangers, Callers::Trusted]);
    let protocol = choices.one(&protocols());
    let method = choices.one(&[&b"POST"[..], b"GET", b"HEAD", b"PUT"]);
    let is_in_header = choices.one(&[true, false]);
    let parts = choices.parts(6);
    let part = |at: usize| parts.get(at).copied();
    let head = Head {
        method,
        path: part(0).unwrap_or_default(),
        encoding: part(1),
    };
    let kind = head.kind();
    let _ = (head.is_encoded(), Form::of(part(1).unwrap_or_default()));
    // From a header, or as a gateway's metadata carries it.
    let subset = part(2).map(|text| match is_in_header {
        true => Subset::parse(&String::from_utf8_lossy(text)),
        false => Subset::of_metadata(text),
    });
    let names: Vec<&str> = header_names().collect();
    let lines = part(3).unwrap_or_default().split(|byte| *byte == b'\n');
    let headers: Vec<(Vec<u8>, Vec<u8>)> = lines
        .enumerate()
        .map(|(at, line)| (names[at % names.len()].as_bytes().to_vec(), line.to_vec()))
        .collect();
    let input = PlanInput {
        headers: &headers,
        session: part(4),
        tenant: part(5),
        subset: subset.as_ref(),
        explain: Explain::ForCaller,
        ..input()
    };
    let mut router = router(protocol, callers, "");
    if kind == Kind::Plain {
        let _ = router.plain(subset.as_ref());
    }
    let body = br#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;
    let plan = router.plan(Generation::Chat, body, input);
    // No worker outside the subset is used, for trusted and untrusted callers.
    if let (Ok(Plan::Forward(dispatch, _)), Some(subset)) = (&plan, &subset)
        && protocol != "direct"
    {
        for address in &dispatch.destinations {
            assert!(
                subset.holds(Some(*address)),
                "{address} is not in {subset:?}"
            );
        }
    }
    // Headers of an untrusted caller override nothing.
    if callers == Callers::Strangers
        && let Ok(Plan::Answer(_)) = plan
    {
        panic!("a stranger's query is answered");
    }
});
