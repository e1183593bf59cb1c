//! Owns the simplest engine: each worker computes one prompt after the other, first come first served.
//!
//! Writing answers takes time but delays no other request. The KV cache moves from prefill to decode in no time.

use std::collections::VecDeque;
use std::time::Duration;

use super::event_queue::EventQueue;
use super::records::{AssignedRequest, RunRecords};
use super::{Engine, Occupancy, Parameters, REPORTS, seconds};

/// All workers.
pub struct Fcfs<'a> {
    parameters: &'a Parameters,
    workers: Vec<Worker>,
    queue: EventQueue<Event>,
}

/// Work of one worker.
#[derive(Default)]
struct Worker {
    /// Time at which all assigned prompts are computed.
    free_at: Duration,
    /// Assigned prompts; the first is being computed.
    prompts: VecDeque<usize>,
    answers: Vec<Answer>,
}

struct Answer {
    request: usize,
    first_token: Duration,
}

/// An event of a request.
enum Event {
    FirstToken(AssignedRequest),
    /// The next part of its answer is complete, counted from 1 to [`REPORTS`].
    Part(AssignedRequest, u64),
}

impl<'a> Fcfs<'a> {
    /// Idle workers.
    pub fn new(parameters: &'a Parameters) -> Self {
        Self {
            parameters,
            workers: (0..parameters.workers.total())
                .map(|_| Worker::default())
                .collect(),
            queue: EventQueue::new(),
        }
    }

    fn answer(&mut self, job: AssignedRequest, now: Duration, records: &mut RunRecords<'_>) {
        self.workers[job.decode].answers.push(Answer {
            request: job.request,
            first_token: now,
        });
        let tokens = records.request(job.request).output_tokens;
        let token_ms = self.parameters.token_ms;
        records.gap(seconds(token_ms / 1000.0), tokens - 1);
        for part in 1..=REPORTS {
            let after = (part_of(tokens, part).max(1) - 1) as f64 * token_ms / 1000.0;
            self.queue
                .push(now + seconds(after), Event::Part(job, part));
        }
    }

    /// Tokens of an answer written so far.
    fn written(&self, answer: &Answer, now: Duration) -> u64 {
        let since = now.saturating_sub(answer.first_token).as_secs_f64();
        (since * 1000.0 / self.parameters.token_ms) as u64 + 1
    }
}

/// Tokens of an answer after that part.
fn part_of(tokens: u64, part: u64) -> u64 {
    tokens * part / REPORTS
}

impl Engine for Fcfs<'_> {
    fn begin(&mut self, job: AssignedRequest, now: Duration, records: &mut RunRecords<'_>) {
        let worker = &mut self.workers[job.prefill];
        let begins = now.max(worker.free_at);
        worker.free_at = begins + self.parameters.prefill_time(job.tokens);
        worker.prompts.push_back(job.request);
        records.prefill_begins(job.request, begins);
        self.queue.push(worker.free_at, Event::FirstToken(job));
    }

    fn due(&self) -> Option<Duration> {
        self.queue.due()
    }

    fn advance(&mut self, records: &mut RunRecords<'_>) {
        match self.queue.pop() {
            None => {}
            Some((now, Event::FirstToken(job))) => {
                self.workers[job.prefill].prompts.pop_front();
                records.first_token(job.request, now);
                self.answer(job, now, records);
            }
            Some((now, Event::Part(job, part))) => {
                let tokens = records.request(job.request).output_tokens;
                records.generated(job.request, part_of(tokens, part));
                if part == REPORTS {
                    let answers = &mut self.workers[job.decode].answers;
                    answers.retain(|answer| answer.request != job.request);
                    records.ended(job.request, now);
                }
            }
        }
    }

    fn occupancy(&self, worker: usize, now: Duration, records: &RunRecords<'_>) -> Occupancy {
        let worker = &self.workers[worker];
        let prompt = |request: usize| records.request(request).prompt_tokens;
        let computing = worker.prompts.front().map(|request| prompt(*request));
        let answers = worker.answers.iter();
        let held = answers.map(|answer| prompt(answer.request) + self.written(answer, now));
        Occupancy {
            waiting: worker.prompts.len().saturating_sub(1),
            running: worker.prompts.len().min(1) + worker.answers.len(),
            tokens: computing.unwrap_or_default() + held.sum::<u64>(),
        }
    }
}
