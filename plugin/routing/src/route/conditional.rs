//! Owns conditional disaggregation: which prompts stay on a decode worker, since a hand-off would cost more than it saves.
//!
//! The rules are Dynamo's (routing semantics, A.5), plus one for prompts that are short in themselves. A client can neither
//! force nor forge the outcome; a request that names a prefill worker always gets a pair.

use super::choice::{Chosen, Step, Whole, choose_decode, choose_prefill, named_decode, take};
use super::selection_request::SelectionContext;
use super::{Refusal, Router};
use crate::config::{Conditional, ConditionalPolicy, PrefillBusy};
use crate::fleet::Role;

/// Takes the decode worker that is to run the request aggregated; none if a pair is to.
pub(super) fn stays(router: &mut Router, context: &SelectionContext<'_>) -> Option<Whole> {
    let conditional = router.pool.conditional.clone()?;
    if context.overrides.query || context.overrides.prefill.worker.is_some() {
        return None;
    }
    // The path through a pair reports any problem with the request.
    let constraints = &context.overrides.constraints;
    let (decode, others) = choose_decode(router, context, constraints).ok()?;
    if vetoes(router, &conditional, context, &decode) {
        return None;
    }
    let uncached = decode.uncached_tokens(context.demand, &router.pool);
    let by_length = is_short(&conditional, uncached, context.demand.prompt_tokens);
    let stays = match conditional.policy {
        ConditionalPolicy::IslBounding => by_length,
        ConditionalPolicy::PrefillLoad => prefill_is_busy(router, &conditional, context),
        ConditionalPolicy::IslOrLoad => by_length || prefill_is_busy(router, &conditional, context),
    };
    if !stays {
        return None;
    }
    take(router, Role::Decode, context, &decode);
    Some(Whole { decode, others })
}

fn is_short(conditional: &Conditional, uncached: u64, prompt: u64) -> bool {
    let is_small_share = (uncached as f64) < conditional.uncached_share * prompt as f64;
    uncached < conditional.short_tokens
        || (uncached < conditional.uncached_tokens && is_small_share)
}

/// Whether the prefill worker that would be picked is too busy. A refusal because all are overloaded counts as busy.
fn prefill_is_busy(
    router: &mut Router,
    conditional: &Conditional,
    context: &SelectionContext<'_>,
) -> bool {
    let decode = named_decode(router, context);
    let prefill = match choose_prefill(router, context, decode.as_ref(), Step::Commit) {
        Ok(prefill) => prefill,
        Err(refusal) => return matches!(refusal, Refusal::Overloaded { .. }),
    };
    let booked = router.ledger.load_in_all(prefill.key()).prefill_tokens;
    let busy = PrefillBusy {
        tokens: conditional.prefill_busy_tokens,
        fraction: conditional.prefill_busy_fraction,
    };
    busy.is_passed(booked, prefill.target.worker.capacity)
}

/// Whether the decode worker would be too full to keep the prompt; an unknown capacity counts as too full.
fn vetoes(
    router: &Router,
    conditional: &Conditional,
    context: &SelectionContext<'_>,
    decode: &Chosen,
) -> bool {
    let Some(fraction) = conditional.decode_busy_fraction else {
        return false;
    };
    let reports = router.workers.reports();
    let capacity = reports.capacity(&decode.target.worker, &router.pool);
    let Some(total) = capacity.kv_blocks else {
        return true;
    };
    let block_tokens = u64::from(router.pool.block_tokens.max(1));
    let own = context.demand.prompt_tokens.div_ceil(block_tokens);
    let booked = router.ledger.load_in_all(decode.key()).decode_blocks;
    booked.saturating_add(own) as f64 > fraction * f64::from(total)
}
