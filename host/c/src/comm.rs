//! Communicators: creation, queries and destruction.

use core::ffi::{c_char, c_int, c_void};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use fusewire::store::{Store, StoreSecret, TcpStore, TcpStoreServer};
use fusewire::{Communicator, Device, Stream, new_comm};

use crate::error::{Outcome, argument, bootstrap, give, guard, text};
use crate::handle::live;
use crate::region::Region;
use crate::types::{FusewireOptions, ParsedOptions};

/// A communicator on a stream: the type `fusewire_comm`.
#[derive(Debug)]
pub struct FusewireComm {
    /// The communicator on this handle's stream.
    pub(crate) comm: Communicator,
    pub(crate) shared: Arc<Shared>,
}

/// State that all handles of a communicator share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The communicator on its own stream.
    home: Communicator,
    /// Windows of the communicator, by the first address of their memory.
    pub(crate) regions: Mutex<BTreeMap<usize, Region>>,
    /// The store server, if this rank serves the store. As the last field, it is dropped after the
    /// other fields. Communicators from a split share the server, so it lives as long as the last
    /// of them.
    server: Option<Arc<TcpStoreServer>>,
}

impl FusewireComm {
    fn boxed(home: Communicator, server: Option<Arc<TcpStoreServer>>) -> *mut Self {
        let comm = home.clone();
        let shared = Arc::new(Shared {
            home,
            regions: Mutex::default(),
            server,
        });
        Box::into_raw(Box::new(Self { comm, shared }))
    }

    /// Returns a reference to the handle at `comm`, or an error if `comm` is null.
    ///
    /// # Safety
    /// `comm` is null or a handle that lives as long as the result is used.
    pub(crate) unsafe fn of<'a>(operation: &str, comm: *const Self) -> Outcome<&'a Self> {
        // SAFETY: the caller passes null or a live handle.
        unsafe { live(operation, "the communicator is", comm) }
    }
}

/// Parses a device. Null selects the CPU.
///
/// # Safety
/// `device` is null or a C string that lives as long as the call.
unsafe fn device_of(operation: &str, device: *const c_char) -> Outcome<Device> {
    // SAFETY: the caller passes null or a C string that lives as long as the call.
    Ok(unsafe { text(operation, "device", device, Some("cpu"))? }.parse()?)
}

/// Joins the communicator `world` as the rank that the environment variables name.
///
/// # Safety
/// `device` is null or a C string. `options` is null or readable for its `struct_size` bytes.
/// `comm` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_from_env(
    device: *const c_char,
    options: *const FusewireOptions,
    comm: *mut *mut FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_comm_from_env";
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "comm", comm, core::ptr::null_mut())? };
        // SAFETY: the caller passes null or a C string that lives as long as the call.
        let device = unsafe { device_of(NAME, device)? };
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let parsed = unsafe { ParsedOptions::read(NAME, options)? };
        if parsed.store_is_served {
            return Err(argument(
                NAME,
                "store_is_served is for fusewire_comm_create; here the environment variable \
                 TORCHELASTIC_USE_AGENT_STORE decides",
            ));
        }
        let made = new_comm(&parsed.backend, device, "world", parsed.options)?;
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "comm", comm, FusewireComm::boxed(made, None)) }
    })
}

/// Joins the communicator `name` as rank `rank` of `size`. The rendezvous uses the store at the
/// address `store`.
///
/// # Safety
/// The preconditions of [`fusewire_comm_from_env`]; `store` and `name` are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_create(
    device: *const c_char,
    rank: u32,
    size: u32,
    store: *const c_char,
    name: *const c_char,
    options: *const FusewireOptions,
    comm: *mut *mut FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_comm_create";
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "comm", comm, core::ptr::null_mut())? };
        // SAFETY: the caller passes null or a C string that lives as long as the call.
        let device = unsafe { device_of(NAME, device)? };
        // SAFETY: the caller passes null or a C string that lives as long as the call.
        let address = unsafe { text(NAME, "store", store, None)? };
        // SAFETY: the caller passes null or a C string that lives as long as the call.
        let name = unsafe { text(NAME, "name", name, Some("world"))? };
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let mut parsed = unsafe { ParsedOptions::read(NAME, options)? };
        if size == 0 || rank >= size {
            return Err(argument(
                NAME,
                format!("rank {rank} of {size}; ranks are 0 to size - 1"),
            ));
        }
        let (host, port) = host_and_port(NAME, address)?;
        let serves = rank == 0 && !parsed.store_is_served;
        let server = if serves {
            let bound = TcpStoreServer::bind_with((host, port), StoreSecret::from_env());
            let bound = bound.map_err(|error| {
                bootstrap(
                    NAME,
                    format!(
                        "rank 0 cannot serve the store at {address} ({error}); give a free port at \
                         an address of its host, or set store_is_served if another process \
                         serves it"
                    ),
                )
            });
            Some(Arc::new(bound?))
        } else {
            None
        };
        let client: Arc<dyn Store> = Arc::new(
            TcpStore::connect(host, port, parsed.options.timeout).map_err(fusewire::Error::from)?,
        );
        parsed.options.store = Some(client);
        parsed.options.rank_size = Some((rank, size));
        let made = new_comm(&parsed.backend, device, name, parsed.options)?;
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "comm", comm, FusewireComm::boxed(made, server)) }
    })
}

