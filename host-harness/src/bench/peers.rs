//! Owns the start of each peer in front of a fleet, and the check that a peer is ready.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::json;

use crate::engine::Dialect;

/// The page on which every peer lists its workers.
pub const WORKERS: &str = "/workers";

/// A router against which pd-router is measured, as `scripts/peers.sh` installs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// SGLang's router; both legs are sent at once.
    SglangRouter,
    /// The Shepherd Model Gateway; both legs are sent at once.
    SmgSglang,
    /// The same in front of vLLM's engines with their NixlConnector; prefill first.
    SmgNixl,
    /// vLLM's router with the NixlConnector; prefill first.
    VllmRouter,
}

/// The engines behind a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineAddresses {
    /// Prefill engines, with their bootstrap servers if any.
    pub prefill: Vec<(SocketAddr, Option<SocketAddr>)>,
    /// Decode engines; at least two, since `power_of_two` is refused otherwise.
    pub decode: Vec<SocketAddr>,
}

/// A command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
}

/// A JSON body for a `PUT` to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutRequest {
    /// Path.
    pub path: String,
    /// The body.
    pub body: String,
}

/// The next step in starting a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartStep {
    /// Not all workers are known and healthy: query again.
    Wait,
    /// Send these, then query again: the peer applies them in the background.
    Configure(Vec<PutRequest>),
    /// Ready for requests.
    Ready,
}

/// The answer to `GET /workers`, as far as needed.
#[derive(Deserialize)]
struct Listing {
    workers: Vec<Listed>,
}

#[derive(Deserialize)]
struct Listed {
    url: String,
    is_healthy: bool,
    // Only smg reports the following fields.
    #[serde(default)]
    id: String,
    #[serde(default)]
    worker_type: String,
    #[serde(default)]
    kv_connector: Option<String>,
}

/// vLLM's name of the connector, which smg also uses.
const NIXL: &str = "NixlConnector";

impl Peer {
    /// All peers.
    pub const ALL: [Self; 4] = [
        Self::SglangRouter,
        Self::SmgSglang,
        Self::SmgNixl,
        Self::VllmRouter,
    ];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::SglangRouter => "sglang-router",
            Self::SmgSglang => "smg sglang",
            Self::SmgNixl => "smg nixl",
            Self::VllmRouter => "vllm-router",
        }
    }

    /// Package name, which is also the name of the command and of the virtual environment.
    pub fn package(self) -> &'static str {
        match self {
            Self::SglangRouter => "sglang-router",
            Self::SmgSglang | Self::SmgNixl => "smg",
            Self::VllmRouter => "vllm-router",
        }
    }

    /// Dialect of its engines.
    pub fn dialect(self) -> Dialect {
        match self {
            Self::SglangRouter | Self::SmgSglang => Dialect::Sglang,
            Self::SmgNixl | Self::VllmRouter => Dialect::Vllm,
        }
    }

    /// Command that starts the peer; the engines must be up, since the peer drops an engine that is not, or waits for it for half
    /// a minute. `venvs` holds a virtual environment for each package.
    pub fn command(
        self,
        venvs: &Path,
        listen: SocketAddr,
        metrics: SocketAddr,
        engines: &EngineAddresses,
    ) -> CommandLine {
        let package = self.package();
        let mut args = Vec::new();
        let mut push = |words: &[&str]| args.extend(words.iter().map(|word| (*word).to_owned()));
        match self {
            Self::SglangRouter | Self::SmgSglang | Self::SmgNixl => {
                push(&["launch", "--pd-disaggregation"]);
            }
            Self::VllmRouter => push(&["--vllm-pd-disaggregation", "--kv-connector", "nixl"]),
        }
        push(&["--host", &listen.ip().to_string()]);
        push(&["--port", &listen.port().to_string()]);
        for (address, bootstrap) in &engines.prefill {
            push(&["--prefill", &url(*address)]);
            if let (Dialect::Sglang, Some(bootstrap)) = (self.dialect(), bootstrap) {
                push(&[&bootstrap.port().to_string()]);
            }
        }
        for address in &engines.decode {
            push(&["--decode", &url(*address)]);
        }
        push(&["--prefill-policy", "cache_aware"]);
        push(&["--decode-policy", "power_of_two"]);
        push(&["--prometheus-host", &metrics.ip().to_string()]);
        push(&["--prometheus-port", &metrics.port().to_string()]);
        push(&["--log-level", "error"]);
        CommandLine {
            program: venvs.join(package).join("bin").join(package),
            args,
        }
    }

    /// The next step, by the answer to `GET` [`WORKERS`].
    pub fn next(self, workers: &[u8], engines: &EngineAddresses) -> StartStep {
        let Ok(listing) = serde_json::from_slice::<Listing>(workers) else {
            return StartStep::Wait;
        };
        if !engines.all().all(|address| listing.is_healthy(address)) {
            return StartStep::Wait;
        }
        let Self::SmgNixl = self else {
            return StartStep::Ready;
        };
        // smg detects vLLM engines by itself, but not their hand-off; and it refuses to start without engines.
        let lacks_nixl = |listed: &&Listed| listed.kv_connector.as_deref() != Some(NIXL);
        let puts: Vec<PutRequest> = listing
            .workers
            .iter()
            .filter(lacks_nixl)
            .map(Listed::with_nixl)
            .collect();
        match puts.is_empty() {
            true => StartStep::Ready,
            false => StartStep::Configure(puts),
        }
    }

    /// The installed version, from the requirements file beside it.
    pub fn version(self, venvs: &Path) -> Option<String> {
        let requirements = venvs.join(self.package()).join("requirements.txt");
        self.version_in(&std::fs::read_to_string(requirements).ok()?)
    }

    fn version_in(self, requirements: &str) -> Option<String> {
        let pinned = requirements.lines().find_map(|line| {
            let rest = line.strip_prefix(self.package())?;
            rest.strip_prefix("==")
        })?;
        pinned.split_whitespace().next().map(str::to_owned)
    }
}

