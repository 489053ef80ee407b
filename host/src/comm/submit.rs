//! From a checked call to a launch: on the caller's thread, on a stream, or into a graph.

use core::any::Any;
use core::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use fusewire_device::arch::SHARED_BYTES;
use fusewire_device::native::{Kernel, KernelInfo, NativeEntry};
use fusewire_device::session::{Call, Operation};

use super::attributes::LaunchAttributes;
use super::observe::{HookArguments, Note, ReplayArguments, ReplayEdge};
use super::work::Work;
use super::{Communicator, Inner, one_grid};
use crate::cpu::{
    BlockOrder, Grid, HostFn, Keep, Launch, LaunchNote, LaunchOwner, MAX_PARAM_BYTES, Replay,
    current_replay,
};
use crate::gpu::{self, Gpu, Scratch, Upload};
use crate::stream::{Event, Recording, Stream, Task};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// What a prepared operation runs.
#[derive(Clone, Copy)]
enum Entry {
    /// A kernel's native entry.
    Native(NativeEntry),
    /// A kernel of a GPU, by its description: it is looked up at the launch.
    Gpu(KernelInfo),
    /// A call of a backend.
    HandOff,
}

/// An operation with its arguments, ready to run: flat, so that it is built where it is used.
pub(super) struct Prepared<'a> {
    /// What runs.
    entry: Entry,
    /// The kernel's parameters.
    params: [u64; 20],
    bytes: usize,
    /// A call of a backend.
    hand_off: Option<HostFn>,
    note: Note,
    tensors: [Option<&'a Tensor>; 3],
    /// What else lives as long as the launch.
    table: Option<Arc<dyn Any + Send + Sync>>,
    /// Whether a pointer among the parameters belongs to the caller's call only.
    borrowed: bool,
    /// The launch's own shape.
    attributes: Option<LaunchAttributes>,
    /// A table that the stream copies to a GPU first.
    upload: Option<Upload>,
}

impl<'a> Prepared<'a> {
    /// Binds `params` to `kernel`. The tensors are kept alive as long as the launch; `borrowed` says that
    /// other memory is used, which lives as long as the call only.
    #[inline(always)]
    pub(super) fn new<P: Copy>(
        comm: &Communicator,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&'a Tensor>; 3],
        borrowed: bool,
        note: Note,
    ) -> Self {
        Self::from_parts(comm, kernel.info(), params, tensors, borrowed, note)
    }

    /// As [`Prepared::new`], for a kernel whose parameter struct has the layout of `P`.
    #[inline(always)]
    pub(super) fn from_parts<P: Copy>(
        comm: &Communicator,
        kernel: &KernelInfo,
        params: P,
        tensors: [Option<&'a Tensor>; 3],
        borrowed: bool,
        note: Note,
    ) -> Self {
        const { assert!(size_of::<P>() <= 160 && align_of::<P>() <= 8) };
        let mut words = [0u64; 20];
        // SAFETY: the parameters fit, by the assertion above.
        unsafe { words.as_mut_ptr().cast::<P>().write(params) };
        let entry = if comm.inner.on_gpu.is_none() {
            let lanes = comm.inner.options.lanes;
            Entry::Native(kernel.native.entry(comm.inner.isa, lanes))
        } else {
            Entry::Gpu(*kernel)
        };
        Self {
            entry,
            params: words,
            bytes: size_of::<P>(),
            hand_off: None,
            note,
            tensors,
            table: None,
            borrowed,
            attributes: None,
            upload: None,
        }
    }

    /// Keeps `table` alive as long as the launch.
    pub(super) fn keeping(mut self, table: Arc<dyn Any + Send + Sync>) -> Self {
        self.table = Some(match self.table.take() {
            Some(before) => Arc::new((before, table)),
            None => table,
        });
        self
    }

    /// Gives the launch a shape of its own.
    pub(super) fn shaped(mut self, attributes: LaunchAttributes) -> Self {
        self.attributes = Some(attributes);
        self
    }

    /// Has the stream make a copy before the launch.
    pub(super) fn uploading(mut self, upload: Option<Upload>) -> Self {
        self.upload = upload;
        self
    }

    /// As [`Prepared::keeping`], where with it all memory that the launch uses is kept alive.
    pub(super) fn owning(mut self, table: Arc<dyn Any + Send + Sync>) -> Self {
        self.borrowed = false;
        self.keeping(table)
    }

    /// The same without its tensors, which the caller keeps alive by [`Prepared::owning`].
    pub(super) fn detached(self) -> Prepared<'static> {
        Prepared {
            entry: self.entry,
            params: self.params,
            bytes: self.bytes,
            hand_off: self.hand_off,
            note: self.note,
            tensors: [None; 3],
            table: self.table,
            borrowed: self.borrowed,
            attributes: self.attributes,
            upload: self.upload,
        }
    }

