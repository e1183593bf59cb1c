//! Owns the host calls about a stream: its header maps, its bodies, its flow, and calls made on its behalf.

use bytes::Bytes;
use wasmtime::Linker;

use super::{
    Answer, GuestCall, Host, Output, Refusal, Span, Status, finish, guest, output, slice, span,
};
use crate::host::maps::Headers;
use crate::host::state::{
    BodySlot, Command, Effect, HostState, LocalReply, MapSlot, PreparedCall, StreamState,
};
use crate::host::upstream::{CallRefused, OutgoingRequest};

pub(super) fn link(linker: &mut Linker<HostState>) -> wasmtime::Result<()> {
    imports! { linker, guest:
        proxy_get_header_map_pairs(map, at, size) => map_pairs(guest, map, output(at, size));
        proxy_get_header_map_size(map, at) => map_size(guest, map, at);
        proxy_set_header_map_pairs(map, at, size) => set_map_pairs(guest, map, span(at, size));
        proxy_get_header_map_value(map, key, key_size, at, size) =>
            map_value(guest, map, span(key, key_size), output(at, size));
        proxy_replace_header_map_value(map, key, key_size, value, value_size) =>
            edit_map(guest, map, span(key, key_size), span(value, value_size), Headers::set);
        proxy_add_header_map_value(map, key, key_size, value, value_size) =>
            edit_map(guest, map, span(key, key_size), span(value, value_size), Headers::add);
        proxy_remove_header_map_value(map, key, key_size) =>
            edit_map(guest, map, span(key, key_size), span(0, 0), |headers, name, _| headers.remove(name));
        proxy_get_buffer_bytes(buffer, start, max, at, size) =>
            buffer_bytes(guest, buffer, span(start, max), output(at, size));
        proxy_get_buffer_status(buffer, size, flags) => buffer_status(guest, buffer, size, flags);
        proxy_set_buffer_bytes(buffer, start, length, at, size) =>
            set_buffer_bytes(guest, buffer, span(start, length), span(at, size));
        proxy_continue_stream(stream) => continue_stream(guest, stream);
        proxy_close_stream(stream) => close_stream(guest, stream);
        proxy_send_local_response(
            status, details, details_size, body, body_size, headers, headers_size, grpc_status: i32
        ) => send_local_response(guest, ReplySpans {
            status,
            details: span(details, details_size),
            body: span(body, body_size),
            headers: span(headers, headers_size),
            grpc_status,
        });
        proxy_http_call(
            cluster, cluster_size, headers, headers_size, body, body_size, _trailers, _trailers_size, timeout_ms, token
        ) => http_call(guest, CallSpans {
            cluster: span(cluster, cluster_size),
            headers: span(headers, headers_size),
            body: span(body, body_size),
            timeout_ms,
        }, token);
    }
    Ok(())
}

/// A map that the plugin may read now. `None`: not visible at this time.
fn readable(state: &HostState, map: u32) -> Result<Option<&Headers>, Status> {
    match map {
        0..=3 => Ok(state
            .streams
            .get(&state.target())
            .and_then(|stream| stream.readable(slot(stream, map)))),
        4 | 5 => Ok(None),
        6 => Ok(state.call_reply.as_ref().and_then(|it| it.headers.as_ref())),
        7 => Ok(state.call_reply.as_ref().map(|reply| &reply.trailers)),
        _ => Err(Status::BadArgument),
    }
}

fn slot(stream: &StreamState, map: u32) -> &MapSlot {
    match map {
        0 => &stream.request_headers,
        1 => &stream.request_trailers,
        2 => &stream.response_headers,
        _ => &stream.response_trailers,
    }
}

/// A map that the plugin may change now.
fn changeable(state: &mut HostState, map: u32) -> Result<&mut Headers, Status> {
    let stream = state.target_stream().ok_or(Status::BadArgument)?;
    let slot = match map {
        0 => &mut stream.request_headers,
        1 => &mut stream.request_trailers,
        2 => &mut stream.response_headers,
        3 => &mut stream.response_trailers,
        _ => return Err(Status::BadArgument),
    };
    slot.open().ok_or(Status::BadArgument)
}

