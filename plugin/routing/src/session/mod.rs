//! Owns one request's life as a value: what has come, and what follows. No proxy, no cell, no clock of its own.

mod complete;
mod deadlines;
mod failure;

mod response;
mod tried;

#[cfg(test)]
mod tests;

pub use complete::CompleteAnswer;
pub use deadlines::Deadlines;
pub use failure::{
    Failure, LastAnswer, LegEnd, after_error, came_of_call, record_server, record_unanswered,
};
pub use response::{
    ConcurrentPrefill, ContentLength, Due, NewBody, Passed, Piece, Response, Step, SuccessHead,
    Takeover,
};
pub use tried::Tried;
