//! Owns the world: the workers that really exist, and the events that can happen to them.
//!
//! A worker lives in a *slot*, which is its address. A restart keeps the address and changes the id. Ids only grow and do
//! not distinguish states, so the number of states is finite.

use std::fmt;

use routing::fleet::{Role, Worker, WorkerId};

/// The namespaces.
pub const SPACES: [&str; 2] = ["a", "b"];

/// The sets' names.
const SETS: [&str; 2] = ["x", "y"];

/// An id that no worker has ever had.
const NOBODY: u64 = 1;

/// Contents of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// No worker yet.
    Never,
    /// A departed worker, whose binding may have been reported late.
    Gone { life: Life, late: bool },
    /// A worker, and the id of its predecessor before a restart.
    Here {
        life: Life,
        bound: bool,
        former: Option<u64>,
    },
}

/// One identity of a worker, from its start to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    pub id: u64,
    pub space: usize,
    pub set: usize,
}

/// Possible events. Slots are numbered, prefill workers first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A new identity appears.
    Join {
        slot: usize,
        space: usize,
        set: usize,
    },
    /// A departed worker returns, unchanged.
    Return(usize),
    /// A worker leaves.
    Leave(usize),
    /// A restart: the same address, set and namespace under a new id.
    Restart(usize),
    /// A binding is built; for a departed worker, too late.
    Bound(usize),
    /// A binding could not be built.
    Failed(usize),
    /// A binding is built for the predecessor before a restart, or for an unknown id.
    LateBound(usize),
    /// A present worker is reported again.
    JoinAgain(usize),
    /// An absent worker is reported gone again.
    LeaveAgain(usize),
}

/// What an event makes known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The workers, as they are now.
    Fleet,
    /// A binding for this id was built.
    Bound(u64),
    /// A binding could not be built.
    Failed,
}

#[derive(Debug, Clone)]
pub struct World {
    prefills: usize,
    slots: Vec<Slot>,
    next_id: u64,
    /// Whether a namespace ever had a worker.
    pub known: [bool; 2],
    /// Whether a namespace was ever active; the oracle's memory.
    pub was_active: [bool; 2],
}

impl World {
    pub fn empty(prefills: usize, decodes: usize) -> Self {
        Self {
            prefills,
            slots: vec![Slot::Never; prefills + decodes],
            next_id: 100,
            known: [false; 2],
            was_active: [false; 2],
        }
    }

