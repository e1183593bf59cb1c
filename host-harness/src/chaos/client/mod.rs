//! Owns the clients: each asks, reads in its manner, leaves where it is one that leaves, and notes what it saw.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::task::JoinHandle;

use super::asks;
use super::judge::{Exchange, Seen};
use super::reply::Ending;
use super::scenario::Crowd;

mod line;
mod manner;

use line::{Line, Outcome};
use manner::Manner;

/// How many ask at once; half of them for streams.
pub const CLIENTS: usize = 48;

/// Between two requests of one client.
const PAUSE: Duration = Duration::from_millis(200);

/// Clients that ask until they are told to stop. Dropped, they stop at once.
pub struct Clients {
    stop: Arc<AtomicBool>,
    running: Vec<JoinHandle<Seen>>,
}

impl Clients {
    /// Lets them begin, one shortly after the other.
    pub fn start(gateway: SocketAddr, crowd: Crowd) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let running = (0..CLIENTS).map(|number| {
            let client = Client {
                crowd,
                number,
                line: Line::new(gateway, manner::window(crowd, number)),
                seen: Seen::default(),
            };
            tokio::spawn(client.ask_until(Arc::clone(&stop)))
        });
        Self {
            running: running.collect(),
            stop,
        }
    }

    /// Lets each end its request, and says what all saw.
    pub async fn stop(mut self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Seen::default();
        for seen in join_all(self.running.drain(..)).await.into_iter().flatten() {
            all.exchanges.extend(seen.exchanges);
            all.left += seen.left;
        }
        all
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        for client in &self.running {
            client.abort();
        }
    }
}

struct Client {
    crowd: Crowd,
    number: usize,
    line: Line,
    seen: Seen,
}

impl Client {
    async fn ask_until(mut self, stop: Arc<AtomicBool>) -> Seen {
        let share = self.number as f64 / CLIENTS as f64;
        tokio::time::sleep(PAUSE.mul_f64(share)).await;
        let mut turn = 0;
        while !stop.load(Ordering::Relaxed) {
            self.ask(turn).await;
            turn += 1;
            tokio::time::sleep(PAUSE).await;
        }
        self.seen
    }

    async fn ask(&mut self, turn: usize) {
        let ask = asks::ask(self.crowd, self.number, turn);
        let manner = Manner::of(self.crowd, self.number, turn);
        let sent = Instant::now();
        match self.line.exchange(&ask, manner).await {
            Outcome::Left => self.seen.left += 1,
            Outcome::Heard(heard) => {
                let ending = heard.judge(ask.expected);
                if let Ending::Failed(why) = &ending {
                    tracing::info!("client {} at its {turn}th: {why}", self.number);
                }
                self.seen.exchanges.push(Exchange {
                    sent,
                    ended: Instant::now(),
                    ending,
                    fit: ask.fit,
                });
            }
        }
    }
}
