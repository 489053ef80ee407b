//! Captures of a stream: begin, end and status.

use super::Stream;
use crate::gpu::driver::{CaptureStatus, RawGraph};
use crate::gpu::graph::{self, Graph};
use crate::{Error, Result};

impl Stream {
    /// Returns the driver's capture status of the stream.
    pub(crate) fn capture_status(&self) -> Result<CaptureStatus> {
        Ok(self.inner.gpu.driver().capture_status(self.inner.raw)?)
    }

    /// Returns the number and the graph of the active capture, or `None` without a capture. Fails
    /// if the capture is invalid.
    pub(super) fn capture(status: CaptureStatus) -> Result<Option<(u64, RawGraph)>> {
        match status {
            CaptureStatus::None => Ok(None),
            CaptureStatus::Active(number, graph) => Ok(Some((number, graph))),
            CaptureStatus::Invalidated => Err(Error::capture(
                "an earlier call invalidated the capture; end it and begin another",
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
            // Code outside this crate has ended the capture that this stream began. Discards the
            // log of that capture.
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
                "end: this stream joined a capture that another stream began, or its own was \
                 begun outside this library; end it there"
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
