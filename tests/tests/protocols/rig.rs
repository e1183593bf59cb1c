//! A fixture, and the legs that each request makes on it.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engines::{RecordedRequest, Role};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::protocols::Protocol;

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const TOKEN: &str = "Bearer the-clients-own";

/// The legs of one request, as the engines received them.
pub struct Legs {
    pub reply: Reply,
    pub prefill: Vec<RecordedRequest>,
    pub decode: Vec<RecordedRequest>,
}

impl Legs {
    /// The two legs; fails unless there is one of each role.
    #[track_caller]
    pub fn pair(&self) -> (&RecordedRequest, &RecordedRequest) {
        match (self.prefill.as_slice(), self.decode.as_slice()) {
            ([prefill], [decode]) => (prefill, decode),
            (prefill, decode) => panic!("not one leg of each: {prefill:?} {decode:?}"),
        }
    }

    /// The only leg, of an aggregated worker or one with a sidecar or frontend; fails if there are more.
    #[track_caller]
    pub fn only(&self) -> &RecordedRequest {
        match (self.prefill.as_slice(), self.decode.as_slice()) {
            ([], [decode]) => decode,
            (prefill, decode) => panic!("not one leg: {prefill:?} {decode:?}"),
        }
    }
}

pub struct Rig {
    pub fixture: Fixture,
    requests: u64,
}

impl Rig {
    pub async fn start(proxy: Proxy, protocol: Protocol) -> Rig {
        Rig::on(FixtureSpec::of(proxy, protocol)).await
    }

    pub async fn on(spec: FixtureSpec) -> Rig {
        Rig {
            fixture: Fixture::acquire(spec).await,
            requests: 0,
        }
    }

    /// Sends the request with a client's id, trace and token, and returns the legs. Each must have the trace and the token, and
    /// all the same id of the gateway.
    pub async fn legs_of(&mut self, ask: Ask) -> Legs {
        self.requests += 1;
        let id = format!("request-{}", self.requests);
        let ask = ask
            .header("x-request-id", &id)
            .header("traceparent", TRACE)
            .header("authorization", TOKEN);
        let legs = self.legs_of_bare(ask).await;
        let first = legs.prefill.iter().chain(&legs.decode).next();
        let own = first.map(|leg| leg.values("x-request-id").join(","));
        for leg in legs.prefill.iter().chain(&legs.decode) {
            let ids = leg.values("x-request-id");
            assert!(!ids.contains(&id.as_str()), "{leg:?}");
            assert_eq!(Some(ids.join(",")), own, "{leg:?}");
            assert_eq!(leg.values("traceparent"), [TRACE], "{leg:?}");
            assert_eq!(leg.values("authorization"), [TOKEN], "{leg:?}");
            let length = leg.body_bytes.to_string();
            assert_eq!(leg.values("content-length"), [length.as_str()], "{leg:?}");
        }
        legs
    }

    /// Sends the request unchanged and returns the legs.
    pub async fn legs_of_bare(&self, ask: Ask) -> Legs {
        let before = [
            self.fixture.requests(Role::Prefill).await,
            self.fixture.requests(Role::Decode).await,
        ];
        let reply = self.fixture.gateway.send(ask).await;
        self.fixture.comes_to_rest().await;
        let [prefill, decode] = before;
        Legs {
            reply,
            prefill: self.since(Role::Prefill, &prefill).await,
            decode: self.since(Role::Decode, &decode).await,
        }
    }

    async fn since(&self, role: Role, before: &[usize]) -> Vec<RecordedRequest> {
        let mut new = Vec::new();
        for (slot, before) in self.fixture.slots(role).iter().zip(before) {
            let requests = slot.engine().requests().await;
            new.extend(requests.into_iter().skip(*before));
        }
        new
    }

    /// Fails if an engine refused a hand-off, computed a prompt again, or holds a hand-off that was never pulled.
    pub async fn ends(self) {
        self.fixture.comes_to_rest().await;
        self.fixture.assert_good_hand_offs().await;
        let state = self.fixture.state().await;
        assert_eq!(state.issued, state.pulled, "{state:?}");
        self.fixture.release();
    }
}
