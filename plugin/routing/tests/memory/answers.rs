//! Tests that reading a prefill worker's answer holds no more than the answer's length and a little.

use routing::answer::PromptLogprobs;
use routing::answer::Verdict;
use routing::answer::usage;
use routing::handoff::nixl::TransferParams;
use routing::handoff::terminal::Terminal;
use routing::handoff::trtllm::{Context, ContextProblem};
use routing::request::AnswerForm;

use crate::peak::peak_of;

/// Bytes of a long answer's bulk.
const BULK: usize = 8_000_000;

/// Bytes that may be held beside copies of the text.
const A_LITTLE: usize = 3_000_000;

/// A list of these elements, of about `BULK` bytes.
fn list(element: &str) -> String {
    let count = BULK / (element.len() + 1);
    format!("[{}]", vec![element; count].join(","))
}

#[test]
fn found_b8_block_ids_are_counted_without_being_held() {
    for (element, per_element) in [("7", 1), ("[1,2]", 2), ("\"\"", 0), ("[]", 0)] {
        // As long as a hand-off may be.
        let ids = list(element);
        let count = ids.matches(element).count() as u64;
        let answer = format!(
            r#"{{"choices":[],"kv_transfer_params":{{"do_remote_prefill":true,"remote_block_ids":{ids}}}}}"#
        );
        let (peak, handoff) = peak_of(|| TransferParams::parse(answer.as_bytes()));
        assert_eq!(handoff.unwrap().blocks, per_element * count, "{element}");
        assert!(peak < answer.len() + A_LITTLE, "{element}: {peak} bytes");
    }
}

#[test]
fn found_b8_a_hand_off_longer_than_any_prompt_needs_is_none() {
    let ids = [list("7"), list("8")].join(",");
    let nixl = format!(
        r#"{{"kv_transfer_params":{{"do_remote_prefill":true,"remote_block_ids":[{ids}]}}}}"#
    );
    let (peak, handoff) = peak_of(|| TransferParams::parse(nixl.as_bytes()));
    assert_eq!(handoff, None);
    assert!(peak < A_LITTLE, "{peak} bytes");

    let trtllm = format!(
        r#"{{"choices":[{{"disaggregated_params":{{"ctx_request_id":1}}}}],"prompt_token_ids":[{ids}]}}"#
    );
    let (peak, context) = peak_of(|| Context::parse(trtllm.as_bytes()));
    assert_eq!(context, Err(ContextProblem::TooLong));
    assert!(peak < A_LITTLE, "{peak} bytes");
}

#[test]
fn found_b8_what_ended_an_answer_is_told_without_holding_it() {
    for element in ["0", "\"\"", "[]", "{}", r#"{"finish_reason":"stop"}"#] {
        let bulk = list(element);
        for answer in [
            format!(r#"{{"choices":{bulk}}}"#),
            format!(r#"{{"choices":[{{"finish_reason":"length","x":{bulk}}}]}}"#),
            format!(r#"{{"status":"completed","output":{bulk}}}"#),
            format!(r#"{{"usage":{bulk},"choices":[{{"disaggregated_params":{bulk}}}]}}"#),
            bulk.clone(),
        ] {
            let answer = answer.as_bytes();
            let start = String::from_utf8_lossy(&answer[..40]).into_owned();
            let (peak, _) = peak_of(|| Verdict::of_prefill(answer));
            assert!(peak < A_LITTLE, "{start}: {peak} bytes");
            let (peak, _) = peak_of(|| usage::cached_tokens(answer));
            assert!(peak < A_LITTLE, "{start}: {peak} bytes");
            let (peak, _) = peak_of(|| Context::parse(answer).ok());
            assert!(peak < answer.len() + A_LITTLE, "{start}: {peak} bytes");
            let stream = AnswerForm::Stream { usage: true };
            for (form, copies) in [(AnswerForm::Unstreamed, 4), (stream, 4)] {
                let (peak, _) = peak_of(|| Terminal::read(answer, form));
                let most = copies * answer.len() + A_LITTLE;
                assert!(peak < most, "{start}: {peak} bytes");
            }
            let (peak, _) = peak_of(|| PromptLogprobs::read(answer));
            assert!(peak < answer.len() + A_LITTLE, "{start}: {peak} bytes");
        }
    }
}
