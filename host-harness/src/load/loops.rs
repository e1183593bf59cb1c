//! Owns the loops: a closed one, in which each connection sends its next request after the answer to the last, and an open one,
//! whose requests are due at fixed times, on any free connection. A request delayed for lack of a connection counts from its due
//! time.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::connection::{AnswerForm, LoadConnection};
use super::measured::{Sample, Window};
use super::request_spec::BodyWriter;
use super::{LoadPlan, PATIENCE, Pacing};

/// Pause of a connection after a failure, to avoid a tight loop on a dead gateway.
const AFTER_FAILURE: Duration = Duration::from_millis(10);

/// The requests of a load, which its connections take in turn.
struct Schedule {
    pacing: Pacing,
    first: Instant,
    ends: Instant,
    writer: BodyWriter,
    taken: u64,
    /// Number of requests, independent of time; `None`: as many as there is time for.
    most: Option<u64>,
}

impl Schedule {
    /// Due time and body of the next request that no connection has taken.
    fn take(&mut self) -> Option<(Instant, Bytes)> {
        let due = match self.pacing {
            Pacing::Closed => Instant::now(),
            Pacing::Open { rate } => self.first + Duration::from_secs_f64(self.taken as f64 / rate),
        };
        if due >= self.ends || self.most == Some(self.taken) {
            return None;
        }
        self.taken += 1;
        Some((due, self.writer.next()))
    }
}

/// Sends until the window is over, or `most` requests are sent; returns the outcome of every request.
pub async fn send(plan: &LoadPlan, window: Window, most: Option<u64>) -> Vec<Sample> {
    let schedule = Rc::new(RefCell::new(Schedule {
        pacing: plan.pacing,
        first: Instant::now(),
        ends: window.ends,
        writer: BodyWriter::new(&plan.spec),
        taken: 0,
        most,
    }));
    let mut connections = JoinSet::new();
    for _ in 0..plan.connections {
        let connection = LoadConnection::new(plan.to);
        connections.spawn_local(one(connection, Rc::clone(&schedule), plan.expected()));
    }
    let all = connections.join_all().await;
    all.into_iter().flatten().collect()
}

async fn one(
    mut connection: LoadConnection,
    schedule: Rc<RefCell<Schedule>>,
    expected: AnswerForm,
) -> Vec<Sample> {
    let limit = schedule.borrow().ends + PATIENCE;
    let mut samples = Vec::new();
    loop {
        let Some((due, body)) = schedule.borrow_mut().take() else {
            return samples;
        };
        if due > Instant::now() {
            sleep_until(due).await;
        }
        let answer = connection.send(body, expected);
        let sample = Sample::of(answer, due, limit).await;
        samples.push(sample);
        if !sample.is_good() {
            sleep(AFTER_FAILURE).await;
        }
    }
}
