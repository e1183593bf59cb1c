//! Owns the right answers: the table, written from the rules and not from the code.

use routing::config::{OnPrefillAbsent, ProtocolName};
use routing::fleet::Role;
use routing::rendezvous::Mode;

use crate::world::{SPACES, World};

/// The configuration of the answers.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub protocol: ProtocolName,
    /// Whether both namespaces serve one model, or each its own.
    pub shared_model: bool,
    pub absent: OnPrefillAbsent,
    /// Whether decode workers run whole requests.
    pub whole: bool,
}

impl Setup {
    pub fn model(&self, space: usize) -> String {
        if self.shared_model {
            "m".to_owned()
        } else {
            format!("m-{}", SPACES[space])
        }
    }

    pub fn models(&self) -> Vec<String> {
        let mut models: Vec<String> = (0..SPACES.len()).map(|space| self.model(space)).collect();
        models.dedup();
        models
    }

    pub fn needs_binding(&self) -> bool {
        self.protocol == ProtocolName::Sglang
    }
}

/// Number of sets, or of bound workers.
#[derive(Debug, Clone, Copy)]
enum Count {
    Zero,
    One,
    Some,
    Many,
    Any,
}

impl Count {
    fn fits(self, count: usize) -> bool {
        match self {
            Self::Zero => count == 0,
            Self::One => count == 1,
            Self::Some => count > 0,
            Self::Many => count > 1,
            Self::Any => true,
        }
    }
}

/// How a request is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cell {
    /// A pair of workers.
    Pair,
    /// One worker that runs the whole request, where the policy is to aggregate and there is one; else an error.
    Absent(&'static str),
    /// An error.
    Refused(&'static str),
}

/// One line of the table.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    prefill_sets: Count,
    decode_sets: Count,
    bound: Count,
    was_active: Option<bool>,
    pub state: &'static str,
    normal: Cell,
    pre_routed: Cell,
    query: Cell,
}

use Cell::{Absent, Pair, Refused};
use Count::{Any, Many, One, Some as Few, Zero};

#[rustfmt::skip]
static TABLE: [Row; 8] = [
    row(Zero, Zero, Any,  None,        "vacant",         Absent("no_worker"),             Absent("no_worker"),             Absent("no_worker")),
    row(Many, Any,  Any,  None,        "ambiguous",      Refused("ambiguous_sets"),       Refused("ambiguous_sets"),       Refused("ambiguous_sets")),
    row(Any,  Many, Any,  None,        "ambiguous",      Refused("ambiguous_sets"),       Refused("ambiguous_sets"),       Refused("ambiguous_sets")),
    row(One,  Zero, Any,  None,        "prefill_ready",  Absent("no_decode_worker"),      Absent("no_decode_worker"),      Absent("no_decode_worker")),
    row(Zero, One,  Any,  Some(false), "decode_waiting", Absent("prefill_not_activated"), Absent("prefill_not_activated"), Absent("prefill_not_activated")),
    row(Zero, One,  Any,  Some(true),  "deactivated",    Absent("prefill_not_activated"), Absent("prefill_not_activated"), Absent("prefill_not_activated")),
    row(One,  One,  Zero, None,        "pending",        Refused("prefill_pending"),      Refused("prefill_pending"),      Pair),
    row(One,  One,  Few,  None,        "active",         Pair,                            Pair,                            Pair),
];

#[allow(clippy::too_many_arguments)]
const fn row(
    prefill_sets: Count,
    decode_sets: Count,
    bound: Count,
    was_active: Option<bool>,
    state: &'static str,
    normal: Cell,
    pre_routed: Cell,
    query: Cell,
) -> Row {
    Row {
        prefill_sets,
        decode_sets,
        bound,
        was_active,
        state,
        normal,
        pre_routed,
        query,
    }
}

/// Order of reasons, nearest to being served first: the first one found is given.
const NEAREST: [&str; 5] = [
    "prefill_pending",
    "ambiguous_sets",
    "prefill_not_activated",
    "no_decode_worker",
    "no_worker",
];

/// The possible answers to a request that names no worker.
#[derive(Debug, PartialEq, Eq)]
pub enum Expected {
    /// Served by one of these namespaces; true: by one worker that runs the whole request.
    Served(Vec<(usize, bool)>),
    Refused(u32, &'static str),
}

/// The table's line for a namespace. Exactly one must fit.
pub fn row_of(world: &World, space: usize, setup: &Setup) -> Row {
    let sets = |role| {
        let mut sets: Vec<usize> = world.of(role, space).map(|(life, _)| life.set).collect();
        sets.sort_unstable();
        sets.dedup();
        sets.len()
    };
    let (prefill, decode) = (sets(Role::Prefill), sets(Role::Decode));
    let bound = world
        .of(Role::Prefill, space)
        .filter(|(_, bound)| *bound || !setup.needs_binding())
        .count();
    let fits = |row: &&Row| {
        row.prefill_sets.fits(prefill)
            && row.decode_sets.fits(decode)
            && row.bound.fits(bound)
            && row
                .was_active
                .is_none_or(|was| was == world.was_active[space])
    };
    let mut rows = TABLE.iter().filter(fits);
    let row = *rows.next().expect("a line for everything that can be");
    assert!(
        rows.all(|other| other.state == row.state),
        "one line for everything that can be"
    );
    row
}

impl Row {
    pub fn cell(&self, mode: Mode) -> Cell {
        match mode {
            Mode::Normal => self.normal,
            Mode::PreRouted => self.pre_routed,
            Mode::QueryOnly => self.query,
        }
    }
}

/// All lines.
pub fn rows() -> &'static [Row] {
    &TABLE
}

/// A cell's value under the policy, with or without a worker that runs whole requests: whether one worker serves the
/// request, or the reason against it.
pub fn resolve(
    cell: Cell,
    absent: OnPrefillAbsent,
    whole_worker: bool,
) -> Result<bool, &'static str> {
    match cell {
        Pair => Ok(false),
        Absent(_) if absent == OnPrefillAbsent::Aggregate && whole_worker => Ok(true),
        Absent(reason) | Refused(reason) => Err(reason),
    }
}

/// The answer of a namespace.
pub fn answer(
    world: &World,
    space: usize,
    setup: &Setup,
    mode: Mode,
) -> Result<bool, &'static str> {
    let whole_worker = setup.whole && world.of(Role::Decode, space).next().is_some();
    resolve(
        row_of(world, space, setup).cell(mode),
        setup.absent,
        whole_worker,
    )
}

/// The answer to a model's request that names no worker.
pub fn expected(world: &World, model: &str, setup: &Setup, mode: Mode) -> Expected {
    if world.known == [false; 2] {
        return Expected::Refused(503, "no_fleet");
    }
    let spaces: Vec<usize> = (0..SPACES.len())
        .filter(|space| world.known[*space] && setup.model(*space) == model)
        .collect();
    if spaces.is_empty() {
        return Expected::Refused(404, "model_not_found");
    }
    let mut served = Vec::new();
    let mut reasons = Vec::new();
    for space in spaces {
        match answer(world, space, setup, mode) {
            Ok(whole) => served.push((space, whole)),
            Err(reason) => reasons.push(reason),
        }
    }
    if served.is_empty() {
        let nearest = NEAREST.into_iter().find(|known| reasons.contains(known));
        return Expected::Refused(503, nearest.expect("a known reason"));
    }
    Expected::Served(served)
}

/// Records which namespaces are active.
pub fn remember(world: &mut World, setup: &Setup) {
    for space in 0..SPACES.len() {
        world.was_active[space] |= row_of(world, space, setup).state == "active";
    }
}