    /// A call of a backend; `run` may be called more than once (replays).
    pub(super) fn hand_off(
        run: HostFn,
        tensors: [Option<&'a Tensor>; 3],
        borrowed: bool,
        note: Note,
    ) -> Self {
        Self {
            entry: Entry::HandOff,
            params: [0; 20],
            bytes: 0,
            hand_off: Some(run),
            note,
            tensors,
            table: None,
            borrowed,
            attributes: None,
            upload: None,
        }
    }
}

/// Most significant bit of what [`LaunchOwner::before`] gives: the entry belongs to a replay.
const REPLAYED: u64 = 1 << 63;

impl LaunchOwner for Inner {
    fn before(&self, note: &LaunchNote) -> Result<u64> {
        let [issued, call, input_count, output_count] = *note;
        let note = Note {
            call,
            input_count,
            output_count,
        };
        if let Err(error) = self.check() {
            self.recorder.end(issued, false);
            return Err(error);
        }
        let Some(replay) = current_replay() else {
            self.recorder.start(issued);
            return Ok(issued);
        };
        let id = self.recorder.issue(&note, true);
        self.recorder.start_at_once(id);
        if !self.hooks.is_empty() {
            self.hooks
                .replay(&replay_arguments(replay, &note, ReplayEdge::Start));
        }
        Ok(id | REPLAYED)
    }

    fn after(&self, word: u64, note: &LaunchNote, ran: bool) -> Result<()> {
        if !ran && self.backend.is_none() {
            // The other ranks wait for this one's part: they shall hear of it.
            self.abort();
        }
        let checked = self.check_launch();
        self.recorder.end(word & !REPLAYED, ran && checked.is_ok());
        if word & REPLAYED != 0
            && !self.hooks.is_empty()
            && let Some(replay) = current_replay()
        {
            let [_, call, input_count, output_count] = *note;
            let note = Note {
                call,
                input_count,
                output_count,
            };
            self.hooks
                .replay(&replay_arguments(replay, &note, ReplayEdge::End));
        }
        checked
    }
}

fn replay_arguments(replay: Replay, note: &Note, edge: ReplayEdge) -> ReplayArguments {
    ReplayArguments {
        graph_id: replay.graph,
        replay_id: replay.replay,
        index: replay.index,
        operation: note.call().operation(),
        edge,
    }
}

impl Communicator {
    /// Runs a prepared operation and waits for its end.
    #[inline]
    pub(super) fn run(&self, prepared: &Prepared<'_>) -> Result<()> {
        if tracing::enabled!(target: "fusewire::operation", tracing::Level::TRACE) {
            return self.run_traced(prepared);
        }
        self.run_untraced(prepared)
    }

    #[cold]
    fn run_traced(&self, prepared: &Prepared<'_>) -> Result<()> {
        let _span = tracing::trace_span!(
            target: "fusewire::operation",
            "operation",
            name = prepared.note.call().operation().name(),
            count = prepared.note.input_count,
        )
        .entered();
        self.run_untraced(prepared)
    }

