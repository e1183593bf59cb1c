//! Owns the engine's time model: the time of a prompt and of a token, and the order of prefills.

use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep_until};

/// Description of the time model for `--help`.
pub const TIME_MODEL: &str = "Time model: an engine computes one prompt at a time, first come first served, in prompt tokens / --prefill-rate \
seconds (at least 1 ms); then each running request gets a token every --token-ms, whatever else runs. Both are divided by --speedup; leases are not. \
The token after a prompt computed here comes with the prompt's end; after a pulled hand-off it takes one --token-ms. \
A request holds the blocks of its prompt while it runs, and waits in line while too few are free.";

/// Maximum wait: keeps absurd arguments within a clock's range.
const LONGEST_SECONDS: f64 = 1e9;

/// Speed of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Prompt tokens per second, before the speed-up.
    pub prefill_rate: f64,
    /// Milliseconds per output token, before the speed-up.
    pub token_ms: f64,
    /// Factor that divides all computing times.
    pub speedup: f64,
}

impl Pace {
    /// The time a prompt of `tokens` takes.
    pub fn prefill(self, tokens: u64) -> Duration {
        self.scaled((tokens as f64 / self.prefill_rate).max(0.001))
    }

    /// The time `count` output tokens of one request take.
    pub fn tokens(self, count: u64) -> Duration {
        self.scaled(count as f64 * self.token_ms / 1000.0)
    }

    fn scaled(self, seconds: f64) -> Duration {
        let seconds = (seconds / self.speedup).clamp(0.0, LONGEST_SECONDS);
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }
}

/// The queue for computing prompts. Holds the time at which it was, or will be, free.
pub struct PrefillServer {
    free_at: Mutex<Instant>,
}

impl PrefillServer {
    /// A server that is free now.
    pub fn new() -> Self {
        Self {
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// Waits until all earlier turns have ended or been dropped.
    pub async fn turn(&self) -> PrefillTurn<'_> {
        let arrived = Instant::now();
        let free_at = self.free_at.lock().await;
        let ends = arrived.max(*free_at);
        PrefillTurn { free_at, ends }
    }
}

/// The right to compute one prompt; if dropped early, the unused time goes to the next one.
pub struct PrefillTurn<'a> {
    free_at: MutexGuard<'a, Instant>,
    ends: Instant,
}

impl PrefillTurn<'_> {
    /// Starts the turn now, if something other than the turn was waited for.
    pub fn start_now(&mut self) {
        self.ends = Instant::now();
    }

    /// Computes for `time`. Starts at the end of the previous turn, not at the timer's wake-up, so that coarse timers cost no
    /// throughput.
    pub async fn compute(mut self, time: Duration) {
        self.ends += time;
        sleep_until(self.ends).await;
    }
}

impl Drop for PrefillTurn<'_> {
    fn drop(&mut self) {
        *self.free_at = self.ends.min(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace = Pace {
        prefill_rate: 8000.0,
        token_ms: 10.0,
        speedup: 2.0,
    };

    #[test]
    fn times_follow_the_model() {
        assert_eq!(PACE.prefill(8000), Duration::from_millis(500));
        assert_eq!(
            PACE.prefill(1),
            Duration::from_micros(500),
            "1 ms at the least"
        );
        assert_eq!(PACE.tokens(4), Duration::from_millis(20));
        assert!(PACE.tokens(u64::MAX) <= Duration::from_secs_f64(LONGEST_SECONDS));
    }

    #[tokio::test]
    async fn prompts_are_computed_one_after_another() {
        let server = PrefillServer::new();
        let start = Instant::now();
        let one = async |time| {
            server
                .turn()
                .await
                .compute(Duration::from_millis(time))
                .await
        };
        tokio::join!(one(30), one(20), one(50));
        let took = start.elapsed().as_millis();
        assert!((100..1000).contains(&took), "{took} ms");
    }

    #[tokio::test]
    async fn a_turn_given_up_leaves_its_time_to_the_next() {
        let server = PrefillServer::new();
        let start = Instant::now();
        let gone = tokio::time::timeout(
            Duration::from_millis(40),
            server.turn().await.compute(Duration::from_millis(2000)),
        );
        assert!(gone.await.is_err());
        server.turn().await.compute(Duration::from_millis(10)).await;
        let took = start.elapsed().as_millis();
        assert!((50..1000).contains(&took), "{took} ms");
    }
}
