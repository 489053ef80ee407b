//! Modes of a call: blocking, enqueued or captured, with `Work` handles and inputs kept or dropped.

use core::slice;

use crate::device::tensor;
use fusewire::GraphExec;
use fusewire::{Operation, Result, Tensor};

use super::{Fault, Grid, REGISTERED};
use crate::backends;
use crate::call::{self, Buffers};
use crate::cases::Case;
use crate::oracle::{self, Shape};

/// Mode of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Blocking.
    Sync,
    /// Enqueued. The next operation is called without waiting for the `Work` handle.
    SyncNoWork,
    /// Enqueued, then waited for.
    Async,
    /// Enqueued. The `Work` handle is dropped immediately.
    AsyncDropped,
    /// Enqueued. The input is dropped immediately.
    InputDropped,
    /// Captured once and replayed four times.
    Graph,
    /// Captured once and replayed four times. The input is dropped before the first replay.
    GraphInputDropped,
    /// Captured as three graphs, which are replayed alternately.
    Graphs,
    /// Captured. Replays alternate with eager calls.
    Mixed,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 9] = [
        Self::Sync,
        Self::SyncNoWork,
        Self::Async,
        Self::AsyncDropped,
        Self::InputDropped,
        Self::Graph,
        Self::GraphInputDropped,
        Self::Graphs,
        Self::Mixed,
    ];

    const fn drops_input(self) -> bool {
        matches!(self, Self::InputDropped | Self::GraphInputDropped)
    }
}

/// Number of guard elements before and after a buffer. No operation may write them.
const GUARD: usize = 48;

/// Memory of a case: input and output, each with guard zones.
#[derive(Debug)]
pub(super) struct CaseMemory {
    output: Tensor,
    input: Option<Tensor>,
    buffers: Option<Buffers>,
}

impl CaseMemory {
    fn buffers(&self) -> &Buffers {
        self.buffers.as_ref().expect("not dropped")
    }

    /// Drops the input, then allocates and writes a tensor that may reuse the input's memory.
    fn drop_input(&mut self) -> Result<Tensor> {
        let input = self.input.take().expect("not dropped before");
        let (dtype, count) = (input.dtype(), input.len());
        self.buffers = None;
        drop(input);
        let next = tensor(dtype, count)?;
        write(&next, &vec![0xee; count * dtype.size()]);
        Ok(next)
    }
}

/// Fills the tensor with `bytes`.
pub(super) fn write(tensor: &Tensor, bytes: &[u8]) {
    assert_eq!(tensor.len() * tensor.dtype().size(), bytes.len());
    // SAFETY: the tensor has exactly `bytes.len()` bytes, as checked above, and no running
    // operation accesses it.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), tensor.as_ptr(), bytes.len()) };
}

/// Returns the bytes of a tensor.
pub(super) fn read(tensor: &Tensor) -> Vec<u8> {
    let bytes = tensor.len() * tensor.dtype().size();
    // SAFETY: the tensor has exactly `bytes` bytes, and no running operation accesses it.
    unsafe { slice::from_raw_parts(tensor.as_ptr(), bytes) }.to_vec()
}

/// Returns the bytes of `count` elements and their guard zones. The elements are `data`, or poison
/// if `data` is `None`. The guard zones are poison.
fn image(size: usize, count: usize, data: Option<&[u8]>, call: u64) -> Vec<u8> {
    let bytes = (count + 2 * GUARD) * size;
    let poison = |i: usize| 0xa5 ^ (i * 29) as u8 ^ (call * 7) as u8;
    let mut image: Vec<u8> = (0..bytes).map(poison).collect();
    if let Some(data) = data {
        image[GUARD * size..(GUARD + count) * size].copy_from_slice(data);
    }
    image
}

