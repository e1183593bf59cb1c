//! Owns the imports of proxy-wasm ABI 0.2.1: their access to the guest's memory, their answers, and their registration.

/// Registers imports: each with its name, its arguments, `u32` unless another type is given, and its answer to the calling guest.
macro_rules! imports {
    ($linker:ident, $guest:ident: $($name:ident($($argument:ident $(: $kind:ty)?),*) => $answer:expr;)*) => {
        $($linker.func_wrap(
            "env",
            stringify!($name),
            |host: Host<'_> $(, $argument: imports!(@type $($kind)?))*| {
                let $guest = guest(host);
                finish($answer)
            },
        )?;)*
    };
    (@type) => { u32 };
    (@type $kind:ty) => { $kind };
}

mod http;
mod process;
mod property;

use wasmtime::{Caller, Linker, Module, Val};

use super::state::HostState;

/// A host call's answer, by its number in the ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Not found.
    NotFound = 1,
    /// The arguments are invalid, or not valid now.
    BadArgument = 2,
    /// A serialized map cannot be parsed.
    SerializationFailure = 3,
    /// A pointer outside the guest's memory.
    InvalidMemoryAccess = 6,
    /// The queue is empty.
    Empty = 7,
    /// Another VM or thread changed the value.
    CasMismatch = 8,
    /// The operation failed.
    InternalFailure = 10,
    /// This host does not implement the call.
    Unimplemented = 12,
}

/// Why a host call does not return Ok.
enum Refusal {
    /// The status is returned to the guest.
    Status(Status),
    /// The guest trapped while the host was using its allocator.
    Trap(wasmtime::Error),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Refusal {
        Refusal::Status(status)
    }
}

type Answer = Result<(), Refusal>;

/// The guest that calls, with the host's state.
type Host<'a> = Caller<'a, HostState>;

/// A range of the guest's memory, as pointer and length.
#[derive(Clone, Copy)]
struct Span {
    at: u32,
    size: u32,
}

fn span(at: u32, size: u32) -> Span {
    Span { at, size }
}

/// Output parameters for bytes from the host: the addresses of the pointer and of the length.
#[derive(Clone, Copy)]
struct Output {
    pointer: u32,
    size: u32,
}

fn output(pointer: u32, size: u32) -> Output {
    Output { pointer, size }
}

/// The guest during one host call.
struct GuestCall<'a>(Host<'a>);

/// The guest during a host call that begins, and is counted.
fn guest(mut caller: Host<'_>) -> GuestCall<'_> {
    caller.data_mut().host_calls += 1;
    GuestCall(caller)
}

impl GuestCall<'_> {
    fn state(&mut self) -> &mut HostState {
        self.0.data_mut()
    }

    /// The guest's memory and the host's state together, so that bytes can be read without a copy.
    fn parts(&mut self) -> Result<(&mut [u8], &mut HostState), Refusal> {
        let guest = self.0.data().guest.as_ref();
        let memory = guest.ok_or(Status::InternalFailure)?.memory;
        Ok(memory.data_and_store_mut(&mut self.0))
    }

    fn write(&mut self, at: u32, bytes: &[u8]) -> Answer {
        let (memory, _) = self.parts()?;
        let start = at as usize;
        let target = start
            .checked_add(bytes.len())
            .and_then(|end| memory.get_mut(start..end))
            .ok_or(Status::InvalidMemoryAccess)?;
        target.copy_from_slice(bytes);
        Ok(())
    }

    fn write_u32(&mut self, at: u32, value: u32) -> Answer {
        self.write(at, &value.to_le_bytes())
    }

    /// Copies bytes into memory from the guest's own allocator. No bytes become a null pointer, as in Envoy.
    fn give(&mut self, bytes: &[u8], to: Output) -> Answer {
        let size = u32::try_from(bytes.len()).map_err(|_| Status::InternalFailure)?;
        let address = self.allocate(size)?;
        self.write(address, bytes)?;
        self.write_u32(to.pointer, address)?;
        self.write_u32(to.size, size)
    }

    fn allocate(&mut self, size: u32) -> Result<u32, Refusal> {
        if size == 0 {
            return Ok(0);
        }
        let guest = self.0.data().guest.as_ref();
        let allocate = guest.ok_or(Status::InternalFailure)?.allocate.clone();
        let address = allocate.call(&mut self.0, size).map_err(Refusal::Trap)?;
        if address == 0 {
            return Err(Status::InternalFailure.into());
        }
        Ok(address)
    }
}

fn slice(memory: &[u8], span: Span) -> Result<&[u8], Status> {
    let start = span.at as usize;
    start
        .checked_add(span.size as usize)
        .and_then(|end| memory.get(start..end))
        .ok_or(Status::InvalidMemoryAccess)
}

fn finish(answer: Answer) -> wasmtime::Result<u32> {
    match answer {
        Ok(()) => Ok(Status::Ok as u32),
        Err(Refusal::Status(status)) => Ok(status as u32),
        Err(Refusal::Trap(error)) => Err(error),
    }
}

/// Registers every host call. Other names of the ABI that the module imports answer `Unimplemented`, so that a plugin which never
/// calls them still loads; names outside of the ABI stay missing, and instantiation reports them.
pub fn link(linker: &mut Linker<HostState>, module: &Module) -> wasmtime::Result<()> {
    for import in module.imports() {
        let Some(function) = import.ty().func().cloned() else {
            continue;
        };
        if import.module() != "env" || !import.name().starts_with("proxy_") {
            continue;
        }
        linker.func_new("env", import.name(), function, |_, _, results| {
            if let Some(result) = results.first_mut() {
                *result = Val::I32(Status::Unimplemented as i32);
            }
            Ok(())
        })?;
    }
    linker.allow_shadowing(true);
    http::link(linker)?;
    process::link(linker)?;
    property::link(linker)?;
    Ok(())
}
