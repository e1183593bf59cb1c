//! Owns the closed loop: each connection sends its next request when it has the answer to the last.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::time::{Instant, sleep};

use super::Plan;
use super::ask::Author;
use super::line::{Expected, Line};
use super::measured::{Sample, Window};
use super::open::AFTER_FAILURE;

/// Sends until the window is over; returns what came of every request.
pub async fn send(plan: &Plan, window: Window) -> Vec<Sample> {
    let author = Rc::new(RefCell::new(Author::new(&plan.asking)));
    let mut lines = tokio::task::JoinSet::new();
    for _ in 0..plan.connections {
        let line = Line::new(plan.to);
        lines.spawn_local(one(line, Rc::clone(&author), plan.expected(), window));
    }
    let all = lines.join_all().await;
    all.into_iter().flatten().collect()
}

async fn one(
    mut line: Line,
    author: Rc<RefCell<Author>>,
    expected: Expected,
    window: Window,
) -> Vec<Sample> {
    let mut samples = Vec::new();
    loop {
        let due = Instant::now();
        if due >= window.ends {
            return samples;
        }
        let body = author.borrow_mut().next();
        let reply = line.ask(body, expected).await;
        let sample = Sample::of(due, reply.ok());
        samples.push(sample);
        if !sample.is_good {
            sleep(AFTER_FAILURE).await;
        }
    }
}
