//! Operations of streams that wait for memory or other devices, or write memory.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::memory::{Memory, View, load, store};
use crate::program::Order;
use crate::shadow::Shadow;

/// An operation of a stream that orders launches.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamOperation {
    /// The stream has waited until the 4 bytes at `address` had the value `value`
    /// (`cuStreamWaitValue32`). What the write of this value releases happens before the launches
    /// of the device that follow.
    Waited {
        /// A multiple of 4.
        address: u64,
        /// The value of the bytes after the wait.
        value: u32,
    },
    /// The stream writes the 4 bytes at `address` (`cuStreamWriteValue32`). The launches of the
    /// device that have ended happen before threads that acquire the value.
    Write {
        /// A multiple of 4.
        address: u64,
        /// The new value.
        value: u32,
    },
    /// The stream has waited for an event of another device (`cuStreamWaitEvent`). The launches of
    /// that device that have ended happen before the launches of the device that follow.
    WaitedFor {
        /// Number of the other device.
        device: u32,
    },
}

impl StreamOperation {
    /// Executes the operation for a stream of `device`. Must be called within [`Memory::hold`].
    pub(crate) fn execute(
        self,
        device: u32,
        memory: &Arc<dyn Memory>,
        shadow: Option<&mut Shadow>,
    ) -> Result<()> {
        let (address, write) = match self {
            Self::Waited { address, .. } => (address, false),
            Self::Write { address, .. } => (address, true),
            Self::WaitedFor { device: other } => {
                if let Some(shadow) = shadow {
                    shadow.order(other, device);
                }
                return Ok(());
            }
        };
        if !address.is_multiple_of(4) {
            return Err(self.error(&format!("{address:#x} is not a multiple of 4")));
        }
        let mut view = View::new(Arc::clone(memory), device, Vec::new());
        view.check(address, 4, write)
            .map_err(|detail| self.error(&detail))?;
        let place = view.place(address);
        match (self, shadow) {
            (Self::Waited { value, .. }, Some(shadow)) => {
                shadow.acquire_word(device, place, value);
            }
            (Self::Write { value, .. }, shadow) => {
                // SAFETY: `check` has found the bytes, which are mapped within `Memory::hold`.
                let before = unsafe { load(address, 4, Order::Weak) };
                if let Some(shadow) = shadow {
                    shadow.release_word(device, place, before as u32, value);
                }
                // SAFETY: as above, and the device may write the bytes.
                unsafe { store(address, 4, Order::Release, value.into()) };
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns an error of the operation.
    pub(crate) fn error(self, detail: &str) -> Error {
        Error::Stream {
            operation: self.to_string(),
            detail: detail.to_owned(),
        }
    }
}

impl core::fmt::Display for StreamOperation {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Waited { address, .. } => write!(f, "wait of a stream for the word {address:#x}"),
            Self::Write { address, .. } => write!(f, "write of a stream to the word {address:#x}"),
            Self::WaitedFor { device } => write!(f, "wait of a stream for device {device}"),
        }
    }
}