    #[inline]
    fn run_untraced(&self, prepared: &Prepared<'_>) -> Result<()> {
        self.inner.check()?;
        // Asked once: on a GPU it is a call of the driver.
        let recording = self.stream.recording()?;
        self.chain(&recording)?;
        if recording.is_some() {
            if prepared.borrowed {
                return Err(capture_of_slices());
            }
            let task = self.task(prepared, 0)?;
            return self.stream.enqueue_in(recording, task).map(drop);
        }
        let recorder = &self.inner.recorder;
        let Some(hooks) = self.inner.hooks.current() else {
            if let Some(entry) = self.single(prepared) {
                return self.stream.run_or_enqueue(
                    recording,
                    || {
                        let open = recorder.open(&prepared.note);
                        let result = self.run_single(prepared, entry);
                        recorder.close(&open, result.is_ok());
                        result
                    },
                    || self.task(prepared, recorder.issue(&prepared.note, false)),
                );
            }
            let id = recorder.issue(&prepared.note, false);
            return self.run_numbered(prepared, recording, id);
        };
        let id = recorder.issue(&prepared.note, false);
        let mut arguments = HookArguments::new(&prepared.note, id, false);
        hooks.before(&arguments);
        let result = self.run_numbered(prepared, recording, id);
        arguments.error = result.as_ref().err();
        hooks.after(&arguments);
        result
    }

    /// The entry of a kernel that one lane of this thread runs.
    #[inline]
    fn single(&self, prepared: &Prepared<'_>) -> Option<NativeEntry> {
        match prepared.entry {
            Entry::Native(entry)
                if self.inner.options.lanes == 1 && self.inner.options.blocks == 1 =>
            {
                Some(entry)
            }
            _ => None,
        }
    }

    #[inline]
    fn run_single(&self, prepared: &Prepared<'_>, entry: NativeEntry) -> Result<()> {
        // SAFETY: the parameters belong to the entry (`Prepared::new`); their pointers are valid during this call.
        unsafe { crate::cpu::run_single(entry, prepared.params.as_ptr().cast())? };
        self.inner.check_launch()
    }

    fn run_numbered(&self, prepared: &Prepared<'_>, recording: Recording, id: u64) -> Result<()> {
        if let Some(entry) = self.single(prepared) {
            let direct = || {
                self.inner.recorder.start_at_once(id);
                let result = self.run_single(prepared, entry);
                self.inner.recorder.end(id, result.is_ok());
                result
            };
            return self
                .stream
                .run_or_enqueue(recording, direct, || self.task(prepared, id));
        }
        let task = self.task(prepared, id)?;
        self.stream
            .run_or_enqueue(recording, || task.execute(), || Ok(task.clone()))
    }

    /// Enqueues a prepared operation.
    pub(super) fn enqueue(&self, prepared: &Prepared<'_>) -> Result<Work> {
        self.inner.check()?;
        let recording = self.stream.recording()?;
        self.chain(&recording)?;
        let capturing = recording.is_some();
        let id = if capturing {
            0
        } else {
            self.inner.recorder.issue(&prepared.note, false)
        };
        let hooks = self.inner.hooks.current().filter(|_| !capturing);
        if let Some(hooks) = &hooks {
            hooks.before(&HookArguments::new(&prepared.note, id, true));
        }
        let ticket = self
            .stream
            .enqueue_in(recording, self.task(prepared, id)?)?;
        let work = Work::new(self.stream.clone(), ticket);
        if let Some(hooks) = &hooks {
            let mut arguments = HookArguments::new(&prepared.note, id, true);
            arguments.work = Some(&work);
            hooks.after(&arguments);
        }
        Ok(work)
    }

    /// The work of a stream that carries the operation out.
    fn task(&self, prepared: &Prepared<'_>, id: u64) -> Result<Task> {
        match &prepared.entry {
            Entry::Native(entry) => self.launch_of(prepared, *entry, id).map(Task::Launch),
            Entry::Gpu(kernel) => self.gpu_launch_of(prepared, kernel, id).map(Task::Kernel),
            Entry::HandOff => Ok(self.hand_off_task(prepared, id)),
        }
    }

    fn hand_off_task(&self, prepared: &Prepared<'_>, id: u64) -> Task {
        let (inner, run) = (Arc::clone(&self.inner), prepared.hand_off.clone());
        let note = prepared.note.launch(id);
        let keep = (
            prepared.tensors.map(|tensor| tensor.map(Tensor::keep)),
            prepared.table.clone(),
        );
        let call: HostFn = Arc::new(move || {
            let _alive = &keep;
            let word = inner.before(&note)?;
            let ran = run.as_ref().map_or(Ok(()), |run| run());
            if let Err(error) = &ran {
                inner.poison(error);
            }
            let after = inner.after(word, &note, ran.is_ok());
            ran.and(after)
        });
        if self.stream.device().is_gpu() {
            // The library puts its own work on the stream, from this thread.
            Task::Call(call)
        } else {
            Task::Host(call)
        }
    }

