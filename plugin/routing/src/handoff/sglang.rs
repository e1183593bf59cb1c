//! Owns SGLang's bootstrap hand-off: both legs at once, with the same fields, through which the engines find each other.
//!
//! Each sequence has a room of its own: a batch, or a request for several choices, carries lists. The prefill worker stops
//! after one token by itself; its leg sets the limit too, and is unstreamed, so that an error is a status and not an event
//! in a stream that began well.

use std::net::SocketAddr;
use std::time::Duration;

use super::binding::{
    Binder, Binding, BindingQuery, Bootstrap, EngineIds, Learned, QueriedCluster,
};
use super::one_token;
use super::protocol::{
    AbortCall, Handoff, HandoffPair, LegOrder, Prefill, Protocol, ProtocolRules,
};
use super::rooms::Rooms;
use super::staged::Staged;
use super::{unserved, without};
use crate::fleet::Target;
use crate::json::Edits;
use crate::refusal::Refusal;
use crate::rendezvous::NotServed;
use crate::request::{Generation, Prompts, Request, Sequences};
use crate::transfer::{BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM};

/// The rank that serves a leg.
const RANK: &str = "routed_dp_rank";

/// The rank that prefills, for decode.
const PREFILL_RANK: &str = "disagg_prefill_dp_rank";

/// The rank that serves a leg, under the name of older releases; newer ones still read it.
const OLD_RANK: &str = "data_parallel_rank";

/// The ranks: the router picks them, and the rooms are aligned to them.
const RANKS: [&str; 3] = [RANK, PREFILL_RANK, OLD_RANK];

/// Maximum sequences in one request: each needs a room, and a small body must not request millions.
const MOST_SEQUENCES: u64 = 1024;

/// SGLang.
#[derive(Debug)]
pub struct Sglang;

impl Protocol for Sglang {
    fn rules(&self) -> &'static ProtocolRules {
        &ProtocolRules {
            name: "sglang",
            order: LegOrder::Concurrent,
            reaches_workers: true,
            split: &[
                Generation::Chat,
                Generation::Completions,
                Generation::Generate,
            ],
            // Some releases drop the fields of the hand-off there.
            split_if_configured: &[Generation::Responses],
            has_generate_api: true,
            // The engine ignores `prompt_logprobs`, and those of its own `/generate` are merged.
            unserved: &[
                &unserved::ECHOED_LOGPROBS,
                &unserved::BACKGROUND,
                &unserved::PREVIOUS_RESPONSE,
            ],
            refuses_too_long: true,
        }
    }

    fn binder(&self) -> Option<&'static dyn Binder> {
        Some(&Self)
    }

    fn handoff(
        &self,
        pair: &HandoffPair<'_>,
        request: &Request<'_>,
        rooms: &mut Rooms,
    ) -> Result<Box<dyn Handoff>, Refusal> {
        let prefill = pair.prefill;
        let binding = prefill
            .binding
            .ok_or(Refusal::NotServed(NotServed::Pending))?;
        let sequences = request.sequences();
        let count = rooms_needed(sequences)?;
        Ok(Box::new(SglangHandoff {
            prefill: prefill_edits(request),
            decode: decode_edits(request),
            rooms: draw(rooms, prefill.target, count),
            form: FieldForm::of(sequences),
            bootstrap: binding.bootstrap.clone(),
            prefill_rank: prefill.target.rank,
            decode_rank: pair.decode_rank,
        }))
    }
}

impl Binder for Sglang {
    fn learned(&self) -> Learned {
        Learned::Port
    }

    fn cluster(&self) -> QueriedCluster {
        QueriedCluster::Prefill
    }

    fn query(&self, worker: SocketAddr, _port: Option<u16>) -> Option<BindingQuery> {
        Some(BindingQuery {
            destination: worker,
            path: "/get_server_info",
        })
    }

    fn read(&self, worker: SocketAddr, _port: Option<u16>, answer: &[u8]) -> Option<Binding> {
        Some(Binding {
            bootstrap: Bootstrap::beside(worker, bootstrap_port(answer)?),
            engines: EngineIds::new(),
        })
    }

