//! Owns a trap with which tests kill a VM. Compiled only with the feature `trap`, into a module of its own.
#![allow(clippy::panic, reason = "that is what it is for")]

use crate::host::{self, Header};
use crate::vm::Vm;

/// Header of a request that kills the VM it reaches (`here`), or the leading VM at its next round (`leader`).
const HEADER: &[u8] = b"x-pd-router-trap";
const KEY: &str = "pd_router.trap";

/// Springs or sets the trap, if the request has the header.
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

/// Kills the leading VM if the trap is set. Called in each round.
pub fn spring(vm: &Vm) {
    let is_set = host::shared(KEY).is_some_and(|(value, _)| value == b"set");
    if is_set && vm.leads() {
        let _ = host::set_shared(KEY, b"", None);
        panic!("the leader's trap has sprung");
    }
}
