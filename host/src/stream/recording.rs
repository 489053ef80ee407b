//! The capture state of a stream of any device.

use super::other_device;
use crate::Result;
use crate::gpu::driver::CaptureStatus;

/// The capture state of a stream. An operation queries the state only once, because the query is a
/// driver call on a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recording(pub(super) RecordingKind);

#[derive(Clone, Copy, Debug)]
pub(super) enum RecordingKind {
    Cpu,
    // No `Cpu(bool)`: the compiler would copy the bytes after the tag by unaligned loads, which
    // wait for the stores before them.
    CpuCapturing,
    Gpu(CaptureStatus),
}

impl Recording {
    /// Returns true if the stream is capturing or its capture is invalid.
    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        match self.0 {
            RecordingKind::Cpu => false,
            RecordingKind::CpuCapturing => true,
            RecordingKind::Gpu(status) => status != CaptureStatus::None,
        }
    }

    /// Returns the capture status that the GPU driver reported.
    pub(super) fn status(self) -> Result<CaptureStatus> {
        match self.0 {
            RecordingKind::Gpu(status) => Ok(status),
            _ => Err(other_device("the capture")),
        }
    }
}