impl Grid {
    /// Runs `case` in `mode` and counts it in `group`.
    pub(super) fn run(&mut self, group: &str, case: &Case, mode: Mode) -> Result<()> {
        let case = &Case {
            exact: self.exact,
            ..*case
        };
        if !backends::supports(&self.comm, case) {
            self.tally.unsupported(group);
            return Ok(());
        }
        if case.operation == Operation::Send && self.comm.size() == 1 {
            return Ok(()); // No peer.
        }
        self.tally.ran(group);
        self.doing = format!("{mode:?} of {case:?}");
        self.used.clear();
        let memory = &mut self.case_memory(case, !mode.drops_input())?;
        match mode {
            Mode::Sync => self.eager(case, memory)?,
            Mode::SyncNoWork => {
                let (other, first) = (self.case_memory(case, false)?, self.put(case, memory));
                let second = self.put(case, &other);
                let _first = call::enqueue(&self.comm, case, memory.buffers())?;
                let _second = call::enqueue(&self.comm, case, other.buffers())?;
                self.comm.synchronize()?;
                self.verify(case, memory, first);
                self.verify(case, &other, second);
            }
            Mode::Async => self.enqueued(case, memory)?,
            Mode::AsyncDropped => {
                let call = self.put(case, memory);
                drop(call::enqueue(&self.comm, case, memory.buffers())?);
                self.comm.synchronize()?;
                self.verify(case, memory, call);
            }
            Mode::InputDropped => {
                let call = self.put(case, memory);
                let works = call::enqueue(&self.comm, case, memory.buffers())?;
                let _next = memory.drop_input()?;
                for work in works {
                    work.wait_blocking()?;
                }
                self.verify(case, memory, call);
            }
            Mode::Graph => {
                let graph = self.capture(case, memory)?;
                for _ in 0..4 {
                    self.replay(case, memory, &graph)?;
                }
            }
            Mode::GraphInputDropped => {
                let graph = self.capture(case, memory)?;
                let call = self.put(case, memory);
                let _next = memory.drop_input()?;
                for _ in 0..4 {
                    self.put_output(case, memory, call);
                    graph.run(self.comm.stream())?;
                    self.verify(case, memory, call);
                }
            }
            Mode::Graphs => {
                let memories = [
                    self.case_memory(case, false)?,
                    self.case_memory(case, true)?,
                ];
                let memories = [&*memory, &memories[0], &memories[1]];
                let graphs = [
                    self.capture(case, memories[0])?,
                    self.capture(case, memories[1])?,
                    self.capture(case, memories[2])?,
                ];
                for at in [0, 1, 0, 2, 1, 0, 2, 2] {
                    self.replay(case, memories[at], &graphs[at])?;
                }
            }
            Mode::Mixed => {
                self.eager(case, memory)?;
                let graph = self.capture(case, memory)?;
                self.enqueued(case, memory)?;
                self.replay(case, memory, &graph)?;
                self.eager(case, memory)?;
                self.replay(case, memory, &graph)?;
                self.replay(case, memory, &graph)?;
                self.enqueued(case, memory)?;
            }
        }
        Ok(())
    }

    fn eager(&mut self, case: &Case, memory: &CaseMemory) -> Result<()> {
        let call = self.put(case, memory);
        call::blocking(&self.comm, case, memory.buffers(), false)?;
        self.verify(case, memory, call);
        Ok(())
    }

    fn enqueued(&mut self, case: &Case, memory: &CaseMemory) -> Result<()> {
        let call = self.put(case, memory);
        for work in call::enqueue(&self.comm, case, memory.buffers())? {
            work.wait_blocking()?;
        }
        self.verify(case, memory, call);
        Ok(())
    }

    fn capture(&self, case: &Case, memory: &CaseMemory) -> Result<GraphExec> {
        let stream = self.comm.stream();
        stream.begin_capture()?;
        let enqueued = call::enqueue(&self.comm, case, memory.buffers());
        let graph = stream.end_capture()?;
        enqueued?;
        graph.instantiate()
    }

    fn replay(&mut self, case: &Case, memory: &CaseMemory, graph: &GraphExec) -> Result<()> {
        let call = self.put(case, memory);
        graph.run(self.comm.stream())?;
        self.verify(case, memory, call);
        Ok(())
    }

    /// Returns memory for `count` elements and guard zones. The memory is in a window if
    /// `registered` is true and the window has space left.
    fn memory(&mut self, case: &Case, count: usize, registered: bool) -> Result<Tensor> {
        let (dtype, total) = (case.dtype, count + 2 * GUARD);
        let start = self.used.get(&dtype).copied().unwrap_or(0);
        if registered
            && start + total <= REGISTERED
            && let Some(window) = self.registered.get(&dtype)
        {
            self.used.insert(dtype, start + total);
            return window.slice(start, total);
        }
        tensor(dtype, total)
    }

