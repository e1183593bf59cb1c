//! A real Dynamo without a GPU: a frontend in direct mode and workers of both roles, found through a folder of files.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{self, Ask};
use crate::engines::{Role, in_turns, with};
use crate::paths;
use crate::process::{ProcessGroup, unique_name};
use crate::vllm;
use crate::wait::{GENEROUS, eventually};

/// The name that the workers serve their model under.
pub const MODEL: &str = "tiny";

/// What a Dynamo's workers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkerKind {
    /// Two of each role, which pretend to be engines.
    Mockers,
    /// One of each role, a vLLM that hands over through NIXL.
    Vllm,
}

impl WorkerKind {
    /// Workers of each role.
    fn count(self) -> u64 {
        match self {
            WorkerKind::Mockers => 2,
            WorkerKind::Vllm => 1,
        }
    }

    /// How long they take to start at most.
    fn start_limit(self) -> Duration {
        match self {
            WorkerKind::Mockers => GENEROUS,
            WorkerKind::Vllm => vllm::START_LIMIT,
        }
    }

    /// The Python that has Dynamo.
    fn python(self) -> Command {
        match self {
            WorkerKind::Mockers => Command::new(paths::dynamo_python()),
            WorkerKind::Vllm => {
                let mut python = Command::new(paths::vllm_venv().join("bin/python"));
                python.env("PYTHONPATH", paths::vllm_dynamo());
                python
            }
        }
    }

    /// What starts the workers of this role.
    fn workers(self, role: Role) -> Command {
        match self {
            WorkerKind::Mockers => mockers(role, self.count()),
            WorkerKind::Vllm => vllm::dynamo_worker(role),
        }
    }
}

/// A frontend and its workers.
pub struct Dynamo {
    /// The frontend's address.
    pub frontend: SocketAddr,
    kind: WorkerKind,
    folder: PathBuf,
    prefill: Option<ProcessGroup>,
    decode: Option<ProcessGroup>,
    _frontend: ProcessGroup,
}

impl Dynamo {
    /// Starts a frontend with mockers and waits until the model is ready with all of them.
    pub async fn start() -> Dynamo {
        Dynamo::start_with(WorkerKind::Mockers).await
    }

    /// The same with a vLLM of each role in the mockers' place.
    pub async fn start_with_vllm() -> Dynamo {
        Dynamo::start_with(WorkerKind::Vllm).await
    }

    async fn start_with(kind: WorkerKind) -> Dynamo {
        let folder = paths::scratch().join(unique_name("dynamo"));
        // Model cards of an earlier run would be discovered again.
        let _ = std::fs::remove_dir_all(&folder);
        for sub in ["home", "kv"] {
            std::fs::create_dir_all(folder.join(sub))
                .unwrap_or_else(|error| panic!("cannot create {}: {error}", folder.display()));
        }
        let frontend = free_address();
        let mut serve = kind.python();
        serve
            .args(["-m", "dynamo.frontend"])
            .args(["--http-host", "127.0.0.1", "--router-mode", "direct"])
            .args(["--http-port", &frontend.port().to_string()]);
        let serve = in_folder(&folder, serve);
        let dynamo = Dynamo {
            frontend,
            kind,
            _frontend: ProcessGroup::start(&serve, "dynamo-frontend").await,
            prefill: Some(workers(kind, &folder, Role::Prefill).await),
            decode: Some(workers(kind, &folder, Role::Decode).await),
            folder,
        };
        dynamo.wait_until_ready().await;
        dynamo
    }

    /// A configuration that finds this Dynamo's workers through its frontend.
    pub fn config(&self) -> Value {
        let pool = json!({
            "name": "dynamo",
            "protocol": "direct",
            "frontends": [self.frontend.to_string()],
            "discovery": {"dynamo": {
                "interval_ms": 1000,
                "models": {"dynamo": MODEL},
                "roles": {"prefill": "prefill", "backend": "decode"},
            }},
        });
        json!({
            "pools": [with(pool, in_turns())],
            "response_headers": true,
        })
    }

    /// The ids of the prefill workers, from the frontend.
    pub async fn prefill_ids(&self) -> BTreeSet<u64> {
        self.ids_of("prefill").await
    }

    /// The ids of the decode workers, from the frontend.
    pub async fn decode_ids(&self) -> BTreeSet<u64> {
        self.ids_of("backend").await
    }

    /// The ids of this role's workers, from the frontend.
    pub async fn ids(&self, role: Role) -> BTreeSet<u64> {
        match role {
            Role::Prefill => self.prefill_ids().await,
            Role::Decode | Role::Aggregated => self.decode_ids().await,
        }
    }

