//! Tests of the parser: what each engine serves, what the format allows, and what is no figure.

use proptest::prelude::*;

use super::*;

fn figures(
    waiting: u32,
    running: u32,
    kv_use: f32,
    kv_blocks: u32,
    block_tokens: u32,
    started: Option<f64>,
) -> Figures {
    Figures {
        waiting: Some(waiting),
        running: Some(running),
        kv_use: Some(kv_use),
        kv_blocks: Some(kv_blocks),
        block_tokens: Some(block_tokens),
        started,
    }
}

const SAMPLES: [(&str, &str); 6] = [
    ("vllm", include_str!("samples/vllm.txt")),
    ("vllm_older", include_str!("samples/vllm_older.txt")),
    ("sglang", include_str!("samples/sglang.txt")),
    ("sglang_older", include_str!("samples/sglang_older.txt")),
    ("trtllm", include_str!("samples/trtllm.txt")),
    ("triton", include_str!("samples/triton.txt")),
];

/// The figures of each sample, in the same order.
fn said() -> [Figures; 6] {
    [
        // Two engines; the usage under the newer name counts.
        figures(3, 31, 0.375, 54_938, 16, Some(1_760_123_456.78)),
        figures(1, 2, 0.0625, 573, 16, None),
        // Two data-parallel ranks; the sum already contains each priority.
        figures(3, 9, 0.625, 12_000, 64, None),
        // Tensor- and pipeline-parallel ranks all report the same requests.
        figures(0, 9, 0.28, 7_034, 16, None),
        figures(2, 6, 0.125, 12_000, 32, None),
        figures(5, 8, 0.4875, 6_239, 64, None),
    ]
}

#[test]
fn each_engine_is_understood() {
    for ((name, text), figures) in SAMPLES.iter().zip(said()) {
        assert_eq!(parse(text.as_bytes()), figures, "{name}");
    }
}

#[test]
fn open_metrics_says_the_same() {
    for ((name, text), figures) in SAMPLES.iter().zip(said()) {
        let open = format!("{text}# EOF\n");
        assert_eq!(parse(open.as_bytes()), figures, "{name}");
        let open = text.replace('\n', "\r\n") + "# EOF";
        assert_eq!(parse(open.as_bytes()), figures, "{name}");
    }
}

fn waiting(rest: &str) -> Option<u32> {
    parse(format!("# a comment\nvllm:num_requests_waiting{rest}").as_bytes()).waiting
}

