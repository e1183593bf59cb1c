//! Owns the summary of a pool in a few sentences: the source of its workers, the path of a request, the handling of failures.

use std::collections::BTreeMap;

use routing::config::{
    Admission, Destinations, Discovery, OnPrefillAbsent, OnPrefillFailure, PolicyName, Pool,
};
use routing::fleet::Role;
use routing::handoff::LegOrder;
use serde_json::Value;

use super::explain::Summary;
use super::shape::{Kind, Shapes};

/// Summary of this pool.
pub fn of(pool: &Pool, shapes: &Shapes) -> Summary {
    let mut says = vec![protocol(pool, shapes), workers(pool), clusters(pool)];
    says.push(selection(pool));
    if pool.rules().order.is_ours() {
        says.push(absent(pool));
        says.push(failed(pool));
    }
    says.push(ejection(pool));
    says.push(admission(&pool.admission));
    if let Some(conditional) = &pool.conditional {
        says.push(format!(
            "Prompts may stay on a decode worker, by the policy {}.",
            name_of(&conditional.policy)
        ));
    }
    says.push(callers(pool).to_owned());
    Summary {
        name: pool.name.clone(),
        says,
    }
}

/// The name as which a value is written.
pub fn name_of(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(name)) => name,
        _ => String::new(),
    }
}

fn protocol(pool: &Pool, shapes: &Shapes) -> String {
    let name = pool.rules().name;
    let variants = match shapes.named("Protocol").map(|shape| shape.kind()) {
        Some(Kind::Choice(variants)) => variants,
        _ => Vec::new(),
    };
    let meaning = variants.iter().find(|variant| variant.name == name);
    let meaning = meaning.map_or("", |variant| variant.description);
    format!("Protocol {name}: {meaning}")
}

fn workers(pool: &Pool) -> String {
    let stale = match pool.discovery.keep_stale_ms() {
        Some(ms) => format!("kept for {} while no good answer comes", span(ms)),
        None => "kept for ever while no good answer comes".to_owned(),
    };
    match &pool.discovery {
        Discovery::Static(list) => {
            let mut roles = BTreeMap::<&str, usize>::new();
            for worker in &list.workers {
                *roles.entry(worker.role.name()).or_default() += 1;
            }
            let counted: Vec<_> = roles
                .iter()
                .map(|(role, count)| format!("{count} {role}"))
                .collect();
            match counted.is_empty() {
                true => "Its workers are listed here, and there are none: every request gets 503."
                    .to_owned(),
                false => format!("Its workers are listed here: {}.", counted.join(", ")),
            }
        }
        Discovery::Dynamo(poll) => format!(
            "Its workers are known from its frontends' /health, asked every {}; {stale}.",
            span(poll.interval_ms)
        ),
        Discovery::Document(poll) => format!(
            "Its workers are known from a document at {} in the cluster `{}`, asked for every {}; {stale}.",
            poll.path,
            poll.cluster,
            span(poll.interval_ms)
        ),
        Discovery::EnvoyClusters(poll) => {
            let members = poll.members.iter();
            let members: Vec<_> = members
                .map(|(cluster, of)| format!("`{cluster}` ({})", of.role.name()))
                .collect();
            format!(
                "Its workers are the hosts of the clusters {}, for which Envoy's admin interface is asked through the cluster `{}` every {}; {stale}.",
                members.join(", "),
                poll.cluster,
                span(poll.interval_ms)
            )
        }
        Discovery::Registration(rules) => format!(
            "Its workers register themselves at /pd-router/workers, at most {}, and are gone {} after they last did.",
            rules.max_workers,
            span(rules.lease_ms)
        ),
    }
}

fn clusters(pool: &Pool) -> String {
    let decode = &pool.clusters.decode;
    let reach = match pool.destinations {
        Destinations::Members => "which must have the workers as members",
        Destinations::OriginalDst(_) => "of type ORIGINAL_DST, within the networks that are named",
    };
    match pool.rules().order {
        _ if !pool.rules().reaches_workers => {
            format!(
                "Requests go to the cluster `{decode}`, which must have the frontends as members."
            )
        }
        LegOrder::Backend | LegOrder::NoHandoff => {
            format!("Requests go to the cluster `{decode}`, {reach}.")
        }
        LegOrder::Sequential | LegOrder::Concurrent => format!(
            "Prefill calls go to the cluster `{}`, requests to `{decode}`, {reach}.",
            pool.clusters.prefill
        ),
    }
}

fn selection(pool: &Pool) -> String {
    let decode = pool.selection.of(Role::Decode);
    match pool.rules().order {
        LegOrder::NoHandoff => format!("Workers are picked by the policy {}.", name_of(&decode)),
        _ => {
            let prefill: PolicyName = pool.selection.of(Role::Prefill);
            format!(
                "Prefill workers are picked by the policy {}, the others by {}.",
                name_of(&prefill),
                name_of(&decode)
            )
        }
    }
}

fn absent(pool: &Pool) -> String {
    let then = match pool.prefill_absent() {
        OnPrefillAbsent::Aggregate => {
            "a worker that can runs a request whole; where none can, it gets 503"
        }
        OnPrefillAbsent::Fail => "a request gets 503",
    };
    format!("While there is no prefill worker, {then}.")
}

fn failed(pool: &Pool) -> String {
    let steps = pool.on_prefill_failure.iter().map(|step| match step {
        OnPrefillFailure::RetryOther => {
            format!("others are tried, {} in all", pool.prefill.attempts)
        }
        OnPrefillFailure::Fail => "the request fails".to_owned(),
        OnPrefillFailure::DecodeOnly => "the decode worker runs it whole".to_owned(),
    });
    let steps: Vec<_> = steps.collect();
    match steps.is_empty() {
        true => "When a prefill worker fails, the request fails.".to_owned(),
        false => format!("When a prefill worker fails, {}.", steps.join("; then ")),
    }
}

fn ejection(pool: &Pool) -> String {
    let health = &pool.health;
    match health.eject_after {
        0 => "No worker is ever ejected.".to_owned(),
        failures => format!(
            "A worker that fails {failures} times in a row while others work is ejected for {}, and for longer each time, up to {}.",
            span(health.eject_ms),
            span(health.most_eject_ms)
        ),
    }
}

fn admission(admission: &Admission) -> String {
    if !admission.has_threshold(Role::Aggregated) {
        return "No worker is ever too busy: nothing waits, and nothing gets 429 for that."
            .to_owned();
    }
    match &admission.queue {
        Some(queue) => format!(
            "While all workers are too busy, {} requests may wait on each thread for {} ({}); others get 429.",
            queue.max_requests,
            span(queue.deadline_ms),
            name_of(&queue.policy)
        ),
        None => "While all workers are too busy, a request gets 429.".to_owned(),
    }
}

fn callers(pool: &Pool) -> &'static str {
    match pool.trust_clients {
        true => {
            "Its callers are trusted: they may pin workers and ask why. Nobody but another gateway should reach it."
        }
        false => "Its callers may not steer.",
    }
}

/// A time span in words.
fn span(ms: u64) -> String {
    match ms {
        ms if ms >= 60_000 && ms % 60_000 == 0 => format!("{} min", ms / 60_000),
        ms if ms >= 1_000 && ms % 1_000 == 0 => format!("{} s", ms / 1_000),
        ms => format!("{ms} ms"),
    }
}