    /// Stops the workers of this role and waits until the frontend has removed them.
    pub async fn remove(&mut self, role: Role) {
        let old = self.ids(role).await;
        if let Some(workers) = self.workers(role).take() {
            workers.terminate();
        }
        eventually("the frontend drops the old workers", GENEROUS, || async {
            let now = self.ids(role).await;
            if now.is_disjoint(&old) {
                return Ok(());
            }
            Err(format!("{now:?}"))
        })
        .await;
    }

    /// Starts workers of this role, with new ids, and waits until the frontend lists all of them.
    pub async fn add(&mut self, role: Role) {
        let workers = workers(self.kind, &self.folder, role).await;
        self.workers(role).replace(workers);
        eventually("the frontend knows the workers", GENEROUS, || async {
            let now = self.ids(role).await;
            if now.len() as u64 == self.kind.count() {
                return Ok(());
            }
            Err(format!("{now:?}"))
        })
        .await;
    }

    /// Stops all workers of this role and starts others with new ids; waits until the model is ready again.
    pub async fn restart(&mut self, role: Role) {
        self.remove(role).await;
        self.add(role).await;
        self.wait_until_ready().await;
    }

    fn workers(&mut self, role: Role) -> &mut Option<ProcessGroup> {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode | Role::Aggregated => &mut self.decode,
        }
    }

    /// True while the frontend reports the model as ready with all its workers.
    pub async fn is_ready(&self) -> bool {
        self.readiness().await.is_ok()
    }

    /// Waits until the frontend reports the model as ready with all its workers.
    pub async fn wait_until_ready(&self) {
        eventually("Dynamo is ready", self.kind.start_limit(), || {
            self.readiness()
        })
        .await;
    }

    async fn readiness(&self) -> Result<(), String> {
        let path = format!("/v1/models/{MODEL}/ready");
        let reply = client::try_send(self.frontend, Ask::get(&path)).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        if reply.status != 200 {
            return Err(format!("{}: {}", reply.status, reply.text()));
        }
        let ready = reply.json();
        let types = &ready["namespaces"]["dynamo"]["worker_types"];
        let complete = |role: &str| types[role]["workers"].as_u64() == Some(self.kind.count());
        if complete("prefill") && complete("decode") {
            return Ok(());
        }
        Err(ready.to_string())
    }

    async fn ids_of(&self, component: &str) -> BTreeSet<u64> {
        let reply = client::send(self.frontend, Ask::get("/health")).await;
        let health = reply.expect(200).json();
        let instances = health["instances"].as_array().cloned().unwrap_or_default();
        instances
            .iter()
            .filter(|one| one["endpoint"] == "generate" && one["component"] == component)
            .filter_map(|one| one["instance_id"].as_u64())
            .collect()
    }
}

async fn workers(kind: WorkerKind, folder: &Path, role: Role) -> ProcessGroup {
    let command = in_folder(folder, kind.workers(role));
    ProcessGroup::start(&command, &format!("dynamo-{}", role.as_str())).await
}

fn mockers(role: Role, count: u64) -> Command {
    let mut command = WorkerKind::Mockers.python();
    command
        .args(["-m", "dynamo.mocker", "--model-path"])
        .arg(paths::dynamo_model())
        .args(["--model-name", MODEL])
        .args(["--disaggregation-mode", role.as_str()])
        .args(["--num-workers", &count.to_string()])
        .args(["--speedup-ratio", "10"]);
    command
}

/// A part of the Dynamo in this folder, with everything on loopback and nothing fetched.
fn in_folder(folder: &Path, mut command: Command) -> Command {
    command
        .env("HOME", folder.join("home"))
        .env("DYN_FILE_KV", folder.join("kv"))
        .env("HF_HUB_OFFLINE", "1")
        .env("DYN_DISCOVERY_BACKEND", "file")
        .env("DYN_REQUEST_PLANE", "tcp")
        .env("DYN_EVENT_PLANE", "zmq")
        .env("DYN_TCP_RPC_HOST", "127.0.0.1")
        .env("DYN_EVENT_PLANE_HOST", "127.0.0.1")
        .env("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")
        .env("DYN_SDK_DISABLE_ANSI_LOGGING", "1");
    command
}

/// A free port, since the frontend does not accept port 0.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0");
    listener
        .and_then(|listener| listener.local_addr())
        .unwrap_or_else(|error| panic!("no free port on loopback: {error}"))
}
