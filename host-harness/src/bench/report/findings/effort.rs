//! Owns the findings on time and CPU: the cost of a request, compared with others under the same load.

use super::{Finding, FindingSpec, Judged, Limit, Verdict, difference};
use crate::bench::report::contenders::name::{
    BUFFER, DIRECT, EMPTY, NIXL, PARSE, PARSE_TWICE, SMG_NIXL, SMG_SGLANG, UNACCOUNTED, VLLM,
};
use crate::bench::report::numbers::short;
use crate::bench::report::select::{KB, MissingFigure, is_usual, loads, median, paced};
use crate::bench::results::{Figures, Load, LoopKind, Row};

/// Bytes of a long prompt's body.
const LONG: usize = 220 * KB;

/// Events of a streamed answer whose cost is measured, compared with an answer of one event.
const CHUNKS: u64 = 64;

/// Findings 1 to 4.
pub fn all(rows: &[Row]) -> Vec<Finding> {
    let mut all = added(rows);
    all.extend(beside_peers(rows));
    all.extend(long_prompts(rows));
    all.extend(chunks(rows));
    all
}

fn added(rows: &[Row]) -> Vec<Finding> {
    let of = |bytes: usize| {
        loads(rows, DIRECT, move |load| {
            closed(load, 16) && !load.streamed && load.body_bytes == bytes
        })
    };
    let small = FindingSpec {
        number: "1a",
        what: "CPU per request that direct mode adds to a filter that only buffers: 4 KB, 16 connections, whole".to_owned(),
        target: "at most 60 µs".to_owned(),
    };
    let large = FindingSpec {
        number: "1b",
        what: "the same at 220 KB, in typed JSON parses of the body in wasm".to_owned(),
        target: "at most 2.5".to_owned(),
    };
    let mut all = small.under(&of(4 * KB), |load| added_micros(rows, load));
    all.extend(large.under(&of(LONG), |load| added_parses(rows, load)));
    all
}

fn added_micros(rows: &[Row], load: &Load) -> Judged {
    let (direct, buffer) = (cpu(rows, DIRECT, load)?, cpu(rows, BUFFER, load)?);
    let added = direct - buffer;
    let words = format!(
        "{} µs ({} − {})",
        short(added),
        short(direct),
        short(buffer)
    );
    Ok((words, Limit::AtMost(60.0).verdict(added, " µs")?))
}

fn added_parses(rows: &[Row], load: &Load) -> Judged {
    let added = cpu(rows, DIRECT, load)? - cpu(rows, BUFFER, load)?;
    let parse = cpu(rows, PARSE_TWICE, load)? - cpu(rows, PARSE, load)?;
    if parse <= 0.0 {
        return Err(MissingFigure::Unfit(
            "a second parse of the body cost nothing that could be measured".to_owned(),
        ));
    }
    let parses = added / parse;
    let words = format!(
        "{} ({} µs; a parse {} µs)",
        short(parses),
        short(added),
        short(parse)
    );
    Ok((words, Limit::AtMost(2.5).verdict(parses, "")?))
}

/// Streamed or not, the word for it, and the numbers of its findings.
type DeliveryCase = (bool, &'static str, [&'static str; 3]);

const DELIVERY_CASES: [DeliveryCase; 2] = [
    (false, "whole", ["2a", "2b", "2c"]),
    (true, "streamed", ["2d", "2e", "2f"]),
];

fn beside_peers(rows: &[Row]) -> Vec<Finding> {
    let of_manner = |(streamed, manner, [smg_cpu, vllm_cpu, latency]): DeliveryCase| {
        let loads = loads(rows, NIXL, |load| {
            is_usual(load) && load.streamed == streamed
        });
        let cost = |number, peer: &str, most: f64| FindingSpec {
            number,
            what: format!(
                "CPU per request, NIXL over Envoy + {peer}: 1 KB, 16 connections, {manner}"
            ),
            target: format!("at most {most}"),
        };
        let times = FindingSpec {
            number: latency,
            what: format!("p50 and p99 of NIXL: 1 KB, 16 connections, {manner}"),
            target: "lower than of Envoy + smg and of Envoy + vllm-router".to_owned(),
        };
        let mut all = cost(smg_cpu, "smg", 0.75).under(&loads, |load| {
            cost_ratio(rows, load, smg(rows, load)?, 0.75)
        });
        all.extend(cost(vllm_cpu, "vllm-router", 0.6).under(&loads, |load| {
            cost_ratio(rows, load, (VLLM, median(rows, VLLM, load)?), 0.6)
        }));
        all.extend(times.under(&loads, |load| latencies(rows, load)));
        all
    };
    DELIVERY_CASES.into_iter().flat_map(of_manner).collect()
}

/// Envoy in front of smg: with the same hand-off if that works, else with the one that does.
fn smg<'a>(rows: &'a [Row], load: &Load) -> Result<(&'static str, &'a Figures), MissingFigure> {
    let of = |contender| median(rows, contender, load).map(|figures| (contender, figures));
    match (of(SMG_NIXL), of(SMG_SGLANG)) {
        (Ok(one), _) | (_, Ok(one)) => Ok(one),
        (Err(first), Err(second)) => Err(first.and(&format!("; {}", second.words()))),
    }
}

fn cost_ratio(rows: &[Row], load: &Load, (name, peer): (&str, &Figures), most: f64) -> Judged {
    let (ours, theirs) = (cpu(rows, NIXL, load)?, peer.cpu_us_per_request);
    let ratio = ours / theirs;
    let words = format!(
        "{} ({} µs, {name} {} µs)",
        short(ratio),
        short(ours),
        short(theirs)
    );
    Ok((words, Limit::AtMost(most).verdict(ratio, "")?))
}

