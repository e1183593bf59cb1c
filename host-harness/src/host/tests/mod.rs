//! Tests of the host with small guests: the view of a client, of a worker and of the metrics.

mod guest;
mod lifecycle;
mod net;
mod routing;
