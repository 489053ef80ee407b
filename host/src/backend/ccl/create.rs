//! Creates communicators of NCCL, NCCLX, RCCL and RCCLX through a rendezvous in the store, and
//! adopts existing communicators of these libraries.

use core::ffi::{c_char, c_void};
use core::time::Duration;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use fusewire_ccl_sys::sys::{NCCL_UNIQUE_ID_BYTES, ncclUniqueId};
use fusewire_ccl_sys::{Comm, Config, Kind, Library};

use super::Ccl;
use crate::backend::{Backend, Setup, backend_error};
use crate::device::Device;
use crate::options::Options;
use crate::{Error, Result};

/// Name of each backend, and the library that implements it.
pub(in crate::backend) const NAMES: [(&str, Kind); 4] = [
    ("nccl", Kind::Nccl),
    ("ncclx", Kind::Ncclx),
    ("rccl", Kind::Rccl),
    ("rcclx", Kind::Rcclx),
];

const READY: &[u8] = b"+";

/// Creates this rank's part of a communicator of backend `name`.
pub(in crate::backend) fn create(
    name: &'static str,
    kind: Kind,
    setup: &Setup,
) -> Result<Arc<dyn Backend>> {
    let init = |detail: String| backend_error(name, "init", detail);
    let prepared = prepare(name, kind, setup);
    let (library, config) = agree(setup, &prepared, init)?;
    let id = if setup.rank == 0 {
        let id = library.unique_id().map_err(|error| init(error.to_string()));
        announce(setup, &id)?;
        id?
    } else {
        learn(setup, init)?
    };
    // All ranks have opened their libraries and set their configurations, so `init_rank` does not
    // wait for a rank that cannot join.
    let (size, rank) = (setup.size as usize, setup.rank as usize);
    let comm = match config {
        None => library.init_rank(size, id, rank),
        Some(config) => library.init_rank_with(size, id, rank, config),
    };
    let comm = comm.map_err(|error| init(error.to_string()))?;
    Ok(Arc::new(Ccl::new(comm, setup.options.timeout)?))
}

/// Returns the configuration that the hints set, or `None` if they set none.
fn config(library: &Library, setup: &Setup) -> fusewire_ccl_sys::Result<Option<Config>> {
    let mut config = None;
    for (name, value) in &setup.options.hints {
        let name = match name.as_str() {
            "cga_cluster_size" => "cgaClusterSize",
            name if Config::NAMES.contains(&name) => name,
            _ => continue,
        };
        config
            .get_or_insert_with(|| Config::new(*library))
            .set(name, value)?;
    }
    Ok(config)
}

/// A library, and the configuration of the communicator if hints set one.
type Prepared = (Library, Option<Config>);

/// Opens the library. Returns an error if the library cannot access the device's memory, or a hint
/// is wrong.
fn prepare(name: &str, kind: Kind, setup: &Setup) -> Result<Prepared> {
    let path = setup.options.hints.get("library_path").map(Path::new);
    let library = Library::open(kind, path)
        .map_err(|error| backend_error(name, "open", error.to_string()))?;
    if setup.device == Device::Cpu && !library.uses_host_memory() {
        let detail = format!(
            "{name} needs a GPU; this communicator's device is {}",
            setup.device
        );
        return Err(backend_error(name, "init", detail));
    }
    let config =
        config(&library, setup).map_err(|error| backend_error(name, "init", error.to_string()))?;
    Ok((library, config))
}

