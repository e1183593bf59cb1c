//! A new configuration of the filter in a running Envoy: streams and waiting requests go on, and knowledge is kept.
#![forbid(unsafe_code)]

mod kept;
mod refused;
mod rig;
mod streams;
mod waiting;

/// Makes a test of each function. Only Envoy can take a new configuration.
macro_rules! tests {
    ($($module:ident { $($name:ident,)* })*) => {
        mod envoy {
            $(mod $module {
                $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let behaviour = crate::$module::$name();
                    pd_router_e2e::wait::judged(stringify!($name), behaviour).await;
                })*
            })*
        }
    };
}

tests! {
    streams {
        a_new_configuration_ends_no_stream_and_forgets_no_booking,
        what_was_booked_before_weighs_after,
        a_worker_that_the_new_configuration_lacks_finishes_its_stream,
    }
    kept {
        conversations_stick_across_a_new_configuration,
    }
    waiting {
        who_waits_in_the_queue_waits_on_and_is_served,
        who_waits_in_a_pool_that_is_no_more_waits_no_longer_than_it_may,
        a_listener_that_is_refused_for_another_reason_changes_nothing,
        the_deadline_of_a_prefill_holds_after_a_new_configuration,
        a_prefill_that_is_answered_after_a_new_configuration_is_heard,
    }
    refused {
        a_wrong_configuration_is_refused_whole_and_the_old_one_goes_on,
    }
}
