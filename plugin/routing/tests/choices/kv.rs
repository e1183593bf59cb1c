//! Tests of the policy `kv`: the credit for a prefix, the cost of a queue, and the balance of the two.

use routing::route::{Client, Router};
use serde_json::{Value, json};

use crate::engine::Engines;
use crate::support::*;

/// Serves this prompt on this worker to its end, so that its prefix is cached there.
fn teach(router: &mut Router, name: u64, tokens: u64, id: u64, ms: u64) {
    let taught = wish(name, tokens).prefilled_by(id).at(ms).served(router);
    assert_eq!(taught, id);
}

fn kv(weights: Value) -> Value {
    json!({"selection": {"kv": weights}})
}

#[test]
fn two_conversations_keep_their_workers() {
    for block in [16, 512] {
        for seed in 0..10 {
            let fields = json!({"block_tokens": block});
            let mut router = router(&pairs(8, 8), fields, seed);
            let mut engines = Engines::new(&[RATE; 8], 0.02);
            let mut turns = [Vec::new(), Vec::new()];
            for turn in 0..10 {
                for (name, of) in turns.iter_mut().enumerate() {
                    let tokens = 2_000 + 700 * turn;
                    // All conversations share a system prompt.
                    let prompt = Prompt::branching(512, name as u64, tokens, block);
                    of.push(engines.take(&mut router, &prompt.ask()));
                    engines.idle();
                    engines.pass(2.0);
                }
            }
            for of in &turns {
                assert!(
                    of.iter().all(|id| *id == of[0]),
                    "{block} {seed}: {turns:?}"
                );
            }
            assert!(router.total_load().is_idle());
        }
    }
}

#[test]
fn so_they_do_while_others_come_and_go() {
    for seed in 0..10 {
        let mut router = router(&pairs(4, 1), json!({}), seed);
        let mut engines = Engines::new(&[RATE; 4], 0.02);
        let mut turns = [Vec::new(), Vec::new()];
        let mut other = 100;
        for turn in 0..10 {
            for (name, of) in turns.iter_mut().enumerate() {
                for tokens in [300, 1_500, 6_000] {
                    other += 1;
                    engines.take(&mut router, &Prompt::new(other, tokens, 16).ask());
                    engines.pass(0.3);
                }
                engines.idle();
                let prompt = Prompt::new(name as u64, 2_000 + 700 * turn, 16);
                of.push(engines.take(&mut router, &prompt.ask()));
                engines.idle();
            }
        }
        for of in &turns {
            assert!(of.iter().all(|id| *id == of[0]), "{seed}: {turns:?}");
        }
    }
}

#[test]
fn chats_keep_their_workers_through_their_bodies() {
    use routing::request::Generation;
    use routing::route::{Plan, PlanInput};
    for seed in 0..10 {
        let mut router = router(&pairs(8, 8), json!({}), seed);
        let mut now = 1_000;
        let mut turns = [Vec::new(), Vec::new()];
        let mut chats = [Vec::new(), Vec::new()];
        for turn in 0..10 {
            for (name, (of, messages)) in turns.iter_mut().zip(&mut chats).enumerate() {
                let text = |of: &str| format!("{of} {name} {turn} ").repeat(60);
                messages.push(json!({"role": "user", "content": text("question")}));
                let body = json!({"model": "m", "messages": messages}).to_string();
                let input = PlanInput {
                    now: at(now),
                    ..PlanInput::default()
                };
                let Ok(Plan::Prefill(phase, assignment)) =
                    router.plan(Generation::Chat, body.as_bytes(), input)
                else {
                    panic!("no prefill");
                };
                of.push(phase.worker().id.0);
                router.advance(at(now + 100));
                drop(phase.answered(GOOD, Client::Waits, &mut router));
                drop(assignment);
                now += 5_000;
                messages.push(json!({"role": "assistant", "content": text("answer")}));
            }
        }
        for of in &turns {
            assert!(of.iter().all(|id| *id == of[0]), "{seed}: {turns:?}");
        }
    }
}

#[test]
fn a_good_prefix_outweighs_a_short_queue_and_a_long_queue_a_good_prefix() {
    let mut router = router(&pairs(3, 3), json!({}), 1);
    teach(&mut router, 1, 8_000, 2, 1_000);
    let again = wish(1, 8_200).at(10_000);
    assert_eq!(again.prefillers(&mut router, 50, 3), [0, 50, 0]);
    let short = wish(2, 2_000)
        .prefilled_by(2)
        .at(10_000)
        .prefill(&mut router);
    assert_eq!(again.prefillers(&mut router, 50, 3), [0, 50, 0]);
    let long = wish(3, 8_000)
        .prefilled_by(2)
        .at(10_000)
        .prefill(&mut router);
    assert_eq!(again.prefillers(&mut router, 50, 3)[1], 0);
    drop((short, long));
    assert_eq!(again.prefillers(&mut router, 50, 3), [0, 50, 0]);
}

