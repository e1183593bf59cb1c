//! Owns the host calls about the VM and the process: log, time, ticks, shared data, queues, metrics, contexts.

use std::time::{SystemTime, UNIX_EPOCH};

use wasmtime::Linker;

use super::{
    Answer, GuestCall, Host, Output, Refusal, Span, Status, counted, finish, guest, output, slice,
    span,
};
use crate::host::metrics::{MetricError, MetricKind};
use crate::host::state::{Effect, HostState};

/// The VM's name in Envoy's bootstrap; queues of other VMs do not exist here.
const VM_ID: &[u8] = b"pd";

pub(super) fn link(linker: &mut Linker<HostState>) -> wasmtime::Result<()> {
    link_vm(linker)?;
    link_shared(linker)?;
    link_metrics(linker)
}

fn link_vm(linker: &mut Linker<HostState>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_log",
        |host: Host<'_>, level: u32, at: u32, size: u32| {
            finish(log(guest(host), level, span(at, size)))
        },
    )?;
    linker.func_wrap("env", "proxy_get_log_level", |host: Host<'_>, at: u32| {
        finish(guest(host).write_u32(at, log_level()))
    })?;
    linker.func_wrap(
        "env",
        "proxy_get_current_time_nanoseconds",
        |host: Host<'_>, at: u32| finish(current_time(guest(host), at)),
    )?;
    linker.func_wrap(
        "env",
        "proxy_set_tick_period_milliseconds",
        |mut host: Host<'_>, period: u32| {
            counted(&mut host).effects.push(Effect::Tick(period));
            finish(Ok(()))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_set_effective_context",
        |mut host: Host<'_>, context: u32| {
            let state = counted(&mut host);
            if !state.knows(context) {
                return finish(Err(Status::BadArgument.into()));
            }
            state.effective = Some(context);
            finish(Ok(()))
        },
    )?;
    linker.func_wrap("env", "proxy_done", |mut host: Host<'_>| {
        let state = counted(&mut host);
        let target = state.target();
        state.effects.push(Effect::Done(target));
        finish(Ok(()))
    })?;
    linker.func_wrap(
        "env",
        "proxy_call_foreign_function",
        |_: Host<'_>, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32| {
            finish(Err(Status::NotFound.into()))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_get_status",
        |host: Host<'_>, code: u32, at: u32, size: u32| {
            finish(status(guest(host), code, output(at, size)))
        },
    )?;
    Ok(())
}

fn link_shared(linker: &mut Linker<HostState>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_get_shared_data",
        |host: Host<'_>, key: u32, key_size: u32, at: u32, size: u32, cas: u32| {
            let (key, to) = (span(key, key_size), output(at, size));
            finish(shared_data(guest(host), key, to, cas))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_set_shared_data",
        |host: Host<'_>, key: u32, key_size: u32, at: u32, size: u32, cas: u32| {
            let (key, value) = (span(key, key_size), span(at, size));
            finish(set_shared_data(guest(host), key, value, cas))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_register_shared_queue",
        |host: Host<'_>, name: u32, size: u32, id: u32| {
            finish(register_queue(guest(host), span(name, size), id))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_resolve_shared_queue",
        |host: Host<'_>, vm: u32, vm_size: u32, name: u32, size: u32, id: u32| {
            let (vm, name) = (span(vm, vm_size), span(name, size));
            finish(resolve_queue(guest(host), vm, name, id))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_enqueue_shared_queue",
        |host: Host<'_>, id: u32, at: u32, size: u32| {
            finish(enqueue(guest(host), id, span(at, size)))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_dequeue_shared_queue",
        |host: Host<'_>, id: u32, at: u32, size: u32| {
            finish(dequeue(guest(host), id, output(at, size)))
        },
    )?;
    Ok(())
}

fn link_metrics(linker: &mut Linker<HostState>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_define_metric",
        |host: Host<'_>, kind: u32, name: u32, size: u32, id: u32| {
            finish(define_metric(guest(host), kind, span(name, size), id))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_increment_metric",
        |mut host: Host<'_>, id: u32, offset: i64| {
            let changed = counted(&mut host).process.metrics.increment(id, offset);
            finish(changed.map_err(metric_refused))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_record_metric",
        |mut host: Host<'_>, id: u32, value: u64| {
            let changed = counted(&mut host).process.metrics.record(id, value);
            finish(changed.map_err(metric_refused))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_get_metric",
        |host: Host<'_>, id: u32, at: u32| finish(metric(guest(host), id, at)),
    )?;
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

fn log_level() -> u32 {
    let levels = [
        tracing::enabled!(target: "plugin", tracing::Level::TRACE),
        tracing::enabled!(target: "plugin", tracing::Level::DEBUG),
        tracing::enabled!(target: "plugin", tracing::Level::INFO),
        tracing::enabled!(target: "plugin", tracing::Level::WARN),
    ];
    let quieter = levels.iter().take_while(|enabled| !**enabled).count();
    u32::try_from(quieter).unwrap_or(4)
}

fn current_time(mut guest: GuestCall<'_>, at: u32) -> Answer {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_err(|_| Status::InternalFailure)?.as_nanos();
    let now = u64::try_from(now).map_err(|_| Status::InternalFailure)?;
    guest.write(at, &now.to_le_bytes())
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
