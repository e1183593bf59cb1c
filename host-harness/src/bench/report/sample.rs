//! Owns made-up results, shaped like a benchmark of all contenders.

use std::collections::BTreeMap;

use crate::bench::results::{Figures, Load, LoopKind, Machine, MemoryRow, Results, Row, TraceRow};

/// Contenders, each with the microseconds of a small request and per KB of body.
const COSTS: [(&str, f64, f64); 20] = [
    ("envoy", 92.0, 0.3),
    ("envoy+empty", 101.0, 0.3),
    ("envoy+buffer", 116.0, 0.9),
    ("envoy+parse", 124.0, 2.6),
    ("envoy+parse2", 131.0, 4.3),
    ("pd-router aggregated", 158.0, 4.0),
    ("pd-router direct", 161.0, 4.1),
    ("pd-router nixl", 288.0, 6.6),
    ("pd-router sglang", 301.0, 6.9),
    ("pd-router wasmtime", 344.0, 7.2),
    ("pd-router direct, no accounting", 155.0, 4.0),
    ("sglang-router", 352.0, 11.0),
    ("smg sglang", 487.0, 15.0),
    ("smg nixl", 566.0, 17.0),
    ("vllm-router", 841.0, 12.0),
    ("envoy+sglang-router", 447.0, 11.4),
    ("envoy+smg sglang", 583.0, 15.4),
    ("envoy+smg nixl", 661.0, 17.4),
    ("envoy+vllm-router", 938.0, 12.4),
    ("a <b>new</b> | one", 500.0, 9.0),
];

/// A closed loop, unstreamed answers, one thread.
pub fn closed(kb: usize, connections: usize) -> Load {
    Load {
        load: LoopKind::Closed,
        rate: None,
        body_bytes: kb * 1024,
        connections,
        streamed: false,
        chunks: None,
        chunk_ms: None,
        threads: 1,
    }
}

/// The same, streamed, without pauses between events.
pub fn streamed(kb: usize, connections: usize) -> Load {
    Load {
        streamed: true,
        chunks: Some(64),
        chunk_ms: Some(0.0),
        ..closed(kb, connections)
    }
}

/// A stream of `chunks` events, 10 ms apart.
pub fn paced(chunks: u64) -> Load {
    Load {
        chunks: Some(chunks),
        chunk_ms: Some(10.0),
        ..streamed(1, 16)
    }
}

/// An open loop of long prompts.
pub fn open() -> Load {
    Load {
        load: LoopKind::Open,
        rate: Some(40.0),
        ..streamed(220, 200)
    }
}

/// A row with the same figures in all rounds, answered.
pub fn row(contender: &str, load: Load, figures: Figures) -> Row {
    let figures = Figures {
        success_rate: if figures.success_rate == 0.0 {
            1.0
        } else {
            figures.success_rate
        },
        ..figures
    };
    Row {
        contender: contender.to_owned(),
        load,
        rounds: 5,
        median: figures,
        min: figures,
        max: figures,
    }
}

/// Empty results.
pub fn nothing() -> Results {
    Results {
        machine: Machine {
            cpu: "A <processor>".to_owned(),
            cores: 2,
            memory_mb: 15_990,
            kernel: "6.1.0".to_owned(),
        },
        date: "2026-03-01T10:00:00Z".to_owned(),
        versions: BTreeMap::from([
            ("Envoy".to_owned(), "1.40.0".to_owned()),
            ("smg".to_owned(), "1.13.0".to_owned()),
        ]),
        round_s: 5.0,
        rows: Vec::new(),
        memory: Vec::new(),
        trace: Vec::new(),
        absent: Vec::new(),
    }
}

/// Results of every measurement.
pub fn everything() -> Results {
    let mut loads = vec![closed(1, 1), closed(1, 16), closed(1, 64)];
    loads.extend([4, 16, 220].map(|kb| closed(kb, 16)));
    loads.extend([1, 16, 64].map(|count| streamed(1, count)));
    loads.extend([
        streamed(220, 20),
        streamed(220, 200),
        open(),
        paced(64),
        paced(1),
    ]);
    let rows = loads.iter().flat_map(|load| {
        let rows = COSTS.iter().enumerate();
        rows.map(|(at, cost)| made_up(at, cost, load))
    });
    Results {
        rows: rows.collect(),
        memory: vec![
            memory("pd-router direct", 21.0),
            memory("pd-router nixl", 26.0),
            memory("smg nixl", 160.0),
        ],
        trace: vec![
            trace("pd-router kv", 1_310.0, 0.29, 1.0),
            trace("pd-router round_robin", 3_240.0, 0.1, 1.0),
            trace("smg nixl", 1_890.0, 0.31, 0.9973),
            trace("vllm-router", 2_410.0, 0.27, 0.982),
        ],
        absent: vec!["sglang-router: its port was <taken>".to_owned()],
        ..nothing()
    }
}

fn made_up(at: usize, (contender, base, by_kb): &(&str, f64, f64), load: &Load) -> Row {
    let kb = load.body_bytes as f64 / 1024.0;
    let events = load.chunks.unwrap_or(0) as f64;
    let cpu = base + by_kb * kb + events * (3.0 + base / 100.0);
    let crowd = load.connections as f64;
    let rps = match load.load {
        LoopKind::Open => 40.0,
        LoopKind::Closed => 1.8e6 / cpu * crowd / (crowd + 1.5),
    };
    let p50 = crowd / rps * 1000.0;
    let refused = *contender == "smg sglang" && load.streamed;
    let median = Figures {
        rps,
        p50_ms: p50,
        p90_ms: p50 * 1.4,
        p99_ms: p50 * (2.0 + (at % 4) as f64 * 0.4),
        ttft_p50_ms: p50 * 0.6,
        cpu_us_per_request: cpu,
        rss_mb: 60.0 + at as f64 * 3.0,
        success_rate: if refused { 0.42 } else { 1.0 },
    };
    Row {
        min: times(median, 0.93),
        max: times(median, 1.06 + (at % 3) as f64 * 0.03),
        ..row(contender, load.clone(), median)
    }
}

fn times(of: Figures, factor: f64) -> Figures {
    Figures {
        rps: of.rps * factor,
        p50_ms: of.p50_ms * factor,
        p90_ms: of.p90_ms * factor,
        p99_ms: of.p99_ms * factor,
        ttft_p50_ms: of.ttft_p50_ms * factor,
        cpu_us_per_request: of.cpu_us_per_request * factor,
        ..of
    }
}

/// Memory that grows by `grows` MB until 100,000 prompts, and hardly after.
pub fn memory(contender: &str, grows: f64) -> MemoryRow {
    let by_ten = (0..=15u64).map(|at| {
        let part = (at as f64 / 10.0).min(1.0);
        (at * 10_000, 62.0 + grows * part + at as f64 * 0.02)
    });
    MemoryRow {
        contender: contender.to_owned(),
        body_bytes: 16 * 1024,
        threads: 1,
        points: by_ten.collect(),
    }
}

/// A played trace.
pub fn trace(contender: &str, ttft_mean_ms: f64, hit_rate: f64, success_rate: f64) -> TraceRow {
    TraceRow {
        contender: contender.to_owned(),
        requests: 12_031,
        speedup: 20.0,
        success_rate,
        hit_rate,
        ttft_mean_ms,
        ttft_p50_ms: ttft_mean_ms * 0.6,
        ttft_p90_ms: ttft_mean_ms * 2.5,
        ttft_p99_ms: ttft_mean_ms * 7.0,
        imbalance: 1.04,
    }
}
