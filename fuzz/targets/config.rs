//! Owns the target of configurations: a valid one builds its routers, and no secret appears in `Debug` output.
#![no_main]

use fuzz::{NOW, input};
use libfuzzer_sys::fuzz_target;
use routing::config::{Config, Discovery};
use routing::discovery;
use routing::request::Generation;
use routing::route::Router;

fuzz_target!(|document: &[u8]| {
    let config = match Config::parse(document) {
        Ok(config) => config,
        Err(error) => {
            let _ = error.to_string();
            return;
        }
    };
    let written = format!("{config:?}");
    for pool in &config.pools {
        if let Discovery::Registration(rules) = &pool.discovery {
            let secret = std::str::from_utf8(rules.token.secret()).expect("ASCII");
            // A shorter secret may appear by chance.
            assert!(secret.len() < 12 || !written.contains(secret) || elsewhere(document, secret));
        }
        let _ = discovery::source(pool).and_then(|source| source.poll());
        let mut router = Router::new(pool.clone(), 1, 2, NOW);
        router.advance(NOW);
        let body = br#"{"model":"m","messages":[]}"#;
        let _ = router.plan(Generation::Chat, body, input());
        let _ = router.plain(None);
        router.reconfigure(pool.clone());
    }
});

/// Whether the document contains the same text in another place, where it is no secret.
fn elsewhere(document: &[u8], secret: &str) -> bool {
    let text = String::from_utf8_lossy(document);
    text.matches(secret).count() > 1 || !text.contains(secret)
}