    fn keep(prepared: &Prepared<'_>) -> Keep {
        let [a, b, c] = prepared
            .tensors
            .map(|tensor| tensor.map(|tensor| tensor.keep() as Arc<dyn Any + Send + Sync>));
        [a, b, c, prepared.table.clone()]
    }

    fn gpu_launch_of(
        &self,
        prepared: &Prepared<'_>,
        info: &KernelInfo,
        id: u64,
    ) -> Result<gpu::Launch> {
        let Some(on_gpu) = &self.inner.on_gpu else {
            return Err(Error::launch("a kernel of a GPU on the CPU"));
        };
        let kernel = on_gpu.gpu().kernel(info)?;
        let params = &bytemuck::bytes_of(&prepared.params)[..prepared.bytes];
        let mut shape = on_gpu.shape(kernel, self.inner.options.blocks);
        if let Some(attributes) = &prepared.attributes {
            for (value, own) in [
                (attributes.blocks, &mut shape.blocks),
                (attributes.threads, &mut shape.threads),
            ] {
                if value != 0 {
                    *own = value;
                }
            }
            attributes.check_on(on_gpu.gpu(), kernel, shape.blocks, shape.threads)?;
            shape.shared_bytes = attributes.shared_bytes;
            shape.cluster = attributes.cluster;
            shape.cooperative = attributes.cooperative;
            shape.dependent = attributes.dependent;
        }
        let operation = prepared.note.call().operation();
        let gang = on_gpu
            .gang()
            .filter(|_| one_grid::is_gathered(info, operation));
        let via = gang.map(|gang| gpu::Via {
            gang: Arc::clone(gang),
            rank: self.inner.rank,
            patience: self.inner.patience(self.timeout_ns),
        });
        // SAFETY: as in `launch_of`; that the image has the same arguments was checked when it was loaded.
        let launch = unsafe { gpu::Launch::new(kernel, params, shape)? };
        Ok(launch
            .owned_by(Arc::clone(&self.inner) as _, prepared.note.launch(id))
            .keeping(Self::keep(prepared))
            .uploading(prepared.upload)
            .via(via))
    }

    /// Device memory that holds a table for the next launch, and the copy that the launch begins with: a capture takes the
    /// table as it is now, once, and waits for that; a stream copies it on its way.
    pub(super) fn table_on_gpu(
        &self,
        gpu: &Arc<Gpu>,
        bytes: &[u8],
    ) -> Result<(Scratch, Option<Upload>)> {
        if self.stream.is_capturing() {
            return Ok((Scratch::holding(gpu, bytes)?, None));
        }
        let (scratch, upload) = Scratch::filled_by_stream(gpu, bytes)?;
        Ok((scratch, Some(upload)))
    }

    fn launch_of(&self, prepared: &Prepared<'_>, entry: NativeEntry, id: u64) -> Result<Launch> {
        const { assert!(MAX_PARAM_BYTES >= 160) };
        let options = &self.inner.options;
        let own = prepared
            .attributes
            .map_or(0, |attributes| attributes.blocks);
        let blocks = if own == 0 { options.blocks } else { own };
        let order = if blocks > 1 {
            BlockOrder::Concurrent
        } else {
            BlockOrder::Sequential
        };
        let grid = Grid {
            blocks,
            lanes: options.lanes,
            shared_bytes: SHARED_BYTES as u32,
            order,
        };
        let params = &bytemuck::bytes_of(&prepared.params)[..prepared.bytes];
        let keep = Self::keep(prepared);
        // SAFETY: the parameters belong to the entry; tensors are kept alive, and for memory
        // without a tensor the caller waits, or has promised (captures).
        let launch = unsafe { Launch::new(entry, params, grid)? };
        Ok(launch
            .owned_by(Arc::clone(&self.inner) as _, prepared.note.launch(id))
            .keeping(keep))
    }

