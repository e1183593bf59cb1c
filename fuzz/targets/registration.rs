//! Owns the target of workers that register themselves: bodies, paths, tokens, and the registry's own bytes.
#![no_main]

use fuzz::{Choices, configured};
use libfuzzer_sys::fuzz_target;
use routing::discovery::{Leases, Registry, read_delete, read_put, registration_pool};

const TOKEN: &[u8] = b"Bearer secret-of-the-test";

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let protocol = choices.one(&["nixl", "sglang"]);
    let parts = choices.parts(5);
    let part = |at: usize| parts.get(at).copied().unwrap_or_default();
    let pool = configured(&format!(
        r#"{{"pools":[{{"name":"p","protocol":"{protocol}","destinations":{{"original_dst":{{"networks":["10.0.0.0/8"]}}}},"discovery":{{"registration":{{"token":"secret-of-the-test","max_workers":3}}}}}}]}}"#
    ));
    let path = String::from_utf8_lossy(part(0));
    let pools = || std::iter::once(&pool);
    // A guess is accepted only if it equals the token.
    if registration_pool(pools(), "/pd-router/workers", Some(part(1))).is_ok() {
        let given = part(1).get(7..).unwrap_or_default().trim_ascii();
        assert_eq!(given, b"secret-of-the-test");
    }
    if let Err(problem) = registration_pool(pools(), &path, Some(TOKEN)) {
        let _: serde_json::Value = serde_json::from_str(&problem.reply().body).expect("JSON");
    }
    let registration =
        registration_pool(pools(), "/pd-router/workers", Some(TOKEN)).expect("the token");

    // The bytes in the shared store may have any author.
    let mut registry = Registry::decode(part(2)).unwrap_or_default();
    let before = registry.entries().len();
    let mut leases = Leases::default();
    for body in [part(3), part(4)] {
        let change = read_put(body, registration).or_else(|_| read_delete(body));
        let change = match change {
            Ok(change) => change,
            Err(problem) => {
                let _: serde_json::Value =
                    serde_json::from_str(&problem.reply().body).expect("JSON");
                continue;
            }
        };
        let _ = registry.apply(&change, 3);
        assert!(registry.entries().len() <= before.max(3));
        let _ = leases.look(&registry, 1, 1);
        let _ = registration.list(&registry, &leases, 2, 1000);
        for worker in registry.workers(&pool.destinations) {
            assert!(
                worker
                    .address
                    .is_none_or(|address| pool.destinations.allow(address))
            );
        }
        if let Ok(bytes) = registry.encode() {
            let read = Registry::decode(&bytes).expect("what was encoded");
            assert_eq!(read.entries().len(), registry.entries().len());
        }
    }
});