impl EngineAddresses {
    fn all(&self) -> impl Iterator<Item = SocketAddr> {
        let prefill = self.prefill.iter().map(|(address, _)| *address);
        prefill.chain(self.decode.iter().copied())
    }
}

impl Listing {
    fn is_healthy(&self, address: SocketAddr) -> bool {
        let url = url(address);
        let mut listed = self.workers.iter();
        listed.any(|listed| listed.url == url && listed.is_healthy)
    }
}

impl Listed {
    /// The same worker with NIXL as its hand-off.
    fn with_nixl(&self) -> PutRequest {
        let body = json!({"url": self.url, "worker_type": self.worker_type,
            "runtime_type": "vllm", "kv_connector": NIXL});
        PutRequest {
            path: format!("{WORKERS}/{}", self.id),
            body: body.to_string(),
        }
    }
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn fleet() -> EngineAddresses {
        EngineAddresses {
            prefill: vec![(at(1), Some(at(51))), (at(2), Some(at(52)))],
            decode: vec![at(11), at(12)],
        }
    }

    fn line(peer: Peer) -> String {
        let start = peer.command(Path::new("/v"), at(80), at(81), &fleet());
        format!("{} {}", start.program.display(), start.args.join(" "))
    }

    const REST: &str = "--decode http://127.0.0.1:11 --decode http://127.0.0.1:12 \
        --prefill-policy cache_aware --decode-policy power_of_two \
        --prometheus-host 127.0.0.1 --prometheus-port 81 --log-level error";

    #[test]
    fn with_sglang_a_prefill_engine_is_named_with_its_bootstrap_port() {
        let rest = format!(
            "launch --pd-disaggregation --host 127.0.0.1 --port 80 \
             --prefill http://127.0.0.1:1 51 --prefill http://127.0.0.1:2 52 {REST}"
        );
        assert_eq!(
            line(Peer::SglangRouter),
            format!("/v/sglang-router/bin/sglang-router {rest}")
        );
        assert_eq!(line(Peer::SmgSglang), format!("/v/smg/bin/smg {rest}"));
    }

    #[test]
    fn with_vllm_it_is_not() {
        let rest = format!(
            "--host 127.0.0.1 --port 80 --prefill http://127.0.0.1:1 --prefill http://127.0.0.1:2 {REST}"
        );
        assert_eq!(
            line(Peer::VllmRouter),
            format!(
                "/v/vllm-router/bin/vllm-router --vllm-pd-disaggregation --kv-connector nixl {rest}"
            )
        );
        assert_eq!(
            line(Peer::SmgNixl),
            format!("/v/smg/bin/smg launch --pd-disaggregation {rest}")
        );
    }

    /// A peer's list of the workers on these ports.
    fn listing(ports: &[u16], more: &str) -> Vec<u8> {
        let workers: Vec<String> = ports
            .iter()
            .map(|port| {
                format!(
                    r#"{{"id":"id-{port}","url":"http://127.0.0.1:{port}","worker_type":"prefill","is_healthy":true,"load":0{more}}}"#
                )
            })
            .collect();
        format!(r#"{{"workers":[{}],"total":4}}"#, workers.join(",")).into_bytes()
    }

    #[test]
    fn a_peer_is_ready_when_it_has_all_workers() {
        for peer in [Peer::SglangRouter, Peer::SmgSglang, Peer::VllmRouter] {
            let next = |workers: &[u8]| peer.next(workers, &fleet());
            assert_eq!(next(b"not yet"), StartStep::Wait);
            assert_eq!(next(&listing(&[1, 2, 11], "")), StartStep::Wait);
            let ill = listing(&[1, 2, 11, 12], "");
            let ill = String::from_utf8(ill).unwrap().replacen("true", "false", 1);
            assert_eq!(next(ill.as_bytes()), StartStep::Wait);
            assert_eq!(next(&listing(&[12, 11, 2, 1], "")), StartStep::Ready);
        }
    }

    #[test]
    fn smg_is_told_how_vllms_engines_hand_over() {
        let next = |workers: &[u8]| Peer::SmgNixl.next(workers, &fleet());
        assert_eq!(next(&listing(&[1, 2, 11], "")), StartStep::Wait);
        let StartStep::Configure(puts) = next(&listing(&[1, 2, 11, 12], "")) else {
            panic!("no configuration");
        };
        assert_eq!(puts.len(), 4);
        assert_eq!(puts[0].path, "/workers/id-1");
        let body: serde_json::Value = serde_json::from_str(&puts[0].body).unwrap();
        assert_eq!(
            body,
            json!({"url": "http://127.0.0.1:1", "worker_type": "prefill", "runtime_type": "vllm",
                "kv_connector": "NixlConnector"})
        );
        let configured = listing(&[1, 2, 11, 12], r#","kv_connector":"NixlConnector""#);
        assert_eq!(next(&configured), StartStep::Ready);
    }

    #[test]
    fn the_version_is_the_one_pinned() {
        let kept =
            "# A comment.\nsetproctitle==1.3.8 \\\n    --hash=x\nsmg==1.13.0 \\\n    --hash=y\n";
        assert_eq!(Peer::SmgNixl.version_in(kept).as_deref(), Some("1.13.0"));
        assert_eq!(Peer::VllmRouter.version_in(kept), None);
    }
}
