//! Owns a prefill engine's rooms, in which the KV of one prefill meets its one decode.
//!
//! In SGLang a room is a number, in Mooncake a transfer id, in TensorRT-LLM a request id. Each is used once. Either side may come
//! first; the decode waits here until the KV is ready or will never be.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Notify;

use super::aborts::AbortSelection;
use super::kv::{Blocks, Kv};
use super::lease::{HandoffPrompt, PullRefusal};

/// Why a room gives no KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoomRefusal {
    /// Another prefill or another decode had the room.
    Used,
    /// No prefill has entered the room.
    Unknown,
    /// The decode's seal differs from that of the KV.
    WrongSeal,
    /// The room's prefill failed, or was aborted.
    PrefillFailed,
    /// The KV was held for its full time, and is gone.
    Expired,
    /// The KV was available, and was lost.
    Lost,
    /// The decode names another rank for the prefill than the room implies.
    RankConflict,
}

/// KV that waits for its decode.
struct HeldKv {
    id: String,
    blocks: Vec<u32>,
    /// The seal that the decode must show.
    seal: Value,
}

enum Progress {
    /// A decode waits; no prefill has entered.
    Awaited,
    /// A prefill has entered.
    Computing,
    /// The KV is available.
    Ready(HeldKv),
}

struct Room {
    progress: Progress,
    /// The prefill's id, empty before its entry.
    rid: String,
    claimed: bool,
    changed: Rc<Notify>,
}

impl Room {
    fn new(progress: Progress) -> Self {
        Self {
            progress,
            rid: String::new(),
            claimed: false,
            changed: Rc::default(),
        }
    }
}

/// The rooms of one engine.
#[derive(Default)]
pub struct Rooms {
    open: RefCell<HashMap<String, Room>>,
    /// Closed rooms, and the reason given to a decode. Grows for ever, since "never twice" has no end: some dozen bytes per room.
    over: RefCell<HashMap<String, RoomRefusal>>,
    /// In a decode engine: the rooms to which it was sent. Grows likewise.
    decoded: RefCell<HashSet<String>>,
}

impl Rooms {
    /// Opens a room for its prefill, the request `rid`; `None` if the room ever had one.
    pub fn enter(self: &Rc<Self>, name: &str, rid: &str) -> Option<RoomPrefill> {
        if self.over.borrow().contains_key(name) {
            return None;
        }
        let mut open = self.open.borrow_mut();
        let room = open
            .entry(name.to_owned())
            .or_insert_with(|| Room::new(Progress::Awaited));
        if !matches!(room.progress, Progress::Awaited) {
            return None;
        }
        room.progress = Progress::Computing;
        room.rid = rid.to_owned();
        Some(RoomPrefill {
            rooms: Rc::clone(self),
            name: name.to_owned(),
        })
    }

    /// Records that a decode was sent to a room; `false` if another one was before.
    pub fn note_decode(&self, name: &str) -> bool {
        self.decoded.borrow_mut().insert(name.to_owned())
    }

    /// Waits for the KV of a room and takes it, for the room's one decode.
    ///
    /// # Errors
    /// When there is no KV, or never will be. If the wait is cancelled, the room stays claimed, and its KV waits until its lease
    /// ends.
    pub async fn take(
        &self,
        name: &str,
        seal: &Value,
        kv: &Kv,
    ) -> Result<HandoffPrompt, RoomRefusal> {
        let changed = self.claim(name)?;
        loop {
            if let Some(outcome) = self.try_take(name, seal, kv) {
                return outcome;
            }
            changed.notified().await;
        }
    }

    /// Takes the KV of a room whose prefill is done.
    ///
    /// # Errors
    /// When there is no KV; a refused request changes nothing.
    pub fn take_now(
        &self,
        name: &str,
        seal: &Value,
        kv: &Kv,
    ) -> Result<HandoffPrompt, RoomRefusal> {
        self.try_take(name, seal, kv)
            .unwrap_or(Err(RoomRefusal::Unknown))
    }

    /// Drops the KV of the rooms whose prefill is selected and done; returns the ids of those prefills.
    pub fn abort(&self, which: &AbortSelection, kv: &Kv) -> Vec<String> {
        let open = self.open.borrow();
        let meant: Vec<String> = open
            .iter()
            .filter(|(_, room)| matches!(room.progress, Progress::Ready(_)))
            .filter(|(_, room)| which.includes(&room.rid))
            .map(|(name, _)| name.clone())
            .collect();
        drop(open);
        let mut dropped = Vec::new();
        for name in meant {
            let Some(room) = self.end(&name, RoomRefusal::PrefillFailed) else {
                continue;
            };
            if let Progress::Ready(held) = room.progress
                && kv.revoke(&held.id)
            {
                dropped.push(room.rid);
            }
        }
        dropped
    }

