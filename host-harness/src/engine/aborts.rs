//! Owns the requests that `POST /abort_request` can end while they run.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use serde::Deserialize;
use tokio::sync::Notify;

/// Selection of the requests to end.
#[derive(Deserialize)]
pub struct AbortSelection {
    #[serde(default)]
    rid: String,
    #[serde(default)]
    abort_all: bool,
}

impl AbortSelection {
    /// Whether the selection includes this id.
    pub fn includes(&self, rid: &str) -> bool {
        self.abort_all || (self.rid == rid && !rid.is_empty())
    }
}

#[derive(Default)]
struct Table {
    entered: u64,
    flights: HashMap<u64, (String, Rc<Notify>)>,
}

/// The requests running now, by their `rid`.
#[derive(Default)]
pub struct Aborts(RefCell<Table>);

impl Aborts {
    /// Makes a request abortable until the returned value is dropped.
    pub fn enter(self: &Rc<Self>, rid: &str) -> Abortable {
        let mut table = self.0.borrow_mut();
        table.entered += 1;
        let serial = table.entered;
        let notify = Rc::new(Notify::new());
        table
            .flights
            .insert(serial, (rid.to_owned(), Rc::clone(&notify)));
        Abortable {
            aborts: Rc::clone(self),
            serial,
            notify,
        }
    }

    /// Notifies the selected requests; returns their ids.
    pub fn notify(&self, which: &AbortSelection) -> Vec<String> {
        let table = self.0.borrow();
        let selected = table
            .flights
            .values()
            .filter(|(rid, _)| which.includes(rid));
        selected
            .map(|(rid, notify)| {
                notify.notify_one();
                rid.clone()
            })
            .collect()
    }
}

/// A request's entry among those that can be aborted.
pub struct Abortable {
    aborts: Rc<Aborts>,
    serial: u64,
    notify: Rc<Notify>,
}

impl Abortable {
    /// Resolves when the request is to end, wherever the request waits then: the notification is kept until it is received.
    pub fn aborted(&self) -> impl Future<Output = ()> + use<> {
        let notify = Rc::clone(&self.notify);
        async move { notify.notified().await }
    }
}

impl Drop for Abortable {
    fn drop(&mut self) {
        self.aborts.0.borrow_mut().flights.remove(&self.serial);
    }
}
