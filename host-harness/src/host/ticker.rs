//! Owns one thread's timer: the period that the plugin set, and the loop that calls `proxy_on_tick`.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;

use super::vm::Vm;

/// The period of one VM's ticks.
#[derive(Default)]
pub struct Ticker {
    period_ms: Cell<u32>,
    changed: Notify,
}

impl Ticker {
    /// Sets the period in milliseconds; zero stops.
    pub fn set(&self, period_ms: u32) {
        self.period_ms.set(period_ms);
        self.changed.notify_one();
    }

    /// Ticks for as long as the thread lives. The next period begins after a tick has returned, as in Envoy.
    pub async fn run(vm: Rc<Vm>) {
        let ticker = Rc::clone(vm.ticker());
        loop {
            let period = Duration::from_millis(u64::from(ticker.period_ms.get()));
            if period.is_zero() {
                ticker.changed.notified().await;
                continue;
            }
            tokio::select! {
                () = ticker.changed.notified() => {}
                // A trap stops the ticks itself.
                () = tokio::time::sleep(period) => { let _ = vm.tick(); }
            }
        }
    }
}
