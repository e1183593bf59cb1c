//! Owns the host calls that can fail on what a client sends: each returns a `Result` or an `Option`.
//!
//! The SDK's wrappers panic on a header that is not UTF-8 and on most statuses but `Ok`, and a panic kills the thread's
//! VM. So everything but calls out goes straight to the host here; calls out stay with the SDK, which keeps their tokens
//! and panics on the answer to a call that it does not know.
#![allow(unsafe_code)]

use std::time::Duration;

use proxy_wasm::types::LogLevel;

pub use proxy_wasm::types::Status;

/// The header maps that are used.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub enum Map {
    /// The client's request.
    Request = 0,
    /// The response to the client.
    Response = 2,
    /// The answer to a call of ours.
    CallResponse = 6,
}

/// The buffers that are used.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub enum Buffer {
    /// The request's body, as far as it is buffered.
    Request = 0,
    /// The response's body, as far as it is buffered.
    Response = 1,
    /// The body of the answer to a call of ours.
    CallResponse = 4,
    /// The plugin's configuration.
    Configuration = 7,
}

/// The kinds of metric.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub enum MetricKind {
    /// Grows only.
    Counter = 0,
    /// Goes up and down.
    Gauge = 1,
    /// Collects values in the host's buckets.
    Histogram = 2,
}

/// A host call that did not end with `Ok`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("host call {call} returned status {status}")]
pub struct HostError {
    /// The call.
    pub call: &'static str,
    /// The ABI's status number.
    pub status: u32,
}

const OK: u32 = 0;
const CAS_MISMATCH: u32 = 8;
const REQUEST_STREAM: u32 = 0;
const RESPONSE_STREAM: u32 = 1;

