//! Owns the host's threads: workers that serve connections, the main thread that only ticks and calls, and the acceptor.

use std::future::Future;
use std::io;
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};
use tokio::task::LocalSet;

use super::admin;
use super::body::{BodyError, ChannelBody};
use super::state::Process;
use super::stream::{self, RequestOrigin};
use super::ticker::Ticker;
use super::vm::{CompiledPlugin, StartError, Vm};

/// A thread with a VM, not started yet.
pub struct Thread {
    name: String,
    compiled: Arc<CompiledPlugin>,
    connections: Option<UnboundedReceiver<TcpStream>>,
    stopping: watch::Receiver<bool>,
}

impl Thread {
    /// The thread whose VM serves no request.
    pub fn main(compiled: &Arc<CompiledPlugin>, stopping: &watch::Receiver<bool>) -> Thread {
        Thread {
            name: "pd-main".to_owned(),
            compiled: Arc::clone(compiled),
            connections: None,
            stopping: stopping.clone(),
        }
    }

    /// A thread that serves the connections sent to it.
    pub fn worker(
        number: usize,
        compiled: &Arc<CompiledPlugin>,
        stopping: &watch::Receiver<bool>,
    ) -> (Thread, UnboundedSender<TcpStream>) {
        let (sender, connections) = unbounded_channel();
        let thread = Thread {
            name: format!("pd-worker-{number}"),
            compiled: Arc::clone(compiled),
            connections: Some(connections),
            stopping: stopping.clone(),
        };
        (thread, sender)
    }

    /// Starts the thread; `report` receives whether its VM came up.
    pub fn spawn(
        self,
        report: oneshot::Sender<Result<(), StartError>>,
    ) -> io::Result<JoinHandle<()>> {
        let stopping = self.stopping.clone();
        spawn_local_runtime(self.name.clone(), stopping, || self.run(report))
    }

    async fn run(self, report: oneshot::Sender<Result<(), StartError>>) {
        let (wake, mut ready) = unbounded_channel();
        let vm = Vm::new(self.compiled, wake);
        let started = vm.start();
        let failed = started.is_err();
        if report.send(started).is_err() || failed {
            return;
        }
        tokio::task::spawn_local(Ticker::run(Rc::clone(&vm)));
        if let Some(connections) = self.connections {
            tokio::task::spawn_local(serve_connections(Rc::clone(&vm), connections));
        }
        while let Some(ready) = ready.recv().await {
            // A trap is logged and handled where it happens.
            let _ = vm.queue_ready(ready);
        }
    }
}

/// Accepts connections, distributes them, and answers on the admin port.
pub struct Acceptor {
    /// The listener for clients.
    pub listener: std::net::TcpListener,
    /// The admin listener.
    pub admin: std::net::TcpListener,
    /// One channel per worker thread.
    pub workers: Vec<UnboundedSender<TcpStream>>,
    /// The state shown on the admin port.
    pub process: Arc<Process>,
    /// True ends the thread.
    pub stopping: watch::Receiver<bool>,
}

impl Acceptor {
    /// Starts the thread.
    pub fn spawn(self) -> io::Result<JoinHandle<()>> {
        let stopping = self.stopping.clone();
        spawn_local_runtime("pd-acceptor".to_owned(), stopping, || self.run())
    }

    async fn run(self) {
        let listeners = tokio::net::TcpListener::from_std(self.listener)
            .and_then(|listener| Ok((listener, tokio::net::TcpListener::from_std(self.admin)?)));
        let (listener, admin) = match listeners {
            Ok(listeners) => listeners,
            Err(error) => {
                tracing::error!(%error, "cannot accept connections");
                return;
            }
        };
        self.process.clusters.follow();
        tokio::task::spawn_local(admin::serve(admin, self.process));
        let mut turn = 0;
        loop {
            let accepted = match listener.accept().await {
                Ok((connection, _)) => connection.into_std(),
                Err(error) => Err(error),
            };
            match accepted {
                Ok(connection) => {
                    turn = (turn + 1) % self.workers.len();
                    // A worker that has ended drops the connection, so that the client sees it close.
                    let _ = self.workers[turn].send(connection);
                }
                Err(error) => {
                    // Mostly for lack of file descriptors: an immediate retry would only burn CPU.
                    tracing::error!(%error, "a connection could not be accepted");
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
            }
        }
    }
}

fn spawn_local_runtime<F: Future<Output = ()>>(
    name: String,
    mut stopping: watch::Receiver<bool>,
    work: impl FnOnce() -> F + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new().name(name).spawn(move || {
        let local = LocalSet::new();
        local.block_on(&runtime, async {
            tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => {}
                () = work() => {}
            }
        });
    })
}

async fn serve_connections(vm: Rc<Vm>, mut connections: UnboundedReceiver<TcpStream>) {
    while let Some(connection) = connections.recv().await {
        let vm = Rc::clone(&vm);
        tokio::task::spawn_local(async move {
            if let Err(error) = serve_connection(vm, connection).await {
                tracing::debug!(%error, "a client connection ended");
            }
        });
    }
}

async fn serve_connection(
    vm: Rc<Vm>,
    connection: TcpStream,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let connection = tokio::net::TcpStream::from_std(connection)?;
    connection.set_nodelay(true)?;
    let origin = RequestOrigin {
        source: connection.peer_addr()?,
        local: connection.local_addr()?,
        connection: vm.process().connections.fetch_add(1, Ordering::Relaxed) + 1,
    };
    let service = service_fn(move |request| answer(Rc::clone(&vm), origin, request));
    let server = auto::Builder::new(LocalExecutor);
    server
        .serve_connection(TokioIo::new(connection), service)
        .await
}

/// The stream is a separate task: any change of the client's connection reaches it as an event, so that it ends cleanly in every
/// case.
async fn answer(
    vm: Rc<Vm>,
    origin: RequestOrigin,
    request: Request<Incoming>,
) -> Result<Response<ChannelBody>, BodyError> {
    let (head, answered) = oneshot::channel();
    tokio::task::spawn_local(stream::serve(vm, origin, request, head));
    answered.await.map_err(|_| BodyError::Reset)
}

/// Runs hyper's tasks on the thread's own `LocalSet`.
#[derive(Clone, Copy)]
struct LocalExecutor;

impl<F> hyper::rt::Executor<F> for LocalExecutor
where
    F: Future + 'static,
{
    fn execute(&self, future: F) {
        tokio::task::spawn_local(async move {
            future.await;
        });
    }
}
