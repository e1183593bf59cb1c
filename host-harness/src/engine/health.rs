//! Owns the answer to `GET /health`, and the switch (`POST /__health`) with which a test makes it fail or slow.

use std::cell::Cell;
use std::time::Duration;

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde::Deserialize;

use super::body::{self, Body};

/// The configured answer; absent fields are as in a healthy engine.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct HealthAnswer {
    status: Option<u16>,
    delay_ms: u64,
}

/// The health that an engine reports.
#[derive(Default)]
pub struct HealthSwitch(Cell<HealthAnswer>);

impl HealthSwitch {
    /// Sets the answer from now on; `{}` makes the engine healthy again.
    pub fn set(&self, content: &[u8]) -> Response<Body> {
        match serde_json::from_slice::<HealthAnswer>(content) {
            Ok(answer) if status(answer).is_ok() => {
                self.0.set(answer);
                body::json(StatusCode::OK, Bytes::from_static(b"{}"))
            }
            Ok(_) => bad("status must be an HTTP status"),
            Err(error) => bad(&error.to_string()),
        }
    }

    /// Answers a probe.
    pub async fn answer(&self) -> Response<Body> {
        let answer = self.0.get();
        if answer.delay_ms > 0 {
            tokio::time::sleep(Duration::from_millis(answer.delay_ms)).await;
        }
        let status = status(answer).unwrap_or_default();
        body::empty(status)
    }
}

fn status(answer: HealthAnswer) -> Result<StatusCode, hyper::http::status::InvalidStatusCode> {
    answer
        .status
        .map_or(Ok(StatusCode::OK), StatusCode::from_u16)
}

fn bad(why: &str) -> Response<Body> {
    let detail = serde_json::json!({ "detail": why });
    body::json(StatusCode::BAD_REQUEST, detail.to_string().into())
}
