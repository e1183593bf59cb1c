//! Owns the properties that the plugin may read about its stream, its route and itself.

use wasmtime::Linker;

use super::{Answer, GuestCall, Host, Output, Span, Status, finish, guest, output, slice, span};
use crate::host::routes::Route;
use crate::host::state::{HostState, PLUGIN_NAME, StreamInfo};

pub(super) fn link(linker: &mut Linker<HostState>) -> wasmtime::Result<()> {
    imports! { linker, guest:
        proxy_get_property(path, path_size, at, size) => get_property(guest, span(path, path_size), output(at, size));
        proxy_set_property(path, path_size, at, size) => set_property(guest, span(path, path_size), span(at, size));
    }
    Ok(())
}

fn get_property(mut guest: GuestCall<'_>, path: Span, to: Output) -> Answer {
    let (memory, state) = guest.parts()?;
    let path = slice(memory, path)?;
    let value = find(state, path).ok_or(Status::NotFound)?;
    guest.give(&value, to)
}

fn set_property(mut guest: GuestCall<'_>, path: Span, value: Span) -> Answer {
    let (memory, state) = guest.parts()?;
    let (path, value) = (slice(memory, path)?, slice(memory, value)?);
    let stream = state.target_stream().ok_or(Status::NotFound)?;
    stream.properties.insert(path.to_vec(), value.to_vec());
    Ok(())
}

/// The value under a path whose parts are separated by zero bytes. Integers are eight bytes, little-endian.
fn find(state: &mut HostState, path: &[u8]) -> Option<Vec<u8>> {
    match path {
        b"plugin_name" | b"plugin_root_id" | b"plugin_vm_id" => return Some(PLUGIN_NAME.into()),
        _ => {}
    }
    let stream = state.target_stream()?;
    if let Some(value) = stream.properties.get(path) {
        return Some(value.clone());
    }
    route_property(&stream.info.route, path).or_else(|| stream_property(&stream.info, path))
}

fn route_property(route: &Route, path: &[u8]) -> Option<Vec<u8>> {
    match path {
        b"xds\0cluster_name" => Some(route.cluster.clone().into_bytes()),
        b"xds\0route_name" | b"xds\0route_metadata\0filter_metadata\0pd_router\0pool" => {
            route.pool.clone().map(String::into_bytes)
        }
        _ => None,
    }
}

fn stream_property(info: &StreamInfo, path: &[u8]) -> Option<Vec<u8>> {
    match path {
        b"source\0address" => Some(info.source.to_string().into_bytes()),
        b"source\0port" => Some(i64::from(info.source.port()).to_le_bytes().to_vec()),
        b"connection\0id" => Some(info.connection.to_le_bytes().to_vec()),
        b"request\0id" if !info.request_id.is_empty() => Some(info.request_id.clone()),
        b"upstream\0address" => Some(info.upstream?.to_string().into_bytes()),
        b"upstream\0request_attempt_count" => Some(info.attempts.to_le_bytes().to_vec()),
        b"response\0code" => Some(i64::from(info.response_code?).to_le_bytes().to_vec()),
        b"response\0code_details" if !info.code_details.is_empty() => {
            Some(info.code_details.clone().into_bytes())
        }
        b"response\0flags" => Some(info.flags.to_le_bytes().to_vec()),
        _ => None,
    }
}