    /// Makes this launch follow the communicator's last one, where that was on another stream and this one is not captured.
    pub(super) fn chain(&self, recording: &Recording) -> Result<()> {
        let id = self.stream.id();
        if self.inner.last_stream.load(Ordering::Relaxed) == id || recording.is_some() {
            return Ok(());
        }
        let mut last = self.inner.lock_order();
        let mut event = Event::new();
        if let Some((stream, last)) = &*last
            && stream.id() != id
            && !stream.is_capturing()
        {
            stream.record(last)?;
            self.stream.wait_event(last)?;
            // A wait is for the record before it, so the next record may use the event again.
            event = last.clone();
        }
        let before = last.replace((self.stream.clone(), event));
        self.inner.last_stream.store(id, Ordering::Relaxed);
        drop(last);
        // Not under the lock: the last handle of a stream waits for its work, which may need the lock.
        drop(before);
        Ok(())
    }

    /// The call word of a kernel of the user's: `agreed` is whatever must be equal on all ranks. Ranks
    /// that launch with different words are told so.
    pub fn call_word(&self, operation: Operation, agreed: u64) -> u64 {
        Call::new(operation, 0, 0, 0, 0xffff, agreed).0
    }

    /// Launches a kernel of the user's on the communicator's stream and waits for its end. The kernel's first
    /// argument is [`Communicator::constants`]; `tensors` are kept alive as long as the launch (a graph may replay it).
    ///
    /// # Safety
    /// `params` must hold valid pointers, and the kernel must follow the rules between ranks.
    ///
    /// # Errors
    /// The communicator's failure; [`Error::InvalidArgument`] for more than 160 bytes of parameters.
    pub unsafe fn launch<P: Copy>(
        &self,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&Tensor>; 3],
    ) -> Result<()> {
        self.run(&Prepared::new(self, kernel, params, tensors, false, USER))
    }

    /// As [`Communicator::launch_async`], with a shape of its own: a kernel that computes may take more blocks than the
    /// communicator's operations, which all ranks have agreed on. Blocks that take part in communication are the first
    /// `Options::blocks`.
    ///
    /// # Safety
    /// As there; blocks beyond `Options::blocks` touch nothing of the communicator's. With
    /// [`LaunchAttributes::dependent`], nothing of the communicator's, and no result of the kernel before, is touched before
    /// the kernel's own dependency wait.
    ///
    /// # Errors
    /// As there; [`Error::Launch`] for a cluster that does not divide the blocks, and for a shape that the device has no room
    /// for or does not know, such as a cooperative one that is too large: nothing was launched then, and the communicator goes
    /// on. What the CPU makes of attributes: see [`LaunchAttributes`].
    pub unsafe fn launch_shaped<P: Copy>(
        &self,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&Tensor>; 3],
        attributes: LaunchAttributes,
    ) -> Result<Work> {
        let blocks = match attributes.blocks {
            0 => self.inner.options.blocks,
            blocks => blocks,
        };
        attributes.check(kernel.info().name, blocks)?;
        let mut prepared = Prepared::new(self, kernel, params, tensors, false, USER);
        prepared.attributes = Some(attributes);
        self.enqueue(&prepared)
    }

    /// As [`Communicator::launch`], without waiting.
    ///
    /// # Safety
    /// As there; what `tensors` do not keep alive must live until the work is done.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn launch_async<P: Copy>(
        &self,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&Tensor>; 3],
    ) -> Result<Work> {
        self.enqueue(&Prepared::new(self, kernel, params, tensors, false, USER))
    }
}

impl Inner {
    pub(super) fn lock_order(&self) -> MutexGuard<'_, Option<(Stream, Event)>> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What recorder and hooks are told of a kernel of the user's.
const USER: Note = Note {
    call: Call::new(Operation::User, 0, 0, 0, 0xffff, 0).0,
    input_count: 0,
    output_count: 0,
};

/// The error for a bad argument of `operation`.
pub(super) fn invalid(operation: &'static str, detail: String) -> Error {
    Error::InvalidArgument { operation, detail }
}

/// The error for a slice in a capture.
pub(super) fn capture_of_slices() -> Error {
    Error::CaptureState {
        detail: "a graph outlives the call: operations on slices can't be captured: use tensors, and for \
                 all_reduce_rms_norm its _async form"
            .to_owned(),
    }
}
