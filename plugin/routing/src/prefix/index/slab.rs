//! Owns memory in pages: growing copies nothing, and leaves at most one page unused.

use std::mem::size_of;

/// The end of a list; no element has this number.
pub(super) const NONE: u32 = u32::MAX;

/// Elements of a page: few enough that a little-used index is small, many enough that there are few pages.
const PAGE: usize = 1024;
const PAGE_BITS: u32 = PAGE.trailing_zeros();

/// An array that grows by pages.
#[derive(Debug)]
pub(super) struct Pages<T> {
    pages: Vec<Box<[T; PAGE]>>,
    count: u32,
    blank: T,
    /// The element for a number beyond the end. Never read on purpose: it spares all callers an impossible case.
    beyond: T,
}

impl<T: Copy> Pages<T> {
    pub(super) fn new(blank: T) -> Self {
        Self {
            pages: Vec::new(),
            count: 0,
            blank,
            beyond: blank,
        }
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    #[inline]
    pub(super) fn get(&self, at: u32) -> &T {
        let (page, place) = split(at);
        let found = self.pages.get(page).and_then(|page| page.get(place));
        found.unwrap_or(&self.beyond)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: u32) -> &mut T {
        let (page, place) = split(at);
        let found = self
            .pages
            .get_mut(page)
            .and_then(|page| page.get_mut(place));
        found.unwrap_or(&mut self.beyond)
    }

    /// Appends an element and returns its number.
    pub(super) fn push(&mut self, value: T) -> u32 {
        let at = self.count;
        if split(at).0 >= self.pages.len() {
            self.pages.push(Box::new([self.blank; PAGE]));
        }
        *self.get_mut(at) = value;
        self.count = at.saturating_add(1);
        at
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * size_of::<[T; PAGE]>() + self.pages.capacity() * size_of::<Box<T>>()
    }
}

#[inline]
fn split(at: u32) -> (usize, usize) {
    ((at >> PAGE_BITS) as usize, at as usize % PAGE)
}

/// An element that can be part of a list of vacant ones.
pub(super) trait Vacant: Copy {
    /// An element that holds nothing.
    const BLANK: Self;

    /// The field in which a vacant element keeps the number of the next.
    fn next(&mut self) -> &mut u32;
}

/// Elements under fixed numbers; the number of a freed element is used again.
#[derive(Debug)]
pub(super) struct Slab<T> {
    all: Pages<T>,
    vacant: u32,
    used: u32,
}

impl<T: Vacant> Slab<T> {
    pub(super) fn new() -> Self {
        Self {
            all: Pages::new(T::BLANK),
            vacant: NONE,
            used: 0,
        }
    }

    /// The most elements ever used at one time.
    pub(super) fn most(&self) -> u32 {
        self.all.count()
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    #[inline]
    pub(super) fn get(&self, at: u32) -> &T {
        self.all.get(at)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: u32) -> &mut T {
        self.all.get_mut(at)
    }

    pub(super) fn put(&mut self, value: T) -> u32 {
        self.used += 1;
        if self.vacant == NONE {
            return self.all.push(value);
        }
        let at = self.vacant;
        let place = self.all.get_mut(at);
        self.vacant = *place.next();
        *place = value;
        at
    }

    pub(super) fn free(&mut self, at: u32) {
        let place = self.all.get_mut(at);
        *place = T::BLANK;
        *place.next() = self.vacant;
        self.vacant = at;
        self.used -= 1;
    }

    pub(super) fn bytes(&self) -> usize {
        self.all.bytes()
    }
}