#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn proxy_get_current_time_nanoseconds(time: *mut u64) -> u32;
    fn proxy_set_tick_period_milliseconds(period: u32) -> u32;
    fn proxy_get_buffer_bytes(
        kind: u32,
        start: usize,
        max: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_set_buffer_bytes(
        kind: u32,
        start: usize,
        size: usize,
        data: *const u8,
        length: usize,
    ) -> u32;
    fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_header_map_value(
        map: u32,
        key: *const u8,
        key_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_replace_header_map_value(
        map: u32,
        key: *const u8,
        key_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_remove_header_map_value(map: u32, key: *const u8, key_size: usize) -> u32;
    fn proxy_get_property(
        path: *const u8,
        path_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_get_shared_data(
        key: *const u8,
        key_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
        cas: *mut u32,
    ) -> u32;
    fn proxy_set_shared_data(
        key: *const u8,
        key_size: usize,
        value: *const u8,
        value_size: usize,
        cas: u32,
    ) -> u32;
    fn proxy_register_shared_queue(name: *const u8, name_size: usize, id: *mut u32) -> u32;
    fn proxy_enqueue_shared_queue(id: u32, value: *const u8, value_size: usize) -> u32;
    fn proxy_dequeue_shared_queue(id: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_continue_stream(stream: u32) -> u32;
    fn proxy_close_stream(stream: u32) -> u32;
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
    fn proxy_set_effective_context(id: u32) -> u32;
    fn proxy_define_metric(kind: u32, name: *const u8, name_size: usize, id: *mut u32) -> u32;
    fn proxy_increment_metric(id: u32, offset: i64) -> u32;
    fn proxy_record_metric(id: u32, value: u64) -> u32;
}

/// Turns a status into a result.
fn done(call: &'static str, status: u32) -> Result<(), HostError> {
    match status {
        OK => Ok(()),
        status => Err(HostError { call, status }),
    }
}

/// Runs a host call that returns bytes in memory of this module.
fn fetch(
    call: &'static str,
    run: impl FnOnce(*mut *mut u8, *mut usize) -> u32,
) -> Result<Vec<u8>, HostError> {
    let mut data: *mut u8 = std::ptr::null_mut();
    let mut size: usize = 0;
    done(call, run(&mut data, &mut size))?;
    if data.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: on `Ok` the host has asked the SDK's allocator for exactly `size` bytes, filled them, and forgets them.
    Ok(unsafe { Vec::from_raw_parts(data, size, size) })
}

/// Nanoseconds since 1970: the host's wall clock, which may be set back. Durations are measured by `Vm::now`.
pub fn now_ns() -> u64 {
    let mut time = 0;
    // SAFETY: the host writes one u64.
    let status = unsafe { proxy_get_current_time_nanoseconds(&mut time) };
    if status == OK { time } else { 0 }
}

/// The host's log level; `Info` if the host does not say.
pub fn log_level() -> LogLevel {
    proxy_wasm::hostcalls::get_log_level().unwrap_or(LogLevel::Info)
}

/// Asks for a tick every `period`.
pub fn set_tick(period: Duration) -> Result<(), HostError> {
    let millis = u32::try_from(period.as_millis()).unwrap_or(u32::MAX);
    // SAFETY: plain numbers.
    done("set_tick_period", unsafe {
        proxy_set_tick_period_milliseconds(millis)
    })
}

/// All of a buffer.
pub fn buffer(kind: Buffer) -> Result<Vec<u8>, HostError> {
    const ALL: usize = (u32::MAX / 2) as usize;
    begin_of(kind, ALL)
}

/// The body of a call's answer, up to one byte beyond `most`: a reader sees that it is too long, and the rest takes no memory.
pub fn call_response(most: usize) -> Result<Vec<u8>, HostError> {
    begin_of(Buffer::CallResponse, most.saturating_add(1))
}

fn begin_of(kind: Buffer, most: usize) -> Result<Vec<u8>, HostError> {
    fetch("get_buffer_bytes", |data, size| {
        // SAFETY: both out-pointers are valid for the call.
        unsafe { proxy_get_buffer_bytes(kind as u32, 0, most, data, size) }
    })
}

/// Replaces all of a buffer.
pub fn set_buffer(kind: Buffer, bytes: &[u8]) -> Result<(), HostError> {
    const ALL: usize = (u32::MAX / 2) as usize;
    // SAFETY: the slice is valid for the call.
    let status =
        unsafe { proxy_set_buffer_bytes(kind as u32, 0, ALL, bytes.as_ptr(), bytes.len()) };
    done("set_buffer_bytes", status)
}

/// A header's name and value.
pub use routing::session::Header;

/// All headers of a map in one buffer: one host call, and no copy of each header.
#[derive(Default)]
pub struct Headers(Vec<u8>);

impl Headers {
    /// Reads a map.
    pub fn of(map: Map) -> Result<Self, HostError> {
        let bytes = fetch("get_header_map_pairs", |data, size| {
            // SAFETY: both out-pointers are valid for the call.
            unsafe { proxy_get_header_map_pairs(map as u32, data, size) }
        })?;
        Ok(Self(bytes))
    }

    /// The first value of a header; `wanted` is in lower case, as names are in the proxy.
    pub fn first(&self, wanted: &str) -> Option<&[u8]> {
        let mut all = pairs(&self.0);
        all.find_map(|(name, value)| (name == wanted.as_bytes()).then_some(value))
    }
}

/// All headers of a map, copied.
pub fn headers(map: Map) -> Result<Vec<Header>, HostError> {
    let read = Headers::of(map)?;
    let all = pairs(&read.0);
    Ok(all
        .map(|(name, value)| (name.to_vec(), value.to_vec()))
        .collect())
}

/// The first value of a header.
pub fn header(map: Map, name: &str) -> Option<Vec<u8>> {
    fetch("get_header_map_value", |data, size| {
        // SAFETY: the name and both out-pointers are valid for the call.
        unsafe { proxy_get_header_map_value(map as u32, name.as_ptr(), name.len(), data, size) }
    })
    .ok()
}

/// Sets a header to one value.
pub fn set_header(map: Map, name: &str, value: &[u8]) -> Result<(), HostError> {
    // SAFETY: both slices are valid for the call.
    let status = unsafe {
        proxy_replace_header_map_value(
            map as u32,
            name.as_ptr(),
            name.len(),
            value.as_ptr(),
            value.len(),
        )
    };
    done("replace_header_map_value", status)
}

/// Removes all values of a header.
pub fn remove_header(map: Map, name: &[u8]) -> Result<(), HostError> {
    // SAFETY: the slice is valid for the call.
    let status = unsafe { proxy_remove_header_map_value(map as u32, name.as_ptr(), name.len()) };
    done("remove_header_map_value", status)
}

/// A property of the stream.
pub fn property(path: &[&str]) -> Option<Vec<u8>> {
    let path = path.join("\0");
    fetch("get_property", |data, size| {
        // SAFETY: the path and both out-pointers are valid for the call.
        unsafe { proxy_get_property(path.as_ptr(), path.len(), data, size) }
    })
    .ok()
}

/// A shared value and its version.
pub fn shared(key: &str) -> Option<(Vec<u8>, u32)> {
    let mut cas = 0;
    let value = fetch("get_shared_data", |data, size| {
        // SAFETY: the key and the three out-pointers are valid for the call.
        unsafe { proxy_get_shared_data(key.as_ptr(), key.len(), data, size, &mut cas) }
    })
    .ok()?;
    Some((value, cas))
}

/// Outcome of writing a shared value.
#[derive(Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The value is written.
    Yes,
    /// Another thread has written first.
    Stale,
}

/// Writes a shared value; with a version only if the value still has that version. The version is ignored for a key that does not
/// exist.
pub fn set_shared(
    key: &str,
    value: &[u8],
    version: Option<u32>,
) -> Result<WriteOutcome, HostError> {
    // SAFETY: both slices are valid for the call.
    let status = unsafe {
        proxy_set_shared_data(
            key.as_ptr(),
            key.len(),
            value.as_ptr(),
            value.len(),
            version.unwrap_or(0),
        )
    };
    match status {
        OK => Ok(WriteOutcome::Yes),
        CAS_MISMATCH => Ok(WriteOutcome::Stale),
        status => Err(HostError {
            call: "set_shared_data",
            status,
        }),
    }
}

/// Registers a queue whose messages wake this VM's root context.
pub fn register_queue(name: &str) -> Result<u32, HostError> {
    let mut id = 0;
    // SAFETY: the name and the out-pointer are valid for the call.
    let status = unsafe { proxy_register_shared_queue(name.as_ptr(), name.len(), &mut id) };
    done("register_shared_queue", status).map(|()| id)
}

/// Puts a message into a queue.
pub fn enqueue(queue: u32, message: &[u8]) -> Result<(), HostError> {
    // SAFETY: the slice is valid for the call.
    let status = unsafe { proxy_enqueue_shared_queue(queue, message.as_ptr(), message.len()) };
    done("enqueue_shared_queue", status)
}

/// Takes a message out of a queue; `None` if it is empty.
pub fn dequeue(queue: u32) -> Option<Vec<u8>> {
    fetch("dequeue_shared_queue", |data, size| {
        // SAFETY: both out-pointers are valid for the call.
        unsafe { proxy_dequeue_shared_queue(queue, data, size) }
    })
    .ok()
}

/// Resumes a paused request.
pub fn resume_request() -> Result<(), HostError> {
    // SAFETY: a plain number.
    done("continue_stream", unsafe {
        proxy_continue_stream(REQUEST_STREAM)
    })
}

/// Resumes a paused response.
pub fn resume_response() -> Result<(), HostError> {
    // SAFETY: a plain number.
    done("continue_stream", unsafe {
        proxy_continue_stream(RESPONSE_STREAM)
    })
}

/// Breaks a response off, so that the client sees that it is incomplete.
pub fn reset_response() -> Result<(), HostError> {
    // SAFETY: a plain number.
    done("close_stream", unsafe {
        proxy_close_stream(RESPONSE_STREAM)
    })
}

/// Answers the request from the filter.
pub fn respond(status: u32, headers: &[(&str, &[u8])], body: &[u8]) -> Result<(), HostError> {
    const NO_GRPC: i32 = -1;
    /// Marks the filter's answers, in contrast to the proxy's own.
    const DETAILS: &str = "pd_router";
    let headers = encode_pairs(headers);
    // SAFETY: all slices are valid for the call.
    let status = unsafe {
        proxy_send_local_response(
            status,
            DETAILS.as_ptr(),
            DETAILS.len(),
            body.as_ptr(),
            body.len(),
            headers.as_ptr(),
            headers.len(),
            NO_GRPC,
        )
    };
    done("send_local_response", status)
}

/// Makes another context the effective one for the following host calls. An error means that the context is gone.
pub fn enter_context(id: u32) -> Result<(), HostError> {
    // SAFETY: a plain number.
    done("set_effective_context", unsafe {
        proxy_set_effective_context(id)
    })
}

/// Makes a metric known, or finds the one that another VM made known under the same name.
pub fn define_metric(kind: MetricKind, name: &str) -> Result<u32, HostError> {
    let mut id = 0;
    // SAFETY: the name and the out-pointer are valid for the call.
    let status = unsafe { proxy_define_metric(kind as u32, name.as_ptr(), name.len(), &mut id) };
    done("define_metric", status).map(|()| id)
}

/// Changes a metric by `offset`.
pub fn increment_metric(id: u32, offset: i64) -> Result<(), HostError> {
    // SAFETY: plain numbers.
    done("increment_metric", unsafe {
        proxy_increment_metric(id, offset)
    })
}

/// Sets a gauge, or adds a value to a histogram.
pub fn record_metric(id: u32, value: u64) -> Result<(), HostError> {
    // SAFETY: plain numbers.
    done("record_metric", unsafe { proxy_record_metric(id, value) })
}

/// Makes a call out, from whichever context is the SDK's active one.
///
/// # Errors
/// When the cluster is unknown, has no host, or its circuit breaker is open.
pub fn call(
    cluster: &str,
    headers: Vec<(&str, &str)>,
    body: Option<&[u8]>,
    timeout: Duration,
) -> Result<u32, Status> {
    proxy_wasm::hostcalls::dispatch_http_call(cluster, headers, body, Vec::new(), timeout)
}

/// Encodes a header map in the ABI's form: count, then all pairs of sizes, then names and values, each with a zero behind it.
fn encode_pairs(pairs: &[(&str, &[u8])]) -> Vec<u8> {
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let mut bytes = word(pairs.len()).to_vec();
    for (name, value) in pairs {
        bytes.extend(word(name.len()));
        bytes.extend(word(value.len()));
    }
    for (name, value) in pairs {
        for part in [name.as_bytes(), value] {
            bytes.extend(part);
            bytes.push(0);
        }
    }
    bytes
}

/// Reads the ABI's form of a header map; missing pairs are left out.
fn pairs(bytes: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let word = |at: usize| -> Option<usize> {
        let raw = bytes.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(raw.try_into().ok()?) as usize)
    };
    let count = word(0).unwrap_or(0).min(bytes.len() / 8);
    let mut at = 4 + count * 8;
    let mut part = move |size: usize| -> Option<&[u8]> {
        let part = bytes.get(at..at.checked_add(size)?)?;
        at = at.checked_add(size)?.checked_add(1)?;
        Some(part)
    };
    (0..count).map_while(move |index| {
        let sizes_at = 4 + index * 8;
        let name = part(word(sizes_at)?)?;
        let value = part(word(sizes_at + 4)?)?;
        Some((name, value))
    })
}
