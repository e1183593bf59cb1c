//! Owns the faults injected over `/__fault`: their kinds, and the requests that they affect.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::LONGEST_WAIT;
use super::body::{self, Body};
use super::dialect::Leg;
use super::refusal::Refusal;
use super::wire::ConnectionKind;

/// Descriptions of the faults for `--help`.
pub const FAULTS: &str = r#"Faults on demand: POST /__fault with one JSON object adds a fault and answers {"id": N}; GET lists them with their "hits"; DELETE clears them
(a request that hangs goes on hanging). A request meets every fault that is for it:
  {"kind": "status", "status": 503, "headers": {"retry-after": "7"}, "body": "text"}
                                           before any work; without a body in the engine's error JSON
  {"kind": "delay", "ms": 500}             before any work
  {"kind": "hang"}                         takes the request and never answers
  {"kind": "reset_before_headers"}         breaks the connection without an answer: a prefill after computing, a decode after the pull
  {"kind": "reset_after_headers"}          answers 200, then breaks the connection before any byte of the body
  {"kind": "silent"}                       answers 200, then says nothing; the connection stays open
  {"kind": "empty"}                        answers 200 and ends with no token: a stream without events, or an empty body
  {"kind": "die_mid_stream", "tokens": 3}  breaks the connection after so many tokens
  {"kind": "slow_drip", "ms": 200}         so long between tokens; not sped up
  {"kind": "lose_handoff"}                 a prefill issues a hand-off that cannot be pulled
  {"kind": "no_handoff"}                   a prefill ends at the length limit, but hands nothing off
  {"kind": "reset_kept_alive"}             breaks a connection that has had an answer before, without one and before any work
Each may have "share" (of the requests, 0 to 1; else all), "times" (requests met; else no end), "leg" ("prefill", "decode" or "whole") and
"above" (only where more than so many other requests wait or run here: an engine that is full).
A prefill whose answer is reset, silent or empty hands nothing off. No request meets these two:
  {"kind": "close_idle", "ms": 50}         closes a connection that has had an answer and no further request for so long
  {"kind": "hang_metrics"}                 GET /metrics is not answered"#;

/// Kinds of faults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
// Braces, since serde accepts unknown members beside the tag of a unit variant.
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Kind {
    Status {
        status: u16,
        #[serde(default)]
        headers: BTreeMap<String, String>,
        body: Option<String>,
    },
    Delay {
        ms: u64,
    },
    Hang {},
    ResetBeforeHeaders {},
    ResetAfterHeaders {},
    Silent {},
    Empty {},
    DieMidStream {
        tokens: u64,
    },
    SlowDrip {
        ms: u64,
    },
    LoseHandoff {},
    NoHandoff {},
    ResetKeptAlive {},
    CloseIdle {
        ms: u64,
    },
    HangMetrics {},
}

impl Kind {
    /// Whether the fault is visible in this leg.
    fn shows_in(&self, leg: Leg) -> bool {
        match self {
            Self::CloseIdle { .. } | Self::HangMetrics {} => false,
            Self::LoseHandoff {} | Self::NoHandoff {} => leg == Leg::Prefill,
            Self::DieMidStream { .. } | Self::SlowDrip { .. } => leg != Leg::Prefill,
            _ => true,
        }
    }

