//! The rows of docs/failures.md, each a function of the host and the protocol, called as there.

mod blame;
mod client;
mod decode;
mod prefill;
mod stream;

pub use blame::*;
pub use client::*;
pub use decode::*;
pub use prefill::*;
pub use stream::*;