/// Parses `host:port`; the host may be an IPv6 address in brackets.
fn host_and_port<'a>(operation: &str, address: &'a str) -> Outcome<(&'a str, u16)> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| {
        let inner = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let host = match inner {
            Some(inner) => inner,
            None if host.contains(':') => return None,
            None => host,
        };
        let port = port.parse().ok().filter(|port| *port != 0)?;
        (!host.is_empty()).then_some((host, port))
    });
    parts.ok_or_else(|| {
        argument(
            operation,
            format!(
                "the store \"{address}\" is not host:port, such as 10.0.0.1:29500 or [::1]:29500"
            ),
        )
    })
}

/// Creates another handle of the communicator. `choose` gets the communicator on its own stream and
/// returns the communicator of the new handle.
///
/// # Safety
/// `comm` is null or a live handle; `on_stream` is null or writable.
unsafe fn on_stream_of(
    operation: &str,
    comm: *const FusewireComm,
    on_stream: *mut *mut FusewireComm,
    choose: impl FnOnce(&Communicator) -> Outcome<Communicator>,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(operation, "on_stream", on_stream, core::ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(operation, comm)? };
        let made = Box::new(FusewireComm {
            comm: choose(&handle.shared.home)?,
            shared: Arc::clone(&handle.shared),
        });
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(operation, "on_stream", on_stream, Box::into_raw(made)) }
    })
}

/// Creates another handle of the communicator, whose operations are enqueued on `stream`. Null is
/// the legacy default stream.
///
/// # Safety
/// `comm` is null or a live handle. `stream` is a default stream, or a stream of the communicator's
/// device that outlives its uses. `on_stream` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_on_stream(
    comm: *const FusewireComm,
    stream: *mut c_void,
    on_stream: *mut *mut FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_comm_on_stream";
    let choose = |home: &Communicator| {
        if !home.device().is_gpu() {
            return Err(argument(
                NAME,
                "the communicator is on the CPU, which has no driver streams: call \
                 fusewire_comm_on_own_stream or fusewire_comm_on_new_stream",
            ));
        }
        // SAFETY: the caller passes a stream of this device that outlives its uses.
        Ok(home.on(&unsafe { Stream::adopt(home.device(), stream)? }))
    };
    // SAFETY: the preconditions of `on_stream_of` are also preconditions of this function.
    unsafe { on_stream_of(NAME, comm, on_stream, choose) }
}

/// Creates another handle of the communicator, on the communicator's own stream.
///
/// # Safety
/// `comm` is null or a live handle; `on_stream` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_on_own_stream(
    comm: *const FusewireComm,
    on_stream: *mut *mut FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_comm_on_own_stream";
    // SAFETY: the preconditions of `on_stream_of` are also preconditions of this function.
    unsafe { on_stream_of(NAME, comm, on_stream, |home| Ok(home.clone())) }
}

/// Creates another handle of the communicator, on a new stream of the device.
///
/// # Safety
/// `comm` is null or a live handle; `on_stream` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_on_new_stream(
    comm: *const FusewireComm,
    on_stream: *mut *mut FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_comm_on_new_stream";
    let choose = |home: &Communicator| Ok(home.on(&Stream::on_device(home.device())?));
    // SAFETY: the preconditions of `on_stream_of` are also preconditions of this function.
    unsafe { on_stream_of(NAME, comm, on_stream, choose) }
}

