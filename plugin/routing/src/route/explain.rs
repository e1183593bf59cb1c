//! Owns the explanation of a choice: what each candidate would have cost, term by term, for one request.

use serde::Serialize;

use crate::config::PolicyName;
use crate::selection::cost::Terms;
use crate::selection::{Candidate, Policy, Task};

/// Candidates listed, the best ones; more would not fit into a header.
const MOST: usize = 8;

/// Why one worker was picked for one role of a request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explained {
    role: &'static str,
    policy: PolicyName,
    prompt_tokens: u64,
    prompt_blocks: u32,
    /// The common prefill rate of the candidates: milliseconds for each prompt, and …
    prompt_ms: Option<f64>,
    /// … milliseconds for each token.
    token_ms: Option<f64>,
    candidates: Vec<Weighed>,
    /// Candidates that are not listed.
    omitted: usize,
}

/// One candidate.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Weighed {
    worker: String,
    dp_rank: Option<u32>,
    picked: bool,
    prefills: u32,
    decodes: u32,
    decode_blocks: f64,
    overlap_blocks: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    terms: Option<Terms>,
}

impl Weighed {
    /// The picked one first, then the cheapest.
    fn order(&self) -> (bool, f64) {
        let cost = self.terms.map_or(0.0, |terms| terms.cost);
        (!self.picked, cost)
    }
}

impl Explained {
    pub(super) fn new(
        policy: &dyn Policy,
        name: PolicyName,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        picked: Option<usize>,
    ) -> Self {
        let terms = policy.terms(task, candidates).unwrap_or_default();
        let weighed = candidates
            .iter()
            .enumerate()
            .map(|(index, candidate)| Weighed {
                worker: candidate.target.worker.name.clone(),
                dp_rank: candidate.target.rank,
                picked: picked == Some(index),
                prefills: candidate.snapshot.prefills,
                decodes: candidate.snapshot.decodes,
                decode_blocks: candidate.snapshot.decode_blocks,
                overlap_blocks: candidate.overlap,
                terms: terms.get(index).copied(),
            });
        let mut all: Vec<Weighed> = weighed.collect();
        all.sort_by(|a, b| {
            let ((a_last, a_cost), (b_last, b_cost)) = (a.order(), b.order());
            a_last.cmp(&b_last).then(a_cost.total_cmp(&b_cost))
        });
        let omitted = all.len().saturating_sub(MOST);
        all.truncate(MOST);
        Self {
            role: task.role.name(),
            policy: name,
            prompt_tokens: task.prompt_tokens,
            prompt_blocks: task.blocks.count(),
            prompt_ms: task.rate.map(|rate| rate.per_prompt * 1000.0),
            token_ms: task.rate.map(|rate| rate.per_token * 1000.0),
            candidates: all,
            omitted,
        }
    }
}

/// The explanations of a request's choices, in order, as ASCII JSON that any header may carry.
pub(super) fn to_json(explained: &[Explained]) -> String {
    let json = serde_json::to_string(explained).unwrap_or_default();
    if json.is_ascii() {
        return json;
    }
    let mut ascii = String::with_capacity(json.len());
    let mut units = [0; 2];
    for letter in json.chars() {
        if letter.is_ascii() {
            ascii.push(letter);
            continue;
        }
        for unit in letter.encode_utf16(&mut units) {
            ascii.push_str(&format!("\\u{unit:04x}"));
        }
    }
    ascii
}