    fn case_memory(&mut self, case: &Case, registered: bool) -> Result<CaseMemory> {
        let shape = Shape::new(case, self.comm.size(), self.comm.rank());
        let output = self.memory(case, shape.output, registered)?;
        let input = self.memory(case, shape.input, registered)?;
        let nothing = tensor(case.dtype, 0)?;
        let buffers = Buffers {
            output: output.slice(GUARD, shape.output)?,
            input: input.slice(GUARD, shape.input)?,
            residual: nothing.clone(),
            weight: nothing.clone(),
            residual_out: nothing,
        };
        Ok(CaseMemory {
            output,
            input: Some(input),
            buffers: Some(buffers),
        })
    }

    /// Returns true if the operation reads its output.
    fn is_in_place(case: &Case) -> bool {
        case.operation == Operation::Broadcast || case.in_place
    }

    /// Fills the input and the output, with their guard zones, for the next call. Returns the
    /// number of that call.
    fn put(&mut self, case: &Case, memory: &CaseMemory) -> u64 {
        self.calls += 1;
        let call = self.calls;
        let (ranks, rank) = (self.comm.size(), self.comm.rank());
        let shown = match (self.fault, rank) {
            (Fault::SwapRanks, 0 | 1) => 1 - rank,
            _ => rank,
        };
        let mut given = oracle::input(case, ranks, shown, call).input;
        let shape = Shape::new(case, ranks, rank);
        given.resize(shape.input * case.dtype.size(), 0);
        if let Some(input) = &memory.input {
            write(
                input,
                &image(case.dtype.size(), shape.input, Some(&given), call),
            );
        }
        let data = Self::is_in_place(case).then_some(&given[..]);
        write(
            &memory.output,
            &image(case.dtype.size(), shape.output, data, call),
        );
        call
    }

    /// Restores the contents that the output had before call number `call`.
    fn put_output(&self, case: &Case, memory: &CaseMemory, call: u64) {
        let (ranks, rank) = (self.comm.size(), self.comm.rank());
        let count = memory.output.len() - 2 * GUARD;
        let given = oracle::input(case, ranks, rank, call).input;
        let data = Self::is_in_place(case).then_some(&given[..]);
        write(&memory.output, &image(case.dtype.size(), count, data, call));
    }

    /// Compares the memory with the expected contents after call number `call`.
    fn verify(&mut self, case: &Case, memory: &CaseMemory, call: u64) {
        let (ranks, rank) = (self.comm.size(), self.comm.rank());
        let size = case.dtype.size();
        let shape = Shape::new(case, ranks, rank);
        let given = oracle::input(case, ranks, rank, call).input;
        let expected = oracle::output(case, ranks, rank, call).map(|expected| expected.output);
        let kept = Self::is_in_place(case).then_some(&given);
        let must = image(
            size,
            shape.output,
            expected.as_ref().or(kept).map(Vec::as_slice),
            call,
        );
        if self.fault == Fault::FlipBit && rank == 1 && shape.output > 0 {
            let mut bytes = read(&memory.output);
            bytes[GUARD * size] ^= 1;
            write(&memory.output, &bytes);
        }
        self.same("output", &must, &read(&memory.output), size);
        if let Some(input) = memory.input.as_ref().filter(|_| self.fault == Fault::None) {
            let must = image(size, shape.input, Some(&given), call);
            self.same("input", &must, &read(input), size);
        }
    }

    fn same(&mut self, name: &str, must: &[u8], is: &[u8], size: usize) {
        let Some(byte) = must.iter().zip(is).position(|(must, is)| must != is) else {
            return;
        };
        let at = (byte / size) as i64 - GUARD as i64;
        let what = format!(
            "{name}[{at}] of {} is wrong: byte {:02x} instead of {:02x}",
            must.len() / size - 2 * GUARD,
            is[byte],
            must[byte]
        );
        self.require(false, &what);
    }
}
