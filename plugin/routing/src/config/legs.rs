//! Owns the limits of a request's legs: the time and the number of tries of each leg.

use std::time::Duration;

use serde::Deserialize;

/// Limits of the prefill leg.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PrefillLeg {
    /// Maximum milliseconds of a prefill call, up to its complete answer.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub timeout_ms: u32,
    /// Milliseconds that a call may take with an empty prompt on an idle worker.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub base_timeout_ms: u32,
    /// Milliseconds in addition to `base_timeout_ms` for each 1,000 tokens that the worker must compute until the call is done,
    /// including the tokens booked on the worker before.
    #[cfg_attr(feature = "schema", schemars(extend("x-unit" = "milliseconds")))]
    pub timeout_ms_per_1k_tokens: u32,
    /// Prefill workers tried in all before the request is refused.
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "workers")))]
    pub attempts: u32,
    /// Milliseconds without an answer after which a second prefill worker is called beside the first; absent: never. The first
    /// good answer counts; the KV that the other worker has computed is fetched and dropped (`nixl`, `mooncake`, `trtllm`).
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub hedge_after_ms: Option<u32>,
    /// Back-pressure: maximum prompt tokens booked on the eligible prefill workers together. A request beyond that gets 429;
    /// absent: no limit. A request is always admitted while nothing is queued.
    pub max_queued_tokens: Option<u64>,
}

impl Default for PrefillLeg {
    /// Two minutes at most: a 128k-token prompt on a slow worker. A worker that computes fewer than 1,000 tokens a second, or
    /// nothing for a quarter of a minute, counts as hung. Three workers are tried.
    fn default() -> Self {
        Self {
            timeout_ms: 120_000,
            base_timeout_ms: 15_000,
            timeout_ms_per_1k_tokens: 1_000,
            attempts: 3,
            hedge_after_ms: None,
            max_queued_tokens: None,
        }
    }
}

impl PrefillLeg {
    /// Time that a call may take on a worker with this number of tokens to compute until the call is done.
    pub fn deadline(&self, tokens: u64) -> Duration {
        let per_1k = u64::from(self.timeout_ms_per_1k_tokens);
        let grown = tokens.saturating_mul(per_1k) / 1_000;
        let wanted = u64::from(self.base_timeout_ms).saturating_add(grown);
        Duration::from_millis(wanted.min(u64::from(self.timeout_ms)))
    }
}

/// Limits of the decode leg.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DecodeLeg {
    /// Decode workers (with `direct`: frontends) tried in all when connections are refused.
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "workers")))]
    pub attempts: u32,
    /// Whether decode workers can run requests aggregated, prefill included.
    pub runs_whole_requests: bool,
    /// Milliseconds from the decode leg's dispatch to the first token, whatever comes before that token; 0: no limit. A worker
    /// that reads the prompt too has the time of a prefill call in addition.
    pub first_token_timeout_ms: u32,
    /// Maximum milliseconds between two pieces of a streamed answer, after the first piece; 0: no limit. A client that reads
    /// slowly silences its worker too: where other streams of the worker move meanwhile, the silence does not count against the
    /// worker.
    pub silence_timeout_ms: u32,
    /// Milliseconds for each token that the client allows for an unstreamed answer, in addition to the time for the first
    /// token. 0, no `first_token_timeout_ms`, or a client that names no limit: no limit.
    #[cfg_attr(feature = "schema", schemars(extend("x-unit" = "milliseconds")))]
    pub timeout_ms_per_token: u32,
    /// Number of replacements by a new pair for a decode leg that fails before its client has read anything. A leg that reached
    /// no worker, or whose worker has left, has a further `decode.attempts` - 1 replacements. 0: no replacement at all.
    #[cfg_attr(feature = "schema", schemars(extend("x-unit" = "times")))]
    pub recoveries: u32,
    /// Maximum bytes of request bodies kept for recoveries, per worker thread, within half of `limits.bodies_in_flight_bytes`. A
    /// request beyond that is not replaced.
    pub recovery_bytes: usize,
}

impl Default for DecodeLeg {
    /// One minute for the queue before the first token. Two minutes of silence, since a client that reads slowly silences its
    /// worker too.
    fn default() -> Self {
        Self {
            attempts: 3,
            runs_whole_requests: false,
            first_token_timeout_ms: 60_000,
            silence_timeout_ms: 120_000,
            timeout_ms_per_token: 200,
            recoveries: 1,
            recovery_bytes: 64 * 1024 * 1024,
        }
    }
}

impl DecodeLeg {
    /// Time that an unstreamed answer of at most this number of tokens may take; none: no limit.
    pub fn whole_deadline(&self, tokens: Option<u64>) -> Option<Duration> {
        let first = self.first_token_deadline()?;
        let per_token = Some(u64::from(self.timeout_ms_per_token)).filter(|ms| *ms > 0)?;
        let others = tokens?.saturating_mul(per_token);
        Some(first.saturating_add(Duration::from_millis(others)))
    }

    /// Time that the first token may take; none: no limit.
    pub fn first_token_deadline(&self) -> Option<Duration> {
        limit(self.first_token_timeout_ms)
    }

    /// Time that a stream may be silent; none: no limit.
    pub fn silence(&self) -> Option<Duration> {
        limit(self.silence_timeout_ms)
    }
}

fn limit(ms: u32) -> Option<Duration> {
    (ms > 0).then(|| Duration::from_millis(u64::from(ms)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefills_deadline_grows_with_its_tokens_up_to_the_most() {
        let leg = PrefillLeg::default();
        let deadline = |tokens| leg.deadline(tokens).as_millis();
        assert_eq!(deadline(1), 15_001);
        assert_eq!(deadline(8_000), 23_000);
        assert_eq!(deadline(u64::MAX), 120_000);
    }

    #[test]
    fn an_answer_in_one_piece_has_a_limit_where_its_length_has() {
        let leg = DecodeLeg::default();
        assert_eq!(leg.whole_deadline(Some(100)), Some(Duration::from_secs(80)));
        assert_eq!(leg.whole_deadline(None), None);
        let unlimited = DecodeLeg {
            first_token_timeout_ms: 0,
            ..leg
        };
        assert_eq!(unlimited.whole_deadline(Some(100)), None);
    }
}