    pub fn role(&self, slot: usize) -> Role {
        if slot < self.prefills {
            Role::Prefill
        } else {
            Role::Decode
        }
    }

    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The present workers: slot, identity, whether bound.
    pub fn here(&self) -> impl Iterator<Item = (usize, Life, bool)> + '_ {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(at, slot)| match slot {
            Slot::Here { life, bound, .. } => Some((at, *life, *bound)),
            _ => None,
        })
    }

    /// Marks a worker as unbound: it must report anew where its KV is fetched.
    pub fn unbind(&mut self, id: u64) {
        for slot in &mut self.slots {
            if let Slot::Here { life, bound, .. } = slot
                && life.id == id
            {
                *bound = false;
            }
        }
    }

    pub fn of(&self, role: Role, space: usize) -> impl Iterator<Item = (Life, bool)> + '_ {
        let here = self.here();
        here.filter(move |(at, life, _)| self.role(*at) == role && life.space == space)
            .map(|(_, life, bound)| (life, bound))
    }

    /// Role, life and binding of an id, if present.
    pub fn find(&self, id: u64) -> Option<(Role, Life, bool)> {
        let mut here = self.here();
        here.find(|(_, life, _)| life.id == id)
            .map(|(at, life, bound)| (self.role(at), life, bound))
    }

    /// Ids that were present and are not now.
    pub fn departed(&self) -> Vec<u64> {
        let ids = self.slots.iter().filter_map(|slot| match slot {
            Slot::Gone { life, .. } => Some(life.id),
            Slot::Here { former, .. } => *former,
            Slot::Never => None,
        });
        ids.collect()
    }

    /// The workers as discovery would list them; `model` gives each namespace's model.
    pub fn workers(&self, model: impl Fn(usize) -> String) -> Vec<Worker> {
        let here = self.here();
        here.map(|(at, life, _)| {
            let address = format!("127.0.0.1:{}", 100 + at).parse().ok();
            Worker {
                name: format!("{}-{}", self.role(at).name(), life.id),
                model: Some(model(life.space)),
                namespace: SPACES[life.space].to_owned(),
                set: SETS[life.set].to_owned(),
                ..Worker::new(WorkerId(life.id), self.role(at), address)
            }
        })
        .collect()
    }

    /// All events possible now. Of events that differ only in names one is listed: the first free slot, namespace and set
    /// stand for all free ones.
    pub fn enabled(&self, bindings: bool) -> Vec<Event> {
        let mut events = Vec::new();
        for role in [Role::Prefill, Role::Decode] {
            let mut fresh = false;
            let mut absent = false;
            for slot in (0..self.slots.len()).filter(|slot| self.role(*slot) == role) {
                match self.slots[slot] {
                    Slot::Never if !std::mem::replace(&mut fresh, true) => {
                        self.joins(slot, &mut events);
                        if !std::mem::replace(&mut absent, true) {
                            events.push(Event::LeaveAgain(slot));
                        }
                    }
                    Slot::Never => {}
                    Slot::Gone { .. } => {
                        absent = true;
                        self.joins(slot, &mut events);
                        events.extend([Event::Return(slot), Event::LeaveAgain(slot)]);
                        if bindings && role == Role::Prefill {
                            events.push(Event::Bound(slot));
                        }
                    }
                    Slot::Here { .. } => {
                        events.extend([
                            Event::Leave(slot),
                            Event::Restart(slot),
                            Event::JoinAgain(slot),
                        ]);
                        if bindings && role == Role::Prefill {
                            events.extend([
                                Event::Bound(slot),
                                Event::Failed(slot),
                                Event::LateBound(slot),
                            ]);
                        }
                    }
                }
            }
        }
        events
    }

    fn joins(&self, slot: usize, events: &mut Vec<Event>) {
        let role = self.role(slot);
        let spaces = if self.known == [false; 2] { 1 } else { 2 };
        for space in 0..spaces {
            let sets = if self.of(role, space).next().is_none() {
                1
            } else {
                2
            };
            events.extend((0..sets).map(|set| Event::Join { slot, space, set }));
        }
    }

    pub fn apply(&mut self, event: Event) -> News {
        let next_id = self.next_id;
        let news = match (event, self.slots[event.slot()]) {
            (Event::Join { slot, space, set }, _) => {
                let life = Life {
                    id: next_id,
                    space,
                    set,
                };
                self.slots[slot] = here(life, None);
                News::Fleet
            }
            (Event::Return(slot), Slot::Gone { life, .. }) => {
                self.slots[slot] = here(life, None);
                News::Fleet
            }
            (Event::Leave(slot), Slot::Here { life, .. }) => {
                self.slots[slot] = Slot::Gone { life, late: false };
                News::Fleet
            }
            (Event::Restart(slot), Slot::Here { life, .. }) => {
                let new = Life {
                    id: next_id,
                    ..life
                };
                self.slots[slot] = here(new, Some(life.id));
                News::Fleet
            }
            (Event::Bound(slot), Slot::Here { life, former, .. }) => {
                self.slots[slot] = Slot::Here {
                    life,
                    bound: true,
                    former,
                };
                News::Bound(life.id)
            }
            (Event::Bound(slot), Slot::Gone { life, .. }) => {
                self.slots[slot] = Slot::Gone { life, late: true };
                News::Bound(life.id)
            }
            (Event::LateBound(_), Slot::Here { former, .. }) => {
                News::Bound(former.unwrap_or(NOBODY))
            }
            (Event::Failed(_), _) => News::Failed,
            (Event::JoinAgain(_) | Event::LeaveAgain(_), _) => News::Fleet,
            (event, slot) => panic!("{event} cannot happen to {slot:?}"),
        };
        self.next_id += 1;
        for space in 0..SPACES.len() {
            let any = self.here().any(|(_, life, _)| life.space == space);
            self.known[space] |= any;
        }
        news
    }
}

fn here(life: Life, former: Option<u64>) -> Slot {
    Slot::Here {
        life,
        bound: false,
        former,
    }
}

impl Event {
    pub fn slot(self) -> usize {
        match self {
            Self::Join { slot, .. }
            | Self::Return(slot)
            | Self::Leave(slot)
            | Self::Restart(slot)
            | Self::Bound(slot)
            | Self::Failed(slot)
            | Self::LateBound(slot)
            | Self::JoinAgain(slot)
            | Self::LeaveAgain(slot) => slot,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Join { slot, space, set } => {
                write!(out, "{slot} joins {}/{}", SPACES[*space], SETS[*set])
            }
            Self::Return(slot) => write!(out, "{slot} returns"),
            Self::Leave(slot) => write!(out, "{slot} leaves"),
            Self::Restart(slot) => write!(out, "{slot} restarts"),
            Self::Bound(slot) => write!(out, "{slot} is bound"),
            Self::Failed(slot) => write!(out, "{slot} cannot be bound"),
            Self::LateBound(slot) => write!(out, "{slot}'s former life is bound"),
            Self::JoinAgain(slot) => write!(out, "{slot} joins again"),
            Self::LeaveAgain(slot) => write!(out, "{slot} leaves again"),
        }
    }
}
