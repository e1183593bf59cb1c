//! The host with small guests: what a client, a worker and the metrics see.

mod guest;
mod lifecycle;
mod net;
mod routing;
