//! Owns the request bodies that are being received on one thread: how long each may take, and which of them give way where
//! there is no room for all.
//!
//! Bodies share a budget of bytes. A slow or stalled client still holds the received part of its body. A complete body
//! therefore takes the room of incomplete ones; an incomplete body takes the room of those whose safe time is over and of
//! those that are much longer.

use std::time::Duration;

use hashbrown::HashMap;

/// How long a body is safe from other incomplete ones: by then a client that is not slow has sent the longest body. Without
/// a safe time, too many bodies at once would drive each other out and none would ever be complete.
const SAFE: Duration = Duration::from_secs(5);

/// A body at least this many times as long as another is much longer and gives way at once. A short body that comes in two
/// pieces is incomplete for a moment and must not be kept out by long incomplete ones; bodies of similar length do not
/// drive each other out.
const MUCH_LONGER: usize = 8;

/// The bodies that are being received, by stream number.
#[derive(Debug, Default)]
pub struct Uploads {
    open: HashMap<u32, Upload>,
}

#[derive(Debug, Clone, Copy)]
struct Upload {
    /// When the headers of the request came.
    began: Duration,
    /// Bytes received so far.
    bytes: usize,
}

impl Upload {
    /// Whether this body gives way to another incomplete one.
    fn gives_way_to(&self, other: &Upload, now: Duration) -> bool {
        let has_had_its_time = now.saturating_sub(self.began) >= SAFE && self.began < other.began;
        has_had_its_time || self.bytes >= other.bytes.saturating_mul(MUCH_LONGER)
    }
}

/// How much of a body has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UploadProgress {
    /// More bytes follow.
    Incomplete,
    /// All bytes are there.
    Complete,
}

impl Uploads {
    /// Registers a stream whose body follows.
    pub fn begin(&mut self, stream: u32, now: Duration) {
        let upload = Upload {
            began: now,
            bytes: 0,
        };
        self.open.insert(stream, upload);
    }

    /// Sets the bytes received so far, in all.
    pub fn received(&mut self, stream: u32, bytes: usize) {
        if let Some(upload) = self.open.get_mut(&stream) {
            upload.bytes = bytes;
        }
    }

    /// Removes a body that is complete, refused, or gone with its stream.
    pub fn end(&mut self, stream: u32) {
        self.open.remove(&stream);
    }

    /// Number of bodies that are being received.
    pub fn count(&self) -> usize {
        self.open.len()
    }

    /// The streams whose bodies are not complete within `limit`.
    pub fn late(&self, now: Duration, limit: Duration) -> Vec<u32> {
        let is_late = |upload: &Upload| now.saturating_sub(upload.began) >= limit;
        let late = self.open.iter().filter(|(_, upload)| is_late(upload));
        late.map(|(stream, _)| *stream).collect()
    }

