//! The encoding in which processes exchange exported memory handles.

use core::time::Duration;
use std::os::fd::AsFd;

use crate::gpu::driver::{Driver, Export, HANDLE_BYTES, Import, RawMulticast};
use crate::gpu::share::{self, PublishedDescriptor, Token};
use crate::{Error, Result};

/// Time limit for fetching a file descriptor from another process.
const FETCH: Duration = Duration::from_secs(10);

/// An exported memory handle that can be sent to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire {
    Descriptor(Token),
    Fabric([u8; HANDLE_BYTES]),
    Ipc([u8; HANDLE_BYTES], u64),
}

impl Wire {
    /// Publishes an exported handle. Peers can fetch a file descriptor until the returned
    /// [`PublishedDescriptor`] is dropped. Other handles need no server and are copied into the
    /// result.
    pub(super) fn offer(export: Export) -> Result<(Self, Option<PublishedDescriptor>)> {
        Ok(match export {
            Export::Descriptor(fd) => {
                let held = share::publish(fd)?;
                (Self::Descriptor(held.token()), Some(held))
            }
            Export::Fabric(handle) => (Self::Fabric(handle), None),
            Export::Ipc(handle, start) => (Self::Ipc(handle, start), None),
        })
    }

    /// Fetches the handle that `rank` published and passes it to `import`.
    pub(super) fn import<R>(
        &self,
        rank: u32,
        import: impl FnOnce(Import<'_>) -> Result<R>,
    ) -> Result<R> {
        let refused = |detail: String| Error::PeerSegment { rank, detail };
        let imported = match self {
            Self::Descriptor(token) => {
                let fd = share::fetch(token, FETCH).map_err(|error| refused(error.to_string()))?;
                import(Import::Descriptor(fd.as_fd()))
            }
            Self::Fabric(handle) => import(Import::Fabric(handle)),
            Self::Ipc(handle, _) => import(Import::Ipc(handle)),
        };
        imported.map_err(|error| refused(error.to_string()))
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(80);
        match self {
            Self::Descriptor(token) => {
                bytes.push(1);
                bytes.extend(token.to_bytes());
            }
            Self::Fabric(handle) => {
                bytes.push(2);
                bytes.extend(handle);
            }
            Self::Ipc(handle, start) => {
                bytes.push(3);
                bytes.extend(handle);
                bytes.extend(start.to_le_bytes());
            }
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match kind {
            1 => Token::from_bytes(rest).ok().map(Self::Descriptor),
            2 => rest.try_into().ok().map(Self::Fabric),
            3 => {
                let (handle, start) = rest.split_first_chunk::<HANDLE_BYTES>()?;
                let start = u64::from_le_bytes(start.try_into().ok()?);
                Some(Self::Ipc(*handle, start))
            }
            _ => None,
        }
    }
}

/// A multicast object that the other ranks can import until this value is dropped.
#[derive(Debug)]
pub(crate) struct Offer {
    wire: Wire,
    _held: Option<PublishedDescriptor>,
}

impl Offer {
    pub(crate) fn new(export: Export) -> Result<Self> {
        let (wire, held) = Wire::offer(export)?;
        Ok(Self { wire, _held: held })
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.wire.to_bytes()
    }

    /// Imports the multicast object of `size` bytes that `rank` published.
    pub(crate) fn take(
        driver: &dyn Driver,
        bytes: &[u8],
        size: u64,
        rank: u32,
    ) -> Result<RawMulticast> {
        let wire = Wire::from_bytes(bytes).ok_or_else(|| Error::PeerSegment {
            rank,
            detail: "it published no multicast object".to_owned(),
        })?;
        wire.import(rank, |import| Ok(driver.import_multicast(import, size)?))
    }
}
