//! Operations of streams that wait for memory or other streams, or write memory.

use core::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::memory::{Memory, View, load, store};
use crate::program::Order;
use crate::shadow::{Mark, Shadow};

/// An operation of a stream that orders launches. The page `docs/memory-model.md` of the project
/// defines the order.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum StreamOperation {
    /// Compares the 4 bytes at `address` (`cuStreamWaitValue32`). If the condition is met, acquires
    /// their value for later launches of the device.
    Wait {
        /// A multiple of 4.
        address: u64,
        /// Comparison of the bytes with `value`.
        comparison: Comparison,
        /// The right side of the comparison.
        value: u32,
    },
    /// Writes the 4 bytes at `address` (`cuStreamWriteValue32`). The value releases the launches of
    /// the device that have ended.
    Write {
        /// A multiple of 4.
        address: u64,
        /// The new value.
        value: u32,
    },
    /// Records an event (`cuEventRecord`), which contains the launches of the device that have
    /// ended.
    Record(Mark),
    /// Waits for an event of another device (`cuStreamWaitEvent`). The launches that the event
    /// contains happen before later launches of this device. An event that was never recorded
    /// contains none.
    WaitFor(Mark),
}

/// A condition of a [`StreamOperation::Wait`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// `(word - value) as i32 >= 0`: greater or equal in cyclic order
    /// (`CU_STREAM_WAIT_VALUE_GEQ`).
    AtLeast,
    /// `word == value` (`CU_STREAM_WAIT_VALUE_EQ`).
    Equal,
    /// `word & value != 0` (`CU_STREAM_WAIT_VALUE_AND`).
    CommonBit,
}

impl Comparison {
    /// Compares the word `word` in memory with `value`.
    pub fn is_met(self, word: u32, value: u32) -> bool {
        match self {
            Self::AtLeast => word.wrapping_sub(value) as i32 >= 0,
            Self::Equal => word == value,
            Self::CommonBit => word & value != 0,
        }
    }
}

impl StreamOperation {
    /// Executes the operation for a stream of `device`. Returns false if it is a wait whose
    /// condition is not met. Must be called within [`Memory::hold`].
    pub(crate) fn execute(
        &self,
        device: u32,
        memory: &Arc<dyn Memory>,
        shadow: Option<&mut Shadow>,
    ) -> Result<bool> {
        let (address, write) = match self {
            Self::Wait { address, .. } => (*address, false),
            Self::Write { address, .. } => (*address, true),
            Self::Record(mark) => {
                if let Some(shadow) = shadow {
                    shadow.record(device, mark);
                }
                return Ok(true);
            }
            Self::WaitFor(mark) => {
                if let Some(shadow) = shadow {
                    shadow.wait_for(device, mark);
                }
                return Ok(true);
            }
        };
        if !address.is_multiple_of(4) {
            return Err(self.error(&format!("{address:#x} is not a multiple of 4")));
        }
        let mut view = View::new(Arc::clone(memory), device, Vec::new());
        view.check(address, 4, write)
            .map_err(|detail| self.error(&detail))?;
        let place = view.place(address);
        // SAFETY: `check` has found the aligned bytes, which are mapped within `Memory::hold`.
        let word = unsafe { load(address, 4, Order::Acquire) } as u32;
        match self {
            Self::Wait {
                comparison, value, ..
            } => {
                if !comparison.is_met(word, *value) {
                    return Ok(false);
                }
                if let Some(shadow) = shadow {
                    shadow.acquire_word(device, place, word);
                }
            }
            Self::Write { value, .. } => {
                if let Some(shadow) = shadow {
                    shadow.release_word(device, place, word, *value);
                }
                // SAFETY: as above, and the device may write the bytes.
                unsafe { store(address, 4, Order::Release, (*value).into()) };
            }
            Self::Record(_) | Self::WaitFor(_) => {}
        }
        Ok(true)
    }

    /// Returns an error of the operation.
    pub(crate) fn error(&self, detail: &str) -> Error {
        Error::Stream {
            operation: self.to_string(),
            detail: detail.to_owned(),
        }
    }
}

impl fmt::Display for StreamOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wait { address, .. } => write!(f, "wait of a stream for 4 bytes at {address:#x}"),
            Self::Write { address, .. } => {
                write!(f, "write of a stream of 4 bytes at {address:#x}")
            }
            Self::Record(_) => f.write_str("record of an event"),
            Self::WaitFor(_) => f.write_str("wait of a stream for an event"),
        }
    }
}