/// Creates a communicator of the listed ranks, in the order of the list. Stores null if the list is
/// empty. All ranks of the parent communicator must call this function.
///
/// # Safety
/// `comm` is null or a live handle; `ranks` is null or has `count` elements; `name` is null or a C
/// string; `part` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_split(
    comm: *const FusewireComm,
    ranks: *const u32,
    count: u32,
    name: *const c_char,
    part: *mut *mut FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_comm_split";
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "part", part, core::ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        // SAFETY: the caller passes null or a C string that lives as long as the call.
        let name = unsafe { text(NAME, "name", name, Some("part"))? };
        if ranks.is_null() && count > 0 {
            return Err(argument(NAME, "ranks is NULL"));
        }
        let ranks = if count == 0 {
            &[][..]
        } else {
            // SAFETY: `ranks` is not null; the caller guarantees `count` readable elements.
            unsafe { core::slice::from_raw_parts(ranks, count as usize) }
        };
        let Some(made) = handle.comm.split(ranks, name)? else {
            return Ok(());
        };
        let made = FusewireComm::boxed(made, handle.shared.server.clone());
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "part", part, made) }
    })
}

/// Destroys a handle. Destroying the last handle of a communicator waits for all work and ends the
/// communicator on this rank.
///
/// # Safety
/// `comm` is null or a live handle that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_destroy(comm: *mut FusewireComm) -> c_int {
    guard(|| {
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: `comm` is not null, so it came from `Box::into_raw`. The caller passes a handle
        // that nothing uses any more, so it is freed only once.
        let FusewireComm { comm, shared } = *unsafe { Box::from_raw(comm) };
        let Some(_last) = Arc::into_inner(shared) else {
            return Ok(());
        };
        Ok(comm.finalize()?)
    })
}

/// Stops the communicator on all ranks. May be called from any thread.
///
/// # Safety
/// `comm` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_abort(comm: *const FusewireComm) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        unsafe { FusewireComm::of("fusewire_comm_abort", comm)? }
            .comm
            .abort();
        Ok(())
    })
}

/// Waits for all work on the handle's stream.
///
/// # Safety
/// `comm` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_synchronize(comm: *const FusewireComm) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of("fusewire_comm_synchronize", comm)? };
        Ok(handle.comm.synchronize()?)
    })
}

/// Loads in advance everything that the first operations would otherwise load.
///
/// # Safety
/// `comm` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_warm_up(comm: *const FusewireComm) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of("fusewire_comm_warm_up", comm)? };
        Ok(handle.comm.warm_up()?)
    })
}

/// Returns the code of the communicator's failure, or `FUSEWIRE_OK`.
///
/// # Safety
/// `comm` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_failure(comm: *const FusewireComm) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of("fusewire_comm_failure", comm)? };
        handle
            .comm
            .failure()
            .map_or(Ok(()), |error| Err(error.into()))
    })
}

/// Stores the number of this rank in `rank`.
///
/// # Safety
/// `comm` is null or a live handle; `rank` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_rank(comm: *const FusewireComm, rank: *mut u32) -> c_int {
    const NAME: &str = "fusewire_comm_rank";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "rank", rank, handle.comm.rank()) }
    })
}

/// Stores the number of ranks in `size`.
///
/// # Safety
/// `comm` is null or a live handle; `size` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_size(comm: *const FusewireComm, size: *mut u32) -> c_int {
    const NAME: &str = "fusewire_comm_size";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "size", size, handle.comm.size()) }
    })
}

/// Stores in `bytes` the size of the workspace that the communicator holds on its device.
///
/// # Safety
/// `comm` is null or a live handle; `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_comm_workspace_bytes(
    comm: *const FusewireComm,
    bytes: *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_comm_workspace_bytes";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "bytes", bytes, handle.comm.workspace_bytes()) }
    })
}

/// Stores in `bytes` the size of the workspace that each rank of a communicator with these options
/// would hold.
///
/// # Safety
/// The preconditions of [`fusewire_comm_from_env`]; `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_workspace_bytes(
    device: *const c_char,
    size: u32,
    options: *const FusewireOptions,
    bytes: *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_workspace_bytes";
    guard(|| {
        // SAFETY: the caller passes null or a C string that lives as long as the call.
        let device = unsafe { device_of(NAME, device)? };
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let parsed = unsafe { ParsedOptions::read(NAME, options)? };
        if parsed.backend != "fusewire" {
            return Err(argument(
                NAME,
                format!("the workspace of backend {} is not known", parsed.backend),
            ));
        }
        let needed = parsed.options.workspace_bytes(device, size)?;
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "bytes", bytes, needed) }
    })
}

#[cfg(test)]
mod tests {
    use super::host_and_port;

    #[test]
    fn addresses() {
        let parse = |text| host_and_port("test", text).ok();
        assert_eq!(parse("10.0.0.1:29500"), Some(("10.0.0.1", 29500)));
        assert_eq!(parse("[::1]:1"), Some(("::1", 1)));
        for wrong in [
            "",
            "host",
            "host:",
            ":1",
            "host:0",
            "host:65536",
            "::1:1",
            "[]:1",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
