//! Owns `docs/states.md`.

use std::fmt::Write;

use routing::config::OnPrefillAbsent;
use routing::rendezvous::{Mode, Rules, ServingDecision, State};

use crate::oracle::{resolve, rows};
use crate::search::Edges;

const HEAD: &str = "# States

Prefill and decode workers of one model meet in one namespace: a *place*. A place's state is computed from what exists
there now; nothing is remembered that decides anything. (*Deactivated* is *decode waiting* after having been active; it
differs for people and metrics only.) This page is generated from the code by
`UPDATE_DOCS=1 cargo test -p routing --test walk`, and a test fails where it is out of date.

A *set* is the workers of one role that share a set name. *Whole workers* run whole requests: those of role aggregated,
and decode workers where the pool says `decode.runs_whole_requests`. A prefill worker is *bound* when all is known that a
request to it needs: at once, except with `bootstrap: ask`, where its bootstrap server's port is asked for first.

## What a request gets

| State | What exists | `on_prefill_absent` | Normal | Pre-routed | Query-only | Readiness |
|---|---|---|---|---|---|---|
";

const NOTES: &str = "
* 503s carry `Retry-After: 1`. The words behind each code are in [errors.md](errors.md).
* `enforce_disagg: true` is `on_prefill_absent: fail`.
* *Pre-routed*: the workers that the request names must be there and fit, else it gets 400, in every state. One that
  names a prefill worker which is not bound yet gets 503 `prefill_pending`.
* *Query-only*: the workers are named, nothing is booked, no backend is touched. A bound prefill worker is named where there
  is one.
* A model in several namespaces is served from those that serve it, drawn by the number of their workers; where none
  does, the reason is told that is nearest to being served: `prefill_pending`, `ambiguous_sets`,
  `prefill_not_activated`, `no_decode_worker`, `no_worker`. A model that never had a worker gets 404 `model_not_found`, and before any worker at
  all was known 503 `no_fleet`.
* Readiness: whether a normal request would be served now (`GET /pd-router/ready`, `GET /v1/models/{model}/ready`).

## How states follow each other

Every change that one event can make, as a walk over all reachable states of two prefill and two decode workers in two
namespaces has found them. A worker that restarts is another worker.

```mermaid
stateDiagram-v2
    [*] --> vacant
";

fn exists(state: State) -> &'static str {
    match state {
        State::Vacant => "neither prefill nor decode workers",
        State::DecodeWaiting => "decode workers, and never yet a pair",
        State::PrefillReady => "prefill workers",
        State::Pending => "one set of each, no prefill worker bound",
        State::Active => "one set of each, a prefill worker bound",
        State::Ambiguous => "two sets of one role",
        State::Deactivated => "decode workers, after having been active",
    }
}

const POLICIES: [(OnPrefillAbsent, bool); 4] = [
    (OnPrefillAbsent::Aggregate, true),
    (OnPrefillAbsent::Aggregate, false),
    (OnPrefillAbsent::Fail, true),
    (OnPrefillAbsent::Fail, false),
];

/// The cells of a state under a policy: the three modes, and readiness.
fn cells(state: State, (on_prefill_absent, whole_workers): (OnPrefillAbsent, bool)) -> String {
    let rules = Rules {
        on_prefill_absent,
        whole_workers,
    };
    let cell = |mode| match state.decision(mode, rules) {
        ServingDecision::Pair => "a pair".to_owned(),
        ServingDecision::Whole => "a whole worker".to_owned(),
        ServingDecision::Refused(reason) => format!("503 `{}`", reason.code()),
    };
    let ready = match state.decision(Mode::Normal, rules) {
        ServingDecision::Refused(reason) => format!("503 `{}`", reason.code()),
        ServingDecision::Pair | ServingDecision::Whole => "ready".to_owned(),
    };
    let modes = Mode::ALL.map(cell);
    format!("{} | {ready}", modes.join(" | "))
}

fn table() -> String {
    let mut text = String::new();
    for state in State::ALL {
        let [first, others @ ..] = POLICIES.map(|policy| cells(state, policy));
        let name = state.name();
        let exists = exists(state);
        // Only workers that run whole requests under `aggregate` make a difference.
        assert!(others.iter().all(|cells| *cells == others[0]), "{name}");
        if first == others[0] {
            writeln!(text, "| **{name}** | {exists} | any | {first} |").unwrap();
            continue;
        }
        writeln!(
            text,
            "| **{name}** | {exists} | `aggregate`, with whole workers | {first} |"
        )
        .unwrap();
        writeln!(
            text,
            "| | | `aggregate` without, or `fail` | {} |",
            others[0]
        )
        .unwrap();
    }
    text
}

fn diagram(edges: &Edges) -> String {
    let mut text = String::new();
    for ((from, to), events) in edges {
        let events: Vec<&str> = events.iter().copied().collect();
        writeln!(text, "    {from} --> {to}: {}", events.join(", ")).unwrap();
    }
    text
}

#[test]
fn the_table_and_the_diagram_of_states_are_what_the_code_says() {
    let walked = crate::the_walk_with_bindings();
    let text = format!("{HEAD}{}{NOTES}{}```\n", table(), diagram(&walked.edges));
    super::compare("states.md", &text);
}

/// Compares the code's table with the oracle's, under every policy.
#[test]
fn every_cell_is_the_oracles() {
    for row in rows() {
        let state = State::ALL
            .into_iter()
            .find(|state| state.name() == row.state);
        let state = state.expect("a state of that name");
        for (on_prefill_absent, whole_workers) in POLICIES {
            for mode in Mode::ALL {
                let rules = Rules {
                    on_prefill_absent,
                    whole_workers,
                };
                let got = match state.decision(mode, rules) {
                    ServingDecision::Pair => Ok(false),
                    ServingDecision::Whole => Ok(true),
                    ServingDecision::Refused(reason) => Err(reason.code()),
                };
                let right = resolve(row.cell(mode), on_prefill_absent, whole_workers);
                assert_eq!(got, right, "{} {}", row.state, mode.name());
            }
        }
    }
    assert!(
        State::ALL
            .iter()
            .all(|state| rows().iter().any(|row| row.state == state.name()))
    );
}
