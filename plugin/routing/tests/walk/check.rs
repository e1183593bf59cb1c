//! Owns the comparison of a subject with the oracle: every question that can be asked in one state.

use routing::config::OnPrefillAbsent;
use routing::fleet::Role;
use routing::rendezvous::Mode;

use crate::oracle::{Expected, Setup, answer, expected, row_of};
use crate::subject::{Ask, Got, Subject};
use crate::world::{SPACES, World};

/// Asks every question.
///
/// # Errors
/// The first answer that differs from the oracle's.
pub fn check(subject: &mut dyn Subject, world: &World, setup: &Setup) -> Result<(), String> {
    for (space, name) in SPACES.into_iter().enumerate() {
        let right = row_of(world, space, setup).state;
        match subject.state(space) {
            Some(state) if state != right => return Err(format!("{name} is {state}, not {right}")),
            _ => {}
        }
    }
    check_unbound(subject, world, setup)?;
    for model in setup.models() {
        check_unpinned(subject, world, setup, &model, Mode::Normal)?;
        check_unpinned(subject, world, setup, &model, Mode::QueryOnly)?;
        let right = match expected(world, &model, setup, Mode::Normal) {
            Expected::Served(_) => Ok(()),
            Expected::Refused(_, code) => Err(code.to_owned()),
        };
        let ready = subject.ready(&model);
        if ready != right {
            return Err(format!("{model} is ready: {ready:?}, not {right:?}"));
        }
    }
    if subject.hears_pins() {
        check_pinned(subject, world, setup)?;
    }
    subject.complaint().map_or(Ok(()), Err)
}

fn check_unbound(subject: &dyn Subject, world: &World, setup: &Setup) -> Result<(), String> {
    let unbound = world.here().filter(|(at, _, bound)| {
        setup.needs_binding() && world.role(*at) == Role::Prefill && !bound
    });
    let mut right: Vec<u64> = unbound.map(|(_, life, _)| life.id).collect();
    right.sort_unstable();
    let unbound = subject.unbound();
    match unbound == right {
        true => Ok(()),
        false => Err(format!("to be bound: {unbound:?}, not {right:?}")),
    }
}

fn check_unpinned(
    subject: &mut dyn Subject,
    world: &World,
    setup: &Setup,
    model: &str,
    mode: Mode,
) -> Result<(), String> {
    let ask = Ask {
        model: model.to_owned(),
        query: mode == Mode::QueryOnly,
        ..Ask::default()
    };
    let got = subject.ask(&ask);
    let right = expected(world, model, setup, mode);
    match fits(&got, &right, world, setup, mode) {
        true => Ok(()),
        false => Err(format!(
            "{} for {model}: {got:?}, not {right:?}",
            mode.name()
        )),
    }
}

/// Whether an answer is one of the right ones.
pub fn fits(got: &Got, right: &Expected, world: &World, setup: &Setup, mode: Mode) -> bool {
    match (got, right) {
        (Got::Refused { status, code }, Expected::Refused(right, reason)) => {
            (*status, code.as_str()) == (*right, *reason)
        }
        (Got::Pair { prefill, decode }, Expected::Served(from)) => {
            let Some((Role::Prefill, of_prefill, bound)) = world.find(*prefill) else {
                return false;
            };
            let Some((Role::Decode, of_decode, _)) = world.find(*decode) else {
                return false;
            };
            let space = of_prefill.space;
            // A query for names also gets a bound worker where there is one.
            let none_bound = !world.of(Role::Prefill, space).any(|(_, bound)| bound);
            let usable = bound || !setup.needs_binding() || (mode == Mode::QueryOnly && none_bound);
            of_decode.space == space && usable && from.contains(&(space, false))
        }
        (Got::Whole { worker }, Expected::Served(from)) => match world.find(*worker) {
            Some((Role::Decode, life, _)) => setup.whole && from.contains(&(life.space, true)),
            _ => false,
        },
        _ => false,
    }
}

/// Requests that name workers: each alone, all pairs, and departed ones.
fn check_pinned(subject: &mut dyn Subject, world: &World, setup: &Setup) -> Result<(), String> {
    let here = |role| {
        let here = world
            .here()
            .filter(move |(at, _, _)| world.role(*at) == role);
        here.map(|(_, life, bound)| (life, bound))
    };
    let none = std::iter::once(None);
    let prefills: Vec<_> = none.chain(here(Role::Prefill).map(Some)).collect();
    let none = std::iter::once(None);
    let decodes: Vec<_> = none.chain(here(Role::Decode).map(Some)).collect();
    for prefill in &prefills {
        for decode in &decodes {
            let Some((first, _)) = prefill.or(*decode) else {
                continue;
            };
            let (named_prefill, named_decode) = (
                prefill.map(|(life, _)| life.id),
                decode.map(|(life, _)| life.id),
            );
            let ask = Ask {
                model: setup.model(first.space),
                query: false,
                prefill: named_prefill,
                decode: named_decode,
            };
            let got = subject.ask(&ask);
            let apart = prefill
                .zip(*decode)
                .is_some_and(|(p, d)| p.0.space != d.0.space);
            let unbound = setup.needs_binding() && prefill.is_some_and(|(_, bound)| !bound);
            let right = if apart {
                Err((400, "invalid_worker_id"))
            } else {
                let answer = answer(world, first.space, setup, Mode::PreRouted);
                match answer {
                    Ok(false) if unbound => Err((503, "prefill_pending")),
                    other => other.map_err(|reason| (503, reason)),
                }
            };
            let good = match (&got, &right) {
                (Got::Refused { status, code }, Err(right)) => (*status, code.as_str()) == *right,
                (Got::Pair { prefill, decode }, Ok(false)) => {
                    named_prefill.is_none_or(|named| named == *prefill)
                        && named_decode.is_none_or(|named| named == *decode)
                }
                (Got::Whole { worker }, Ok(true)) => Some(*worker) == named_decode,
                _ => false,
            };
            if !good {
                return Err(format!("{ask:?}: {got:?}, not {right:?}"));
            }
        }
    }
    check_departed(subject, world, setup)
}

/// The name of a departed worker names no worker any more.
fn check_departed(subject: &mut dyn Subject, world: &World, setup: &Setup) -> Result<(), String> {
    let Some(space) = (0..SPACES.len()).find(|space| world.known[*space]) else {
        return Ok(());
    };
    let model = setup.model(space);
    let is_known = world.here().next().is_some();
    for id in world.departed() {
        let ask = Ask {
            model: model.clone(),
            query: false,
            prefill: Some(id),
            decode: None,
        };
        let got = subject.ask(&ask);
        // Where the name is ignored, the answer is the same as without a name.
        let right = match (setup.absent, is_known) {
            (_, false) => Expected::Refused(503, "no_worker"),
            (OnPrefillAbsent::Fail, true) => Expected::Refused(503, "stale_worker_id"),
            (OnPrefillAbsent::Aggregate, true) => expected(world, &model, setup, Mode::Normal),
        };
        if !fits(&got, &right, world, setup, Mode::Normal) {
            return Err(format!("{ask:?}: {got:?}, not {right:?}"));
        }
    }
    Ok(())
}
