//! Owns a planted trap: tests kill a VM with it. It is compiled only with the feature `trap`, into a module of its own.
#![allow(clippy::panic, reason = "that is what it is for")]

use crate::host::{self, Header};
use crate::vm::Vm;

/// A request with this header kills the VM that it reaches (`here`), or the one that leads (`leader`), at its next round.
const HEADER: &[u8] = b"x-pd-router-trap";
const KEY: &str = "pd_router.trap";

/// A request has come.
pub fn step_on(headers: &[Header]) {
    let value = headers
        .iter()
        .find_map(|(name, value)| (name.as_slice() == HEADER).then_some(value.as_slice()));
    match value {
        Some(b"here") => panic!("stepped on the trap"),
        Some(b"leader") => {
            let _ = host::set_shared(KEY, b"set", None);
        }
        _ => {}
    }
}

/// A round has begun.
pub fn spring(vm: &Vm) {
    let is_set = host::shared(KEY).is_some_and(|(value, _)| value == b"set");
    if is_set && vm.leads() {
        let _ = host::set_shared(KEY, b"", None);
        panic!("the leader's trap has sprung");
    }
}
