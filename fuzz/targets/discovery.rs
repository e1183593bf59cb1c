//! Owns the target of answers from discovery sources: a Dynamo frontend, a document, Envoy's clusters, and unsolicited ones.
#![no_main]

use fuzz::{Choices, NOW, configured, input};
use libfuzzer_sys::fuzz_target;
use routing::config::Pool;
use routing::discovery::{self, Believed, PollAnswer, PolledWorkers, SourceUpdate};
use routing::fleet::Fleet;
use routing::request::Generation;
use routing::route::Router;

const POOLS: [&str; 6] = [
    r#"{"name":"p","protocol":"direct","frontends":["127.0.0.1:8000"],"discovery":{"dynamo":{"models":{"dynamo":"m"}}}}"#,
    r#"{"name":"p","protocol":"nixl","discovery":{"document":{"cluster":"c","addresses":["127.0.0.1:1"]}}}"#,
    r#"{"name":"p","protocol":"sglang","destinations":{"original_dst":{"networks":["10.0.0.0/8","fd00::/8"]}},"discovery":{"document":{"cluster":"c","addresses":["127.0.0.1:1"]}}}"#,
    r#"{"name":"p","protocol":"direct","frontends":["127.0.0.1:8000"],"discovery":{"document":{"cluster":"c","addresses":["127.0.0.1:1"]}}}"#,
    r#"{"name":"p","protocol":"nixl","discovery":{"envoy_clusters":{"members":{"prefill":{"role":"prefill","model":"m"},"decode":{"role":"decode","model":"m"}}}}}"#,
    r#"{"name":"p","protocol":"nixl","discovery":{"registration":{"token":"t"}}}"#,
];

fn pool(nth: usize) -> Pool {
    configured(&format!(r#"{{"pools":[{}]}}"#, POOLS[nth]))
}

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let nth = choices.one(&[0, 1, 2, 3, 4, 5]);
    let status = choices.one(&[200, 200, 200, 304, 500]);
    let pool = pool(nth);
    let mut router = Router::new(pool.clone(), 1, 2, NOW);
    router.advance(NOW);
    let mut source = discovery::source(&pool).expect("a source");
    let mut polled = PolledWorkers::default();
    // One source receives several answers in a row.
    for (version, body) in choices.parts(4).into_iter().enumerate() {
        let _ = source.poll();
        let answer = PollAnswer {
            status,
            etag: body.get(..4),
            body,
        };
        let update = match source.read_answer(&answer) {
            Ok(update) => update,
            Err(error) => {
                let _ = error.to_string();
                continue;
            }
        };
        let SourceUpdate::Workers(workers, _) = update else {
            continue;
        };
        for worker in &workers {
            let allowed = worker
                .address
                .is_none_or(|address| pool.destinations.allow(address));
            assert!(allowed, "{:?}", worker.address);
        }
        if let Believed::Changed(workers) = polled.accept(workers) {
            let fleet = Fleet::new(version as u64 + 1, workers);
            let decoded = Fleet::decode(&fleet.encode()).expect("what was encoded");
            assert!(decoded.workers().eq(fleet.workers()));
            router.adopt(fleet);
        }
        let body = br#"{"model":"m","messages":[]}"#;
        let _ = router.plan(Generation::Chat, body, input());
        let _ = router.plain(None);
        let _ = (router.can_serve_any(), router.take_transitions());
    }
});
