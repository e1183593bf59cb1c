//! Owns waiting: polls with generous deadlines, the limit around a whole test, and the test's name for its logs.

use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

/// Long enough for anything a healthy gateway does, on a machine that is busy with other tests.
pub const GENEROUS: Duration = Duration::from_secs(60);

/// Interval of a poll.
const POLL: Duration = Duration::from_millis(50);

/// Time limit of a test.
const TEST_LIMIT: Duration = Duration::from_secs(240);
const SOAK_LIMIT: Duration = Duration::from_secs(3600);

/// Most tries of what chance decides: so many requests in a row miss one of two equal workers once in 10^18 times.
/// Fewer than the requests that an engine remembers.
const TRIES: usize = 60;

tokio::task_local! {
    static TEST_NAME: String;
}

/// True when `PD_SOAK=1` asks for the long counts.
pub fn soak() -> bool {
    std::env::var("PD_SOAK").is_ok_and(|value| value == "1")
}

/// The usual count, or the long one in a soak.
pub fn count(usual: usize, in_a_soak: usize) -> usize {
    if soak() { in_a_soak } else { usual }
}

/// Runs one test under its name and within the limit for tests.
pub async fn judged<F: Future<Output = ()>>(name: &str, test: F) {
    judged_within(if soak() { SOAK_LIMIT } else { TEST_LIMIT }, name, test).await;
}

/// The same with its own limit.
pub async fn judged_within<F: Future<Output = ()>>(limit: Duration, name: &str, test: F) {
    let file_name = name.replace("::", "-");
    let finished = timeout(limit, TEST_NAME.scope(file_name, test)).await;
    assert!(finished.is_ok(), "the test hangs: not over after {limit:?}");
}

/// The running test's name, fit for a file name.
pub fn test_name() -> String {
    TEST_NAME
        .try_with(Clone::clone)
        .unwrap_or_else(|_| "unnamed".to_owned())
}

/// Polls until the answer is `Ok`; fails with the last reason when `within` has passed.
pub async fn eventually<T, F, Fut>(what: &str, within: Duration, probe: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, String>>,
{
    let outcome = polled(within, probe).await;
    outcome.unwrap_or_else(|reason| panic!("{what}: not so after {within:?}; last seen: {reason}"))
}

/// Polls until the answer is `Ok`.
///
/// # Errors
/// With the last reason when `within` has passed.
pub async fn polled<T, F, Fut>(within: Duration, mut probe: F) -> Result<T, String>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, String>>,
{
    let deadline = Instant::now() + within;
    loop {
        let answer = probe().await;
        if answer.is_ok() || Instant::now() >= deadline {
            return answer;
        }
        sleep(POLL).await;
    }
}

/// Tries until the answer is `Ok`; fails with the last reason when too many tries have failed for that to be bad luck.
/// For what is drawn anew at each try, such as which of several idle workers gets a request. A try is given its number,
/// from 0 on.
pub async fn within_tries<T>(
    what: &str,
    mut attempt: impl AsyncFnMut(usize) -> Result<T, String>,
) -> T {
    let mut seen = String::new();
    for number in 0..TRIES {
        match attempt(number).await {
            Ok(value) => return value,
            Err(reason) => seen = reason,
        }
    }
    panic!("{what}: not so after {TRIES} tries; last seen: {seen}");
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn eventually_asks_until_it_is_so() {
        let attempts = Cell::new(0);
        let attempts = &attempts;
        let answer = eventually("three", GENEROUS, || async move {
            attempts.set(attempts.get() + 1);
            if attempts.get() < 3 {
                return Err(format!("{}", attempts.get()));
            }
            Ok(attempts.get())
        })
        .await;
        assert_eq!(answer, 3);
    }

    #[tokio::test]
    async fn tries_end_with_the_first_that_is_right() {
        let mut tried = 0;
        let answer = within_tries("the third", async |number| {
            tried += 1;
            match number {
                2 => Ok(number),
                _ => Err(number.to_string()),
            }
        })
        .await;
        assert_eq!((answer, tried), (2, 3));
    }

    #[tokio::test]
    #[should_panic(expected = "not so after 60 tries; last seen: 59")]
    async fn tries_end_with_the_reason_of_the_last() {
        within_tries("nothing", async |number| Err::<(), _>(number.to_string())).await;
    }

    #[tokio::test]
    #[should_panic(expected = "last seen: never")]
    async fn eventually_gives_up_with_the_reason() {
        eventually("nothing", Duration::ZERO, || async {
            Err::<(), _>("never".to_owned())
        })
        .await;
    }
}