fn map_pairs(mut guest: GuestCall<'_>, map: u32, to: Output) -> Answer {
    let pairs = readable(guest.state(), map)?.map(Headers::serialize);
    let none = || Headers::default().serialize();
    guest.give(&pairs.unwrap_or_else(none), to)
}

fn map_size(mut guest: GuestCall<'_>, map: u32, at: u32) -> Answer {
    let headers = readable(guest.state(), map)?.ok_or(Status::BadArgument)?;
    let size = u32::try_from(headers.bytes()).unwrap_or(u32::MAX);
    guest.write_u32(at, size)
}

fn set_map_pairs(mut guest: GuestCall<'_>, map: u32, pairs: Span) -> Answer {
    let (memory, state) = guest.parts()?;
    let pairs = Headers::parse(slice(memory, pairs)?).map_err(|_| Status::SerializationFailure)?;
    *changeable(state, map)? = pairs;
    Ok(())
}

fn map_value(mut guest: GuestCall<'_>, map: u32, key: Span, to: Output) -> Answer {
    let (memory, state) = guest.parts()?;
    let key = slice(memory, key)?;
    let Some(headers) = readable(state, map)? else {
        return Err(unseen_map(state).into());
    };
    let value = headers.get(key).ok_or(Status::NotFound)?.to_vec();
    guest.give(&value, to)
}

/// Status for an invisible map: absent maps are normal when a stream is logged, and the plugin's mistake at any other time.
fn unseen_map(state: &HostState) -> Status {
    match state.streams.get(&state.target()) {
        Some(stream) if stream.logging => Status::NotFound,
        _ => Status::BadArgument,
    }
}

fn edit_map(
    mut guest: GuestCall<'_>,
    map: u32,
    key: Span,
    value: Span,
    edit: impl FnOnce(&mut Headers, &[u8], &[u8]),
) -> Answer {
    let (memory, state) = guest.parts()?;
    let (key, value) = (slice(memory, key)?, slice(memory, value)?);
    edit(changeable(state, map)?, key, value);
    Ok(())
}

fn body_slot(state: &mut HostState, buffer: u32) -> Option<&mut BodySlot> {
    let stream = state.target_stream()?;
    match buffer {
        0 => Some(&mut stream.request_body),
        1 => Some(&mut stream.response_body),
        _ => None,
    }
}

/// The bytes of a buffer; a body out of the plugin's reach is empty, as in Envoy.
fn buffer(state: &mut HostState, buffer: u32) -> Result<&[u8], Status> {
    match buffer {
        0 | 1 => match body_slot(state, buffer) {
            Some(body) if body.open => Ok(&body.bytes),
            Some(_) => Ok(&[]),
            None => Err(Status::NotFound),
        },
        4 => match &state.call_reply {
            Some(reply) => Ok(&reply.body),
            None => Err(Status::NotFound),
        },
        6 => Ok(&[]),
        7 => Ok(&state.process.plugin_config),
        _ => Err(Status::NotFound),
    }
}

fn buffer_bytes(mut guest: GuestCall<'_>, number: u32, range: Span, to: Output) -> Answer {
    let bytes = buffer(guest.state(), number)?;
    let start = (range.at as usize).min(bytes.len());
    let end = start.saturating_add(range.size as usize).min(bytes.len());
    let size = u32::try_from(end - start).map_err(|_| Status::InternalFailure)?;
    let address = guest.allocate(size)?;
    // Copied straight from the buffer: bodies are megabytes, and an intermediate copy would be expensive.
    let (memory, state) = guest.parts()?;
    let bytes = &buffer(state, number)?[start..end];
    let target = memory
        .get_mut(address as usize..)
        .and_then(|memory| memory.get_mut(..bytes.len()))
        .ok_or(Status::InvalidMemoryAccess)?;
    target.copy_from_slice(bytes);
    guest.write_u32(to.pointer, address)?;
    guest.write_u32(to.size, size)
}

fn buffer_status(mut guest: GuestCall<'_>, number: u32, size: u32, flags: u32) -> Answer {
    let length = buffer(guest.state(), number)?.len();
    guest.write_u32(size, u32::try_from(length).unwrap_or(u32::MAX))?;
    guest.write_u32(flags, 0)
}

