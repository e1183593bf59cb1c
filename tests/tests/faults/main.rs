//! The table of docs/failures.md: each row a test, in a module for each of its protocols. One protocol of each kind
//! (prefill before decode, prefill beside decode, no prefill) runs in both hosts; the others differ in bytes only.
#![forbid(unsafe_code)]

mod row;
mod rows;

/// Makes a module of each protocol with its rows, and a test of each row.
macro_rules! columns {
    ($(@$only:ident only)? $($column:ident = $protocol:ident { $($row:ident,)* })*) => {
        $(mod $column {
            use pd_router_e2e::Proxy;
            use pd_router_e2e::protocols::Protocol;

            $(pub async fn $row(proxy: Proxy) {
                crate::rows::$row(proxy, Protocol::$protocol).await;
            })*
        })*

        pd_router_e2e::on_both_hosts! { $($only only)? $($column { $($row,)* })* }
    };
}

columns! {
    nixl = Nixl {
        prefill_refuses,
        prefill_answers_4xx,
        prefill_answers_429,
        prefill_answers_5xx,
        prefill_passes_its_deadline,
        prefill_breaks_off,
        prefill_hands_nothing_off,
        prefill_ends_the_answer,
        decode_refuses,
        decode_answers_4xx,
        decode_answers_429,
        decode_answers_5xx,
        decode_answers_5xx_to_a_stream,
        decode_breaks_before_headers,
        decode_breaks_before_headers_of_a_stream,
        decode_answers_nothing,
        decode_hangs,
        decode_is_silent_before_its_first_token,
        decode_breaks_after_headers,
        decode_dies_after_its_first_token,
        decode_is_silent_after_its_first_token,
        client_leaves_during_prefill,
        client_leaves_before_headers,
        client_leaves_before_the_first_token,
        client_leaves_a_stream,
        prefill_alone_is_blamed,
        decode_alone_is_blamed,
    }
    sglang = Sglang {
        prefill_refuses,
        prefill_answers_4xx,
        prefill_answers_429,
        prefill_answers_5xx,
        prefill_passes_its_deadline,
        prefill_breaks_off,
        prefill_fails_late,
        decode_refuses,
        decode_answers_4xx,
        decode_answers_429,
        decode_answers_5xx,
        decode_answers_5xx_to_a_stream,
        decode_breaks_before_headers,
        decode_breaks_before_headers_of_a_stream,
        decode_answers_nothing,
        decode_hangs,
        decode_is_silent_before_its_first_token,
        decode_breaks_after_headers,
        decode_dies_after_its_first_token,
        decode_is_silent_after_its_first_token,
        client_leaves_during_prefill,
        client_leaves_before_headers,
        client_leaves_before_the_first_token,
        client_leaves_a_stream,
        prefill_alone_is_blamed,
        decode_alone_is_blamed,
    }
    aggregated = Aggregated {
        decode_refuses,
        decode_answers_4xx,
        decode_answers_429,
        decode_answers_5xx,
        decode_answers_5xx_to_a_stream,
        decode_breaks_before_headers,
        decode_breaks_before_headers_of_a_stream,
        decode_answers_nothing,
        decode_hangs,
        decode_is_silent_before_its_first_token,
        decode_breaks_after_headers,
        decode_dies_after_its_first_token,
        decode_is_silent_after_its_first_token,
        client_leaves_before_headers,
        client_leaves_before_the_first_token,
        client_leaves_a_stream,
        decode_alone_is_blamed,
    }
}

columns! {
    @wasmtime only
    mooncake = Mooncake {
        prefill_refuses,
        prefill_answers_4xx,
        prefill_answers_429,
        prefill_answers_5xx,
        prefill_passes_its_deadline,
        prefill_breaks_off,
        prefill_ends_the_answer,
        decode_refuses,
        decode_answers_4xx,
        decode_answers_429,
        decode_answers_5xx,
        decode_answers_5xx_to_a_stream,
        decode_breaks_before_headers,
        decode_breaks_before_headers_of_a_stream,
        decode_answers_nothing,
        decode_hangs,
        decode_is_silent_before_its_first_token,
        decode_breaks_after_headers,
        decode_dies_after_its_first_token,
        decode_is_silent_after_its_first_token,
        client_leaves_during_prefill,
        client_leaves_before_headers,
        client_leaves_before_the_first_token,
        client_leaves_a_stream,
        prefill_alone_is_blamed,
        decode_alone_is_blamed,
    }
    trtllm = Trtllm {
        prefill_refuses,
        prefill_answers_4xx,
        prefill_answers_429,
        prefill_answers_5xx,
        prefill_passes_its_deadline,
        prefill_breaks_off,
        prefill_hands_nothing_off,
        prefill_ends_the_answer,
        decode_refuses,
        decode_answers_4xx,
        decode_answers_429,
        decode_answers_5xx,
        decode_answers_5xx_to_a_stream,
        decode_breaks_before_headers,
        decode_breaks_before_headers_of_a_stream,
        decode_answers_nothing,
        decode_hangs,
        decode_is_silent_before_its_first_token,
        decode_breaks_after_headers,
        decode_dies_after_its_first_token,
        decode_is_silent_after_its_first_token,
        client_leaves_during_prefill,
        client_leaves_before_headers,
        client_leaves_before_the_first_token,
        client_leaves_a_stream,
        prefill_alone_is_blamed,
        decode_alone_is_blamed,
    }
    llmd = Llmd {
        decode_refuses,
        decode_answers_4xx,
        decode_answers_429,
        decode_answers_5xx,
        decode_answers_5xx_to_a_stream,
        decode_breaks_before_headers,
        decode_breaks_before_headers_of_a_stream,
        decode_answers_nothing,
        decode_hangs,
        decode_is_silent_before_its_first_token,
        decode_breaks_after_headers,
        decode_dies_after_its_first_token,
        decode_is_silent_after_its_first_token,
        client_leaves_before_headers,
        client_leaves_before_the_first_token,
        client_leaves_a_stream,
        decode_alone_is_blamed,
    }
    direct = Direct {
        decode_refuses,
        decode_answers_4xx,
        decode_answers_429,
        decode_answers_5xx,
        decode_answers_5xx_to_a_stream,
        decode_breaks_before_headers,
        decode_breaks_before_headers_of_a_stream,
        decode_answers_nothing,
        decode_hangs,
        decode_is_silent_before_its_first_token,
        decode_breaks_after_headers,
        decode_dies_after_its_first_token,
        decode_is_silent_after_its_first_token,
        client_leaves_before_headers,
        client_leaves_before_the_first_token,
        client_leaves_a_stream,
    }
}
