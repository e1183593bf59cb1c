//! Owns the legs of a request that is under way: the calls of the root for it, their answers, and what its end leaves behind.

pub mod calls;
pub mod cleanup;
pub mod effects;
pub mod ending;
pub mod marks;
pub mod prefill;
pub mod recovery;
