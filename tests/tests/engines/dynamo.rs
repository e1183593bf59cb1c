//! A real Dynamo with a vLLM of each role behind it: the gateway names the two, and Dynamo runs the hand-off.

use pd_router_e2e::Proxy;
use pd_router_e2e::dynamo::Dynamo;
use pd_router_e2e::engines::Role;
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::vllm::{self, Fleet};
use serde_json::Value;

use crate::answer::Answer;
use crate::compare::{ask_all, counted};
use crate::corpus;

const CASES: usize = 60;

pub async fn what_dynamo_hands_over_is_answered_as_by_one_engine(fleet: &Fleet) {
    let dynamo = Dynamo::start_with_vllm().await;
    let gateway = Gateway::start(Proxy::Envoy, &dynamo.config(), &[]).await;
    gateway.is_ready().await;
    let cases = corpus::handed_over(CASES);
    let through = ask_all(gateway.listen, &cases).await;
    let expected = ask_all(fleet.alone.address, &cases).await;
    let said = |answers: &[Answer]| -> Vec<_> { answers.iter().map(Said::by).collect() };
    let (said_through, said_alone) = (said(&through), said(&expected));
    let differing = said_through.iter().zip(&said_alone);
    let differing = differing
        .filter(|(through, alone)| through != alone)
        .count();
    let tokens = expected.iter().map(Answer::tokens).sum();
    counted(CASES, tokens, differing);
    assert_eq!(said_through, said_alone);
    let decode = vllm::dynamo_metrics(Role::Decode).await;
    let prompts =
        |source| decode.sum_where("vllm:prompt_tokens_by_source_total", &[("source", source)]);
    assert!(prompts("external_kv_transfer") > Some(0.0));
    assert_eq!(prompts("local_compute"), Some(0.0));
    gateway.assert_comes_to_rest().await;
}

/// What an answer says, apart from the JSON around it.
#[derive(Debug, PartialEq)]
struct Said {
    status: u16,
    text: String,
    finish_reason: Value,
}

impl Said {
    fn by(answer: &Answer) -> Said {
        let choice = &answer.body["choices"][0];
        let texts = ["/text", "/message/content", "/delta/content"];
        let text = texts.iter().find_map(|at| choice.pointer(at)?.as_str());
        Said {
            status: answer.status,
            // Of a character whose bytes have not all come, Dynamo shows the replacement, and vLLM nothing.
            text: text
                .unwrap_or_default()
                .trim_end_matches('\u{fffd}')
                .to_owned(),
            finish_reason: choice["finish_reason"].clone(),
        }
    }
}