/// Envoy's rules: at the start, prepend or replace everything; at the end, append; nothing in between.
fn set_buffer_bytes(mut guest: GuestCall<'_>, number: u32, range: Span, bytes: Span) -> Answer {
    let (memory, state) = guest.parts()?;
    let bytes = slice(memory, bytes)?;
    let body = body_slot(state, number).ok_or(Status::BadArgument)?;
    if !body.open {
        return Err(Status::BadArgument.into());
    }
    let size = body.bytes.len();
    if range.at == 0 && range.size == 0 {
        let kept = body.bytes.split();
        body.bytes.extend_from_slice(bytes);
        body.bytes.unsplit(kept);
        return Ok(());
    }
    if range.at == 0 && range.size as usize >= size {
        body.bytes.clear();
        body.bytes.extend_from_slice(bytes);
        return Ok(());
    }
    if range.at as usize >= size {
        body.bytes.extend_from_slice(bytes);
        return Ok(());
    }
    Err(Status::BadArgument.into())
}

fn continue_stream(mut guest: GuestCall<'_>, stream: u32) -> Answer {
    let command = match stream {
        0 => Command::ContinueRequest,
        1 => Command::ContinueResponse,
        _ => return Err(Status::BadArgument.into()),
    };
    guest.state().command(command);
    Ok(())
}

fn close_stream(mut guest: GuestCall<'_>, stream: u32) -> Answer {
    if stream > 1 {
        return Err(Status::BadArgument.into());
    }
    guest.state().command(Command::Reset);
    Ok(())
}

struct ReplySpans {
    status: u32,
    details: Span,
    body: Span,
    headers: Span,
    grpc_status: i32,
}

fn send_local_response(mut guest: GuestCall<'_>, reply: ReplySpans) -> Answer {
    let (memory, state) = guest.parts()?;
    let headers = slice(memory, reply.headers)?;
    let mut headers = Headers::parse(headers).map_err(|_| Status::SerializationFailure)?;
    let mut body = Bytes::copy_from_slice(slice(memory, reply.body)?);
    let mut status = u16::try_from(reply.status).map_err(|_| Status::BadArgument)?;
    if reply.grpc_status >= 0 {
        headers.set(b"content-type", b"application/grpc");
        headers.set(b"grpc-status", reply.grpc_status.to_string().as_bytes());
        headers.set(b"grpc-message", &body);
        (status, body) = (200, Bytes::new());
    }
    let details = String::from_utf8_lossy(slice(memory, reply.details)?).into_owned();
    state.command(Command::Reply(LocalReply {
        status,
        details,
        flags: 0,
        headers,
        body,
    }));
    Ok(())
}

struct CallSpans {
    cluster: Span,
    headers: Span,
    body: Span,
    timeout_ms: u32,
}

fn http_call(mut guest: GuestCall<'_>, call: CallSpans, token_at: u32) -> Answer {
    let (memory, state) = guest.parts()?;
    let cluster = String::from_utf8_lossy(slice(memory, call.cluster)?);
    let mut headers =
        Headers::parse(slice(memory, call.headers)?).map_err(|_| Status::BadArgument)?;
    let body = Bytes::copy_from_slice(slice(memory, call.body)?);
    if !body.is_empty() {
        headers.set(b"content-length", body.len().to_string().as_bytes());
    }
    let cluster = state.process.clusters.get(cluster.as_ref());
    let cluster = cluster.ok_or(Status::BadArgument)?;
    let request = OutgoingRequest::call(&headers, cluster).map_err(refused_call)?;
    let token = state.next_token();
    state.effects.push(Effect::Call(Box::new(PreparedCall {
        token,
        request,
        body,
        timeout_ms: call.timeout_ms,
    })));
    guest.write_u32(token_at, token)
}

fn refused_call(refused: CallRefused) -> Refusal {
    match refused {
        CallRefused::Headers => Status::BadArgument.into(),
        CallRefused::NoHost => Status::InternalFailure.into(),
    }
}
