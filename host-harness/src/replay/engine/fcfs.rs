//! Owns the simplest engine: each worker computes one prompt after the other, first come first served.
//!
//! Writing answers takes time and delays nobody. The KV cache travels from prefill to decode in no time.

use std::time::Duration;

use super::agenda::Agenda;
use super::books::{Books, Job};
use super::{Engine, Parameters, REPORTS, seconds};

/// All workers.
pub struct Fcfs<'a> {
    parameters: &'a Parameters,
    /// When each worker has computed all that it was given.
    free_at: Vec<Duration>,
    agenda: Agenda<Event>,
}

/// What happens to a request.
enum Event {
    FirstToken(usize),
    /// Another part of its answer is there, counted from 1 to [`REPORTS`].
    Part(usize, u64),
}

impl<'a> Fcfs<'a> {
    /// Idle workers.
    pub fn new(parameters: &'a Parameters) -> Self {
        Self {
            parameters,
            free_at: vec![Duration::ZERO; parameters.shape.workers()],
            agenda: Agenda::new(),
        }
    }

    fn answer(&mut self, number: usize, now: Duration, books: &mut Books<'_>) {
        let tokens = books.request(number).output_tokens;
        let token_ms = self.parameters.token_ms;
        books.gap(seconds(token_ms / 1000.0), tokens - 1);
        for part in 1..=REPORTS {
            let after = (part_of(tokens, part).max(1) - 1) as f64 * token_ms / 1000.0;
            self.agenda
                .enter(now + seconds(after), Event::Part(number, part));
        }
    }
}

/// The tokens of an answer when that part of it is there.
fn part_of(tokens: u64, part: u64) -> u64 {
    tokens * part / REPORTS
}

impl Engine for Fcfs<'_> {
    fn begin(&mut self, job: Job, now: Duration, books: &mut Books<'_>) {
        let free_at = &mut self.free_at[job.prefill];
        let begins = now.max(*free_at);
        *free_at = begins + self.parameters.prefill_time(job.tokens);
        books.prefill_begins(job.request, begins);
        self.agenda.enter(*free_at, Event::FirstToken(job.request));
    }

    fn due(&self) -> Option<Duration> {
        self.agenda.due()
    }

    fn advance(&mut self, books: &mut Books<'_>) {
        match self.agenda.take() {
            None => {}
            Some((now, Event::FirstToken(number))) => {
                books.first_token(number, now);
                self.answer(number, now, books);
            }
            Some((now, Event::Part(number, part))) => {
                books.generated(number, part_of(books.request(number).output_tokens, part));
                if part == REPORTS {
                    books.ended(number, now);
                }
            }
        }
    }
}
