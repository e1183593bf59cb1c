//! Owns this VM's part in the election of a leader, and what depends on its outcome.

use crate::shared::Lease;

/// Rounds between two settings of all gauges: about a second.
const ROUNDS_TO_SET_ANEW: u32 = 10;

/// This VM's part in the election of a leader. The leading VM polls, and logs changes that all VMs see.
pub struct Leadership {
    lease: Lease,
    /// Whether this VM has had a request; the main thread's never has.
    pub serves: bool,
    /// Whether this VM holds the lease.
    pub leads: bool,
    /// Rounds that this VM has led.
    rounds_led: u32,
}

impl Leadership {
    /// A VM that does not lead yet.
    pub fn new() -> Self {
        Self {
            lease: Lease::new(),
            serves: false,
            leads: false,
            rounds_led: 0,
        }
    }

    /// Takes part in the election; whether this VM leads from now on. Called in each round.
    pub fn run(&mut self) -> bool {
        let led = self.leads;
        self.leads = self.lease.tick(self.serves);
        self.leads && !led
    }

    /// Whether all gauges are to be set again in this round, changed or not: two VMs may both believe that they lead, for a
    /// moment, and the wrong one may set the gauges last. Called in each round that this VM leads.
    pub fn sets_gauges_anew(&mut self) -> bool {
        self.rounds_led = self.rounds_led.wrapping_add(1);
        self.rounds_led.is_multiple_of(ROUNDS_TO_SET_ANEW)
    }
}
