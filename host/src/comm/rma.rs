//! One-sided communication: windows with put, get, signals, counters and barriers.

use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::session::{Call, Operation};
use fusewire_device::window::{Compare, DeviceWindow, pad_bytes};
use fusewire_kernels::window::{
    NONE, WINDOW_GET, WINDOW_PUT, WINDOW_SIGNAL, WINDOW_WAIT, WindowGetParams, WindowPutParams,
    WindowSignalParams, WindowWaitParams,
};

use super::observe::Note;
use super::submit::{Prepared, invalid};
use super::windows::Part;
use super::{Communicator, Inner, Work};
use crate::gpu::Scratch;
use crate::options::Algorithm;
use crate::tensor::{Allocation, Tensor};
use crate::{Error, Result};

/// Words of a window; torchcomms' defaults. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct WindowOptions {
    /// Signals; the number of ranks where it is `None`.
    pub signals: Option<u32>,
    /// Counters; the number of ranks where it is `None`.
    pub counters: Option<u32>,
    /// Barriers; 1.
    pub barriers: u32,
}

impl Default for WindowOptions {
    fn default() -> Self {
        Self {
            signals: None,
            counters: None,
            barriers: 1,
        }
    }
}

/// How a peer's part of a window is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowAccess {
    /// By load and store: there is one copy of the memory.
    Unified,
    /// By the network only.
    Separate,
}

/// What a signal does to the slot that it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalUpdate {
    /// Stores the value.
    Set(u64),
    /// Adds the value, wrapping.
    Add(u64),
}

/// Symmetric memory with signals: every rank contributes a tensor of the same length, and each can write, read and
/// signal every other one's without its help.
///
/// Operations are enqueued in the communicator's order (the plain methods also wait for their end); they are not
/// collective. A signal covers the puts that this rank has issued to that peer on this communicator before.
/// What is overwritten when is the program's protocol: a put does not ask whether its target is free.
///
/// ```
/// use fusewire::{Compare, DType, Options, SignalUpdate, WindowOptions, run_threads};
///
/// run_threads(2, &Options::default(), |comm| {
///     let window = comm.alloc_window(DType::F32, 4, WindowOptions::default())?;
///     let next = (comm.rank() + 1) % comm.size();
///     let mine = comm.alloc(DType::F32, 4)?;
///     mine.copy_from(&[comm.rank() as f32; 4])?;
///     window.put(&mine, next, 0)?;
///     window.signal(next, 0, SignalUpdate::Add(1))?;
///     window.wait_signal(0, None, Compare::GreaterEqual, 1)?;
///     assert_eq!(window.tensor().to_vec::<f32>()?, [next as f32; 4]);
///     window.free()
/// })
/// .into_iter()
/// .collect::<Result<(), _>>()?;
/// # Ok::<(), fusewire::Error>(())
/// ```
#[derive(Clone)]
pub struct Window {
    comm: Communicator,
    tensor: Tensor,
    shared: Arc<Shared>,
}

/// What a window's launches need.
struct Shared {
    device: Box<DeviceWindow>,
    /// The same in a GPU's memory.
    on_gpu: Option<Scratch>,
    inner: Arc<Inner>,
    freed: AtomicBool,
    /// Every rank's memory of both windows: mapped as long as a launch that names it may run, also after the end of
    /// the window.
    _parts: [Vec<Part>; 2],
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("window", &self.shared.device.window)
            .field("dtype", &self.tensor.dtype())
            .field("count", &self.tensor.len())
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// Whether [`Communicator::new_window`] works: where the ranks reach each other by load and store.
    pub fn supports_window(&self) -> bool {
        self.inner.backend.is_none()
    }

