//! Owns the host calls about the VM and the process: log, time, ticks, shared data, queues, metrics, contexts.

use std::time::{SystemTime, UNIX_EPOCH};

use wasmtime::Linker;

use super::{
    Answer, GuestCall, Host, Output, Refusal, Span, Status, finish, guest, output, slice, span,
};
use crate::host::metrics::{MetricError, MetricKind};
use crate::host::state::{Effect, HostState};

/// The VM's name in Envoy's bootstrap; queues of other VMs do not exist here.
const VM_ID: &[u8] = b"pd";

pub(super) fn link(linker: &mut Linker<HostState>) -> wasmtime::Result<()> {
    imports! { linker, guest:
        proxy_log(level, at, size) => log(guest, level, span(at, size));
        proxy_get_log_level(at) => log_level(guest, at);
        proxy_get_current_time_nanoseconds(at) => current_time(guest, at);
        proxy_set_tick_period_milliseconds(period) => set_tick(guest, period);
        proxy_set_effective_context(context) => set_effective_context(guest, context);
        proxy_done() => done(guest);
        proxy_call_foreign_function(_name, _name_size, _at, _size, _to, _to_size) => no_foreign_function(guest);
        proxy_get_status(code, at, size) => status(guest, code, output(at, size));
        proxy_get_shared_data(key, key_size, at, size, cas) =>
            shared_data(guest, span(key, key_size), output(at, size), cas);
        proxy_set_shared_data(key, key_size, at, size, cas) =>
            set_shared_data(guest, span(key, key_size), span(at, size), cas);
        proxy_register_shared_queue(name, size, id) => register_queue(guest, span(name, size), id);
        proxy_resolve_shared_queue(vm, vm_size, name, size, id) =>
            resolve_queue(guest, span(vm, vm_size), span(name, size), id);
        proxy_enqueue_shared_queue(id, at, size) => enqueue(guest, id, span(at, size));
        proxy_dequeue_shared_queue(id, at, size) => dequeue(guest, id, output(at, size));
        proxy_define_metric(kind, name, size, id) => define_metric(guest, kind, span(name, size), id);
        proxy_increment_metric(id, offset: i64) => increment_metric(guest, id, offset);
        proxy_record_metric(id, value: u64) => record_metric(guest, id, value);
        proxy_get_metric(id, at) => metric(guest, id, at);
    }
    Ok(())
}

fn log(mut guest: GuestCall<'_>, level: u32, message: Span) -> Answer {
    let (memory, _) = guest.parts()?;
    let message = String::from_utf8_lossy(slice(memory, message)?);
    match level {
        0 => tracing::trace!(target: "plugin", "{message}"),
        1 => tracing::debug!(target: "plugin", "{message}"),
        2 => tracing::info!(target: "plugin", "{message}"),
        3 => tracing::warn!(target: "plugin", "{message}"),
        4 | 5 => tracing::error!(target: "plugin", "{message}"),
        _ => return Err(Status::BadArgument.into()),
    }
    Ok(())
}

fn log_level(mut guest: GuestCall<'_>, at: u32) -> Answer {
    let levels = [
        tracing::enabled!(target: "plugin", tracing::Level::TRACE),
        tracing::enabled!(target: "plugin", tracing::Level::DEBUG),
        tracing::enabled!(target: "plugin", tracing::Level::INFO),
        tracing::enabled!(target: "plugin", tracing::Level::WARN),
    ];
    let quieter = levels.iter().take_while(|enabled| !**enabled).count();
    guest.write_u32(at, u32::try_from(quieter).unwrap_or(4))
}

fn current_time(mut guest: GuestCall<'_>, at: u32) -> Answer {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_err(|_| Status::InternalFailure)?.as_nanos();
    let now = u64::try_from(now).map_err(|_| Status::InternalFailure)?;
    guest.write(at, &now.to_le_bytes())
}

fn set_tick(mut guest: GuestCall<'_>, period: u32) -> Answer {
    guest.state().effects.push(Effect::Tick(period));
    Ok(())
}

