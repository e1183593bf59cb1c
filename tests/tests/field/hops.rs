//! Headers about a connection, which do not apply to the next one (gateway-api-inference-extension #2993).

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Connection, Reply};
use pd_router_e2e::fixture::Fixture;
use pd_router_e2e::gateway::Gateway;
use serde_json::json;

/// An HTTP/1.1 worker's headers about its connection.
const OF_A_HOP: [&str; 4] = ["connection", "keep-alive", "proxy-connection", "upgrade"];

async fn connection(gateway: &Gateway, http2: bool) -> Connection {
    let opened = match http2 {
        true => Connection::open_http2(gateway.listen).await,
        false => Connection::open(gateway.listen).await,
    };
    opened.unwrap_or_else(|failure| panic!("no connection: {failure}"))
}

async fn sent(connection: &mut Connection, ask: Ask) -> Reply {
    let reply = connection.send(ask).await;
    reply.unwrap_or_else(|failure| panic!("no answer: {failure}"))
}

/// Fails if HTTP/2 has a header that it forbids.
fn assert_fit(reply: &Reply, http2: bool) {
    if http2 {
        assert_eq!(reply.header("transfer-encoding"), None, "{reply:?}");
    }
    for name in OF_A_HOP {
        assert_eq!(reply.header(name), None, "{reply:?}");
    }
}

pub async fn answers_are_whole_over_http_1_and_2(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    for http2 in [false, true] {
        let mut connection = connection(&fixture.gateway, http2).await;
        for _ in 0..3 {
            for ask in [Ask::chat_stream("hello"), Ask::chat("hello")] {
                let reply = sent(&mut connection, ask).await.expect_tokens(4);
                assert_fit(&reply, http2);
            }
        }
    }
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

/// The filter's own answer, with a worker's answer to its call in it.
pub async fn what_a_worker_says_of_its_connection_goes_no_further(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let fault = json!({
        "kind": "status", "status": 418, "body": "no",
        "headers": {
            "content-type": "text/plain", "connection": "keep-alive", "keep-alive": "timeout=5",
            "proxy-connection": "keep-alive",
        },
    });
    fixture.prefill(0).fault(&fault).await;
    for http2 in [false, true] {
        let mut connection = connection(&fixture.gateway, http2).await;
        for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
            let reply = sent(&mut connection, ask).await.expect(418);
            assert_eq!(reply.text(), "no");
            assert_fit(&reply, http2);
        }
    }
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}