#[test]
fn the_longer_of_two_prefixes_counts() {
    let mut router = router(&pairs(3, 3), json!({}), 1);
    teach(&mut router, 1, 3_000, 1, 1_000);
    teach(&mut router, 1, 8_000, 2, 5_000);
    // The first worker caches the first part too, but less of it.
    assert_eq!(
        wish(1, 9_000).at(10_000).prefillers(&mut router, 50, 3),
        [0, 50, 0]
    );
    // For a prompt that both have cached, either one is picked.
    let both = wish(1, 2_000).at(10_000).prefillers(&mut router, 200, 3);
    assert!(both[0] > 60 && both[1] > 60 && both[2] == 0, "{both:?}");
}

#[test]
fn credit_decays_on_a_worker_with_more_booked() {
    for (decay, expected) in [(0.0, 2), (1.0, 2), (3.0, 1)] {
        let fields = kv(json!({"overlap_score_credit_decay": decay}));
        let mut router = router(&pairs(2, 1), fields, 1);
        teach(&mut router, 1, 1_000, 2, 1_000);
        // Half a prompt waits there: 31 blocks against 62 cached ones. With decay 3 the credit is 62 / (1 + 3 / 2).
        let _busy = wish(2, 500).prefilled_by(2).at(10_000).prefill(&mut router);
        assert_eq!(wish(1, 1_000).at(10_000).prefiller(&mut router), expected);
    }
}

#[test]
fn a_prefix_is_worth_what_the_configuration_says() {
    for (credit, sticks) in [(1.0, true), (0.4, false)] {
        let fields = kv(json!({"overlap_score_credit": credit}));
        let mut router = router(&pairs(2, 1), fields, 1);
        teach(&mut router, 1, 1_000, 2, 1_000);
        let _busy = wish(2, 500).prefilled_by(2).at(10_000).prefill(&mut router);
        assert_eq!(
            wish(1, 1_000).at(10_000).prefiller(&mut router) == 2,
            sticks
        );
    }
}

#[test]
fn with_a_temperature_others_are_picked_now_and_then() {
    for (temperature, least, most) in [(0.0, 1_000, 1_000), (0.5, 830, 930), (1_000.0, 430, 570)] {
        let fields = kv(json!({"router_temperature": temperature}));
        let mut router = router(&pairs(2, 1), fields, 1);
        teach(&mut router, 1, 4_000, 2, 1_000);
        let picked = wish(1, 4_000).at(10_000).prefillers(&mut router, 1_000, 2);
        // At 0.5 the odds are 1 : exp(-2), 88 in a hundred.
        assert!(
            (least..=most).contains(&picked[1]),
            "{temperature}: {picked:?}"
        );
    }
}

#[test]
fn with_a_scale_of_nothing_prefill_does_not_count() {
    let mut router = router(&pairs(2, 1), kv(json!({"prefill_load_scale": 0.0})), 1);
    teach(&mut router, 1, 4_000, 2, 1_000);
    let _busy = wish(2, 9_000)
        .prefilled_by(1)
        .at(10_000)
        .prefill(&mut router);
    let picked = wish(1, 4_000).at(10_000).prefillers(&mut router, 1_000, 2);
    assert!((430..570).contains(&picked[1]), "{picked:?}");
}

#[test]
fn the_scale_weighs_prefill_against_blocks_in_use() {
    // The first worker decodes much; on the second much prefill waits.
    for (scale, expected) in [(1.0, 202), (10.0, 201)] {
        let mut router = router(&wholes(2), kv(json!({"prefill_load_scale": scale})), 1);
        let (_, mut long) = wish(1, 4_000).decoded_by(201).forward(&mut router);
        long.first_token(at(1_000));
        let _short = wish(2, 1_000).decoded_by(202).forward(&mut router);
        assert_eq!(wish(3, 100).decoder(&mut router), expected, "{scale}");
    }
}

#[test]
fn requests_being_decoded_count_as_configured() {
    for (weight, expected) in [(0.0, 102), (20.0, 101)] {
        let fields = kv(json!({"decode_active_request_weight": weight}));
        let mut router = router(&pairs(1, 2), fields, 1);
        // A hundred blocks in one request, fifty in ten.
        let _long = wish(1, 1_600).decoded_by(101).prefill(&mut router);
        let _short: Vec<_> = (2..12)
            .map(|name| wish(name, 80).decoded_by(102).prefill(&mut router))
            .collect();
        assert_eq!(wish(99, 160).decoder(&mut router), expected, "{weight}");
    }
}