    /// The engine queries all its schedulers before it answers.
    fn renewal(&self) -> Duration {
        Duration::from_secs(2)
    }
}

/// The legs of one request, and the rooms in which they meet.
#[derive(Debug, Clone)]
struct SglangHandoff {
    prefill: Edits,
    decode: Edits,
    rooms: Vec<u64>,
    form: FieldForm,
    bootstrap: Bootstrap,
    prefill_rank: Option<u32>,
    decode_rank: Option<u32>,
}

impl SglangHandoff {
    /// The id by which the worker aborts the prefill leg: as unique as its first room. All are as long, since the engine aborts
    /// what begins with the id.
    fn rid(&self) -> String {
        let room = self.rooms.first().copied().unwrap_or_default();
        format!("pd-router-{room:019}")
    }
}

impl Handoff for SglangHandoff {
    fn prefill(&self) -> Edits {
        let mut edits = self.prefill.clone();
        edits.insert("rid", format!("\"{}\"", self.rid()));
        self.bootstrap.put_into(&self.rooms, self.form, &mut edits);
        put_prefill_rank(self.prefill_rank, &mut edits);
        edits
    }

    fn decode_at_once(&self) -> Option<Edits> {
        let mut edits = self.decode.clone();
        self.bootstrap.put_into(&self.rooms, self.form, &mut edits);
        put_decode_ranks(self.prefill_rank, self.decode_rank, &mut edits);
        Some(edits)
    }

    fn staged(&self, _answer: &[u8], _block_tokens: u32) -> Option<Staged> {
        None
    }

    fn renewed(&self, prefill: &Prefill<'_>, rooms: &mut Rooms) -> Option<Box<dyn Handoff>> {
        Some(Box::new(Self {
            bootstrap: prefill.binding?.bootstrap.clone(),
            rooms: draw(rooms, prefill.target, self.rooms.len()),
            prefill_rank: prefill.target.rank,
            ..self.clone()
        }))
    }

    fn abort(&self) -> Option<AbortCall> {
        Some(AbortCall {
            path: "/abort_request",
            body: format!("{{\"rid\":\"{}\"}}", self.rid()),
        })
    }
}

fn draw(rooms: &mut Rooms, prefill: &Target, count: usize) -> Vec<u64> {
    let rank = prefill.rank.unwrap_or(0);
    let drawn = std::iter::repeat_with(|| rooms.draw(rank, prefill.worker.dp_size));
    drawn.take(count).collect()
}

/// How the fields of a hand-off are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FieldForm {
    /// As plain values.
    One,
    /// As lists, one element per sequence, even for a single one.
    Lists,
}

impl FieldForm {
    /// The form that the engine expects for these sequences.
    fn of(asked: Sequences) -> Self {
        match (asked.prompts, asked.choices) {
            (Prompts::One, 1) => Self::One,
            _ => Self::Lists,
        }
    }
}

/// Number of rooms that a request needs.
///
/// # Errors
/// [`Refusal::Field`] above [`MOST_SEQUENCES`].
fn rooms_needed(asked: Sequences) -> Result<usize, Refusal> {
    let count = asked.count();
    if count > MOST_SEQUENCES {
        return Err(Refusal::Field {
            name: if asked.choices > 1 { "n" } else { "prompt" },
            problem: "asks for more than 1024 sequences in one request",
        });
    }
    Ok(usize::try_from(count).unwrap_or(usize::MAX))
}

impl Bootstrap {
    /// Adds the hand-off to a leg: both legs get the same.
    fn put_into(&self, rooms: &[u64], form: FieldForm, edits: &mut Edits) {
        // An IP address needs no escaping.
        let host = format!("\"{}\"", self.host());
        let port = self.port().to_string();
        let numbers: Vec<String> = rooms.iter().map(u64::to_string).collect();
        let numbers = numbers.join(",");
        let (host, port, room) = match form {
            FieldForm::One => (host, port, numbers),
            FieldForm::Lists => (
                repeated(&host, rooms.len()),
                repeated(&port, rooms.len()),
                format!("[{numbers}]"),
            ),
        };
        edits.insert(BOOTSTRAP_HOST.name(), host);
        edits.insert(BOOTSTRAP_PORT.name(), port);
        edits.insert(BOOTSTRAP_ROOM.name(), room);
    }
}

