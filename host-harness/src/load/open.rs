//! Owns the open loop: requests at fixed times, on any free connection. A request delayed for lack of a connection counts from
//! its due time.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::connection::{AnswerForm, LoadConnection};
use super::measured::{Sample, Window};
use super::request_spec::BodyWriter;
use super::{LoadPlan, PATIENCE};

/// Pause of a connection after a failure, to avoid a tight loop on a dead gateway.
pub const AFTER_FAILURE: Duration = Duration::from_millis(10);

/// Due times of the requests, taken in turn.
struct Schedule {
    first: Instant,
    rate: f64,
    ends: Instant,
    writer: RefCell<BodyWriter>,
    number: RefCell<u64>,
}

impl Schedule {
    /// Due time of the next request that no connection has taken, and its body.
    fn take(&self) -> Option<(Instant, bytes::Bytes)> {
        let mut number = self.number.borrow_mut();
        let due = self.first + Duration::from_secs_f64(*number as f64 / self.rate);
        if due >= self.ends {
            return None;
        }
        *number += 1;
        Some((due, self.writer.borrow_mut().next()))
    }
}

/// Sends due requests until the window is over; returns the outcome of every request.
pub async fn send(plan: &LoadPlan, rate: f64, window: Window) -> Vec<Sample> {
    let schedule = Rc::new(Schedule {
        first: Instant::now(),
        rate,
        ends: window.ends,
        writer: RefCell::new(BodyWriter::new(&plan.spec)),
        number: RefCell::new(0),
    });
    let mut connections = JoinSet::new();
    for _ in 0..plan.connections {
        connections.spawn_local(one(
            LoadConnection::new(plan.to),
            Rc::clone(&schedule),
            plan.expected(),
        ));
    }
    let all = connections.join_all().await;
    all.into_iter().flatten().collect()
}

async fn one(
    mut connection: LoadConnection,
    schedule: Rc<Schedule>,
    expected: AnswerForm,
) -> Vec<Sample> {
    let mut samples = Vec::new();
    while let Some((due, body)) = schedule.take() {
        sleep_until(due).await;
        let answer = connection.send(body, expected);
        let sample = Sample::of(answer, due, schedule.ends + PATIENCE).await;
        samples.push(sample);
        if !sample.is_good() {
            sleep(AFTER_FAILURE).await;
        }
    }
    samples
}
