//! Owns the clients: each sends requests, reads in its own way, leaves if it is a leaver, and records the outcomes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::task::JoinHandle;

use super::asks;
use super::judge::{ClientOutcomes, Conduct, Exchange};
use super::reply::Ending;
use super::scenario::ClientMix;

mod behaviour;
mod connection;
mod uploads;

use behaviour::ClientBehaviour;
use connection::{ClientConnection, ExchangeOutcome};
use uploads::Uploader;

/// Concurrent clients; half of them ask for streams.
pub const CLIENTS: usize = 48;

/// Pause between two requests of one client.
const PAUSE: Duration = Duration::from_millis(200);

/// Clients that send requests until they are stopped. Dropped, they stop at once.
pub struct Clients {
    good: Group,
    bad: Group,
}

/// Clients of the same behaviour.
#[derive(Default)]
struct Group {
    stop: Arc<AtomicBool>,
    running: Vec<JoinHandle<ClientOutcomes>>,
}

impl Clients {
    /// Starts the clients, one shortly after the other.
    pub fn start(gateway: SocketAddr, mix: ClientMix) -> Self {
        let (mut good, mut bad) = (Group::default(), Group::default());
        for number in 0..CLIENTS {
            let client = Client {
                mix,
                number,
                connection: ClientConnection::new(gateway, behaviour::window(mix, number)),
                seen: ClientOutcomes::default(),
            };
            let group = match ClientBehaviour::of(mix, number, 0).conduct() {
                Conduct::Good => &mut good,
                Conduct::Bad => &mut bad,
            };
            let stop = Arc::clone(&group.stop);
            group.running.push(tokio::spawn(client.ask_until(stop)));
        }
        for uploader in Uploader::of(mix, gateway) {
            let stop = Arc::clone(&bad.stop);
            bad.running.push(tokio::spawn(uploader.upload_until(stop)));
        }
        Self { good, bad }
    }

    /// Lets each client end its request, and returns what all saw. The well-behaved ones go on until the others have ended, so
    /// that they feel what the others do.
    pub async fn stop(mut self) -> ClientOutcomes {
        let mut all = self.bad.stop().await;
        let good = self.good.stop().await;
        all.exchanges.extend(good.exchanges);
        all.left += good.left;
        all
    }
}

impl Group {
    async fn stop(&mut self) -> ClientOutcomes {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = ClientOutcomes::default();
        for seen in join_all(self.running.drain(..)).await.into_iter().flatten() {
            all.exchanges.extend(seen.exchanges);
            all.left += seen.left;
        }
        all
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for client in &self.running {
            client.abort();
        }
    }
}

struct Client {
    mix: ClientMix,
    number: usize,
    connection: ClientConnection,
    seen: ClientOutcomes,
}

impl Client {
    async fn ask_until(mut self, stop: Arc<AtomicBool>) -> ClientOutcomes {
        let share = self.number as f64 / CLIENTS as f64;
        let within = behaviour::all_begin_within(self.mix, self.number).unwrap_or(PAUSE);
        tokio::time::sleep(within.mul_f64(share)).await;
        let mut turn = 0;
        while !stop.load(Ordering::Relaxed) {
            self.ask(turn).await;
            turn += 1;
            tokio::time::sleep(PAUSE).await;
        }
        self.seen
    }

    async fn ask(&mut self, turn: usize) {
        let ask = asks::ask(self.mix, self.number, turn);
        let behaviour = ClientBehaviour::of(self.mix, self.number, turn);
        let sent = Instant::now();
        match self.connection.exchange(&ask, behaviour).await {
            ExchangeOutcome::Left => self.seen.left += 1,
            ExchangeOutcome::Received(received) => {
                let ending = received.judge(ask.expected);
                if let Ending::Failed(why) = &ending {
                    tracing::info!("client {} at its {turn}th: {why}", self.number);
                }
                self.seen.exchanges.push(Exchange {
                    sent,
                    ended: Instant::now(),
                    ending,
                    fit: ask.fit,
                    conduct: behaviour.conduct(),
                });
            }
        }
    }
}
