//! Owns engines with continuous batching: a worker works in steps, each of which computes parts of several prompts, up to a
//! budget of tokens, and one token for each running answer.
//!
//! A prefill worker's steps contain prompts, a decode worker's contain answers; an aggregated worker has both in one step. The KV
//! cache moves from prefill to decode in no time. The constants are of the order of a large model on a current accelerator; they
//! are the same for all routers, and no claim about any engine.

use std::collections::VecDeque;
use std::time::Duration;

use super::event_queue::EventQueue;
use super::records::{AssignedRequest, RunRecords};
use super::{Engine, Occupancy, Parameters, REPORTS, seconds};

/// Prompt tokens in one step: the default of engines with chunked prefill.
const STEP_TOKENS: u64 = 8192;
/// Answers in one step.
const STEP_ANSWERS: usize = 256;
/// Seconds of every step: its start, and the reading of the weights.
const STEP: f64 = 0.012;
/// Seconds per answer in a step.
const PER_ANSWER: f64 = 0.0001;
/// Seconds per thousand tokens of KV held by a step's answers.
const PER_THOUSAND_HELD: f64 = 0.000_05;

/// All workers.
pub struct Batched<'a> {
    parameters: &'a Parameters,
    workers: Vec<Worker>,
    /// Ends of steps, by worker.
    queue: EventQueue<usize>,
}

/// Work of one worker.
#[derive(Default)]
struct Worker {
    /// Prompts; the first ones may be partly computed.
    prompts: VecDeque<Prompt>,
    /// Answers for which there is no room yet.
    waiting: VecDeque<Answer>,
    /// Running answers.
    answers: Vec<Answer>,
    /// Tokens held by the running answers, including those still to be generated.
    reserved: u64,
    /// Tokens held by the running answers.
    held: u64,
    step: Option<Step>,
}

struct Prompt {
    job: AssignedRequest,
    left: u64,
}

struct Answer {
    request: usize,
    tokens: u64,
    written: u64,
    prompt: u64,
    last: Duration,
}

/// A running step: the prompts that end with it. All running answers take part.
struct Step {
    ending: Vec<AssignedRequest>,
}

impl<'a> Batched<'a> {
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

    /// Starts a worker's next step, if the worker is idle and has work.
    fn start(&mut self, at: usize, now: Duration, records: &mut RunRecords<'_>) {
        let worker = &mut self.workers[at];
        if worker.step.is_some() {
            return;
        }
        worker.admit(self.parameters.capacity());
        let (tokens, ending) = worker.chunks(now, records);
        let answers = worker.answers.len();
        if tokens == 0 && answers == 0 {
            return;
        }
        worker.step = Some(Step { ending });
        let lasts =
            STEP + answers as f64 * PER_ANSWER + worker.held as f64 / 1000.0 * PER_THOUSAND_HELD;
        let ends = now + seconds(lasts) + self.parameters.prefill_time(tokens);
        self.queue.push(ends, at);
    }

    /// Ends a prompt with its first token: the decode worker generates the rest of the answer.
    fn hand_over(&mut self, job: AssignedRequest, now: Duration, records: &mut RunRecords<'_>) {
        let request = records.request(job.request);
        if request.output_tokens == 1 {
            records.ended(job.request, now);
            return;
        }
        self.workers[job.decode].waiting.push_back(Answer {
            request: job.request,
            tokens: request.output_tokens,
            written: 1,
            prompt: request.prompt_tokens,
            last: now,
        });
    }
}

impl Worker {
    /// Admits answers as long as their KV fits, first come first served; one that never fits runs alone.
    fn admit(&mut self, capacity: u64) {
        while let Some(next) = self.waiting.front() {
            let fits =
                self.reserved + next.prompt + next.tokens <= capacity || self.answers.is_empty();
            if !fits || self.answers.len() == STEP_ANSWERS {
                return;
            }
            self.reserved += next.prompt + next.tokens;
            self.held += next.prompt + next.written;
            self.answers.extend(self.waiting.pop_front());
        }
    }

    /// The next step's share of the prompts: the number of tokens, and the prompts that end with it.
    fn chunks(
        &mut self,
        now: Duration,
        records: &mut RunRecords<'_>,
    ) -> (u64, Vec<AssignedRequest>) {
        let (mut budget, mut ending) = (STEP_TOKENS, Vec::new());
        while let Some(prompt) = self.prompts.front_mut()
            && budget > 0
        {
            if prompt.left == prompt.job.tokens {
                records.prefill_begins(prompt.job.request, now);
            }
            let chunk = prompt.left.min(budget);
            prompt.left -= chunk;
            budget -= chunk;
            if prompt.left > 0 {
                break;
            }
            ending.extend(self.prompts.pop_front().map(|prompt| prompt.job));
        }
        (STEP_TOKENS - budget, ending)
    }

    /// Adds a token to each answer; complete answers leave.
    fn write(&mut self, now: Duration, records: &mut RunRecords<'_>) {
        self.held += self.answers.len() as u64;
        for answer in &mut self.answers {
            answer.written += 1;
            records.gap(now - answer.last, 1);
            answer.last = now;
            if answer.written % answer.tokens.div_ceil(REPORTS) == 0 {
                records.generated(answer.request, answer.written);
            }
        }
        let complete = self
            .answers
            .extract_if(.., |answer| answer.written >= answer.tokens);
        for answer in complete {
            self.reserved -= answer.prompt + answer.tokens;
            self.held -= answer.prompt + answer.written;
            records.ended(answer.request, now);
        }
    }
}

impl Engine for Batched<'_> {
    fn begin(&mut self, job: AssignedRequest, now: Duration, records: &mut RunRecords<'_>) {
        let left = job.tokens;
        self.workers[job.prefill]
            .prompts
            .push_back(Prompt { job, left });
        self.start(job.prefill, now, records);
    }

    fn due(&self) -> Option<Duration> {
        self.queue.due()
    }

    fn advance(&mut self, records: &mut RunRecords<'_>) {
        let Some((now, at)) = self.queue.pop() else {
            return;
        };
        let Some(step) = self.workers[at].step.take() else {
            return;
        };
        self.workers[at].write(now, records);
        let mut touched = vec![at];
        for job in step.ending {
            records.first_token(job.request, now);
            self.hand_over(job, now, records);
            touched.push(job.decode);
        }
        for at in touched {
            self.start(at, now, records);
        }
    }

    fn occupancy(&self, worker: usize, _now: Duration, records: &RunRecords<'_>) -> Occupancy {
        let worker = &self.workers[worker];
        let (begun, untouched): (Vec<&Prompt>, Vec<&Prompt>) = worker
            .prompts
            .iter()
            .partition(|prompt| prompt.left < prompt.job.tokens);
        let ending = worker.step.iter().flat_map(|step| &step.ending);
        let of_prompts = begun
            .iter()
            .map(|prompt| {
                let tokens = records.request(prompt.job.request).prompt_tokens;
                tokens.saturating_sub(prompt.left)
            })
            .chain(
                ending
                    .clone()
                    .map(|job| records.request(job.request).prompt_tokens),
            );
        Occupancy {
            waiting: untouched.len() + worker.waiting.len(),
            running: begun.len() + ending.clone().count() + worker.answers.len(),
            tokens: worker.held + of_prompts.sum::<u64>(),
        }
    }
}
