//! Owns the open loop: requests at fixed times, on whichever connection is free. One that is late because none was free is
//! late: its time counts from when it was due.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::ask::Author;
use super::line::{Expected, Line};
use super::measured::{Sample, Window};
use super::{PATIENCE, Plan};

/// Pause of a connection after a failure, so that a gateway that is gone is not asked in a tight loop.
pub const AFTER_FAILURE: Duration = Duration::from_millis(10);

/// When requests are due, and whose turn it is.
struct Schedule {
    first: Instant,
    rate: f64,
    ends: Instant,
    author: RefCell<Author>,
    number: RefCell<u64>,
}

impl Schedule {
    /// When the next request that nobody has taken is due, and its body.
    fn take(&self) -> Option<(Instant, bytes::Bytes)> {
        let mut number = self.number.borrow_mut();
        let due = self.first + Duration::from_secs_f64(*number as f64 / self.rate);
        if due >= self.ends {
            return None;
        }
        *number += 1;
        Some((due, self.author.borrow_mut().next()))
    }
}

/// Sends what is due until the window is over; returns what came of every request.
pub async fn send(plan: &Plan, rate: f64, window: Window) -> Vec<Sample> {
    let schedule = Rc::new(Schedule {
        first: Instant::now(),
        rate,
        ends: window.ends,
        author: RefCell::new(Author::new(&plan.asking)),
        number: RefCell::new(0),
    });
    let mut lines = JoinSet::new();
    for _ in 0..plan.connections {
        lines.spawn_local(one(
            Line::new(plan.to),
            Rc::clone(&schedule),
            plan.expected(),
        ));
    }
    let all = lines.join_all().await;
    all.into_iter().flatten().collect()
}

async fn one(mut line: Line, schedule: Rc<Schedule>, expected: Expected) -> Vec<Sample> {
    let mut samples = Vec::new();
    while let Some((due, body)) = schedule.take() {
        sleep_until(due).await;
        let answer = line.ask(body, expected);
        let sample = Sample::of(answer, due, schedule.ends + PATIENCE).await;
        samples.push(sample);
        if !sample.is_good() {
            sleep(AFTER_FAILURE).await;
        }
    }
    samples
}
