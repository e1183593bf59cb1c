//! Owns the walks: every reachable state, breadth first, and every short sequence of events.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use routing::fleet::Role;

use crate::check::check;
use crate::oracle::{Setup, remember, row_of};
use crate::subject::Subject;
use crate::world::{Event, SPACES, Slot, World};

/// Makes a new subject.
pub type Make<'a> = &'a dyn Fn() -> Box<dyn Subject>;

/// Events after which an answer was wrong.
pub struct Counterexample {
    pub events: Vec<Event>,
    pub problem: String,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let events: Vec<String> = self.events.iter().map(Event::to_string).collect();
        write!(out, "{}: {}", events.join(", "), self.problem)
    }
}

/// Transitions between states, each with its events.
pub type Edges = BTreeMap<(&'static str, &'static str), BTreeSet<&'static str>>;

/// Results of a walk.
#[derive(Default)]
pub struct Walked {
    pub states: usize,
    pub steps: usize,
    pub edges: Edges,
}

/// Every reachable state of two prefill and two decode workers in two namespaces, states that differ only in names counted
/// once.
///
/// # Errors
/// The shortest sequence of events after which an answer is wrong.
pub fn walk(setup: &Setup, make: Make<'_>) -> Result<Walked, Counterexample> {
    // Each state with the one it was reached from.
    let mut reached: Vec<(usize, Option<Event>, World)> = vec![(0, None, World::empty(2, 2))];
    let mut seen = HashSet::new();
    let mut walked = Walked::default();
    let mut next = 0;
    while let Some((_, _, world)) = reached.get(next).cloned() {
        let before = path(&reached, next);
        for event in world.enabled(setup.needs_binding()) {
            let mut events = before.clone();
            events.push(event);
            let (mut subject, after) = replay(&events, setup, make);
            if let Err(problem) = check(subject.as_mut(), &after, setup) {
                return Err(Counterexample { events, problem });
            }
            walked.steps += 1;
            note(&mut walked.edges, &world, event, &after, setup);
            if seen.insert(key(&after, subject.as_ref())) {
                reached.push((next, Some(event), after));
            }
        }
        next += 1;
    }
    walked.states = reached.len();
    Ok(walked)
}

fn path(reached: &[(usize, Option<Event>, World)], mut at: usize) -> Vec<Event> {
    let mut events = Vec::new();
    while let (from, Some(event), _) = &reached[at] {
        events.push(*event);
        at = *from;
    }
    events.reverse();
    events
}

fn replay(events: &[Event], setup: &Setup, make: Make<'_>) -> (Box<dyn Subject>, World) {
    let mut subject = make();
    let mut world = World::empty(2, 2);
    for event in events {
        let news = world.apply(*event);
        remember(&mut world, setup);
        subject.on_news(news, &world);
    }
    (subject, world)
}

/// Every sequence of up to `depth` events from the beginning, sequences that differ only in names counted once.
///
/// # Errors
/// The first sequence in order after which an answer is wrong.
pub fn sequences(depth: usize, setup: &Setup, make: Make<'_>) -> Result<usize, Counterexample> {
    let mut events = Vec::new();
    extend(depth, &World::empty(2, 2), &mut events, setup, make)
}

fn extend(
    depth: usize,
    world: &World,
    events: &mut Vec<Event>,
    setup: &Setup,
    make: Make<'_>,
) -> Result<usize, Counterexample> {
    if depth == 0 {
        return Ok(0);
    }
    let mut count = 0;
    for event in world.enabled(setup.needs_binding()) {
        events.push(event);
        let (mut subject, after) = replay(events, setup, make);
        if let Err(problem) = check(subject.as_mut(), &after, setup) {
            return Err(Counterexample {
                events: events.clone(),
                problem,
            });
        }
        count += 1 + extend(depth - 1, &after, events, setup, make)?;
        events.pop();
    }
    Ok(count)
}

/// Key of a state: equal for states that differ only in ids and in the names of slots, namespaces and sets.
fn key(world: &World, subject: &dyn Subject) -> Vec<u64> {
    let memories: Vec<u64> = (0..SPACES.len())
        .map(|space| hash(&subject.memory(space)))
        .collect();
    let unbound = subject.unbound();
    let orders = [[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [1, 0, 3, 2]];
    let turned = [[0, 1], [1, 0]];
    let keys = orders.iter().flat_map(|order| {
        turned
            .iter()
            .map(|spaces| key_as(world, &unbound, &memories, order, spaces))
    });
    keys.min().unwrap_or_default()
}

fn key_as(
    world: &World,
    unbound: &[u64],
    memories: &[u64],
    order: &[usize; 4],
    spaces: &[usize; 2],
) -> Vec<u64> {
    let mut sets: HashMap<(bool, usize, usize), usize> = HashMap::new();
    let mut key = Vec::with_capacity(24);
    for at in order {
        let role = world.role(*at) == Role::Prefill;
        let mut place = |life: &crate::world::Life| {
            let used = sets
                .keys()
                .filter(|(of, space, _)| (*of, *space) == (role, life.space))
                .count();
            let set = *sets.entry((role, life.space, life.set)).or_insert(used);
            (spaces[life.space] * 2 + set) as u64
        };
        key.push(match &world.slots()[*at] {
            Slot::Never => 0,
            Slot::Gone { life, late } => 10 + place(life) * 2 + u64::from(*late),
            Slot::Here { life, bound, .. } => {
                let unbound = unbound.contains(&life.id);
                100 + place(life) * 4 + u64::from(*bound) * 2 + u64::from(unbound)
            }
        });
    }
    for space in *spaces {
        // `spaces` is its own inverse.
        key.extend([
            u64::from(world.known[space]),
            u64::from(world.was_active[space]),
            memories[space],
        ]);
    }
    key
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Records an event's effect on the state of its namespace.
fn note(edges: &mut Edges, before: &World, event: Event, after: &World, setup: &Setup) {
    for space in 0..SPACES.len() {
        let name = |world: &World| row_of(world, space, setup).state;
        let (from, to) = (name(before), name(after));
        if from != to {
            let label = label(event, before, after);
            edges.entry((from, to)).or_default().insert(label);
        }
    }
}

fn label(event: Event, before: &World, after: &World) -> &'static str {
    let role = after.role(event.slot());
    let alone = |space, set| !before.of(role, space).any(|(life, _)| life.set != set);
    let same_set = match event {
        Event::Join { space, set, .. } => alone(space, set),
        Event::Return(slot) => match before.slots()[slot] {
            Slot::Gone { life, .. } => alone(life.space, life.set),
            _ => true,
        },
        _ => true,
    };
    match (event, role) {
        (Event::Join { .. } | Event::Return(_), Role::Prefill) if same_set => "prefill joins",
        (Event::Join { .. } | Event::Return(_), _) if same_set => "decode joins",
        (Event::Join { .. } | Event::Return(_), Role::Prefill) => "prefill of another set joins",
        (Event::Join { .. } | Event::Return(_), _) => "decode of another set joins",
        (Event::Leave(_), Role::Prefill) => "prefill leaves",
        (Event::Leave(_), _) => "decode leaves",
        (Event::Restart(_), Role::Prefill) => "prefill restarts",
        (Event::Restart(_), _) => "decode restarts",
        (Event::Bound(_), _) => "binding built",
        (Event::Failed(_), _) => "binding failed",
        (Event::LateBound(_), _) => "late binding",
        (Event::JoinAgain(_) | Event::LeaveAgain(_), _) => "told again",
    }
}