    /// A window over `tensor` of each rank: memory from [`Tensor::new`] or [`Communicator::alloc`], of the same
    /// type and length on all ranks, at any place of its allocation. Collectives on the tensor then need no copy. All
    /// ranks together.
    ///
    /// # Errors
    /// [`Error::Communicator`] when ranks differ; [`Error::InvalidArgument`] on backends without windows.
    pub fn new_window(&self, tensor: &Tensor, options: WindowOptions) -> Result<Window> {
        if !self.supports_window() {
            return Err(invalid(
                "new_window",
                format!("backend {} has no windows", self.backend()),
            ));
        }
        self.inner.check()?;
        let (id, parts) = self.register_parts(tensor)?;
        let size = self.size();
        let signals = options.signals.unwrap_or(size);
        let counters = options.counters.unwrap_or(size);
        let barriers = options.barriers;
        let bytes = pad_bytes(size, signals, counters, barriers).max(8);
        let pad = self.alloc(DType::U8, bytes as usize)?;
        let pad_id = self.inner.windows.place(pad.as_ptr(), 1).window();
        let pads = (0..size)
            .filter_map(|rank| self.inner.windows.part(pad_id as usize, rank))
            .collect();
        let device = Box::new(DeviceWindow {
            constants: self.constants() as u64,
            window: id as u32,
            pad: pad_id,
            offset: 0,
            bytes: (tensor.len() * tensor.dtype().size()) as u64,
            signals,
            counters,
            barriers,
            size,
        });
        let on_gpu = self.inner.on_gpu.as_ref();
        let on_gpu = on_gpu
            .map(|on_gpu| Scratch::holding(on_gpu.gpu(), bytemuck::bytes_of(&*device)))
            .transpose()?;
        Ok(Window {
            comm: self.clone(),
            tensor: tensor.clone(),
            shared: Arc::new(Shared {
                device,
                on_gpu,
                inner: Arc::clone(&self.inner),
                freed: AtomicBool::new(false),
                _parts: [parts, pads],
            }),
        })
    }

    /// A window over `count` zeroed elements of new memory. All ranks together.
    ///
    /// # Errors
    /// As [`Communicator::new_window`] and [`Tensor::new`].
    pub fn alloc_window(
        &self,
        dtype: DType,
        count: usize,
        options: WindowOptions,
    ) -> Result<Window> {
        self.new_window(&self.tensor(dtype, count)?, options)
    }

    /// Registers `tensor` (the same type and length on all ranks), so that collectives work on it without a copy. All
    /// ranks together. The registration lasts until [`Communicator::tensor_deregister`].
    ///
    /// # Errors
    /// As [`Communicator::new_window`].
    pub fn tensor_register(&self, tensor: &Tensor) -> Result<Registration> {
        self.inner.check()?;
        if let Some(backend) = &self.inner.backend {
            let bytes = tensor.len() * tensor.dtype().size();
            // SAFETY: the registration keeps the tensor alive.
            let handle = unsafe { backend.register(tensor.as_ptr(), bytes)? };
            return Ok(Registration {
                window: None,
                handle,
                _tensor: tensor.clone(),
            });
        }
        let (id, _) = self.register_parts(tensor)?;
        Ok(Registration {
            window: Some(id),
            handle: 0,
            _tensor: tensor.clone(),
        })
    }

    /// Ends a registration. All ranks together; waits until no operation of any rank uses the memory.
    ///
    /// # Errors
    /// The communicator's failure: then peers may still use the memory, and it stays registered.
    pub fn tensor_deregister(&self, registration: Registration) -> Result<()> {
        match (&self.inner.backend, registration.window) {
            (Some(backend), _) => backend.deregister(registration.handle),
            (None, Some(id)) => self.end_windows(&[id]),
            (None, None) => Ok(()),
        }
    }

    /// Shares the memory behind `tensor` with all ranks as a new window.
    fn register_parts(&self, tensor: &Tensor) -> Result<(usize, Vec<Part>)> {
        let (memory, offset) = tensor.memory();
        let bytes = (tensor.len() * tensor.dtype().size()) as u64;
        let pieces = self.share_memory("register", memory)?;
        // Where each rank's part begins is its own affair; how long it is, is not.
        let mine = [offset, bytes, tensor.dtype() as u64];
        let mut all = vec![0u64; 3 * self.size() as usize];
        self.all_gather_single(all.as_mut_slice(), mine.as_slice())?;
        if let Some(rank) = all.chunks(3).position(|theirs| theirs[1..] != mine[1..]) {
            return Err(Error::Communicator {
                name: self.inner.name.clone(),
                detail: format!(
                    "rank {rank} registers {} bytes, rank {} {bytes} (or types differ): they must be equal",
                    all[3 * rank + 1],
                    self.rank()
                ),
            });
        }
        let offsets = all.chunks(3).map(|theirs| theirs[0]);
        let parts: Vec<Part> = pieces.into_iter().zip(offsets).collect();
        for (rank, (memory, offset)) in parts.iter().enumerate() {
            if offset
                .checked_add(bytes)
                .is_none_or(|end| end > memory.bytes())
            {
                return Err(Error::PeerSegment {
                    rank: rank as u32,
                    detail: format!(
                        "its part of {bytes} bytes at {offset} leaves its memory of {}",
                        memory.bytes()
                    ),
                });
            }
        }
        let id = self.add_window(parts.clone(), bytes)?;
        self.meet("window")?;
        Ok((id, parts))
    }

