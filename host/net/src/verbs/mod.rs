//! Safe layer over libibverbs: devices and their ports, registered memory, and reliable connected
//! queue pairs. Knows nothing of links and keys.

mod device;
mod distance;
mod queue_pair;
mod region;
mod status;

use std::io;

use crate::{Error, TransportFailure};

pub(crate) use device::{Context, PortChoice};
pub use device::{Gid, GidKind, LinkLayer, VerbsPort, verbs_ports};
pub(crate) use queue_pair::{Completion, Opcode, QueueAddress, QueuePair, WorkRequest};
pub(crate) use region::{MemoryRegion, Registrable};

/// Returns the error of a function of libibverbs on `device`.
fn failed(function: &'static str, device: &str, error: &io::Error) -> Error {
    let hint = match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
            "; registered memory is locked, so raise the limit (ulimit -l)"
        }
        Some(libc::EACCES) => "; this user may not open /dev/infiniband/uverbs*",
        _ => "",
    };
    Error::Call {
        operation: function,
        peer: format!("the RDMA device {device}"),
        kind: TransportFailure::System,
        detail: format!("{error}{hint}"),
    }
}
