//! Owns the order of a benchmark: stages of contenders under loads, then memory, then the trace. A contender that cannot be
//! measured is named, and the rest continues.

use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::join_all;
use indicatif::ProgressBar;

use super::contender::Contender;
use super::fleet::Engines;
use super::loads::Stage;
use super::quality::{TraceContender, TracePlay};
use super::results::{MemoryRow, Results, Row, TraceRow};
use super::rounds::{self, Participant, PromptNumbers, Rounds, WARM_UP};
use super::running_contender::{ContenderFiles, RunningContender};
use super::{BenchError, machine, memory};

/// The planned measurements.
#[derive(Debug)]
pub struct BenchPlan {
    /// Contenders under loads.
    pub stages: Vec<Stage>,
    /// Number and length of the rounds.
    pub rounds: Rounds,
    /// Contenders whose memory is measured.
    pub memory: Vec<Contender>,
    /// Prompts after which memory is judged; 0: not measured.
    pub memory_prompts: u64,
    /// Contenders that play the trace.
    pub trace_contenders: Vec<TraceContender>,
    /// The trace.
    pub trace: PathBuf,
    /// Number of requests of the trace; 0: not played.
    pub trace_requests: usize,
    /// Factor by which the trace is played faster than recorded.
    pub speedup: f64,
}

impl BenchPlan {
    /// Keeps only pd-router and Envoy with lesser filters.
    pub fn leave_peers_out(&mut self) {
        let is_own =
            |contender: Contender| !matches!(contender, Contender::Peer(_) | Contender::Behind(_));
        self.keep_contenders(is_own);
        self.trace_contenders
            .retain(|contender| !matches!(contender, TraceContender::Peer(_)));
    }

    /// Keeps only contenders with matching names.
    pub fn keep(&mut self, is_kept: impl Fn(&str) -> bool) {
        self.keep_contenders(|contender| is_kept(&contender.name()));
        self.trace_contenders
            .retain(|contender| is_kept(contender.name()));
    }

    fn keep_contenders(&mut self, is_kept: impl Fn(Contender) -> bool) {
        for stage in &mut self.stages {
            stage.keep(&is_kept);
        }
        self.stages.retain(|stage| !stage.trials.is_empty());
        self.memory.retain(|contender| is_kept(*contender));
    }

    /// Whether there is nothing to measure.
    pub fn is_empty(&self) -> bool {
        self.stages.is_empty() && self.memory.is_empty() && self.trace_contenders.is_empty()
    }
}

/// Estimated start time of a contender, for the progress bar: most take two seconds, some of the others ten.
const START: Duration = Duration::from_secs(3);
/// Estimated time per prompt of a memory measurement, for the progress bar.
const PROMPT: Duration = Duration::from_micros(800);

/// A running benchmark.
pub struct BenchRun<'a> {
    plan: BenchPlan,
    parts: &'a ContenderFiles,
    bar: ProgressBar,
    numbers: PromptNumbers,
    absent: Vec<String>,
}

impl<'a> BenchRun<'a> {
    /// A benchmark ready to run.
    pub fn new(plan: BenchPlan, parts: &'a ContenderFiles, bar: ProgressBar) -> Self {
        Self {
            plan,
            parts,
            bar,
            numbers: PromptNumbers::default(),
            absent: Vec::new(),
        }
    }

    /// Performs all measurements.
    ///
    /// # Errors
    /// When engines are not available; an unavailable contender is no error.
    pub async fn run(mut self) -> Result<Results, BenchError> {
        let date = machine::now();
        let trace_play = self.trace_play();
        self.bar
            .set_length(milliseconds(self.expected(trace_play.as_ref())));
        let mut rows = Vec::new();
        for stage in std::mem::take(&mut self.plan.stages) {
            rows.extend(self.stage(&stage).await?);
        }
        let memory = self.memory().await?;
        let trace = match &trace_play {
            Some(trace_play) => self.trace(trace_play).await,
            None => Vec::new(),
        };
        Ok(Results {
            machine: machine::this(),
            date,
            versions: machine::versions(self.parts),
            round_s: self.plan.rounds.lasts.as_secs_f64(),
            rows,
            memory,
            trace,
            absent: self.absent,
        })
    }

    /// Estimated total time, for the progress bar only.
    fn expected(&self, trace_play: Option<&TracePlay>) -> Duration {
        let BenchPlan { stages, rounds, .. } = &self.plan;
        let measurement = WARM_UP + rounds.lasts;
        let of_stage = |stage: &Stage| {
            let measurements = stage.measurements() * rounds.number;
            measurement * count(measurements) + START * count(stage.contenders().len())
        };
        let stages: Duration = stages.iter().map(of_stage).sum();
        let steps: u64 = self
            .memory_contenders()
            .map(|one| memory::steps(*one))
            .sum();
        let trace_contenders = count(self.plan.trace_contenders.len());
        let trace = trace_play.map(TracePlay::lasts).unwrap_or_default() * trace_contenders;
        stages + self.step() * count(usize::try_from(steps).unwrap_or(usize::MAX)) + trace
    }

