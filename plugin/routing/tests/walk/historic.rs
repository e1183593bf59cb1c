//! Owns the event-driven rendezvous of an early version, to show that the checker finds its bugs.
//!
//! A register of half-finished handshakes per namespace. With both bugs fixed it passes all checks, so that any finding of
//! the checker is the planted bug.

use routing::config::{OnPrefillAbsent, ProtocolName};
use routing::fleet::Role;
use std::collections::BTreeMap;

use crate::oracle::Setup;
use crate::subject::{Ask, Got, Subject};
use crate::world::{News, SPACES, World};

/// The planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    Healed,
    /// A finished handshake empties the register: a rebuilt decode router waits for ever.
    EndpointForgotten,
    /// A decode router that ends leaves its waiter in the register: the next one gets none.
    WaiterLeftBehind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Entry {
    #[default]
    Vacant,
    /// The decode router with this number waits.
    Waiting(u64),
    /// The prefill endpoint is known.
    Ready,
}

#[derive(Debug, Clone, Copy)]
struct DecodeRouter {
    number: u64,
    activated: bool,
    deactivated: bool,
}

#[derive(Debug, Default)]
struct Space {
    known: bool,
    entry: Entry,
    router: Option<DecodeRouter>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Member {
    role: Role,
    space: usize,
    set: usize,
    bound: bool,
}

pub struct Historic {
    setup: Setup,
    bug: Bug,
    members: BTreeMap<u64, Member>,
    spaces: [Space; 2],
    routers: u64,
}

impl Historic {
    pub fn new(setup: Setup, bug: Bug) -> Self {
        Self {
            setup,
            bug,
            members: BTreeMap::new(),
            spaces: Default::default(),
            routers: 0,
        }
    }

    fn joined(&mut self, id: u64, member: Member) {
        let first = self.of(member.role, member.space).is_empty();
        self.members.insert(id, member);
        self.spaces[member.space].known = true;
        match member.role {
            Role::Decode if first => self.register(member.space),
            Role::Prefill => self.activate(member.space),
            _ => {}
        }
    }

    fn left(&mut self, id: u64) {
        let Some(member) = self.members.remove(&id) else {
            return;
        };
        if !self.of(member.role, member.space).is_empty() {
            return;
        }
        let space = &mut self.spaces[member.space];
        match (member.role, space.entry) {
            (Role::Prefill, entry) => {
                if entry == Entry::Ready {
                    space.entry = Entry::Vacant;
                }
                if let Some(router) = &mut space.router {
                    router.deactivated = true;
                }
            }
            (_, entry) => {
                space.router = None;
                if matches!(entry, Entry::Waiting(_)) && self.bug != Bug::WaiterLeftBehind {
                    space.entry = Entry::Vacant;
                }
            }
        }
    }

    /// Builds a decode router.
    fn register(&mut self, space: usize) {
        self.routers += 1;
        let mut router = DecodeRouter {
            number: self.routers,
            activated: false,
            deactivated: false,
        };
        let space = &mut self.spaces[space];
        match space.entry {
            Entry::Vacant => space.entry = Entry::Waiting(router.number),
            Entry::Waiting(_) => {}
            Entry::Ready => {
                router.activated = true;
                if self.bug == Bug::EndpointForgotten {
                    space.entry = Entry::Vacant;
                }
            }
        }
        space.router = Some(router);
    }

    /// Adds a prefill endpoint.
    fn activate(&mut self, space: usize) {
        let space = &mut self.spaces[space];
        let waiting = space.entry;
        space.entry = Entry::Ready;
        let Some(router) = &mut space.router else {
            return;
        };
        match waiting {
            Entry::Waiting(number) if number == router.number => {
                router.activated = true;
                router.deactivated = false;
                if self.bug == Bug::EndpointForgotten {
                    space.entry = Entry::Vacant;
                }
            }
            Entry::Waiting(_) => {}
            Entry::Vacant | Entry::Ready => router.deactivated = false,
        }
    }

    fn of(&self, role: Role, space: usize) -> Vec<(u64, Member)> {
        let members = self.members.iter().map(|(id, member)| (*id, *member));
        members
            .filter(|(_, member)| member.role == role && member.space == space)
            .collect()
    }

    fn sets(&self, role: Role, space: usize) -> usize {
        let members = self.of(role, space);
        let mut sets: Vec<usize> = members.iter().map(|(_, member)| member.set).collect();
        sets.sort_unstable();
        sets.dedup();
        sets.len()
    }

