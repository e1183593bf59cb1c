//! Owns filters that do less than pd-router: their cost is that of any filter in Wasm. The plugin's configuration, one word,
//! selects the filter: `empty` does nothing, `buffer` holds a request until its body is complete, `parse` also parses the body as
//! a typed chat request, and `parse2` does so twice, so that the difference is the cost of one parse.

use std::borrow::Cow;
use std::hint::black_box;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType, LogLevel};
use serde::Deserialize;

/// The macro exports the ABI's entry function without a doc comment; the private module keeps it out of the documentation.
mod entry {
    use super::*;

    proxy_wasm::main! {{
        proxy_wasm::set_log_level(LogLevel::Warn);
        proxy_wasm::set_root_context(|_| Box::new(Root(Task::Nothing)));
    }}
}

/// The work done for each request.
#[derive(Clone, Copy)]
enum Task {
    Nothing,
    Buffer,
    Parse { times: u32 },
}

struct Root(Task);

impl Context for Root {}

impl RootContext for Root {
    fn on_configure(&mut self, _size: usize) -> bool {
        let configuration = self.get_plugin_configuration().unwrap_or_default();
        self.0 = match configuration.as_slice() {
            b"empty" => Task::Nothing,
            b"buffer" => Task::Buffer,
            b"parse" => Task::Parse { times: 1 },
            b"parse2" => Task::Parse { times: 2 },
            _ => return false,
        };
        true
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }

    fn create_http_context(&self, _id: u32) -> Option<Box<dyn HttpContext>> {
        Some(match self.0 {
            Task::Nothing => Box::new(Empty),
            Task::Buffer => Box::new(Buffering { times: 0 }),
            Task::Parse { times } => Box::new(Buffering { times }),
        })
    }
}

struct Empty;

impl Context for Empty {}
impl HttpContext for Empty {}

struct Buffering {
    times: u32,
}

impl Context for Buffering {}

impl HttpContext for Buffering {
    fn on_http_request_headers(&mut self, _count: usize, end: bool) -> Action {
        if end { Action::Continue } else { Action::Pause }
    }

    fn on_http_request_body(&mut self, size: usize, end: bool) -> Action {
        if !end {
            return Action::Pause;
        }
        if self.times > 0 {
            let body = self.get_http_request_body(0, size).unwrap_or_default();
            for _ in 0..self.times {
                let chat: Option<Chat> = serde_json::from_slice(black_box(&body)).ok();
                black_box(chat);
            }
        }
        Action::Continue
    }
}

/// A chat request as a router would parse it without keeping anything: text stays in place.
#[derive(Deserialize)]
#[expect(dead_code, reason = "read for what reading costs")]
struct Chat<'a> {
    #[serde(borrow)]
    model: Cow<'a, str>,
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
    stream: Option<bool>,
    max_tokens: Option<u32>,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "read for what reading costs")]
struct Message<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: Cow<'a, str>,
}
