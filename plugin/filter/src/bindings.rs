//! Owns the questions to prefill workers for what routing must know and discovery does not say.

use std::rc::Rc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use routing::fleet::{Incarnation, WorkerId};
use routing::route::Question;

use crate::legs::calls;
use crate::vm::PoolRuntime;

/// Timeout of a question to a worker.
const PATIENCE: Duration = Duration::from_secs(1);

/// Questions under way, and when each worker is asked next.
#[derive(Default)]
pub struct Asker {
    pending: HashMap<u32, Incarnation>,
    /// Time of the next question, and whether the worker's answer was known at the last one: a worker whose answer is no longer
    /// known is asked at once.
    again: HashMap<WorkerId, (Duration, bool)>,
    /// Workers without a usable answer: only the first failure is logged.
    silent: HashSet<WorkerId>,
}

impl Asker {
    /// Asks the prefill workers whose questions are due.
    pub fn tick(&mut self, runtime: &PoolRuntime) {
        let questions = runtime.router().questions();
        let is_asked = |id: &WorkerId| questions.iter().any(|question| question.worker.id == *id);
        self.again.retain(|id, _| is_asked(id));
        self.silent.retain(is_asked);
        let now = runtime.now();
        for question in questions {
            let id = question.worker.id;
            let last = self.again.get(&id);
            let waits = last
                .is_some_and(|(until, was_bound)| now < *until && *was_bound == question.is_bound);
            let life = question.worker.incarnation();
            if !waits && !self.pending.values().any(|asked| *asked == life) {
                let until = now.saturating_add(question.again);
                self.again.insert(id, (until, question.is_bound));
                self.ask(&question);
            }
        }
    }

    fn ask(&mut self, question: &Question) {
        let Question {
            cluster,
            destination,
            path,
            ..
        } = question;
        match calls::get(cluster, Some(*destination), path, &[], PATIENCE) {
            Ok(token) => {
                self.pending.insert(token, question.worker.incarnation());
            }
            Err(status) => self.failed(question.worker.id, &format!("the call failed: {status:?}")),
        }
    }

    /// Handles the answer to a question; false if the token is another call's.
    pub fn answered(&mut self, token: u32, has_headers: bool, runtime: &Rc<PoolRuntime>) -> bool {
        let Some(life) = self.pending.remove(&token) else {
            return false;
        };
        let body = calls::good_answer(has_headers).unwrap_or_default();
        match runtime.on_reply(&life, &body) {
            true => {
                self.silent.remove(&life.id);
            }
            false => self.failed(life.id, "it did not tell what it was asked"),
        }
        true
    }

    fn failed(&mut self, id: WorkerId, problem: &str) {
        if self.silent.insert(id) {
            log::warn!(
                "prefill worker {id} did not tell where its KV is fetched, and is asked again: {problem}"
            );
        }
    }
}