/// A latency: name and accessor.
type Latency = (&'static str, fn(&Figures) -> f64);

const LATENCIES: [Latency; 2] = [
    ("p50", |figures| figures.p50_ms),
    ("p99", |figures| figures.p99_ms),
];

fn latencies(rows: &[Row], load: &Load) -> Judged {
    let ours = median(rows, NIXL, load)?;
    let peers = [smg(rows, load)?, (VLLM, median(rows, VLLM, load)?)];
    let (mut words, mut missed) = (Vec::new(), Vec::new());
    for (latency, of) in LATENCIES {
        let theirs = peers.map(|(name, peer)| format!("{name} {}", short(of(peer))));
        words.push(format!(
            "{latency} {} ms ({})",
            short(of(ours)),
            theirs.join(", ")
        ));
        for (name, peer) in peers {
            let beyond = of(ours) - of(peer);
            if beyond >= 0.0 {
                missed.push(format!("{latency} by {} ms to {name}", difference(beyond)));
            }
        }
    }
    let verdict = match missed.is_empty() {
        true => Verdict::Reached,
        false => Verdict::Missed(missed.join(", ")),
    };
    Ok((words.join("; "), verdict))
}

fn long_prompts(rows: &[Row]) -> Vec<Finding> {
    let streamed = |load: &Load| load.streamed && load.body_bytes == LONG && !paced(load);
    let mut all = Vec::new();
    for (number, count) in [("3a", 20), ("3b", 200)] {
        let spec = FindingSpec {
            number,
            what: format!(
                "requests/s of direct mode over those of a filter that only buffers: 220 KB, streamed, {count} connections"
            ),
            target: "at least 0.85".to_owned(),
        };
        let loads = loads(rows, DIRECT, |load| streamed(load) && closed(load, count));
        all.extend(spec.under(&loads, |load| throughput(rows, load)));
    }
    let open = FindingSpec {
        number: "3c",
        what: "TTFT p50 that direct mode adds to a filter that only buffers: 220 KB, streamed, open loop".to_owned(),
        target: "at most 2 ms".to_owned(),
    };
    let loads = loads(rows, DIRECT, |load| {
        streamed(load) && load.load == LoopKind::Open
    });
    all.extend(open.under(&loads, |load| first_token(rows, load)));
    all
}

fn throughput(rows: &[Row], load: &Load) -> Judged {
    let rps = |contender| median(rows, contender, load).map(|figures| figures.rps);
    let (direct, buffer) = (rps(DIRECT)?, rps(BUFFER)?);
    let words = format!(
        "{} ({} and {}); NIXL {}",
        short(direct / buffer),
        short(direct),
        short(buffer),
        rps(NIXL).map_or("not measured".to_owned(), |nixl| short(nixl / buffer))
    );
    Ok((words, Limit::AtLeast(0.85).verdict(direct / buffer, "")?))
}

fn first_token(rows: &[Row], load: &Load) -> Judged {
    let ttft = |contender| median(rows, contender, load).map(|figures| figures.ttft_p50_ms);
    let (direct, buffer) = (ttft(DIRECT)?, ttft(BUFFER)?);
    let words = format!(
        "{} ms ({} − {}); NIXL {}",
        short(direct - buffer),
        short(direct),
        short(buffer),
        ttft(NIXL).map_or("not measured".to_owned(), |nixl| {
            format!("{} ms", short(nixl - buffer))
        })
    );
    Ok((words, Limit::AtMost(2.0).verdict(direct - buffer, " ms")?))
}

fn chunks(rows: &[Row]) -> Vec<Finding> {
    let mut all = Vec::new();
    for (number, contender, how, most) in [
        ("4a", DIRECT, "with output accounting", 8.0),
        ("4b", UNACCOUNTED, "without output accounting", 3.0),
    ] {
        let spec = FindingSpec {
            number,
            what: format!(
                "CPU per chunk of an answer that pd-router adds to the empty filter, {how}"
            ),
            target: format!("at most {most} µs"),
        };
        let loads = loads(rows, contender, |load| {
            paced(load) && load.body_bytes == KB && load.chunks == Some(CHUNKS)
        });
        all.extend(spec.under(&loads, |load| added_by_chunk(rows, contender, load, most)));
    }
    all
}

fn added_by_chunk(rows: &[Row], contender: &str, load: &Load, most: f64) -> Judged {
    let (ours, empty) = (
        chunk_cost(rows, contender, load)?,
        chunk_cost(rows, EMPTY, load)?,
    );
    let added = ours - empty;
    let words = format!("{} µs ({} − {})", short(added), short(ours), short(empty));
    Ok((words, Limit::AtMost(most).verdict(added, " µs")?))
}

/// Microseconds of each chunk after the first: the cost of many chunks beyond that of one.
fn chunk_cost(rows: &[Row], contender: &str, many: &Load) -> Result<f64, MissingFigure> {
    let one = Load {
        chunks: Some(1),
        ..many.clone()
    };
    let all = cpu(rows, contender, many)?;
    let beyond =
        all - cpu(rows, contender, &one).map_err(|why| why.and(", with an answer of 1 event"))?;
    Ok(beyond / (CHUNKS - 1) as f64)
}

fn closed(load: &Load, connections: usize) -> bool {
    load.load == LoopKind::Closed && load.connections == connections
}

fn cpu(rows: &[Row], contender: &str, load: &Load) -> Result<f64, MissingFigure> {
    median(rows, contender, load).map(|figures| figures.cpu_us_per_request)
}