    /// Number of rooms that some leg has entered and that are still open. A room whose KV has expired is closed here at the
    /// latest.
    pub fn count_open(&self, kv: &Kv) -> usize {
        let stale =
            |room: &Room| matches!(&room.progress, Progress::Ready(held) if !kv.holds(&held.id));
        let open = self.open.borrow();
        let expired = open.iter().filter(|(_, room)| stale(room));
        let expired: Vec<String> = expired.map(|(name, _)| name.clone()).collect();
        drop(open);
        for name in expired {
            self.end(&name, RoomRefusal::Expired);
        }
        self.open.borrow().len()
    }

    fn claim(&self, name: &str) -> Result<Rc<Notify>, RoomRefusal> {
        if let Some(refusal) = self.over.borrow().get(name) {
            return Err(*refusal);
        }
        let mut open = self.open.borrow_mut();
        let room = open
            .entry(name.to_owned())
            .or_insert_with(|| Room::new(Progress::Awaited));
        if room.claimed {
            return Err(RoomRefusal::Used);
        }
        room.claimed = true;
        Ok(Rc::clone(&room.changed))
    }

    /// `None` while the prefill is not done.
    fn try_take(
        &self,
        name: &str,
        seal: &Value,
        kv: &Kv,
    ) -> Option<Result<HandoffPrompt, RoomRefusal>> {
        if let Some(refusal) = self.over.borrow().get(name) {
            return Some(Err(*refusal));
        }
        if let Some(room) = self.open.borrow_mut().get_mut(name) {
            match &room.progress {
                Progress::Ready(held) if held.seal == *seal => {}
                Progress::Ready(_) => {
                    room.claimed = false;
                    return Some(Err(RoomRefusal::WrongSeal));
                }
                Progress::Awaited | Progress::Computing => return None,
            }
        }
        let Progress::Ready(held) = self.end(name, RoomRefusal::Used)?.progress else {
            return None;
        };
        Some(match kv.consume(&held.id, &[held.blocks]) {
            Ok(of) => Ok(of),
            Err(PullRefusal::Expired) => Err(RoomRefusal::Expired),
            Err(_) => Err(RoomRefusal::PrefillFailed),
        })
    }

    /// Closes an open room for ever, and notifies the waiting decode.
    fn end(&self, name: &str, refusal: RoomRefusal) -> Option<Room> {
        let (name, room) = self.open.borrow_mut().remove_entry(name)?;
        self.over.borrow_mut().insert(name, refusal);
        room.changed.notify_one();
        Some(room)
    }
}

/// The prefill of a room; dropped before it has handed KV over, it counts as failed.
pub struct RoomPrefill {
    rooms: Rc<Rooms>,
    name: String,
}

impl RoomPrefill {
    /// Puts the KV into the room for its decode, which must show the seal.
    pub fn hand_over(self, blocks: Blocks, of: HandoffPrompt, seal: Value) {
        let mut open = self.rooms.open.borrow_mut();
        let Some(room) = open.get_mut(&self.name) else {
            return;
        };
        let (id, blocks) = blocks.hand_off(&room.rid, of);
        room.progress = Progress::Ready(HeldKv { id, blocks, seal });
        room.changed.notify_one();
    }
}

impl RoomPrefill {
    /// Hands the KV over, and loses it at once.
    pub fn lose(self, blocks: Blocks, of: HandoffPrompt, kv: &Kv) {
        let Some(room) = self.rooms.end(&self.name, RoomRefusal::Lost) else {
            return;
        };
        let (id, _) = blocks.hand_off(&room.rid, of);
        kv.lose(&id);
    }
}