    fn step(&self) -> Duration {
        let prompts = self.plan.memory_prompts / memory::STEPS;
        PROMPT * u32::try_from(prompts).unwrap_or(u32::MAX)
    }

    fn passed(&self, time: Duration) {
        self.bar.inc(milliseconds(time));
    }

    /// Records once why a contender or a measurement is missing.
    fn miss(&mut self, what: &str, why: &impl std::error::Error) {
        let lines = why.to_string();
        let why: Vec<&str> = lines.lines().map(str::trim).collect();
        let sentence = format!("{what}: {}", why.join(" "));
        if !self.absent.contains(&sentence) {
            self.absent.push(sentence);
        }
    }

    async fn stage(&mut self, stage: &Stage) -> Result<Vec<Row>, BenchError> {
        let gap = Duration::from_secs_f64(stage.gap_ms / 1000.0);
        let engines = Engines::start(gap).await?;
        let mut participants = Vec::new();
        for contender in stage.contenders() {
            let started = self.start(contender, &engines, stage.threads).await;
            participants.extend(started.map(|running| Participant { contender, running }));
            self.passed(START);
        }
        let (bar, rounds) = (self.bar.clone(), self.plan.rounds);
        let measured = rounds::measure(
            stage,
            &participants,
            rounds,
            &mut self.numbers,
            |contender| {
                bar.set_message(contender.name());
                bar.inc(milliseconds(WARM_UP + rounds.lasts));
            },
        );
        let rows = measured.await;
        let stopping = participants
            .into_iter()
            .map(|participant| participant.running.stop());
        join_all(stopping).await;
        engines.stop().await;
        Ok(rows)
    }

    /// Starts a contender; `None`, and a recorded sentence, if it does not start.
    async fn start(
        &mut self,
        contender: Contender,
        engines: &Engines,
        threads: u16,
    ) -> Option<RunningContender> {
        self.bar
            .set_message(format!("starting {}", contender.name()));
        match RunningContender::start(contender, engines, threads, self.parts).await {
            Ok(running) => Some(running),
            Err(why) => {
                self.miss(&contender.name(), &why);
                None
            }
        }
    }

    fn memory_contenders(&self) -> impl Iterator<Item = &Contender> {
        let all = self.plan.memory.iter();
        all.filter(|_| self.plan.memory_prompts > 0)
    }

    async fn memory(&mut self) -> Result<Vec<MemoryRow>, BenchError> {
        let contenders: Vec<Contender> = self.memory_contenders().copied().collect();
        let mut rows = Vec::new();
        for contender in contenders {
            let engines = Engines::start(Duration::ZERO).await?;
            if let Some(running) = self.start(contender, &engines, memory::THREADS).await {
                rows.extend(self.memory_of(contender, &running).await);
                running.stop().await;
            }
            engines.stop().await;
        }
        Ok(rows)
    }

    async fn memory_of(
        &mut self,
        contender: Contender,
        running: &RunningContender,
    ) -> Option<MemoryRow> {
        let what = format!("memory of {}", contender.name());
        self.bar.set_message(what.clone());
        let (bar, step) = (self.bar.clone(), self.step());
        let prompts = self.plan.memory_prompts;
        let passed = || bar.inc(milliseconds(step));
        let measured =
            memory::measure(contender, running, prompts, &mut self.numbers, passed).await;
        measured.map_err(|why| self.miss(&what, &why)).ok()
    }

    /// The trace, if it exists and is to be played.
    fn trace_play(&mut self) -> Option<TracePlay> {
        let BenchPlan {
            trace_contenders,
            trace,
            trace_requests: requests,
            speedup,
            ..
        } = &self.plan;
        if trace_contenders.is_empty() || *requests == 0 {
            return None;
        }
        let trace_play = TracePlay::read(trace, *requests, *speedup);
        trace_play.map_err(|why| self.miss("the trace", &why)).ok()
    }

    async fn trace(&mut self, trace_play: &TracePlay) -> Vec<TraceRow> {
        let mut rows = Vec::new();
        for contender in self.plan.trace_contenders.clone() {
            let what = format!("the trace through {}", contender.name());
            self.bar.set_message(what.clone());
            let (bar, before) = (self.bar.clone(), self.bar.position());
            let (lasts, requests) = (trace_play.lasts(), count(trace_play.requests()).max(1));
            let passed = |ended: usize| {
                bar.set_position(before + milliseconds(lasts * count(ended) / requests));
            };
            match trace_play.play(contender, self.parts, passed).await {
                Ok(outcome) => {
                    self.absent.extend(outcome.complaint());
                    rows.push(outcome.row);
                }
                Err(why) => self.miss(&what, &why),
            }
        }
        rows
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