#[test]
fn decode_goes_by_the_blocks_in_use() {
    let mut router = router(&pairs(1, 2), json!({}), 1);
    let _large = wish(1, 3_200).decoded_by(101).prefill(&mut router);
    let small: Vec<_> = (2..12)
        .map(|name| wish(name, 160).decoded_by(102).prefill(&mut router))
        .collect();
    assert_eq!(wish(99, 160).decoder(&mut router), 102);
    let more: Vec<_> = (12..30)
        .map(|name| wish(name, 160).decoded_by(102).prefill(&mut router))
        .collect();
    assert_eq!(wish(99, 160).decoder(&mut router), 101);
    drop((small, more));
}

#[test]
fn what_is_preferred_is_a_factor_on_the_cost() {
    let tainted = json!({"topology": {"taints": ["fast"]}});
    let prefer =
        |weight: f64| json!({"routing_constraints": {"preferred_taints": {"fast": weight}}});
    // exp(-tanh(1)) is 0.47: 113 blocks become 53, 163 become 76; the other worker would cost 63.
    for (booked, weight, expected) in [
        (800, 0.0, 102),
        (800, 1.0, 101),
        (1_600, 1.0, 102),
        (0, -1.0, 102),
    ] {
        let workers = [
            worker("prefill", 1),
            worker_with("decode", 101, tainted.clone()),
            worker("decode", 102),
        ];
        let mut pairs = router(&workers, json!({}), 1);
        let busy = (booked > 0).then(|| wish(1, booked).decoded_by(101).prefill(&mut pairs));
        let wish = wish(2, 1_000).saying(prefer(weight));
        assert_eq!(wish.decoder(&mut pairs), expected, "{booked} {weight}");
        drop(busy);
    }
    for (weight, expected) in [(1.0, 201), (-1.0, 202)] {
        let workers = [
            worker_with("aggregated", 201, tainted.clone()),
            worker("aggregated", 202),
        ];
        let mut whole = router(&workers, json!({}), 1);
        let wish = wish(2, 1_000).saying(prefer(weight));
        assert_eq!(wish.decoder(&mut whole), expected, "{weight}");
    }
}

/// Both workers have a measured rate of [`RATE`] tokens a second.
fn rated() -> Router {
    let mut router = router(&pairs(2, 1), json!({}), 1);
    teach(&mut router, 1, 8_000, 1, 1_000);
    teach(&mut router, 2, 8_000, 2, 5_000);
    router
}

#[test]
fn prefill_under_way_drains_as_it_is_thought_to_be_read() {
    // Of 8,000 tokens half are left after half a second.
    for (ms, other, expected) in [
        (10_000, 7_000, 2),
        (10_500, 3_000, 2),
        (10_500, 5_000, 1),
        (10_900, 1_500, 1),
        (60_000, 100, 1),
    ] {
        let mut router = rated();
        let _first = wish(3, 8_000)
            .prefilled_by(1)
            .at(10_000)
            .prefill(&mut router);
        let _second = wish(4, other).prefilled_by(2).at(ms).prefill(&mut router);
        let picked = wish(5, 1_000).at(ms).prefiller(&mut router);
        assert_eq!(picked, expected, "{ms} {other}");
    }
    // The prompts behind the first one do not shrink.
    let mut router = rated();
    let _head = wish(3, 800).prefilled_by(1).at(10_000).prefill(&mut router);
    let _tail = wish(4, 8_000)
        .prefilled_by(1)
        .at(10_000)
        .prefill(&mut router);
    let _other = wish(5, 7_000)
        .prefilled_by(2)
        .at(10_100)
        .prefill(&mut router);
    assert_eq!(wish(6, 1_000).at(60_000).prefiller(&mut router), 2);
}

#[test]
fn before_any_first_token_nothing_drains() {
    let mut router = router(&pairs(2, 1), json!({}), 1);
    let _first = wish(3, 8_000)
        .prefilled_by(1)
        .at(10_000)
        .prefill(&mut router);
    let _second = wish(4, 5_000)
        .prefilled_by(2)
        .at(20_000)
        .prefill(&mut router);
    assert_eq!(wish(5, 1_000).at(20_000).prefiller(&mut router), 2);
}

#[test]
fn a_prompt_in_another_scope_knows_nothing_of_the_first() {
    // The same token ids under another salt, or for an adapter, are other blocks.
    let mut router = router(&pairs(8, 1), json!({}), 1);
    teach(&mut router, 1, 4_000, 2, 1_000);
    let salted = wish(1, 4_000)
        .at(10_000)
        .saying(json!({"cache_salt": "mine"}));
    let picked = salted.prefillers(&mut router, 400, 8);
    assert!(unevenness(&picked) < 26.0, "{picked:?}");
}
