//! Owns what the fuzz targets share: pools and routers of known workers, and the reading of bytes as choices.
#![forbid(unsafe_code)]

mod faithful;

pub use faithful::check_edited;

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

use routing::config::{Config, Pool};
use routing::request::Generation;
use routing::route::{Explain, PlanInput, Router};

/// The API generations whose bodies are read.
pub const GENERATIONS: [Generation; 5] = [
    Generation::Chat,
    Generation::Completions,
    Generation::Responses,
    Generation::Generate,
    Generation::Other,
];

/// The protocols by configuration name, each with the fields that its pool needs.
const PROTOCOLS: [(&str, &str); 7] = [
    ("nixl", ""),
    ("mooncake", ""),
    ("sglang", ""),
    ("trtllm", ""),
    ("direct", r#","frontends":["127.0.0.1:8000"]"#),
    ("llmd", ""),
    ("aggregated", ""),
];

/// Whether a pool trusts its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callers {
    /// It does.
    Trusted,
    /// It does not.
    Strangers,
}

/// The bytes left to choose with.
#[derive(Debug, Clone, Copy)]
pub struct Choices<'a>(pub &'a [u8]);

impl<'a> Choices<'a> {
    /// The next byte; 0 at the end.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    /// One of these values. Digits choose as numbers do, so that a corpus is readable.
    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.byte().wrapping_sub(b'0')) % of.len()]
    }

    /// At most `most` of the next bytes.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A number from the next two bytes.
    pub fn length(&mut self) -> usize {
        usize::from(self.byte()) | usize::from(self.byte()) << 8
    }

    /// The remaining bytes, split by [`SEAM`] into at most `most` parts.
    pub fn parts(self, most: usize) -> Vec<&'a [u8]> {
        let mut parts = Vec::new();
        let mut rest = self.0;
        while parts.len().saturating_add(1) < most
            && let Some(at) = rest.windows(SEAM.len()).position(|window| window == SEAM)
        {
            parts.push(&rest[..at]);
            rest = &rest[at + SEAM.len()..];
        }
        parts.push(rest);
        parts
    }
}

/// Separates parts: can be typed, and occurs in no part by itself.
const SEAM: &[u8] = b"\n----\n";

thread_local! {
    /// Parsed pools by document: parsing takes longer than most of what is tested.
    static POOLS: RefCell<HashMap<String, Pool>> = RefCell::default();
}

/// The pool of a configuration document.
pub fn configured(document: &str) -> Pool {
    POOLS.with_borrow_mut(|pools| {
        if let Some(pool) = pools.get(document) {
            return pool.clone();
        }
        let pool = read(document);
        pools.insert(document.to_owned(), pool.clone());
        pool
    })
}

fn read(document: &str) -> Pool {
    let config = Config::parse(document.as_bytes());
    let config = config.unwrap_or_else(|error| panic!("{document}: {error}"));
    config.pools.into_iter().next().expect("a pool")
}

/// A pool of the model `m`, with workers of every role that its protocol knows; its decode workers also run aggregated requests.
pub fn pool(protocol: &str, callers: Callers, fields: &str) -> Pool {
    let worker = |role: &str, id: u32| {
        let port = if role == "prefill" {
            r#","bootstrap_port":8998"#
        } else {
            ""
        };
        format!(
            r#"{{"role":"{role}","id":{id},"address":"127.0.0.1:{id}","model":"m","dp_size":2,"adapters":["a"]{port}}}"#
        )
    };
    let workers = match protocol {
        "aggregated" => vec![worker("aggregated", 21), worker("aggregated", 22)],
        _ => vec![
            worker("prefill", 1),
            worker("prefill", 2),
            worker("decode", 11),
            worker("decode", 12),
        ],
    };
    let (_, needed) = PROTOCOLS
        .into_iter()
        .find(|(name, _)| *name == protocol)
        .expect("a protocol");
    let decode = r#","decode":{"runs_whole_requests":true}"#;
    let trusts = callers == Callers::Trusted;
    configured(&format!(
        r#"{{"pools":[{{"name":"p","protocol":"{protocol}","trust_clients":{trusts},"discovery":{{"static":{{"workers":[{}]}}}}{needed}{decode}{fields}}}]}}"#,
        workers.join(",")
    ))
}

/// A router of such a pool, ready to plan.
pub fn router(protocol: &str, callers: Callers, fields: &str) -> Router {
    let mut router = Router::new(pool(protocol, callers, fields), 1, 2, NOW);
    router.advance(NOW);
    for id in [1, 2] {
        let worker = router.fleet().get(routing::fleet::WorkerId(id));
        if let Some(life) = worker.map(|worker| worker.incarnation()) {
            router.on_reply(&life, br#"{"0":{"engine_id":"e0"},"1":{"engine_id":"e1"}}"#);
        }
    }
    router
}

/// An arbitrary moment.
pub const NOW: Duration = Duration::from_secs(1_800_000_000);

/// The names of the protocols.
pub fn protocols() -> [&'static str; 7] {
    PROTOCOLS.map(|(name, _)| name)
}

/// Plan inputs beside the body: none.
pub fn input<'a>() -> PlanInput<'a> {
    PlanInput {
        now: NOW,
        explain: Explain::ForLog,
        ..PlanInput::default()
    }
}