#[test]
fn a_line_may_be_written_in_many_ways() {
    for (rest, value) in [
        (" 7", 7),
        ("\t7.0\n", 7),
        ("   7   1760123456000\n", 7),
        ("{} 7", 7),
        ("{ } 7", 7),
        ("{engine=\"0\",} 7\n", 7),
        ("{engine=\"0\" , model_name = \"m\"}7\n", 7),
        ("{model_name=\"a } b\"} 7", 7),
        (r#"{model_name="say \"7\" \\"} 7"#, 7),
        (r#"{model_name="\\\\\"} 5, \n"} 7"#, 7),
        ("{engine=\"0\"} 7 # {trace_id=\"x\"} 3 1760123456.0\n", 7),
        (" 7e0", 7),
        (" 1.2e+03", 1200),
        (" +5", 5),
        (" 0.0", 0),
        (" -0.0", 0),
        (" 4294967295", u32::MAX),
    ] {
        assert_eq!(waiting(rest), Some(value), "{rest:?}");
    }
}

#[test]
fn what_is_no_count_is_missing() {
    for rest in [
        "",
        " ",
        "{}",
        "{} \n",
        " seven",
        " 0x7",
        " 7,0",
        " NaN",
        " nan",
        " +Inf",
        " Inf",
        " -Inf",
        " -1",
        " -1e-9",
        " 1e999",
        " 4294967296",
        " 1e300",
        "{engine=\"0\" 7",
        "{engine=\"0} 7",
        "{engine} 7",
        "{engine=0} 7",
        "{engine=\"0\\\"} 7",
        "_total 7",
        "_by_reason{reason=\"capacity\"} 7",
    ] {
        assert_eq!(waiting(rest), None, "{rest:?}");
    }
}

#[test]
fn one_series_that_cannot_be_read_makes_the_figure_missing_and_no_other() {
    let text = "vllm:num_requests_waiting{engine=\"0\"} 1\nvllm:num_requests_waiting{engine=\"1\"} NaN\n\
                vllm:num_requests_running{engine=\"0\"} 2\nvllm:kv_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc -1\n";
    let expected = Figures {
        running: Some(2),
        ..Figures::default()
    };
    assert_eq!(parse(text.as_bytes()), expected);
}

#[test]
fn a_cache_that_is_not_set_up_yet_has_no_size() {
    for text in [
        "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1.0",
        "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"0\"} 1.0",
        "vllm:cache_config_info{block_size=\"16\"} 1.0",
    ] {
        let read = parse(text.as_bytes());
        assert_eq!(
            (read.kv_blocks, read.block_tokens),
            (None, Some(16)),
            "{text}"
        );
    }
}

#[test]
fn engines_that_disagree_on_a_block_have_none() {
    let text = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10\"} 1\n\
                vllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"5\"} 1\n";
    let read = parse(text.as_bytes());
    assert_eq!((read.kv_blocks, read.block_tokens), (Some(15), None));
}

#[test]
fn usage_is_never_more_than_all() {
    assert_eq!(parse(b"sglang:token_usage 1.02").kv_use, Some(1.0));
}

#[test]
fn of_several_processes_the_last_one_to_start_counts() {
    let text = "process_start_time_seconds 1.5e9\nprocess_start_time_seconds 1.7e9\nprocess_start_time_seconds 1.6e9";
    assert_eq!(parse(text.as_bytes()).started, Some(1.7e9));
}

/// Lines that are nearly right, cut and mixed.
fn nearly() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just("vllm:num_requests_waiting".to_owned()),
        Just("vllm:cache_config_info".to_owned()),
        Just("sglang:num_running_reqs".to_owned()),
        Just("nv_trt_llm_request_metrics".to_owned()),
        Just("{tp_rank=\"1\",request_type=\"waiting\"}".to_owned()),
        Just("{block_size=\"".to_owned()),
        "[{}\",=\\\\# \n\t\r]{1,4}",
        "[-+]?[0-9]{1,3}(\\.[0-9]{1,3})?(e[-+]?[0-9]{1,4})?",
        "\\PC{0,6}",
    ];
    let lines = prop::collection::vec(piece, 0..30);
    lines.prop_map(|pieces| pieces.concat().into_bytes())
}

fn sound(read: Figures) -> bool {
    read.kv_use.is_none_or(|part| (0.0..=1.0).contains(&part))
        && read.kv_blocks != Some(0)
        && read.block_tokens != Some(0)
        && read
            .started
            .is_none_or(|at| at.is_finite() && !at.is_sign_negative())
}

proptest! {
    #[test]
    fn no_bytes_do_harm(text in prop::collection::vec(any::<u8>(), 0..600)) {
        prop_assert!(sound(parse(&text)));
    }

    #[test]
    fn nor_do_lines_that_are_nearly_right(text in nearly()) {
        prop_assert!(sound(parse(&text)));
    }

    #[test]
    fn nor_do_samples_with_a_byte_changed_or_cut(sample in 0usize..6, at in any::<prop::sample::Index>(), byte: u8, cut: bool) {
        let mut text = SAMPLES[sample].1.as_bytes().to_vec();
        let at = at.index(text.len());
        match cut {
            true => text.truncate(at),
            false => text[at] = byte,
        }
        prop_assert!(sound(parse(&text)));
    }

    #[test]
    fn engines_are_summed(counts in prop::collection::vec(0u32..1_000_000, 1..40)) {
        let lines = counts.iter().enumerate().map(|(engine, count)| {
            format!("vllm:num_requests_running{{engine=\"{engine}\",model_name=\"m\"}} {count}.0\n")
        });
        let text: String = lines.collect();
        prop_assert_eq!(parse(text.as_bytes()).running, Some(counts.iter().sum()));
    }
}

#[test]
fn of_a_text_that_is_too_long_nothing_is_believed() {
    let mut text = b"vllm:num_requests_waiting 3\n".to_vec();
    assert_eq!(parse(&text).waiting, Some(3));
    text.resize(MAX_TEXT + 1, b'\n');
    assert_eq!(parse(&text), Figures::default());
}
