//! The host with small guests.