impl Drop for RoomPrefill {
    fn drop(&mut self) {
        let computing = |room: &Room| matches!(room.progress, Progress::Computing);
        let failed = self
            .rooms
            .open
            .borrow()
            .get(&self.name)
            .is_some_and(computing);
        if failed {
            self.rooms.end(&self.name, RoomRefusal::PrefillFailed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const OF: HandoffPrompt = HandoffPrompt {
        prompt_tokens: 20,
        prompt_fingerprint: 7,
    };

    fn rooms() -> (Rc<Rooms>, Rc<Kv>) {
        (Rc::default(), Kv::new(8, Duration::from_secs(60)))
    }

    fn blocks(kv: &Rc<Kv>) -> Blocks {
        kv.try_reserve(2).expect("free blocks")
    }

    #[tokio::test]
    async fn either_side_may_come_first() {
        let (rooms, kv) = rooms();
        let room_prefill = rooms.enter("1", "a").expect("a new room");
        room_prefill.hand_over(blocks(&kv), OF, Value::Null);
        assert_eq!(rooms.take("1", &Value::Null, &kv).await, Ok(OF));

        let late = async {
            rooms
                .enter("2", "b")
                .expect("awaited")
                .hand_over(blocks(&kv), OF, Value::Null)
        };
        let (taken, ()) = tokio::join!(rooms.take("2", &Value::Null, &kv), late);
        assert_eq!(taken, Ok(OF));
        assert_eq!(kv.counts().0, 0);
    }

    #[tokio::test]
    async fn a_room_is_used_once() {
        let (rooms, kv) = rooms();
        let room_prefill = rooms.enter("1", "a").expect("a new room");
        assert!(rooms.enter("1", "b").is_none(), "while it computes");
        room_prefill.hand_over(blocks(&kv), OF, Value::Null);
        assert!(rooms.enter("1", "b").is_none(), "while it waits");
        assert_eq!(rooms.take("1", &Value::Null, &kv).await, Ok(OF));
        assert!(rooms.enter("1", "b").is_none(), "when it is over");
        assert_eq!(
            rooms.take("1", &Value::Null, &kv).await,
            Err(RoomRefusal::Used)
        );
        assert!(rooms.note_decode("1"));
        assert!(!rooms.note_decode("1"));
    }

    #[tokio::test]
    async fn a_prefill_that_fails_fails_its_decode() {
        let (rooms, kv) = rooms();
        let room_prefill = rooms.enter("1", "a").expect("a new room");
        let (taken, ()) = tokio::join!(rooms.take("1", &Value::Null, &kv), async {
            drop(room_prefill)
        });
        assert_eq!(taken, Err(RoomRefusal::PrefillFailed));
        drop(rooms.enter("2", "b"));
        assert_eq!(
            rooms.take("2", &Value::Null, &kv).await,
            Err(RoomRefusal::PrefillFailed)
        );
        assert!(rooms.enter("2", "b").is_none());
    }

    #[tokio::test]
    async fn an_abort_drops_what_waits_for_its_decode() {
        let (rooms, kv) = rooms();
        for (name, rid) in [("1", "a"), ("2", "b")] {
            let room_prefill = rooms.enter(name, rid).expect("a new room");
            room_prefill.hand_over(blocks(&kv), OF, Value::Null);
        }
        let which = |json: &str| serde_json::from_str::<AbortSelection>(json).expect("valid");
        assert_eq!(rooms.abort(&which(r#"{"rid":"a"}"#), &kv), ["a"]);
        assert_eq!(rooms.abort(&which(r#"{"rid":"a"}"#), &kv).len(), 0);
        assert_eq!(kv.counts().0, 2);
        assert_eq!(
            rooms.take("1", &Value::Null, &kv).await,
            Err(RoomRefusal::PrefillFailed)
        );
        assert_eq!(rooms.abort(&which(r#"{"abort_all":true}"#), &kv), ["b"]);
        assert_eq!(kv.counts().0, 0);
    }

    #[tokio::test]
    async fn a_room_ends_with_its_lease() {
        let rooms: Rc<Rooms> = Rc::default();
        let kv = Kv::new(8, Duration::ZERO);
        let room_prefill = rooms.enter("1", "a").expect("a new room");
        assert_eq!(rooms.count_open(&kv), 1);
        room_prefill.hand_over(blocks(&kv), OF, Value::Null);
        assert_eq!(rooms.count_open(&kv), 0);
        assert_eq!(
            rooms.take("1", &Value::Null, &kv).await,
            Err(RoomRefusal::Expired)
        );
    }

    #[tokio::test]
    async fn a_decode_that_gave_up_leaves_the_room_claimed() {
        let (rooms, kv) = rooms();
        let gave_up =
            tokio::time::timeout(Duration::from_millis(1), rooms.take("1", &Value::Null, &kv))
                .await;
        assert!(gave_up.is_err());
        rooms
            .enter("1", "a")
            .expect("awaited")
            .hand_over(blocks(&kv), OF, Value::Null);
        assert_eq!(
            rooms.take("1", &Value::Null, &kv).await,
            Err(RoomRefusal::Used)
        );
        assert_eq!(kv.counts().0, 2);
    }

    #[tokio::test]
    async fn the_seal_must_be_shown() {
        let (rooms, kv) = rooms();
        let (good, bad) = (Value::from("a"), Value::from("b"));
        let take_now = |seal| rooms.take_now("1", seal, &kv);
        assert_eq!(take_now(&good), Err(RoomRefusal::Unknown));
        let room_prefill = rooms.enter("1", "a").expect("a new room");
        assert_eq!(take_now(&good), Err(RoomRefusal::Unknown));
        room_prefill.hand_over(blocks(&kv), OF, good.clone());
        assert_eq!(take_now(&bad), Err(RoomRefusal::WrongSeal));
        let waits = rooms.take("1", &bad, &kv).await;
        assert_eq!(waits, Err(RoomRefusal::WrongSeal));
        assert_eq!(kv.counts().0, 2, "a refused taking changes nothing");
        assert_eq!(rooms.take("1", &good, &kv).await, Ok(OF));
        assert_eq!(take_now(&good), Err(RoomRefusal::Used));
    }
}