    /// The streams whose bodies give way so that `wanted` more bytes can be held for the body of `stream`, longest under
    /// way first; none where that would not be enough.
    pub fn make_way(
        &self,
        stream: u32,
        wanted: usize,
        progress: UploadProgress,
        now: Duration,
    ) -> Option<Vec<u32>> {
        let own = self.open.get(&stream);
        let gives_way = |upload: &Upload| match progress {
            UploadProgress::Complete => true,
            UploadProgress::Incomplete => own.is_some_and(|own| upload.gives_way_to(own, now)),
        };
        let mut others: Vec<(Duration, u32, usize)> = self
            .open
            .iter()
            .filter(|(other, upload)| **other != stream && upload.bytes > 0 && gives_way(upload))
            .map(|(other, upload)| (upload.began, *other, upload.bytes))
            .collect();
        others.sort_unstable();
        let mut freed = 0_usize;
        let mut ways = Vec::new();
        for (_, other, bytes) in others {
            if freed >= wanted {
                break;
            }
            freed = freed.saturating_add(bytes);
            ways.push(other);
        }
        (freed >= wanted && wanted > 0).then_some(ways)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Bodies by stream number: start in seconds, and bytes received.
    fn uploads(all: &[(u32, u64, usize)]) -> Uploads {
        let mut uploads = Uploads::default();
        for (stream, began, bytes) in all {
            uploads.begin(*stream, at(*began));
            uploads.received(*stream, *bytes);
        }
        uploads
    }

    #[test]
    fn found_b6_a_body_has_a_deadline_of_its_own() {
        let mut uploads = uploads(&[(1, 0, 0), (2, 10, 500)]);
        assert!(uploads.late(at(59), at(60)).is_empty());
        assert_eq!(uploads.late(at(60), at(60)), [1]);
        // A byte now and then does not extend the deadline.
        uploads.received(2, 501);
        let mut late = uploads.late(at(70), at(60));
        late.sort_unstable();
        assert_eq!(late, [1, 2]);
        uploads.end(1);
        uploads.end(2);
        assert!(uploads.late(at(1000), at(60)).is_empty());
        assert_eq!(uploads.count(), 0);
        // Bytes of an unknown stream create no upload.
        uploads.received(1, 7);
        assert_eq!(uploads.count(), 0);
    }

    #[test]
    fn found_b6_a_complete_body_takes_the_room_of_those_that_are_not() {
        let uploads = uploads(&[
            (1, 2, 1000),
            (2, 0, 100),
            (3, 9, 100),
            (4, 1, 0),
            (9, 10, 5),
        ]);
        let ways = |wanted| uploads.make_way(9, wanted, UploadProgress::Complete, at(10));
        assert_eq!(ways(1), Some(vec![2]));
        assert_eq!(ways(100), Some(vec![2]));
        assert_eq!(ways(101), Some(vec![2, 1]));
        assert_eq!(ways(1200), Some(vec![2, 1, 3]));
        assert_eq!(ways(1201), None);
        assert_eq!(ways(0), None);
    }

    #[test]
    fn found_b6_an_incomplete_body_takes_that_of_those_that_have_had_their_time() {
        let uploads = uploads(&[(1, 0, 1000), (2, 4, 100), (3, 7, 100), (9, 10, 500)]);
        let ways = |stream, wanted, now| {
            uploads.make_way(stream, wanted, UploadProgress::Incomplete, at(now))
        };
        assert_eq!(ways(9, 50, 10), Some(vec![1]));
        assert_eq!(ways(9, 1100, 10), Some(vec![1, 2]));
        assert_eq!(ways(9, 1101, 10), None);
        assert_eq!(ways(9, 1101, 12), Some(vec![1, 2, 3]));
        // No body takes the room of one that began later.
        assert_eq!(ways(1, 1, 100), None);
        // An unknown stream has no start time.
        assert_eq!(ways(7, 1, 100), None);
    }

    #[test]
    fn found_b6_an_incomplete_body_takes_that_of_those_that_are_much_longer() {
        let uploads = uploads(&[
            (1, 9, 800),
            (2, 10, 801),
            (3, 8, 799),
            (4, 10, 100),
            (9, 10, 100),
        ]);
        let ways =
            |stream, wanted| uploads.make_way(stream, wanted, UploadProgress::Incomplete, at(10));
        assert_eq!(ways(9, 50), Some(vec![1]));
        assert_eq!(ways(9, 1601), Some(vec![1, 2]));
        assert_eq!(ways(9, 1602), None);
        // Bodies that are not much longer stay, and so do all shorter ones.
        assert_eq!(ways(1, 1), None);
        assert_eq!(ways(4, 1602), None);
    }

    #[test]
    fn found_b6_sixteen_that_hold_everything_and_send_nothing_keep_nobody_out() {
        const BODY: usize = 16 * 1024 * 1024;
        let slow: Vec<_> = (0..16).map(|stream| (stream, 0, BODY - 1)).collect();
        let mut uploads = uploads(&slow);
        uploads.begin(99, at(6));
        uploads.received(99, 64 * 1024);
        for progress in [UploadProgress::Complete, UploadProgress::Incomplete] {
            let ways = uploads.make_way(99, 64 * 1024, progress, at(7));
            assert_eq!(ways, Some(vec![0]), "{progress:?}");
        }
    }
}
