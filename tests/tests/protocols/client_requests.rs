//! Clients' requests: each body as sent, and the same body for one token and unstreamed.

use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::golden::front;

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
pub const RESPONSES: &str = "/v1/responses";

/// A request, and its body after the one-token edits.
#[derive(Clone, Copy, Debug)]
pub struct ClientRequest {
    pub path: &'static str,
    /// As the client sends it.
    pub body: &'static str,
    /// The body with every present limit at one, unstreamed.
    pub one: &'static str,
    /// The limit that the body lacks.
    pub lacks: Option<&'static str>,
}

impl ClientRequest {
    /// The one-token body with these members and the hand-off's at the front.
    pub fn one_token_with(&self, members: &str) -> String {
        match self.lacks {
            Some(limit) => front(self.one, &format!("{limit},{members}")),
            None => front(self.one, members),
        }
    }

    pub fn ask(&self) -> Ask {
        Ask::post(self.path, self.body)
    }

    pub fn is_streamed(&self) -> bool {
        self.body.contains("\"stream\":true")
    }

    /// Fails unless this is a complete answer.
    #[track_caller]
    pub fn assert_answered(&self, reply: Reply) {
        let reply = reply.expect(200);
        if self.path == RESPONSES && self.is_streamed() {
            let text = reply.text();
            assert!(text.contains("response.output_text.delta"), "{text}");
            let ends = ["event: response.completed", "event: response.incomplete"];
            assert!(ends.iter().any(|end| text.contains(end)), "{text}");
            return;
        }
        if self.is_streamed() {
            let events = reply.events();
            assert!(events.len() >= 4, "{events:?}");
            return;
        }
        let usage = reply.json()["usage"].clone();
        let tokens = ["completion_tokens", "output_tokens"].map(|name| usage[name].as_u64());
        let count = tokens.into_iter().flatten().next();
        assert!(count.is_some_and(|tokens| tokens > 0), "{}", reply.text());
    }
}

/// Requests with one prompt each, in every form, with everything that re-writing JSON loses.
pub const CHATS: &[ClientRequest] = &[
    ClientRequest {
        path: CHAT,
        body: r#"{"model":"sim","messages":[{"role":"user","content":"one"}],"max_tokens":4}"#,
        one: r#"{"model":"sim","messages":[{"role":"user","content":"one"}],"max_tokens":1}"#,
        lacks: None,
    },
    ClientRequest {
        path: CHAT,
        body: concat!(
            " {\n\"messages\" : [ {\"role\":\"user\",\"content\":\"caf\\u00e9 \\/ \u{e9} two\"} ],\r\n\t\"model\":\"sim\",",
            "\"seed\": 9007199254740993,\"stream\":true,\"stream_options\":{\"include_usage\":true},\"max_tokens\" : 4,",
            "\"max_completion_tokens\":4,\"min_tokens\":2,\"vendor\":{\"max_tokens\":7,\"stream\":true,\"a\":1.0},\"top_p\":1e0} \n",
        ),
        one: concat!(
            " {\n\"messages\" : [ {\"role\":\"user\",\"content\":\"caf\\u00e9 \\/ \u{e9} two\"} ],\r\n\t\"model\":\"sim\",",
            "\"seed\": 9007199254740993,\"stream\":false,\"max_tokens\" : 1,",
            "\"max_completion_tokens\":1,\"min_tokens\":1,\"vendor\":{\"max_tokens\":7,\"stream\":true,\"a\":1.0},\"top_p\":1e0} \n",
        ),
        lacks: None,
    },
    ClientRequest {
        path: CHAT,
        body: r#"{"messages":[{"role":"user","content":[{"type":"text","text":"three"}]}],"model":"sim"}"#,
        one: r#"{"messages":[{"role":"user","content":[{"type":"text","text":"three"}]}],"model":"sim"}"#,
        lacks: Some(r#""max_tokens":1"#),
    },
];

/// The prompt of a completion, as written, and the completion.
pub const COMPLETED: &[(&str, ClientRequest)] = &[
    (
        r#""Once upon a time""#,
        ClientRequest {
            path: COMPLETIONS,
            body: r#"{"model":"sim","prompt":"Once upon a time","max_tokens":4}"#,
            one: r#"{"model":"sim","prompt":"Once upon a time","max_tokens":1}"#,
            lacks: None,
        },
    ),
    (
        "[11, 12,13,14,15,16]",
        ClientRequest {
            path: COMPLETIONS,
            body: r#"{"model":"sim","prompt":[11, 12,13,14,15,16],"max_tokens":4,"stream":true}"#,
            one: r#"{"model":"sim","prompt":[11, 12,13,14,15,16],"max_tokens":1,"stream":false}"#,
            lacks: None,
        },
    ),
    (
        r#"["a list of one"]"#,
        ClientRequest {
            path: COMPLETIONS,
            body: r#"{"model":"sim","stream":true,"prompt":["a list of one"]}"#,
            one: r#"{"model":"sim","stream":false,"prompt":["a list of one"]}"#,
            lacks: Some(r#""max_tokens":1"#),
        },
    ),
];

pub const RESPONDED: &[ClientRequest] = &[
    ClientRequest {
        path: RESPONSES,
        body: r#"{"model":"sim","input":"Tell me","max_output_tokens":4}"#,
        one: r#"{"model":"sim","input":"Tell me","max_output_tokens":1}"#,
        lacks: None,
    },
    ClientRequest {
        path: RESPONSES,
        body: r#"{"model":"sim","input":"Tell me more"}"#,
        one: r#"{"model":"sim","input":"Tell me more"}"#,
        lacks: Some(r#""max_output_tokens":1"#),
    },
    ClientRequest {
        path: RESPONSES,
        body: r#"{"model":"sim","stream":true,"input":"Tell me all","max_output_tokens":4}"#,
        one: r#"{"model":"sim","stream":false,"input":"Tell me all","max_output_tokens":1}"#,
        lacks: None,
    },
];
