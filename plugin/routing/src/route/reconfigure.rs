//! Owns what a new configuration keeps: workers, their bookings, and the blocks that they are estimated to hold.

use std::time::Duration;

use super::Router;
use crate::config::{Discovery, Pool};
use crate::discovery::static_workers;
use crate::fleet::Fleet;
use crate::prefix::index::{Bounds, Index};
use crate::selection::policy;

impl Router {
    /// Applies the configuration `pool`. Known workers stay until their source says otherwise, unless they are listed in the
    /// configuration itself, or are reached in another way now. Bookings stay, and so does the prefix index, unless the
    /// block size or the index's bounds have changed. Requests under way end as they began.
    pub fn reconfigure(&mut self, pool: Pool) {
        let before = std::mem::replace(&mut self.pool, pool);
        let pool = &self.pool;
        if before.selection.prefill != pool.selection.prefill {
            self.prefill_policy = policy(pool.selection.prefill);
        }
        if before.selection.decode != pool.selection.decode {
            self.decode_policy = policy(pool.selection.decode);
        }
        self.health.follow(pool.health.clone());
        if before.protocol != pool.protocol || before.bootstrap != pool.bootstrap {
            self.bindings.clear();
        }
        if before.block_tokens != pool.block_tokens || before.prefixes != pool.prefixes {
            self.prefixes = index(pool);
            self.opened.clear();
        }
        let workers = match &pool.discovery {
            Discovery::Static(list) => static_workers(&list.workers),
            _ if before.rules().reaches_workers == pool.rules().reaches_workers => {
                let known = self.fleet.workers();
                known.map(|worker| (**worker).clone()).collect()
            }
            _ => Vec::new(),
        };
        let version = self.fleet.version();
        self.adopt(Fleet::new(version, workers));
    }
}

/// An empty index, as large as the pool allows.
pub(super) fn index(pool: &Pool) -> Index {
    Index::new(Bounds {
        max_pairs: pool.prefixes.max_blocks,
        ttl: Duration::from_millis(pool.prefixes.ttl_ms),
    })
}