    fn check(&self) -> Result<(), String> {
        match self {
            Self::Status {
                status, headers, ..
            } => InjectedStatus::new(*status, headers, None).map(drop),
            Self::Delay { ms } | Self::SlowDrip { ms } | Self::CloseIdle { ms }
                if Duration::from_millis(*ms) > LONGEST_WAIT =>
            {
                Err("ms must be at most a year".to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// Selection of the requests that a fault affects.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Target {
    share: f64,
    times: Option<u64>,
    leg: Option<Leg>,
    #[serde(skip_serializing_if = "Option::is_none")]
    above: Option<u64>,
}

/// A request's properties that faults depend on.
#[derive(Clone, Copy, Debug)]
pub struct FaultContext {
    /// Its leg.
    pub leg: Leg,
    /// Other requests that wait or run in the engine.
    pub others: u64,
    /// Kind of connection that carried the request.
    pub connection: ConnectionKind,
}

impl Default for Target {
    fn default() -> Self {
        Self {
            share: 1.0,
            times: None,
            leg: None,
            above: None,
        }
    }
}

#[derive(Serialize)]
struct Fault {
    id: u64,
    #[serde(flatten)]
    kind: Kind,
    #[serde(flatten)]
    target: Target,
    /// Number of affected requests.
    hits: u64,
}

impl Fault {
    fn meets(&self, context: FaultContext) -> bool {
        let FaultContext {
            leg,
            others,
            connection,
        } = context;
        self.kind.shows_in(leg)
            && (self.kind != Kind::ResetKeptAlive {} || connection == ConnectionKind::Kept)
            && self.target.above.is_none_or(|above| others > above)
            && self.target.leg.is_none_or(|wanted| wanted == leg)
            && self.target.times.is_none_or(|times| self.hits < times)
            && (self.target.share >= 1.0 || rand::random::<f64>() < self.target.share)
    }
}

#[derive(Default)]
struct FaultList {
    given: u64,
    faults: Vec<Fault>,
}

/// The faults of one engine.
#[derive(Default)]
pub struct Faults(RefCell<FaultList>);

impl Faults {
    /// Adds the fault that `content` describes.
    pub fn add(&self, content: &[u8]) -> Response<Body> {
        let (kind, target) = match read(content) {
            Ok(read) => read,
            Err(why) => {
                return body::serialized(StatusCode::BAD_REQUEST, &json!({ "detail": why }));
            }
        };
        let mut list = self.0.borrow_mut();
        list.given += 1;
        let id = list.given;
        list.faults.push(Fault {
            id,
            kind,
            target,
            hits: 0,
        });
        body::serialized(StatusCode::OK, &json!({ "id": id }))
    }

    /// The list of faults, as JSON.
    pub fn list(&self) -> Response<Body> {
        body::serialized(StatusCode::OK, &self.0.borrow().faults)
    }

    /// Clears the faults; a request that met one continues unchanged.
    pub fn clear(&self) -> Response<Body> {
        self.0.borrow_mut().faults.clear();
        body::serialized(StatusCode::OK, &json!({}))
    }

    /// Allowed idle time of a connection.
    pub fn idle_limit(&self) -> Option<Duration> {
        let list = self.0.borrow();
        list.faults.iter().find_map(|fault| match fault.kind {
            Kind::CloseIdle { ms } => Some(Duration::from_millis(ms)),
            _ => None,
        })
    }

    /// Counts a connection closed as idle.
    pub fn idle_closed(&self) {
        self.note(|kind| matches!(kind, Kind::CloseIdle { .. }));
    }

    /// Whether a metrics poll is to hang now.
    pub fn hangs_metrics(&self) -> bool {
        self.note(|kind| *kind == Kind::HangMetrics {})
    }

    /// Counts a hit of the first fault of this kind, if there is one.
    fn note(&self, meant: impl Fn(&Kind) -> bool) -> bool {
        let mut list = self.0.borrow_mut();
        let fault = list.faults.iter_mut().find(|fault| meant(&fault.kind));
        fault.map(|fault| fault.hits += 1).is_some()
    }

    /// The faults that affect a request.
    pub fn draw(&self, context: FaultContext) -> DrawnFaults {
        let mut list = self.0.borrow_mut();
        let faults = list.faults.iter_mut();
        let met = faults.filter(|fault| fault.meets(context));
        DrawnFaults(
            met.map(|fault| {
                fault.hits += 1;
                fault.kind.clone()
            })
            .collect(),
        )
    }
}

fn read(content: &[u8]) -> Result<(Kind, Target), String> {
    let invalid = |error: serde_json::Error| error.to_string();
    let mut kind: Map<String, Value> = serde_json::from_slice(content).map_err(invalid)?;
    let common = ["share", "times", "leg", "above"];
    let target: Map<String, Value> = common
        .iter()
        .filter_map(|name| kind.remove_entry(*name))
        .collect();
    let kind: Kind = serde_json::from_value(kind.into()).map_err(invalid)?;
    let target: Target = serde_json::from_value(target.into()).map_err(invalid)?;
    kind.check()?;
    if !(0.0..=1.0).contains(&target.share) {
        return Err("share must be from 0 to 1".to_owned());
    }
    if target.leg.is_some_and(|leg| !kind.shows_in(leg)) {
        return Err("leg is not one in which this kind can be seen".to_owned());
    }
    Ok((kind, target))
}

/// How an answer is spoilt after its KV is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFault {
    /// The connection breaks without an answer.
    ResetBeforeHeaders,
    /// The connection breaks after the headers.
    ResetAfterHeaders,
    /// Nothing comes after the headers.
    Silent,
    /// A clean end comes after the headers.
    Empty,
}

/// Fate of the KV that a prefill computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoffFate {
    /// Handed off.
    HandedOff,
    /// A hand-off is issued that cannot be pulled.
    Lost,
    /// No hand-off.
    Dropped,
}

/// The faults of one request.
#[derive(Clone, Debug, Default)]
pub struct DrawnFaults(Vec<Kind>);

impl DrawnFaults {
    /// Delays the request, holds it for ever, or refuses it.
    ///
    /// # Errors
    /// [`Refusal::Ordered`], [`Refusal::ResetByFault`].
    pub async fn before_work(&self) -> Result<(), Refusal> {
        let delay = self.first(|kind| match kind {
            Kind::Delay { ms } => Some(Duration::from_millis(*ms)),
            _ => None,
        });
        if let Some(delay) = delay {
            tokio::time::sleep(delay).await;
        }
        if self.0.contains(&Kind::Hang {}) {
            std::future::pending::<()>().await;
        }
        if self.0.contains(&Kind::ResetKeptAlive {}) {
            return Err(Refusal::ResetByFault);
        }
        let status = self.first(|kind| match kind {
            Kind::Status {
                status,
                headers,
                body,
            } => InjectedStatus::new(*status, headers, body.clone()).ok(),
            _ => None,
        });
        match status {
            Some(status) => Err(Refusal::Ordered(Box::new(status))),
            None => Ok(()),
        }
    }

    /// How the answer is to be spoilt, if at all.
    pub fn spoil(&self) -> Option<AnswerFault> {
        self.first(|kind| match kind {
            Kind::ResetBeforeHeaders {} => Some(AnswerFault::ResetBeforeHeaders),
            Kind::ResetAfterHeaders {} => Some(AnswerFault::ResetAfterHeaders),
            Kind::Silent {} => Some(AnswerFault::Silent),
            Kind::Empty {} => Some(AnswerFault::Empty),
            _ => None,
        })
    }

    /// Tokens after which the connection is to break.
    pub fn lifetime(&self) -> Option<u64> {
        self.first(|kind| match kind {
            Kind::DieMidStream { tokens } => Some(*tokens),
            _ => None,
        })
    }

    /// Time between two tokens, if changed by a fault.
    pub fn drip(&self) -> Option<Duration> {
        self.first(|kind| match kind {
            Kind::SlowDrip { ms } => Some(Duration::from_millis(*ms)),
            _ => None,
        })
    }

    /// Fate of the computed KV.
    pub fn fate(&self) -> HandoffFate {
        let fate = self.first(|kind| match kind {
            Kind::LoseHandoff {} => Some(HandoffFate::Lost),
            Kind::NoHandoff {} => Some(HandoffFate::Dropped),
            _ => None,
        });
        fate.unwrap_or(HandoffFate::HandedOff)
    }

    fn first<T>(&self, pick: impl Fn(&Kind) -> Option<T>) -> Option<T> {
        self.0.iter().find_map(pick)
    }
}

/// An injected status.
#[derive(Debug)]
pub struct InjectedStatus {
    /// The status.
    pub status: StatusCode,
    headers: HeaderMap,
    body: Option<String>,
}

impl InjectedStatus {
    fn new(
        status: u16,
        headers: &BTreeMap<String, String>,
        body: Option<String>,
    ) -> Result<Self, String> {
        let status = StatusCode::from_u16(status)
            .ok()
            .filter(|status| !status.is_informational())
            .ok_or("status must be an HTTP status from 200")?;
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let bad = |why: &str| format!("headers: {name}: {why}");
            let key = HeaderName::try_from(name).map_err(|error| bad(&error.to_string()))?;
            if key == CONTENT_LENGTH || key == TRANSFER_ENCODING {
                return Err(bad("is the body's own"));
            }
            let value = HeaderValue::try_from(value).map_err(|error| bad(&error.to_string()))?;
            map.append(key, value);
        }
        Ok(Self {
            status,
            headers: map,
            body,
        })
    }

    /// The answer, with the injected headers; `default` if no body was injected.
    pub fn response(&self, default: Response<Body>) -> Response<Body> {
        let mut response = match &self.body {
            Some(body) => body::json(self.status, Bytes::from(body.clone())),
            None => default,
        };
        for (name, value) in &self.headers {
            response.headers_mut().insert(name, value.clone());
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(content: &str) -> String {
        read(content.as_bytes()).expect_err(content)
    }

    #[test]
    fn unknown_members_are_named() {
        for (content, named) in [
            (r#"{"kind":"hang","mss":1}"#, "mss"),
            (r#"{"kind":"delay","ms":1,"sharee":1}"#, "sharee"),
            (r#"{"kind":"hangs"}"#, "hangs"),
            (r#"{"kind":"delay"}"#, "ms"),
            (r#"{"ms":1}"#, "kind"),
            (r#"{"kind":"hang","share":1.5}"#, "share"),
            (r#"{"kind":"hang","leg":"both"}"#, "both"),
            (r#"{"kind":"hang","times":-1}"#, "-1"),
            (r#"{"kind":"status","status":99}"#, "status"),
            (
                r#"{"kind":"status","status":500,"headers":{"a b":"c"}}"#,
                "a b",
            ),
            (
                r#"{"kind":"status","status":500,"headers":{"content-length":"0"}}"#,
                "content-length",
            ),
            (r#"{"kind":"lose_handoff","leg":"decode"}"#, "leg"),
            (
                r#"{"kind":"delay","ms":18446744073709551615}"#,
                "at most a year",
            ),
            ("[]", "map"),
        ] {
            let why = refused(content);
            assert!(why.contains(named), "{content}: {why}");
        }
    }

    fn meeting(leg: Leg) -> FaultContext {
        FaultContext {
            leg,
            others: 0,
            connection: ConnectionKind::Fresh,
        }
    }

    #[test]
    fn a_full_engine_refuses_what_comes_above_its_bound_only() {
        let faults = Faults::default();
        faults.add(br#"{"kind":"status","status":503,"above":2}"#);
        let met = |others| {
            let context = FaultContext {
                others,
                ..meeting(Leg::Prefill)
            };
            !faults.draw(context).0.is_empty()
        };
        assert!(!met(0) && !met(2) && met(3));
    }

    #[test]
    fn a_kept_alive_connection_alone_is_reset_as_such() {
        let faults = Faults::default();
        faults.add(br#"{"kind":"reset_kept_alive"}"#);
        let met = |connection| {
            let context = FaultContext {
                connection,
                ..meeting(Leg::Decode)
            };
            !faults.draw(context).0.is_empty()
        };
        assert!(!met(ConnectionKind::Fresh) && met(ConnectionKind::Kept));
    }

    #[test]
    fn what_no_request_meets_is_counted_where_it_is_met() {
        let faults = Faults::default();
        assert!(!faults.hangs_metrics());
        faults.add(br#"{"kind":"hang_metrics"}"#);
        faults.add(br#"{"kind":"close_idle","ms":40}"#);
        assert!(faults.draw(meeting(Leg::Decode)).0.is_empty());
        assert!(faults.hangs_metrics());
        assert_eq!(faults.idle_limit(), Some(Duration::from_millis(40)));
        faults.idle_closed();
        let hits = |number: usize| faults.0.borrow().faults[number].hits;
        assert_eq!((hits(0), hits(1)), (1, 1));
    }

    #[test]
    fn a_fault_meets_the_requests_it_is_for() {
        let faults = Faults::default();
        faults.add(br#"{"kind":"slow_drip","ms":7,"times":2}"#);
        faults.add(br#"{"kind":"no_handoff","share":0.5}"#);
        faults.add(br#"{"kind":"silent","leg":"whole"}"#);
        let drips = |leg| faults.draw(meeting(leg)).drip().is_some();
        assert!(!drips(Leg::Prefill));
        assert!(drips(Leg::Decode) && drips(Leg::Whole) && !drips(Leg::Whole));
        assert_eq!(
            faults.draw(meeting(Leg::Whole)).spoil(),
            Some(AnswerFault::Silent)
        );
        assert_eq!(faults.draw(meeting(Leg::Decode)).spoil(), None);
        let dropped =
            (0..1000).filter(|_| faults.draw(meeting(Leg::Prefill)).fate() == HandoffFate::Dropped);
        assert!((400..600).contains(&dropped.count()));
        faults.clear();
        assert_eq!(
            faults.draw(meeting(Leg::Prefill)).fate(),
            HandoffFate::HandedOff
        );
    }

    #[test]
    fn the_help_names_every_kind() {
        let kinds = refused(r#"{"kind":""}"#);
        let kinds = kinds.split('`').skip(3).step_by(2);
        assert_eq!(kinds.clone().count(), 14);
        for kind in kinds {
            assert!(FAULTS.contains(&format!(r#""{kind}""#)), "{kind}");
        }
    }
}
