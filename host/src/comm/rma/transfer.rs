//! Put and get: copies elements to and from a peer's part.

use fusewire_device::call::Operation;
use fusewire_kernels::window::{NONE, WINDOW_GET, WINDOW_PUT, WindowGetParams, WindowPutParams};

use super::Window;
use crate::Result;
use crate::comm::observe::OpInfo;
use crate::comm::submit::{PreparedOp, invalid};
use crate::comm::work::Work;
use crate::tensor::{Input, Tensor, TensorUse};

impl Window {
    /// Writes `source` to `peer`'s part, starting at element `at`. `peer` may be this rank.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a wrong type, rank or range,
    /// before any data moves; the communicator's failure.
    pub fn put(&self, source: &Tensor, peer: u32, at: usize) -> Result<()> {
        self.comm.run(&self.prepare_put(source, peer, at, None)?)
    }

    /// Enqueues [`Window::put`].
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn put_async(&self, source: &Tensor, peer: u32, at: usize) -> Result<Work> {
        self.comm.submit(&self.prepare_put(source, peer, at, None)?)
    }

    /// Runs [`Window::put`], then adds 1 to signal `signal` at the peer.
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn put_signal(&self, source: &Tensor, peer: u32, at: usize, signal: u32) -> Result<()> {
        self.comm
            .run(&self.prepare_put(source, peer, at, Some(signal))?)
    }

    /// Enqueues [`Window::put_signal`].
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn put_signal_async(
        &self,
        source: &Tensor,
        peer: u32,
        at: usize,
        signal: u32,
    ) -> Result<Work> {
        self.comm
            .submit(&self.prepare_put(source, peer, at, Some(signal))?)
    }

    /// Reads `target.len()` elements of `peer`'s part, starting at element `at`.
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn get(&self, target: &Tensor, peer: u32, at: usize) -> Result<()> {
        self.comm.run(&self.prepare_get(target, peer, at)?)
    }

    /// Enqueues [`Window::get`].
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn get_async(&self, target: &Tensor, peer: u32, at: usize) -> Result<Work> {
        self.comm.submit(&self.prepare_get(target, peer, at)?)
    }

    /// Checks a transfer of `tensor` to or from element `at` of a part. Returns the byte offset.
    fn range(&self, operation: &'static str, tensor: &Tensor, at: usize) -> Result<u64> {
        self.comm.check_device(operation, tensor)?;
        if tensor.dtype() != self.tensor.dtype() {
            return Err(invalid(
                operation,
                format!(
                    "elements of {}, the window has {}",
                    tensor.dtype().name(),
                    self.tensor.dtype().name()
                ),
            ));
        }
        if at
            .checked_add(tensor.len())
            .is_none_or(|end| end > self.tensor.len())
        {
            return Err(invalid(
                operation,
                format!(
                    "elements {at}..{} of a window of {}",
                    at.saturating_add(tensor.len()),
                    self.tensor.len()
                ),
            ));
        }
        Ok((at * tensor.dtype().size()) as u64)
    }

    fn prepare_put<'a>(
        &'a self,
        source: &'a Tensor,
        peer: u32,
        at: usize,
        signal: Option<u32>,
    ) -> Result<PreparedOp<'a>> {
        self.peer("put", peer)?;
        let offset = self.range("put", source, at)?;
        if let Some(signal) = signal {
            self.check_signal("put", signal)?;
        }
        let call = self.call(Operation::Put, source.dtype() as u8, peer);
        let params = WindowPutParams {
            header: self
                .comm
                .header(call, (source.len() * source.dtype().size()) as u64),
            window: self.device_window(),
            source: Input::from(source).raw_bytes(),
            offset,
            signal: signal.map_or(NONE, u64::from),
        };
        let op_info = OpInfo {
            call,
            input_count: source.len() as u64,
            output_count: 0,
        };
        let own = (peer == self.comm.rank()).then_some(TensorUse::Write(&self.tensor));
        let tensors = [Some(TensorUse::Read(source)), own, None];
        Ok(self.bind(PreparedOp::new(
            &self.comm,
            &WINDOW_PUT,
            params,
            tensors,
            false,
            op_info,
        )))
    }

    fn prepare_get<'a>(
        &'a self,
        target: &'a Tensor,
        peer: u32,
        at: usize,
    ) -> Result<PreparedOp<'a>> {
        self.peer("get", peer)?;
        let offset = self.range("get", target, at)?;
        let call = self.call(Operation::Get, target.dtype() as u8, peer);
        let params = WindowGetParams {
            header: self
                .comm
                .header(call, (target.len() * target.dtype().size()) as u64),
            window: self.device_window(),
            target: Input::from(target).raw_bytes(),
            offset,
        };
        let op_info = OpInfo {
            call,
            input_count: 0,
            output_count: target.len() as u64,
        };
        let own = (peer == self.comm.rank()).then_some(TensorUse::Read(&self.tensor));
        let tensors = [Some(TensorUse::Write(target)), own, None];
        Ok(self.bind(PreparedOp::new(
            &self.comm,
            &WINDOW_GET,
            params,
            tensors,
            false,
            op_info,
        )))
    }
}
