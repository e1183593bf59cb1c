//! Owns a VM's published state as bytes: owner, beat, bookings, and the position of its log.
//!
//! ```text
//! blob  = "pdv2" · owner u64 · beat u64 · next segment u64 · totals 5 × u64 · pools u32 · pool …
//! pool  = pool u64 · shares u32 · share …
//! share = worker u64 · rank u32 · booked u32 · queued u32 · prefills u32 · decode blocks u32 · decode weight u32 · decodes u32
//! ```

use std::cmp::Reverse;

use super::bytes::{Input, put_count, put_most, put_u32, put_u64};
use super::{BLOB_BYTES, ThreadLoad};
use crate::fleet::{TargetKey, WorkerId};
use crate::load::Occupied;

const MAGIC: u32 = u32::from_le_bytes(*b"pdv2");
const HEAD_BYTES: usize = 72;
const POOL_BYTES: usize = 12;
const SHARE_BYTES: usize = 36;

/// Maximum pools in a blob: as many as a configuration may have.
const MOST_POOLS: usize = 64;
const MOST_SHARES: usize = (BLOB_BYTES - HEAD_BYTES - MOST_POOLS * POOL_BYTES) / SHARE_BYTES;

/// Bookings of one VM, or of several together, in one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolShares {
    /// The pool, as [`super::pool_number`] gives it.
    pub pool: u64,
    /// Each worker rank with bookings.
    pub shares: Vec<ThreadLoad>,
}

/// Totals of one VM, or of several together, for gauges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Clients' streams.
    pub streams: u64,
    /// Prefills under way.
    pub prefills: u64,
    /// Requests being decoded.
    pub decodes: u64,
    /// Requests that wait for a worker.
    pub waiting: u64,
    /// Workers that are ejected.
    pub ejected: u64,
}

impl Totals {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            streams: self.streams.saturating_add(other.streams),
            prefills: self.prefills.saturating_add(other.prefills),
            decodes: self.decodes.saturating_add(other.decodes),
            waiting: self.waiting.saturating_add(other.waiting),
            ejected: self.ejected.saturating_add(other.ejected),
        }
    }
}

/// The part of a blob that changes even where nothing happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlobHead {
    pub(super) owner: u64,
    /// Grows with every blob.
    pub(super) beat: u64,
    /// Number of the next segment to be written.
    pub(super) next_segment: u64,
}

/// A blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blob {
    pub(super) head: BlobHead,
    pub(super) totals: Totals,
    pub(super) pools: Vec<PoolShares>,
}

impl BlobHead {
    /// The bytes of a blob: this head, then [`body`]'s bytes.
    pub(super) fn encode(self, body: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES.saturating_add(body.len()));
        put_u32(&mut out, MAGIC);
        put_u64(&mut out, self.owner);
        put_u64(&mut out, self.beat);
        put_u64(&mut out, self.next_segment);
        out.extend_from_slice(body);
        out
    }

    /// The head of a blob; none where the bytes are something else.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        Self::read(&mut Input(bytes))
    }

    fn read(input: &mut Input<'_>) -> Option<Self> {
        if input.u32()? != MAGIC {
            return None;
        }
        Some(Self {
            owner: input.u64()?,
            beat: input.u64()?,
            next_segment: input.u64()?,
        })
    }
}

impl Blob {
    /// Reads what [`Head::encode`] wrote; none where the bytes are something else.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = Input(bytes);
        let head = BlobHead::read(&mut input)?;
        let totals = Totals {
            streams: input.u64()?,
            prefills: input.u64()?,
            decodes: input.u64()?,
            waiting: input.u64()?,
            ejected: input.u64()?,
        };
        let count = input.count(POOL_BYTES)?;
        let mut pools = Vec::with_capacity(count.min(MOST_POOLS));
        for _ in 0..count {
            pools.push(read_pool(&mut input)?);
        }
        Some(Self {
            head,
            totals,
            pools,
        })
    }
}

/// The bytes of a blob after its head. Shares beyond the size limit are left out, lightest first.
pub(super) fn body(totals: &Totals, pools: &[PoolShares]) -> Vec<u8> {
    let pools = pools.get(..MOST_POOLS).unwrap_or(pools);
    let count = pools.iter().map(|pool| pool.shares.len()).sum();
    if count <= MOST_SHARES {
        return whole_body(totals, pools, count);
    }
    let mut heaviest = Vec::with_capacity(count);
    for (nth, pool) in pools.iter().enumerate() {
        heaviest.extend(pool.shares.iter().map(|share| (nth, *share)));
    }
    heaviest.select_nth_unstable_by_key(MOST_SHARES, |(_, share)| Reverse(weight(share)));
    heaviest.truncate(MOST_SHARES);
    let heaviest_of = |(nth, pool): (usize, &PoolShares)| PoolShares {
        pool: pool.pool,
        shares: heaviest
            .iter()
            .filter(|(of, _)| *of == nth)
            .map(|(_, share)| *share)
            .collect(),
    };
    let pools: Vec<PoolShares> = pools.iter().enumerate().map(heaviest_of).collect();
    whole_body(totals, &pools, MOST_SHARES)
}

fn whole_body(totals: &Totals, pools: &[PoolShares], count: usize) -> Vec<u8> {
    let heads = HEAD_BYTES.saturating_add(pools.len().saturating_mul(POOL_BYTES));
    let mut out = Vec::with_capacity(heads.saturating_add(count.saturating_mul(SHARE_BYTES)));
    for total in [
        totals.streams,
        totals.prefills,
        totals.decodes,
        totals.waiting,
        totals.ejected,
    ] {
        put_u64(&mut out, total);
    }
    put_count(&mut out, pools.len());
    for PoolShares { pool, shares } in pools {
        put_u64(&mut out, *pool);
        put_count(&mut out, shares.len());
        for share in shares {
            put_share(&mut out, share);
        }
    }
    out
}

/// Weight of a share: its requests, then its booked tokens and decode weight.
fn weight(share: &ThreadLoad) -> u128 {
    let requests = u128::from(share.prefills) + u128::from(share.decodes);
    let held = share.booked_tokens.saturating_add(share.decoding.weight);
    (requests << 64) | u128::from(held)
}

fn put_share(out: &mut Vec<u8>, share: &ThreadLoad) {
    put_u64(out, share.key.worker.0);
    put_u32(out, share.key.rank);
    put_most(out, share.booked_tokens);
    put_most(out, share.queued_tokens);
    put_u32(out, share.prefills);
    put_most(out, share.decoding.blocks);
    put_most(out, share.decoding.weight);
    put_u32(out, share.decodes);
}

fn read_pool(input: &mut Input<'_>) -> Option<PoolShares> {
    let pool = input.u64()?;
    let count = input.count(SHARE_BYTES)?;
    let mut shares = Vec::with_capacity(count);
    for _ in 0..count {
        shares.push(read_share(input)?);
    }
    Some(PoolShares { pool, shares })
}

fn read_share(input: &mut Input<'_>) -> Option<ThreadLoad> {
    Some(ThreadLoad {
        key: TargetKey {
            worker: WorkerId(input.u64()?),
            rank: input.u32()?,
        },
        booked_tokens: input.u32()?.into(),
        queued_tokens: input.u32()?.into(),
        prefills: input.u32()?,
        decoding: Occupied {
            blocks: input.u32()?.into(),
            weight: input.u32()?.into(),
        },
        decodes: input.u32()?,
    })
}
