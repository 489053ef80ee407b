//! Captures: whether a stream is in one, their beginning and end.

use super::Stream;
use crate::gpu::driver::{CaptureStatus, RawGraph};
use crate::gpu::graph::{self, Graph};
use crate::{Error, Result};

impl Stream {
    /// What the driver says of the stream's capture.
    pub(crate) fn capture_status(&self) -> Result<CaptureStatus> {
        self.inner.gpu.driver().capture_status(self.inner.raw)
    }

    /// The capture that the stream is in.
    pub(super) fn capture(status: CaptureStatus) -> Result<Option<(u64, RawGraph)>> {
        match status {
            CaptureStatus::None => Ok(None),
            CaptureStatus::Active(number, graph) => Ok(Some((number, graph))),
            CaptureStatus::Invalidated => Err(Error::capture(
                "the capture became invalid by an earlier call; end it, and begin anew",
            )),
        }
    }

    pub(crate) fn is_capturing(&self) -> bool {
        !matches!(self.capture_status(), Ok(CaptureStatus::None) | Err(_))
    }

    pub(crate) fn begin_capture(&self) -> Result<()> {
        let gpu = &self.inner.gpu;
        if self.is_capturing() {
            return Err(Error::capture("begin: this stream is capturing already"));
        }
        if let Some(ended) = self.state().capture.take() {
            // Somebody else has ended the capture that began here.
            let _ = graph::end(gpu, ended);
        }
        gpu.driver().begin_capture(self.inner.raw)?;
        let capture = Self::capture(self.capture_status()?)?.map(|(capture, _)| capture);
        if let Some(capture) = capture {
            graph::begin(gpu, capture);
        }
        self.state().capture = capture;
        Ok(())
    }

    pub(crate) fn end_capture(&self) -> Result<Graph> {
        let gpu = &self.inner.gpu;
        let Some(capture) = self.state().capture.take() else {
            let detail = if self.is_capturing() {
                "end: this stream joined a capture that another stream began, or its own was begun by somebody else; \
                 end it there"
            } else {
                "end: this stream is not capturing"
            };
            return Err(Error::capture(detail));
        };
        let log = graph::end(gpu, capture);
        let raw = gpu.driver().end_capture(self.inner.raw)?;
        Graph::new(gpu, raw, log)
    }
}