fn repeated(value: &str, times: usize) -> String {
    format!("[{}]", vec![value; times].join(","))
}

/// Adds the picked rank to the prefill leg, where the worker has several.
fn put_prefill_rank(prefill: Option<u32>, edits: &mut Edits) {
    if let Some(rank) = prefill {
        edits.insert(RANK, rank.to_string());
    }
}

/// Adds the picked ranks to the decode leg, where the workers have several.
fn put_decode_ranks(prefill: Option<u32>, decode: Option<u32>, edits: &mut Edits) {
    if let Some(rank) = decode {
        edits.insert(RANK, rank.to_string());
    }
    if let Some(rank) = prefill {
        edits.insert(PREFILL_RANK, rank.to_string());
    }
}

/// Edits of the decode leg, without the hand-off.
fn decode_edits(request: &Request<'_>) -> Edits {
    without_picked(request, request.body.edit())
}

/// The edits, with those that remove the hand-off and the ranks.
fn without_picked(request: &Request<'_>, edits: Edits) -> Edits {
    let fields = [BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM];
    let mut edits = without(request, &fields, edits);
    for rank in RANKS {
        edits.remove_all(&request.body, rank);
    }
    edits
}

/// Edits of the prefill leg, without the hand-off.
fn prefill_edits(request: &Request<'_>) -> Edits {
    let mut edits = without_picked(request, one_token::edits(request));
    // The router uses an id of its own to abort the request at the worker: of two, the last one would count.
    edits.remove_all(&request.body, "rid");
    edits
}