    /// Ends windows once no rank uses them.
    fn end_windows(&self, ids: &[usize]) -> Result<()> {
        if self.stream().is_capturing() {
            return Err(Error::CaptureState {
                detail: "a window cannot end while its communicator's stream is capturing"
                    .to_owned(),
            });
        }
        self.barrier()?;
        for id in ids {
            self.inner.windows.remove(*id);
        }
        Ok(())
    }
}

/// A registered tensor: see [`Communicator::tensor_register`].
#[derive(Debug)]
pub struct Registration {
    window: Option<usize>,
    handle: u64,
    _tensor: Tensor,
}

impl Window {
    /// This rank's part.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// This window with another stream: as [`Communicator::on`].
    #[must_use]
    pub fn on(&self, stream: &crate::stream::Stream) -> Self {
        Self {
            comm: self.comm.on(stream),
            ..self.clone()
        }
    }

    /// Number of signals.
    pub fn signals(&self) -> u32 {
        self.shared.device.signals
    }

    /// The window as kernels take it: an address that is valid as long as the window or a clone of it.
    pub fn device_window(&self) -> *const DeviceWindow {
        match &self.shared.on_gpu {
            Some(on_gpu) => on_gpu.address() as *const DeviceWindow,
            None => &raw const *self.shared.device,
        }
    }

    /// How `peer`'s part is reached.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank out of range.
    pub fn attributes(&self, peer: u32) -> Result<WindowAccess> {
        self.peer("attributes", peer)?;
        Ok(WindowAccess::Unified)
    }

    /// `peer`'s part as a tensor of this rank: the same memory. The program orders its accesses with the peer's,
    /// by signals or barriers.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank out of range, or a window that was freed.
    pub fn map_remote(&self, peer: u32) -> Result<Tensor> {
        self.peer("map_remote", peer)?;
        let id = self.shared.device.window as usize;
        let Some((memory, offset)) = self.comm.inner.windows.part(id, peer) else {
            return Err(invalid("map_remote", "the window was freed".to_owned()));
        };
        let allocation = Allocation::new(memory, None);
        Ok(Tensor::at(
            allocation,
            offset,
            self.tensor.dtype(),
            self.tensor.len(),
        ))
    }

    /// Writes `source` to `peer`'s part, from element `at` on. Putting to oneself works.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a wrong type, rank or range, before anything moves; the communicator's failure.
    pub fn put(&self, source: &Tensor, peer: u32, at: usize) -> Result<()> {
        self.comm.run(&self.prepare_put(source, peer, at, None)?)
    }

    /// As [`Window::put`], enqueued.
    ///
    /// # Errors
    /// As there.
    pub fn put_async(&self, source: &Tensor, peer: u32, at: usize) -> Result<Work> {
        self.comm
            .enqueue(&self.prepare_put(source, peer, at, None)?)
    }

    /// As [`Window::put`], then adds 1 to signal `signal` at the peer.
    ///
    /// # Errors
    /// As there.
    pub fn put_signal(&self, source: &Tensor, peer: u32, at: usize, signal: u32) -> Result<()> {
        self.comm
            .run(&self.prepare_put(source, peer, at, Some(signal))?)
    }

    /// As [`Window::put_signal`], enqueued.
    ///
    /// # Errors
    /// As there.
    pub fn put_signal_async(
        &self,
        source: &Tensor,
        peer: u32,
        at: usize,
        signal: u32,
    ) -> Result<Work> {
        self.comm
            .enqueue(&self.prepare_put(source, peer, at, Some(signal))?)
    }

    /// Reads `target.len()` elements of `peer`'s part, from element `at` on.
    ///
    /// # Errors
    /// As [`Window::put`].
    pub fn get(&self, target: &Tensor, peer: u32, at: usize) -> Result<()> {
        self.comm.run(&self.prepare_get(target, peer, at)?)
    }

    /// As [`Window::get`], enqueued.
    ///
    /// # Errors
    /// As there.
    pub fn get_async(&self, target: &Tensor, peer: u32, at: usize) -> Result<Work> {
        self.comm.enqueue(&self.prepare_get(target, peer, at)?)
    }