/// Reports to rank 0 that this rank is ready or has failed. Rank 0 waits for the reports of all
/// ranks. If a rank has failed, rank 0 stores the first error under [`ID`], where all ranks read
/// it.
fn agree<'a>(
    setup: &Setup,
    prepared: &'a Result<Prepared>,
    init: impl Fn(String) -> Error,
) -> Result<&'a Prepared> {
    let store = &*setup.store;
    if setup.rank != 0 {
        let word = match prepared {
            Ok(_) => READY.to_vec(),
            Err(error) => error.to_string().into_bytes(),
        };
        store.set(&ready(setup.rank), &word)?;
        return prepared.as_ref().map_err(Error::clone);
    }
    let until = Instant::now() + setup.options.timeout;
    let others = prepared.as_ref().map_err(Error::clone).and_then(|library| {
        for rank in 1..setup.size {
            let left = until.saturating_duration_since(Instant::now());
            let word = store.get(&ready(rank), left)?;
            if word != READY {
                let said = String::from_utf8_lossy(&word).into_owned();
                return Err(init(format!(
                    "rank {rank} cannot create the communicator: {said}"
                )));
            }
        }
        Ok(library)
    });
    if let Err(error) = &others {
        store.set(ID, error.to_string().as_bytes())?;
    }
    others
}

fn ready(rank: u32) -> String {
    format!("ready/{rank}")
}

/// Key under which rank 0 stores [`READY`] and the id, or an error message.
const ID: &str = "id";

fn announce(setup: &Setup, id: &Result<ncclUniqueId>) -> Result<()> {
    let word = match id {
        Ok(id) => READY
            .iter()
            .copied()
            .chain(id.internal.iter().map(|byte| byte.cast_unsigned()))
            .collect(),
        Err(error) => error.to_string().into_bytes(),
    };
    Ok(setup.store.set(ID, &word)?)
}

fn learn(setup: &Setup, init: impl Fn(String) -> Error) -> Result<ncclUniqueId> {
    let word = setup.store.get(ID, setup.options.timeout)?;
    let bytes = word
        .strip_prefix(READY)
        .and_then(|id| <[u8; NCCL_UNIQUE_ID_BYTES]>::try_from(id).ok());
    let Some(bytes) = bytes else {
        let said = String::from_utf8_lossy(&word);
        return Err(init(format!("rank 0 cannot: {said}")));
    };
    Ok(ncclUniqueId {
        internal: bytes.map(|byte| byte as c_char),
    })
}

/// Adopts a communicator that another part of the program has created with the C interface. `raw`
/// is an `ncclComm_t`. Backend `name` (`nccl`, `ncclx`, `rccl` or `rcclx`) opens its library at
/// `path`, or at the default location. This must be the library file that created `raw`. The
/// returned backend can be passed to [`crate::Communicator::adopt`]. Dropping the backend destroys
/// the communicator.
///
/// # Safety
/// `raw` must be a live, initialized, blocking communicator of that library. No other code may use
/// or free it after this call.
///
/// # Errors
/// [`Error::InvalidArgument`] if `name` is none of these names or `raw` is null. [`Error::Backend`]
/// if the library cannot be opened, or if it does not accept the communicator. In the latter case,
/// the communicator is aborted.
pub unsafe fn adopt_nccl(
    name: &str,
    path: Option<&Path>,
    raw: *mut c_void,
) -> Result<Arc<dyn Backend>> {
    let refuse = |detail: String| Error::InvalidArgument {
        operation: "adopt_nccl",
        detail,
    };
    let Some((name, kind)) = NAMES.into_iter().find(|(known, _)| *known == name) else {
        let names = NAMES.map(|(name, _)| name).join(", ");
        return Err(refuse(format!("\"{name}\" is none of {names}")));
    };
    if raw.is_null() {
        return Err(refuse("the communicator is null".to_owned()));
    }
    let failed = |error: fusewire_ccl_sys::Error| backend_error(name, "adopt", error.to_string());
    let library = Library::open(kind, path).map_err(failed)?;
    // SAFETY: `raw` is not null (checked above), and the caller guarantees that it is a live
    // communicator of this library.
    let comm = unsafe { Comm::from_raw(library, raw) }.map_err(failed)?;
    let timeout: Duration = Options::default().timeout;
    Ok(Arc::new(Ccl::new(comm, timeout)?))
}
