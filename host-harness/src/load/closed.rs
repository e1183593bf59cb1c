//! Owns the closed loop: each connection sends its next request after the answer to the last.

use std::cell::RefCell;
use std::rc::Rc;

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::ask::Author;
use super::line::{Expected, Line};
use super::measured::{Sample, Window};
use super::open::AFTER_FAILURE;
use super::{PATIENCE, Plan};

/// Bodies still to be sent.
struct Bodies {
    author: Author,
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
        Some(self.author.next())
    }
}

/// Sends until the window is over, or `most` requests are sent; returns the outcome of every request.
pub async fn send(plan: &Plan, window: Window, most: Option<u64>) -> Vec<Sample> {
    let bodies = Rc::new(RefCell::new(Bodies {
        author: Author::new(&plan.asking),
        left: most,
    }));
    let mut lines = tokio::task::JoinSet::new();
    for _ in 0..plan.connections {
        let line = Line::new(plan.to);
        lines.spawn_local(one(line, Rc::clone(&bodies), plan.expected(), window));
    }
    let all = lines.join_all().await;
    all.into_iter().flatten().collect()
}

async fn one(
    mut line: Line,
    bodies: Rc<RefCell<Bodies>>,
    expected: Expected,
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
        let answer = line.ask(body, expected);
        let sample = Sample::of(answer, due, window.ends + PATIENCE).await;
        samples.push(sample);
        if !sample.is_good() {
            sleep(AFTER_FAILURE).await;
        }
    }
}
