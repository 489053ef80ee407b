//! Captures of a stream: begin, end and status.

use super::{Inner, Stream};
use crate::gpu::device::OwnCapture;
use crate::gpu::driver::{CaptureStatus, RawGraph, RawStream};
use crate::gpu::graph::{self, Graph};
use crate::{Error, Result};

impl Stream {
    /// Returns the driver's capture status of the stream.
    ///
    /// # Errors
    /// [`Error::CaptureState`] if this is the legacy default stream and another stream is
    /// capturing; [`Error::InvalidArgument`] if this is the default stream of another thread.
    pub(crate) fn capture_status(&self) -> Result<CaptureStatus> {
        self.inner.check_thread()?;
        match self.inner.capture_status()? {
            CaptureStatus::Blocked => Err(legacy_blocked()),
            status => Ok(status),
        }
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
            CaptureStatus::Blocked => Err(legacy_blocked()),
        }
    }

    /// Returns the number of the active capture, or `None` without a capture. Fails if the capture
    /// is invalid.
    pub(crate) fn capture_number(&self) -> Result<Option<u64>> {
        Ok(Self::capture(self.capture_status()?)?.map(|(capture, _)| capture))
    }

    pub(crate) fn is_capturing(&self) -> bool {
        !matches!(self.capture_status(), Ok(CaptureStatus::None) | Err(_))
    }

    pub(crate) fn begin_capture(&self) -> Result<()> {
        let gpu = &self.inner.gpu;
        if self.inner.raw == RawStream::LEGACY {
            return Err(Error::capture(
                "begin: the legacy default stream (handle 0) cannot be captured; use another \
                 stream (PyTorch: torch.cuda.Stream())",
            ));
        }
        if self.capture_status()? != CaptureStatus::None {
            return Err(Error::capture("begin: this stream is capturing already"));
        }
        if let Some(ended) = self.inner.take_capture() {
            // Code outside this crate has ended the capture that this stream began. Discards the
            // log of that capture.
            let _ = graph::end(gpu, ended);
        }
        let _no_legacy_work = gpu.begin_capture();
        gpu.driver().begin_capture(self.inner.raw)?;
        let capture = self.capture_number()?;
        if let Some(capture) = capture {
            graph::begin(gpu, capture);
        }
        self.state().capture = capture;
        if capture.is_some() {
            gpu.add_capture(OwnCapture {
                stream: self.inner.raw,
                thread: self.inner.thread,
            });
        }
        Ok(())
    }

    pub(crate) fn end_capture(&self) -> Result<Graph> {
        let gpu = &self.inner.gpu;
        self.inner.check_thread()?;
        // The capture counts as active until the driver has ended it.
        let Some(capture) = self.state().capture else {
            let detail = if self.is_capturing() {
                "end: this stream joined a capture that another stream began, or its own was \
                 begun outside this library; end it there"
            } else {
                "end: this stream is not capturing"
            };
            return Err(Error::capture(detail));
        };
        let log = graph::end(gpu, capture);
        let ended = gpu.driver().end_capture(self.inner.raw);
        self.inner.take_capture();
        let raw = ended?;
        Graph::new(gpu, raw, log)
    }
}

impl Inner {
    /// Returns the capture status. Does not call the driver for the legacy default stream while a
    /// stream of this library is capturing.
    pub(super) fn capture_status(&self) -> Result<CaptureStatus> {
        if self.raw == RawStream::LEGACY && self.gpu.has_capture() {
            return Ok(CaptureStatus::Blocked);
        }
        Ok(self.gpu.driver().capture_status(self.raw)?)
    }

    /// Removes and returns the number of the capture that this stream began.
    pub(super) fn take_capture(&self) -> Option<u64> {
        let capture = self.lock().capture.take();
        if capture.is_some() {
            self.gpu.remove_capture(self.raw);
        }
        capture
    }
}

/// Returns the error for work on the legacy default stream during a capture.
pub(super) fn legacy_blocked() -> Error {
    Error::capture(
        "the legacy default stream (handle 0) cannot be used while another stream of the GPU is \
         capturing: the work would invalidate that capture; enqueue it before the capture begins, \
         or on another stream",
    )
}
