//! Owns how many bytes may be held at once, and the shares of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of bytes held now, for any number of budgets.
#[derive(Debug, Clone, Default)]
pub struct HeldBytes(Arc<AtomicUsize>);

/// A bound on bytes held at once. Several budgets with limits of their own may count the same bytes.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    held: HeldBytes,
    outer: Option<Box<Budget>>,
}

impl Budget {
    /// At most `limit` bytes, of which `held` are already taken.
    pub fn of(limit: usize, held: &HeldBytes) -> Self {
        Self {
            limit,
            held: held.clone(),
            outer: None,
        }
    }

    /// The same within another budget, which counts these bytes too.
    #[must_use]
    pub fn within(self, outer: Self) -> Self {
        Self {
            outer: Some(Box::new(outer)),
            ..self
        }
    }

    /// Takes a share; none where that would exceed the limit.
    pub fn take(&self, bytes: usize) -> Option<Share> {
        let outer = match &self.outer {
            Some(outer) => Some(Box::new(outer.take(bytes)?)),
            None => None,
        };
        let with = |held: usize| {
            let total = held.checked_add(bytes)?;
            (total <= self.limit).then_some(total)
        };
        let held = &self.held.0;
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with)
            .ok()?;
        Some(Share {
            held: self.held.clone(),
            bytes,
            _outer: outer,
        })
    }

    /// How many of `bytes` more bytes exceed the limit.
    pub fn lacks(&self, bytes: usize) -> usize {
        let total = self.held.0.load(Ordering::Relaxed).saturating_add(bytes);
        total.saturating_sub(self.limit)
    }
}

/// A share of a budget, given back when dropped.
#[derive(Debug)]
pub struct Share {
    held: HeldBytes,
    bytes: usize,
    _outer: Option<Box<Share>>,
}

impl Share {
    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.held.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_held_than_may_be_and_a_share_is_given_back() {
        let held = HeldBytes::default();
        let (budget, narrower) = (Budget::of(10, &held), Budget::of(5, &held));
        let share = budget.take(6).unwrap();
        assert!(budget.take(5).is_none() && narrower.take(1).is_none());
        assert!(budget.take(usize::MAX).is_none());
        let rest = budget.take(4).unwrap();
        assert!(budget.take(1).is_none() && budget.take(0).is_some());
        assert_eq!((budget.lacks(7), narrower.lacks(0)), (7, 5));
        drop(share);
        assert!(narrower.take(1).is_some() && narrower.take(2).is_none());
        drop(rest);
        assert_eq!(held.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_budget_within_another_takes_nothing_where_either_is_full() {
        let (inner, outer) = (HeldBytes::default(), HeldBytes::default());
        let bound = |limit| Budget::of(limit, &inner).within(Budget::of(6, &outer));
        let share = bound(4).take(4).unwrap();
        assert!(bound(4).take(1).is_none());
        assert!(bound(9).take(3).is_none());
        let both = |bytes| {
            [&inner, &outer]
                .iter()
                .all(|held| held.0.load(Ordering::Relaxed) == bytes)
        };
        assert!(both(4), "a refused share is in neither");
        drop(share);
        assert!(both(0));
    }
}
