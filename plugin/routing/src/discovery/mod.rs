//! Owns where workers are known from: one file per source, and what of a source's answers is believed.

mod belief;
mod document;
mod dynamo;
mod fixed;

pub use belief::{Belief, Believed};
pub use document::{DocumentError, parse as parse_document};
pub use dynamo::{DynamoError, parse as parse_dynamo};
pub use fixed::workers as static_workers;
