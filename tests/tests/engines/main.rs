//! The gateway, in real Envoy, in front of a real vLLM: the same answers as from one engine alone, and nothing left behind.
//!
//! The engines take minutes to start, so all tests share them, one after the other. `PD_ENGINES=short` is the part for every
//! day: one engine of each role, none of which is killed.

mod aborts;
mod answer;
mod clients;
mod compare;
mod contract;
mod corpus;
mod dynamo;
mod errors;
mod failures;
mod handoffs;
mod knowledge;
mod relay;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use pd_router_e2e::vllm::{Fleet, Size};
use pd_router_e2e::wait::judged_within;
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;

/// After this long a test hangs: the longest starts engines anew, one after the other.
const TEST_LIMIT: Duration = Duration::from_secs(2400);

/// What all tests share. The engines start with the first of them.
struct Shared {
    runtime: Runtime,
    size: Size,
    fleet: OnceCell<Fleet>,
}

impl Shared {
    async fn fleet(&self) -> &Fleet {
        self.fleet.get_or_init(|| start(self.size)).await
    }
}

async fn start(size: Size) -> Fleet {
    let began = Instant::now();
    let fleet = Fleet::start(size).await;
    println!("the engines serve after {} s", began.elapsed().as_secs());
    fleet
}

/// A list of tests by their functions, each of which is given the fleet.
macro_rules! trials {
    ($shared:ident: $($module:ident::$name:ident,)*) => {
        vec![$({
            let shared = Arc::clone($shared);
            let name = concat!(stringify!($module), "::", stringify!($name));
            Trial::test(name, move || {
                shared.runtime.block_on(judged_within(TEST_LIMIT, name, async {
                    $module::$name(shared.fleet().await).await;
                }));
                Ok(())
            })
        },)*]
    };
}

fn every_day(shared: &Arc<Shared>) -> Vec<Trial> {
    trials![shared:
        compare::each_kind_of_request_is_answered_as_by_one_engine,
        compare::what_no_hand_off_serves_runs_whole,
        compare::decode_engines_compute_no_prompt,
        errors::an_engines_refusal_is_passed_on_in_its_own_words,
        aborts::clients_that_leave_leave_nothing_held,
        knowledge::found_v5_models_are_listed_as_an_engine_lists_them,
        knowledge::engine_metrics_are_read_by_their_real_names,
        knowledge::cached_tokens_are_those_of_prefill,
    ]
}

fn at_length(shared: &Arc<Shared>) -> Vec<Trial> {
    trials![shared:
        compare::five_hundred_mixed_requests_are_answered_as_by_one_engine,
        errors::found_v1_what_decode_refuses_leaves_nothing_held,
        handoffs::found_v2_a_load_failure_is_recovered_streamed_or_not,
        handoffs::a_hand_off_that_is_cut_is_not_used,
        handoffs::found_v3_a_hand_off_is_used_once,
        handoffs::found_v4_a_first_prefill_that_is_slow_is_waited_for,
        handoffs::found_v8_a_prefill_engine_whose_blocks_cannot_be_fetched_is_blamed,
        contract::the_simulated_engine_answers_as_vllm_does,
        dynamo::what_dynamo_hands_over_is_answered_as_by_one_engine,
        clients::openai_python,
        clients::openai_node,
        clients::litellm,
        clients::langchain,
        failures::engines_are_killed_and_come_back,
    ]
}

fn main() {
    let mut arguments = Arguments::from_args();
    // What the engines count is compared before and after.
    arguments.test_threads = Some(1);
    let is_short = std::env::var("PD_ENGINES").is_ok_and(|part| part == "short");
    let shared = Arc::new(Shared {
        runtime: Runtime::new().expect("threads"),
        size: if is_short { Size::Pair } else { Size::TwoPairs },
        fleet: OnceCell::new(),
    });
    let mut trials = every_day(&shared);
    if !is_short {
        trials.extend(at_length(&shared));
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if shared.fleet.initialized() {
        let verdict = if conclusion.has_failed() {
            "failed"
        } else {
            "passed"
        };
        println!("{verdict}: {}", compare::report());
    }
    conclusion.exit();
}