    fn answer(&self, space: usize, query: bool) -> Result<Got, &'static str> {
        let (prefills, decodes) = (
            self.sets(Role::Prefill, space),
            self.sets(Role::Decode, space),
        );
        if prefills > 1 || decodes > 1 {
            return Err("ambiguous_sets");
        }
        let Some(router) = self.spaces[space].router else {
            return Err(match prefills {
                0 => "no_worker",
                _ => "no_decode_worker",
            });
        };
        let decode = self.of(Role::Decode, space)[0].0;
        if !router.activated || router.deactivated {
            return match self.setup.whole && self.setup.absent == OnPrefillAbsent::Aggregate {
                true => Ok(Got::Whole { worker: decode }),
                false => Err("prefill_not_activated"),
            };
        }
        let prefills = self.of(Role::Prefill, space);
        let bound = prefills.iter().find(|(_, member)| member.bound);
        match (bound, query) {
            (Some((prefill, _)), _) => Ok(Got::Pair {
                prefill: *prefill,
                decode,
            }),
            (None, true) => Ok(Got::Pair {
                prefill: prefills[0].0,
                decode,
            }),
            (None, false) => Err("prefill_pending"),
        }
    }

    fn answers(&self, model: &str, query: bool) -> Got {
        let refused = |status, code: &str| Got::Refused {
            status,
            code: code.to_owned(),
        };
        if self.spaces.iter().all(|space| !space.known) {
            return refused(503, "no_fleet");
        }
        let spaces =
            (0..SPACES.len()).filter(|s| self.spaces[*s].known && self.setup.model(*s) == model);
        let answers: Vec<_> = spaces.map(|space| self.answer(space, query)).collect();
        if answers.is_empty() {
            return refused(404, "model_not_found");
        }
        if let Some(got) = answers.iter().find_map(|answer| answer.as_ref().ok()) {
            return got.clone();
        }
        let order = [
            "prefill_pending",
            "ambiguous_sets",
            "prefill_not_activated",
            "no_decode_worker",
        ];
        let code = order.into_iter().find(|code| answers.contains(&Err(code)));
        refused(503, code.unwrap_or("no_worker"))
    }
}

impl Subject for Historic {
    fn on_news(&mut self, news: News, world: &World) {
        match news {
            News::Fleet => {
                let here: Vec<_> = world.here().collect();
                let gone: Vec<u64> = self.members.keys().copied().collect();
                for id in gone.into_iter().filter(|id| world.find(*id).is_none()) {
                    self.left(id);
                }
                for (at, life, _) in here {
                    if !self.members.contains_key(&life.id) {
                        let member = Member {
                            role: world.role(at),
                            space: life.space,
                            set: life.set,
                            bound: self.setup.protocol != ProtocolName::Sglang,
                        };
                        self.joined(life.id, member);
                    }
                }
            }
            News::Bound(id) => {
                if let Some(member) = self.members.get_mut(&id) {
                    member.bound = true;
                }
            }
            News::Failed => {}
        }
    }

    fn ask(&mut self, ask: &Ask) -> Got {
        self.answers(&ask.model, ask.query)
    }

    fn ready(&self, model: &str) -> Result<(), String> {
        match self.answers(model, false) {
            Got::Refused { code, .. } => Err(code),
            Got::Pair { .. } | Got::Whole { .. } => Ok(()),
        }
    }

    fn unbound(&self) -> Vec<u64> {
        let unbound = self.members.iter();
        unbound
            .filter(|(_, member)| member.role == Role::Prefill && !member.bound)
            .map(|(id, _)| *id)
            .collect()
    }

    fn state(&self, _space: usize) -> Option<&'static str> {
        None
    }

    fn memory(&self, space: usize) -> String {
        let space = &self.spaces[space];
        let waits_for = match (space.entry, space.router) {
            (Entry::Waiting(number), Some(router)) if number == router.number => "this",
            (Entry::Waiting(_), _) => "another",
            (Entry::Vacant, _) => "vacant",
            (Entry::Ready, _) => "ready",
        };
        let router = space
            .router
            .map(|router| (router.activated, router.deactivated));
        format!("{waits_for} {router:?} {}", space.known)
    }

    fn hears_pins(&self) -> bool {
        false
    }

    fn complaint(&self) -> Option<String> {
        None
    }
}