    /// Changes this rank's slot of signal `signal` at `peer`.
    ///
    /// # Errors
    /// As [`Window::put`].
    pub fn signal(&self, peer: u32, signal: u32, update: SignalUpdate) -> Result<()> {
        self.comm.run(&self.prepare_signal(peer, signal, update)?)
    }

    /// As [`Window::signal`], enqueued.
    ///
    /// # Errors
    /// As there.
    pub fn signal_async(&self, peer: u32, signal: u32, update: SignalUpdate) -> Result<Work> {
        self.comm
            .enqueue(&self.prepare_signal(peer, signal, update)?)
    }

    /// Waits until signal `signal` of this rank, as `sender` has left it or summed over all ranks, compares with
    /// `value`. Signals keep their values: what is awaited grows, or is reset where nobody can be signalling.
    ///
    /// # Errors
    /// As [`Window::put`]; [`Error::Timeout`] names the sender.
    pub fn wait_signal(
        &self,
        signal: u32,
        sender: Option<u32>,
        compare: Compare,
        value: u64,
    ) -> Result<()> {
        self.comm
            .run(&self.prepare_wait(signal, sender, compare, value)?)
    }

    /// As [`Window::wait_signal`], enqueued: what is behind it on the stream waits.
    ///
    /// # Errors
    /// As there.
    pub fn wait_signal_async(
        &self,
        signal: u32,
        sender: Option<u32>,
        compare: Compare,
        value: u64,
    ) -> Result<Work> {
        self.comm
            .enqueue(&self.prepare_wait(signal, sender, compare, value)?)
    }

    /// Signal `signal` of this rank now: of one sender, or summed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a signal or rank out of range.
    pub fn read_signal(&self, signal: u32, sender: Option<u32>) -> Result<u64> {
        self.check_signal("read_signal", signal)?;
        if let Some(sender) = sender {
            self.peer("read_signal", sender)?;
        }
        let senders = match sender {
            Some(sender) => sender..sender + 1,
            None => self.comm.ranks(),
        };
        senders
            .map(|sender| {
                let (memory, at) = self.word(self.shared.device.signal_at(signal, sender))?;
                Ok(memory.load(at))
            })
            .try_fold(0u64, |sum, seen: Result<u64>| Ok(sum.wrapping_add(seen?)))
    }

    /// Sets signal `signal` of this rank to 0 for all senders; none of them may be signalling.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a signal out of range, or a window that was freed.
    pub fn reset_signal(&self, signal: u32) -> Result<()> {
        self.check_signal("reset_signal", signal)?;
        for sender in 0..self.comm.size() {
            let (memory, at) = self.word(self.shared.device.signal_at(signal, sender))?;
            memory.store(at, 0)?;
        }
        Ok(())
    }

    /// Counter `counter` of this rank now.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a counter out of range.
    pub fn read_counter(&self, counter: u32) -> Result<u64> {
        if counter >= self.shared.device.counters {
            return Err(invalid(
                "read_counter",
                format!("counter {counter} of {}", self.shared.device.counters),
            ));
        }
        let (memory, at) = self.word(self.shared.device.counter_at(counter))?;
        Ok(memory.load(at))
    }

    /// Ends the window; all ranks together. Waits until no operation of any rank uses it. Without it the window
    /// lives as long as the communicator.
    ///
    /// # Errors
    /// The communicator's failure: then the memory stays.
    pub fn free(self) -> Result<()> {
        self.alive("free")?;
        self.shared.freed.store(true, Ordering::Release);
        let device = &self.shared.device;
        self.comm
            .end_windows(&[device.window as usize, device.pad as usize])
    }

    /// Where a word of this rank's pad is, which is only accessed atomically.
    fn word(&self, offset: u64) -> Result<Part> {
        let pad = self.shared.device.pad as usize;
        match self.shared.inner.windows.part(pad, self.comm.rank()) {
            Some((memory, start)) => Ok((memory, start + offset)),
            None => Err(invalid("window", "the window was freed".to_owned())),
        }
    }

    fn alive(&self, operation: &'static str) -> Result<()> {
        if self.shared.freed.load(Ordering::Acquire) {
            return Err(invalid(operation, "the window was freed".to_owned()));
        }
        Ok(())
    }

