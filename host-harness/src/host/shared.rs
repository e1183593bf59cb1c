//! Owns what all VMs of the process share: data with compare-and-swap, queues, and the owners that a queue wakes.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc::UnboundedSender;

/// A notice of a message in a queue registered by a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueReady {
    /// Incarnation of the thread's VM that registered the queue.
    pub generation: u64,
    /// The queue's id.
    pub queue: u32,
}

/// Receiver of the notices of a queue.
#[derive(Clone, Debug)]
pub struct QueueOwner {
    /// Incarnation of the thread's VM that registers.
    pub generation: u64,
    /// The thread's own channel.
    pub wake: UnboundedSender<QueueReady>,
}

/// The value was changed by another thread since it was read.
#[derive(Debug, PartialEq, Eq)]
pub struct CasMismatch;

/// There is no queue with this id.
#[derive(Debug, PartialEq, Eq)]
pub struct NoQueue;

/// Data and queues of the process. They outlive every VM.
#[derive(Default)]
pub struct Shared {
    data: Mutex<Data>,
    queues: Mutex<Queues>,
}

#[derive(Default)]
struct Data {
    values: HashMap<Vec<u8>, (Vec<u8>, u32)>,
    last_cas: u32,
}

#[derive(Default)]
struct Queues {
    ids: HashMap<Vec<u8>, u32>,
    queues: Vec<Queue>,
}

struct Queue {
    messages: VecDeque<Vec<u8>>,
    owner: QueueOwner,
}

impl Shared {
    /// The value of `key` and its version, which is never zero.
    pub fn get(&self, key: &[u8]) -> Option<(Vec<u8>, u32)> {
        lock(&self.data).values.get(key).cloned()
    }

    /// Stores a value. `cas` zero is unconditional; a key that does not exist yet ignores `cas`, as in Envoy.
    pub fn set(&self, key: &[u8], value: &[u8], cas: u32) -> Result<(), CasMismatch> {
        let mut data = lock(&self.data);
        let data = &mut *data;
        data.last_cas = data.last_cas.checked_add(1).unwrap_or(1);
        let version = data.last_cas;
        let Some((stored, current)) = data.values.get_mut(key) else {
            data.values.insert(key.to_vec(), (value.to_vec(), version));
            return Ok(());
        };
        if cas != 0 && cas != *current {
            return Err(CasMismatch);
        }
        stored.clear();
        stored.extend_from_slice(value);
        *current = version;
        Ok(())
    }

    /// Creates the queue, or takes over an existing one: only the last registrant is woken, as in Envoy.
    pub fn register_queue(&self, name: &[u8], owner: QueueOwner) -> u32 {
        let mut queues = lock(&self.queues);
        if let Some(&id) = queues.ids.get(name) {
            if let Some(queue) = queues.queues.get_mut(index(id)) {
                queue.owner = owner;
            }
            return id;
        }
        queues.queues.push(Queue {
            messages: VecDeque::new(),
            owner,
        });
        let id = u32::try_from(queues.queues.len()).unwrap_or(u32::MAX);
        queues.ids.insert(name.to_vec(), id);
        id
    }

    /// The id of a registered queue.
    pub fn resolve_queue(&self, name: &[u8]) -> Option<u32> {
        lock(&self.queues).ids.get(name).copied()
    }

    /// Appends a message and wakes the queue's owner.
    pub fn enqueue(&self, id: u32, message: &[u8]) -> Result<(), NoQueue> {
        let mut queues = lock(&self.queues);
        let queue = queues.queues.get_mut(index(id)).ok_or(NoQueue)?;
        queue.messages.push_back(message.to_vec());
        let ready = QueueReady {
            generation: queue.owner.generation,
            queue: id,
        };
        // A thread that has ended cannot be woken; the message stays, as in Envoy.
        let _ = queue.owner.wake.send(ready);
        Ok(())
    }

    /// Takes the oldest message.
    pub fn dequeue(&self, id: u32) -> Result<Option<Vec<u8>>, NoQueue> {
        let mut queues = lock(&self.queues);
        let queue = queues.queues.get_mut(index(id)).ok_or(NoQueue)?;
        Ok(queue.messages.pop_front())
    }
}

/// Index of a queue. Ids begin at one; zero would look like "none" to a guest.
fn index(id: u32) -> usize {
    (id as usize).wrapping_sub(1)
}

/// Locks a mutex, ignoring poison: no code under these locks can panic half-way, so the data is sound.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc::unbounded_channel;

    #[test]
    fn compare_and_swap_guards_existing_keys_only() {
        let shared = Shared::default();
        assert_eq!(shared.get(b"k"), None);
        assert_eq!(shared.set(b"k", b"1", 77), Ok(()));
        let (value, cas) = shared.get(b"k").expect("stored");
        assert_eq!((value.as_slice(), cas != 0), (&b"1"[..], true));
        assert_eq!(shared.set(b"k", b"2", cas), Ok(()));
        assert_eq!(shared.set(b"k", b"3", cas), Err(CasMismatch));
        assert_eq!(shared.set(b"k", b"4", 0), Ok(()));
        assert_eq!(shared.get(b"k").expect("stored").0, b"4");
    }

    #[test]
    fn increments_of_two_threads_are_all_kept() {
        let shared = Shared::default();
        shared.set(b"n", &0u64.to_le_bytes(), 0).expect("new key");
        let count = || {
            for _ in 0..2000 {
                loop {
                    let (value, cas) = shared.get(b"n").expect("exists");
                    let value = u64::from_le_bytes(value.try_into().expect("8 bytes")) + 1;
                    if shared.set(b"n", &value.to_le_bytes(), cas).is_ok() {
                        break;
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(count);
            scope.spawn(count);
        });
        assert_eq!(shared.get(b"n").expect("exists").0, 4000u64.to_le_bytes());
    }

    #[test]
    fn a_queue_wakes_the_last_registrant_and_keeps_order() {
        let shared = Shared::default();
        let (first, mut first_wakes) = unbounded_channel();
        let (second, mut second_wakes) = unbounded_channel();
        let owner = |wake, generation| QueueOwner { generation, wake };
        let id = shared.register_queue(b"jobs", owner(first, 1));
        assert_eq!(shared.register_queue(b"jobs", owner(second, 2)), id);
        assert_eq!(shared.resolve_queue(b"jobs"), Some(id));
        assert_eq!(shared.resolve_queue(b"other"), None);
        shared.enqueue(id, b"a").expect("queue");
        shared.enqueue(id, b"b").expect("queue");
        let ready = QueueReady {
            generation: 2,
            queue: id,
        };
        assert_eq!(second_wakes.try_recv(), Ok(ready));
        assert!(first_wakes.try_recv().is_err());
        assert_eq!(shared.dequeue(id), Ok(Some(b"a".to_vec())));
        assert_eq!(shared.dequeue(id), Ok(Some(b"b".to_vec())));
        assert_eq!(shared.dequeue(id), Ok(None));
        assert_eq!(shared.dequeue(99), Err(NoQueue));
        assert_eq!(shared.enqueue(0, b"x"), Err(NoQueue));
    }
}
