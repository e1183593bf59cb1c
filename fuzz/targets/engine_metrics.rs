//! Owns the target of engines' metrics: for any text, a figure is a sane number or unknown.
#![no_main]

use libfuzzer_sys::fuzz_target;
use routing::engine_metrics::parse;

fuzz_target!(|text: &[u8]| {
    let figures = parse(text);
    if let Some(share) = figures.kv_use {
        assert!((0.0..=1.0).contains(&share), "{share}");
    }
    if let Some(started) = figures.started {
        assert!(started.is_finite() && started >= 0.0, "{started}");
    }
    assert_ne!(figures.kv_blocks, Some(0));
    assert_ne!(figures.block_tokens, Some(0));
    // Lines that no engine writes change nothing.
    let more = [
        b"# HELP of nothing\nprocess_open_fds 3\n",
        text,
        b"\npython_gc 1\n# EOF\n",
    ]
    .concat();
    assert_eq!(parse(&more), figures);
});
