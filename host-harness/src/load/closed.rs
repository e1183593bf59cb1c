//! Owns the closed loop: each connection sends its next request after the answer to the last.

use std::cell::RefCell;
use std::rc::Rc;

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::connection::{AnswerForm, LoadConnection};
use super::measured::{Sample, Window};
use super::open::AFTER_FAILURE;
use super::request_spec::BodyWriter;
use super::{LoadPlan, PATIENCE};

/// Bodies still to be sent.
struct Bodies {
    writer: BodyWriter,
    /// Number of bodies, independent of time; `None`: as many as there is time for.
    left: Option<u64>,
}

impl Bodies {
    fn next(&mut self) -> Option<Bytes> {
        match &mut self.left {
            Some(0) => return None,
            Some(left) => *left -= 1,
            None => {}
        }
        Some(self.writer.next())
    }
}

/// Sends until the window is over, or `most` requests are sent; returns the outcome of every request.
pub async fn send(plan: &LoadPlan, window: Window, most: Option<u64>) -> Vec<Sample> {
    let bodies = Rc::new(RefCell::new(Bodies {
        writer: BodyWriter::new(&plan.spec),
        left: most,
    }));
    let mut connections = tokio::task::JoinSet::new();
    for _ in 0..plan.connections {
        let connection = LoadConnection::new(plan.to);
        connections.spawn_local(one(connection, Rc::clone(&bodies), plan.expected(), window));
    }
    let all = connections.join_all().await;
    all.into_iter().flatten().collect()
}

async fn one(
    mut connection: LoadConnection,
    bodies: Rc<RefCell<Bodies>>,
    expected: AnswerForm,
    window: Window,
) -> Vec<Sample> {
    let mut samples = Vec::new();
    loop {
        let due = Instant::now();
        if due >= window.ends {
            return samples;
        }
        let Some(body) = bodies.borrow_mut().next() else {
            return samples;
        };
        let answer = connection.send(body, expected);
        let sample = Sample::of(answer, due, window.ends + PATIENCE).await;
        samples.push(sample);
        if !sample.is_good() {
            sleep(AFTER_FAILURE).await;
        }
    }
}