    fn peer(&self, operation: &'static str, peer: u32) -> Result<()> {
        self.alive(operation)?;
        if peer < self.comm.size() {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!("peer {peer}; ranks are 0 to {}", self.comm.size() - 1),
        ))
    }

    fn check_signal(&self, operation: &'static str, signal: u32) -> Result<()> {
        self.alive(operation)?;
        if signal < self.signals() {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!("signal {signal}; the window has {}", self.signals()),
        ))
    }

    /// Checks a transfer of `tensor` to or from element `at` of a part; the byte offset.
    fn range(&self, operation: &'static str, tensor: &Tensor, at: usize) -> Result<u64> {
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

    fn call(&self, operation: Operation, dtype: u8, peer: u32) -> u64 {
        Call::new(operation, dtype, 0, Algorithm::Signal as u8, peer as u16, 0).0
    }

    fn prepare_put<'a>(
        &self,
        source: &'a Tensor,
        peer: u32,
        at: usize,
        signal: Option<u32>,
    ) -> Result<Prepared<'a>> {
        self.peer("put", peer)?;
        let offset = self.range("put", source, at)?;
        if let Some(signal) = signal {
            self.check_signal("put", signal)?;
        }
        let call = self.call(Operation::Put, source.dtype() as u8, peer);
        let params = WindowPutParams {
            constants: self.comm.constants(),
            call,
            bytes: (source.len() * source.dtype().size()) as u64,
            timeout_ns: self.comm.timeout_ns,
            window: self.device_window(),
            source: source.as_ptr(),
            offset,
            signal: signal.map_or(NONE, u64::from),
        };
        let note = Note {
            call,
            input_count: source.len() as u64,
            output_count: 0,
        };
        let tensors = [Some(source), None, None];
        Ok(self.bind(Prepared::new(
            &self.comm,
            &WINDOW_PUT,
            params,
            tensors,
            false,
            note,
        )))
    }

    fn prepare_get<'a>(&self, target: &'a Tensor, peer: u32, at: usize) -> Result<Prepared<'a>> {
        self.peer("get", peer)?;
        let offset = self.range("get", target, at)?;
        let call = self.call(Operation::Get, target.dtype() as u8, peer);
        let params = WindowGetParams {
            constants: self.comm.constants(),
            call,
            bytes: (target.len() * target.dtype().size()) as u64,
            timeout_ns: self.comm.timeout_ns,
            window: self.device_window(),
            target: target.as_ptr(),
            offset,
        };
        let note = Note {
            call,
            input_count: 0,
            output_count: target.len() as u64,
        };
        let tensors = [Some(target), None, None];
        Ok(self.bind(Prepared::new(
            &self.comm,
            &WINDOW_GET,
            params,
            tensors,
            false,
            note,
        )))
    }

    fn prepare_signal(
        &self,
        peer: u32,
        signal: u32,
        update: SignalUpdate,
    ) -> Result<Prepared<'static>> {
        self.peer("signal", peer)?;
        self.check_signal("signal", signal)?;
        let call = self.call(Operation::Signal, 0, peer);
        let (value, add) = match update {
            SignalUpdate::Set(value) => (value, 0),
            SignalUpdate::Add(value) => (value, 1),
        };
        let params = WindowSignalParams {
            constants: self.comm.constants(),
            call,
            signal: u64::from(signal),
            timeout_ns: self.comm.timeout_ns,
            window: self.device_window(),
            value,
            add,
        };
        let note = Note {
            call,
            ..Note::default()
        };
        Ok(self.bind(Prepared::new(
            &self.comm,
            &WINDOW_SIGNAL,
            params,
            [None; 3],
            false,
            note,
        )))
    }

    fn prepare_wait(
        &self,
        signal: u32,
        sender: Option<u32>,
        compare: Compare,
        value: u64,
    ) -> Result<Prepared<'static>> {
        self.check_signal("wait_signal", signal)?;
        if let Some(sender) = sender {
            self.peer("wait_signal", sender)?;
        }
        let peer = sender.unwrap_or(self.comm.rank());
        let call = self.call(Operation::WaitSignal, 0, peer);
        let params = WindowWaitParams {
            constants: self.comm.constants(),
            call,
            signal: u64::from(signal),
            timeout_ns: self.comm.timeout_ns,
            window: self.device_window(),
            sender: sender.map_or(NONE, u64::from),
            value,
            compare: compare as u32,
        };
        let note = Note {
            call,
            ..Note::default()
        };
        Ok(self.bind(Prepared::new(
            &self.comm,
            &WINDOW_WAIT,
            params,
            [None; 3],
            false,
            note,
        )))
    }

    /// The launch keeps the window's description alive.
    fn bind<'a>(&self, prepared: Prepared<'a>) -> Prepared<'a> {
        prepared.keeping(Arc::clone(&self.shared) as _)
    }
}