/// The bootstrap port in a worker's `/get_server_info`; none where missing.
fn bootstrap_port(server_info: &[u8]) -> Option<u16> {
    #[derive(serde::Deserialize)]
    struct ServerInfo {
        disaggregation_bootstrap_port: Option<u16>,
    }
    let info: ServerInfo = serde_json::from_slice(server_info).ok()?;
    info.disaggregation_bootstrap_port.filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Generation;

    fn bootstrap() -> Bootstrap {
        Bootstrap::beside("10.0.0.1:30000".parse().unwrap(), 8998)
    }

    fn leg(mut edits: Edits, rooms: &[u64], form: FieldForm, body: &str) -> String {
        bootstrap().put_into(rooms, form, &mut edits);
        String::from_utf8(edits.apply(body.as_bytes())).unwrap()
    }

    #[test]
    fn both_legs_golden_bytes() {
        let body = r#"{"model":"m", "messages":[],"stream":true,"stream_options":{"include_usage":true},"bootstrap_room":null,"rid":"mine","seed":9007199254740993}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        let rooms = [9_223_372_036_854_775_807];
        let fields = r#""bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":9223372036854775807"#;
        assert_eq!(
            leg(decode_edits(&request), &rooms, FieldForm::One, body),
            format!(
                r#"{{{fields},"model":"m", "messages":[],"stream":true,"stream_options":{{"include_usage":true}},"rid":"mine","seed":9007199254740993}}"#
            )
        );
        assert_eq!(
            leg(prefill_edits(&request), &rooms, FieldForm::One, body),
            format!(
                r#"{{"max_tokens":1,{fields},"model":"m", "messages":[],"stream":false,"seed":9007199254740993}}"#
            )
        );
    }

    #[test]
    fn a_batch_and_several_choices_carry_lists_golden_bytes() {
        let body = r#"{"text":["a", "b"],"sampling_params":{"max_new_tokens":5,"min_new_tokens":2},"stream":true}"#;
        let request = Request::parse(Generation::Generate, body.as_bytes()).unwrap();
        let form = FieldForm::of(request.sequences());
        assert_eq!(rooms_needed(request.sequences()), Ok(2));
        let fields = r#""bootstrap_host":["10.0.0.1","10.0.0.1"],"bootstrap_port":[8998,8998],"bootstrap_room":[4,5]"#;
        assert_eq!(
            leg(decode_edits(&request), &[4, 5], form, body),
            body.replacen('{', &format!("{{{fields},"), 1)
        );
        assert_eq!(
            leg(prefill_edits(&request), &[4, 5], form, body),
            format!(
                r#"{{{fields},"text":["a", "b"],"sampling_params":{{"max_new_tokens":1,"min_new_tokens":1}},"stream":false}}"#
            )
        );
        let body = r#"{"model":"m","prompt":["a"]}"#;
        let request = Request::parse(Generation::Completions, body.as_bytes()).unwrap();
        assert_eq!(
            leg(
                decode_edits(&request),
                &[4],
                FieldForm::of(request.sequences()),
                body
            ),
            r#"{"bootstrap_host":["10.0.0.1"],"bootstrap_port":[8998],"bootstrap_room":[4],"model":"m","prompt":["a"]}"#
        );
    }

    #[test]
    fn so_many_sequences_and_no_more() {
        let rooms = |n: u64| {
            let body = format!(r#"{{"model":"m","prompt":"p","n":{n}}}"#);
            let request = Request::parse(Generation::Completions, body.as_bytes()).unwrap();
            rooms_needed(request.sequences())
        };
        assert_eq!((rooms(1), rooms(1024)), (Ok(1), Ok(1024)));
        for n in [1025, u64::MAX] {
            let refusal = rooms(n).unwrap_err();
            assert!(matches!(refusal, Refusal::Field { name: "n", .. }), "{n}");
        }
    }

    #[test]
    fn ranks_are_those_that_were_picked_golden_bytes() {
        let body = r#"{"model":"m","messages":[],"routed_dp_rank":9,"max_tokens":2}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        let fields = r#""bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7"#;
        let mut prefill = prefill_edits(&request);
        bootstrap().put_into(&[7], FieldForm::One, &mut prefill);
        put_prefill_rank(Some(1), &mut prefill);
        assert_eq!(
            String::from_utf8(prefill.apply(body.as_bytes())).unwrap(),
            format!(r#"{{{fields},"routed_dp_rank":1,"model":"m","messages":[],"max_tokens":1}}"#)
        );
        let mut decode = decode_edits(&request);
        bootstrap().put_into(&[7], FieldForm::One, &mut decode);
        put_decode_ranks(Some(1), Some(3), &mut decode);
        assert_eq!(
            String::from_utf8(decode.apply(body.as_bytes())).unwrap(),
            format!(
                r#"{{{fields},"routed_dp_rank":3,"disagg_prefill_dp_rank":1,"model":"m","messages":[],"max_tokens":2}}"#
            )
        );
        let mut none = decode_edits(&request);
        put_prefill_rank(None, &mut none);
        put_decode_ranks(None, None, &mut none);
        assert_eq!(
            String::from_utf8(none.apply(body.as_bytes())).unwrap(),
            r#"{"model":"m","messages":[],"max_tokens":2}"#
        );
    }

    #[test]
    fn found_w7_a_clients_rank_reaches_no_leg_in_any_spelling() {
        let body = r#"{"model":"m","messages":[],"data_parallel_rank":3,"routed_dp_rank":3,"disagg_prefill_dp_rank":3,"data_parallel_rank":null,"max_tokens":2}"#;
        let request = Request::parse(Generation::Chat, body.as_bytes()).unwrap();
        for edits in [prefill_edits(&request), decode_edits(&request)] {
            let leg = String::from_utf8(edits.apply(body.as_bytes())).unwrap();
            assert!(!leg.contains("rank"), "{leg}");
        }
    }

    #[test]
    fn a_port_is_read_from_what_a_worker_says() {
        assert_eq!(
            bootstrap_port(br#"{"disaggregation_bootstrap_port": 8999, "x": 1}"#),
            Some(8999)
        );
        for answer in [
            &b"{}"[..],
            b"",
            br#"{"disaggregation_bootstrap_port": null}"#,
            br#"{"disaggregation_bootstrap_port": -1}"#,
        ] {
            assert_eq!(bootstrap_port(answer), None);
        }
    }
}