fn set_effective_context(mut guest: GuestCall<'_>, context: u32) -> Answer {
    let state = guest.state();
    if !state.knows(context) {
        return Err(Status::BadArgument.into());
    }
    state.effective = Some(context);
    Ok(())
}

fn done(mut guest: GuestCall<'_>) -> Answer {
    let state = guest.state();
    let target = state.target();
    state.effects.push(Effect::Done(target));
    Ok(())
}

fn no_foreign_function(_: GuestCall<'_>) -> Answer {
    Err(Status::NotFound.into())
}

fn status(mut guest: GuestCall<'_>, code_at: u32, to: Output) -> Answer {
    let (code, message) = guest.state().status;
    guest.write_u32(code_at, code)?;
    guest.give(message.as_bytes(), to)
}

fn shared_data(mut guest: GuestCall<'_>, key: Span, to: Output, cas_at: u32) -> Answer {
    let (memory, state) = guest.parts()?;
    let found = state.process.shared.get(slice(memory, key)?);
    let (value, cas) = found.ok_or(Status::NotFound)?;
    guest.give(&value, to)?;
    guest.write_u32(cas_at, cas)
}

fn set_shared_data(mut guest: GuestCall<'_>, key: Span, value: Span, cas: u32) -> Answer {
    let (memory, state) = guest.parts()?;
    let (key, value) = (slice(memory, key)?, slice(memory, value)?);
    let stored = state.process.shared.set(key, value, cas);
    stored.map_err(|_| Status::CasMismatch.into())
}

fn register_queue(mut guest: GuestCall<'_>, name: Span, id_at: u32) -> Answer {
    let (memory, state) = guest.parts()?;
    let name = slice(memory, name)?;
    let owner = state.queue_owner.clone();
    let id = state.process.shared.register_queue(name, owner);
    guest.write_u32(id_at, id)
}

fn resolve_queue(mut guest: GuestCall<'_>, vm: Span, name: Span, id_at: u32) -> Answer {
    let (memory, state) = guest.parts()?;
    let (vm, name) = (slice(memory, vm)?, slice(memory, name)?);
    if !vm.is_empty() && vm != VM_ID {
        return Err(Status::NotFound.into());
    }
    let id = state.process.shared.resolve_queue(name);
    let id = id.ok_or(Status::NotFound)?;
    guest.write_u32(id_at, id)
}

fn enqueue(mut guest: GuestCall<'_>, id: u32, message: Span) -> Answer {
    let (memory, state) = guest.parts()?;
    let queued = state.process.shared.enqueue(id, slice(memory, message)?);
    queued.map_err(|_| Status::NotFound.into())
}

fn dequeue(mut guest: GuestCall<'_>, id: u32, to: Output) -> Answer {
    let message = guest.state().process.shared.dequeue(id);
    let message = message.map_err(|_| Status::NotFound)?;
    guest.give(&message.ok_or(Status::Empty)?, to)
}

fn define_metric(mut guest: GuestCall<'_>, kind: u32, name: Span, id_at: u32) -> Answer {
    let (memory, state) = guest.parts()?;
    let kind = MetricKind::from_abi(kind).ok_or(Status::BadArgument)?;
    let id = state.process.metrics.define(kind, slice(memory, name)?);
    guest.write_u32(id_at, id)
}

fn increment_metric(mut guest: GuestCall<'_>, id: u32, offset: i64) -> Answer {
    let changed = guest.state().process.metrics.increment(id, offset);
    changed.map_err(metric_refused)
}

fn record_metric(mut guest: GuestCall<'_>, id: u32, value: u64) -> Answer {
    let changed = guest.state().process.metrics.record(id, value);
    changed.map_err(metric_refused)
}

fn metric(mut guest: GuestCall<'_>, id: u32, at: u32) -> Answer {
    let value = guest.state().process.metrics.get(id);
    let value = value.map_err(metric_refused)?;
    guest.write(at, &value.to_le_bytes())
}

fn metric_refused(error: MetricError) -> Refusal {
    match error {
        MetricError::NotFound => Status::NotFound.into(),
        MetricError::BadArgument => Status::BadArgument.into(),
    }
}
