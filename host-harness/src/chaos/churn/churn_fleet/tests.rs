//! Tests of the churning workers: what is counted of the requests to those that were removed.

use std::net::Ipv4Addr;

use hyper::Method;

use super::*;

async fn fleet(source: Source) -> ChurnFleet {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let mut fleet = ChurnFleet::start(source, Dialect::Vllm, ip, 1)
        .await
        .unwrap();
    // Postpones the next random event beyond the test.
    fleet.next_event = Instant::now() + Duration::from_secs(3600);
    fleet
}

async fn ask(address: SocketAddr) {
    // Refused, since the request is no leg; but it is counted.
    let body = "{}".to_owned();
    let answer = http::send(Method::POST, address, "/v1/completions", body, None).await;
    assert!(answer.is_err());
}

#[tokio::test]
async fn a_request_that_comes_long_after_a_removal_is_counted_and_an_earlier_one_is_not() {
    let mut fleet = fleet(Source::Document).await;
    let removed = fleet.workers[0].address;
    fleet.workers[0].state = WorkerState::Removed {
        since: Instant::now(),
        requests: None,
    };
    ask(removed).await;
    let begin = Instant::now();
    let mut late = false;
    while fleet.workers.iter().any(|worker| worker.address == removed) {
        fleet.step().await.unwrap();
        assert!(fleet.entries().iter().all(|entry| entry.address != removed));
        if !late && begin.elapsed() > GRACE + 4 * LOOK {
            late = true;
            ask(removed).await;
        }
        tokio::time::sleep(LOOK).await;
    }
    assert_eq!(fleet.stop().await.removed_worker_requests, 1);
}

#[test]
fn no_port_is_given_twice() {
    let slots = free_slots(IpAddr::V4(Ipv4Addr::new(127, 9, 9, 9)), MANY).unwrap();
    let ports = slots
        .iter()
        .flat_map(|slot| [slot.address.port(), slot.bootstrap]);
    let ports: std::collections::BTreeSet<_> = ports.collect();
    assert_eq!((slots.len(), ports.len()), (2 * MANY, 4 * MANY));
    let prefill = slots.iter().filter(|slot| slot.role == Role::Prefill);
    assert_eq!(prefill.count(), MANY);
}

#[tokio::test]
async fn enough_stay_and_whoever_is_written_down_only_dies() {
    let fleet = fleet(Source::Static).await;
    let later = Instant::now() + 2 * KNOWN;
    assert_eq!(fleet.possible(Role::Prefill, later), [WorkerEvent::Die]);
    assert_eq!(fleet.possible(Role::Prefill, Instant::now()), []);
    fleet.stop().await;
}
