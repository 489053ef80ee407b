//! Callbacks that run before and after operations.

use core::cell::Cell;
use core::fmt;
use core::panic::AssertUnwindSafe;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::panic;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use fusewire_device::call::Operation;
use fusewire_device::element::ReductionCode;
use fusewire_device::{DType, Element};

use crate::algorithm::Algorithm;
use crate::comm::p2p::P2pOp;
use crate::comm::{Communicator, Inner};
use crate::cpu::message;
use crate::tensor::{Input, Tensor};
use crate::{Device, Error, Result, Work};

/// Arguments of a hook before or after a call.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HookArguments<'a> {
    /// The communicator.
    pub comm: &'a Communicator,
    /// Name of the called function as in torchcomms, without the suffix `_async`: for example
    /// `all_gather` for lists of tensors and `all_gather_single` for one tensor, `batch_op_issue`,
    /// `split`, `dup`, `new_window` (also for `alloc_window`) or `finalize`. For a user kernel, the
    /// name of the kernel. An execution of a persistent all_gather has the name
    /// `all_gather_single`.
    pub name: &'static str,
    /// The operation; [`Operation::None`] for calls that are not operations, such as `split`.
    pub operation: Operation,
    /// Number of the call, from 1; the same before and after. It counts all calls for which this
    /// rank has called hooks, captured ones included, on this communicator and on those that were
    /// created from it or that it was created from.
    pub id: u64,
    /// Number of the operation in the flight recorder ([`crate::FlightRecord::id`]). `None` if the
    /// call is not one recorded operation. A captured operation is recorded at each replay, not at
    /// its capture.
    pub record_id: Option<u64>,
    /// Element type, if the operation has one.
    pub dtype: Option<DType>,
    /// Reduction, if the operation has one.
    pub reduction: Option<ReductionCode>,
    /// Root or peer, if the operation has one.
    pub peer: Option<u32>,
    /// Elements of this rank's input.
    pub input_count: u64,
    /// Elements of this rank's output.
    pub output_count: u64,
    /// Memory that the call reads on this rank: a single buffer; for lists, one per tensor; for
    /// batches, one per send. Empty for prepared kernels. If rows have a stride, includes the
    /// elements between the rows.
    pub inputs: &'a [HookBuffer<'a>],
    /// Memory that the call writes on this rank, like `inputs`.
    pub outputs: &'a [HookBuffer<'a>],
    /// The sends and receives of a batch.
    pub ops: &'a [P2pOp],
    /// Timeout of the call's waits.
    pub timeout: Duration,
    /// Algorithm of the operation; for other calls, the requested algorithm.
    pub algorithm: Algorithm,
    /// True if the operation is enqueued, false if it runs before the call returns.
    pub is_async: bool,
    /// True if the call adds the operation to a graph and does not run it. Replays call the hooks
    /// of [`Communicator::register_graph_replay_hook`] instead.
    pub is_captured: bool,
    /// Handle of an enqueued operation, after it was enqueued.
    pub work: Option<&'a Work>,
    /// The new communicator, after `dup`, or after a `split` that this rank is part of.
    pub new_comm: Option<&'a Communicator>,
    /// Error of a failed call, after it has run.
    pub error: Option<&'a Error>,
}

/// Memory that a call reads or writes, in [`HookArguments`].
#[derive(Clone, Copy, Debug)]
pub struct HookBuffer<'a> {
    memory: Input<'a>,
    /// Device of the memory.
    device: Device,
}

impl<'a> HookBuffer<'a> {
    /// `device` is that of the communicator.
    pub(crate) fn new(memory: Input<'a>, device: Device) -> Self {
        let device = if memory.is_slice { Device::Cpu } else { device };
        Self { memory, device }
    }

    /// Returns the address of the first element.
    pub const fn as_ptr(&self) -> *const u8 {
        self.memory.as_ptr()
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns true if the buffer has no elements.
    pub const fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// Returns the type of the elements.
    pub const fn dtype(&self) -> DType {
        self.memory.dtype()
    }

    /// Returns the tensor, if the call was made with one.
    pub const fn tensor(&self) -> Option<&'a Tensor> {
        self.memory.tensor
    }

    /// Returns a copy of the elements, like [`Tensor::to_vec`]. Waits until operations of this
    /// process that write a tensor have ended, among them the operation of an asynchronous call
    /// after it was enqueued.
    ///
    /// # Errors
    /// The errors of [`Tensor::to_vec`].
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.as_tensor()?.to_vec()
    }

    /// Returns a copy of the elements' bytes, like [`HookBuffer::to_vec`].
    ///
    /// # Errors
    /// The errors of [`Tensor::to_bytes`].
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.as_tensor()?.to_bytes()
    }

    /// Returns the memory as a tensor, which must not outlive this value.
    pub(crate) fn as_tensor(&self) -> Result<Tensor> {
        if let Some(tensor) = self.tensor() {
            return Ok(tensor.clone());
        }
        let (at, count) = (self.as_ptr().cast_mut(), self.len());
        // SAFETY: the call that this value belongs to borrows the memory, or got it by `from_raw`,
        // whose caller keeps it valid and excludes other code during the call. Hooks run inside the
        // call, and this value cannot outlive its hook. The operation does not run meanwhile.
        unsafe { Tensor::adopt(self.device, at, self.dtype(), count, None) }
    }
}

/// Point in a replayed operation at which a hook is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayEdge {
    /// Before the operation runs.
    Start,
    /// After the operation has run.
    End,
}

/// Arguments of a hook on graph replay, which is called on the thread that replays.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ReplayArguments {
    /// Number that identifies the graph in this process.
    pub graph_id: u64,
    /// Number of the replay of this graph, from 1.
    pub replay_id: u64,
    /// Index of the operation among the graph's nodes.
    pub index: u64,
    /// The operation.
    pub operation: Operation,
    /// Start or end of the operation.
    pub edge: ReplayEdge,
}

/// A hook before or after a call. An error of a hook before a call refuses the call.
type CallHook = Arc<dyn Fn(&HookArguments<'_>) -> Result<()> + Send + Sync>;
type AbortHook = Arc<dyn Fn(&Error) + Send + Sync>;
type ReplayHook = Arc<dyn Fn(&ReplayArguments) + Send + Sync>;

/// Maximum nesting depth of hooks on a thread.
const MAX_DEPTH: u32 = 16;

/// A registered hook.
#[derive(Clone)]
struct Entry<T> {
    id: u64,
    /// Node of the communicator on which the hook was registered.
    node: u64,
    hook: T,
}

#[derive(Clone, Default)]
struct HookLists {
    before: Vec<Entry<CallHook>>,
    after: Vec<Entry<CallHook>>,
    abort: Vec<Entry<AbortHook>>,
    replay: Vec<Entry<ReplayHook>>,
}

impl HookLists {
    fn remove(&mut self, id: u64) {
        self.before.retain(|entry| entry.id != id);
        self.after.retain(|entry| entry.id != id);
        self.abort.retain(|entry| entry.id != id);
        self.replay.retain(|entry| entry.id != id);
    }
}

/// Snapshot of the hooks. A call uses the hooks that were registered when it was made, without
/// holding a lock, so hooks may register and remove hooks.
pub(crate) struct CurrentHooks<'a> {
    lists: Arc<HookLists>,
    hooks: &'a Hooks,
    /// Number of the call.
    pub(crate) id: u64,
}

impl CurrentHooks<'_> {
    /// Calls the pre-hooks.
    ///
    /// # Errors
    /// The error of a hook that refuses the call; [`Error::InvalidArgument`] if hooks call
    /// operations without end.
    pub(crate) fn before(&self, arguments: &HookArguments<'_>) -> Result<()> {
        self.call(&self.lists.before, arguments)
    }

    /// Calls the post-hooks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if hooks call operations without end.
    pub(crate) fn after(&self, arguments: &HookArguments<'_>) -> Result<()> {
        self.call(&self.lists.after, arguments)
    }

    /// Calls hooks, which may call operations, whose hooks may call operations.
    fn call(&self, entries: &[Entry<CallHook>], arguments: &HookArguments<'_>) -> Result<()> {
        thread_local!(static DEPTH: Cell<u32> = const { Cell::new(0) });
        struct Inside;
        impl Drop for Inside {
            fn drop(&mut self) {
                DEPTH.set(DEPTH.get() - 1);
            }
        }
        if entries.is_empty() {
            return Ok(());
        }
        DEPTH.set(DEPTH.get() + 1);
        let _inside = Inside;
        if DEPTH.get() > MAX_DEPTH {
            return Err(Error::InvalidArgument {
                operation: arguments.name,
                detail: format!(
                    "hooks have called operations in {MAX_DEPTH} levels; a hook that calls an \
                     operation is called for that operation too, and must end the recursion"
                ),
            });
        }
        let mut hooks = self.hooks.own(entries);
        hooks.try_for_each(|hook| hook(arguments))
    }
}

/// The hooks of a communicator, and of all that were created from it by `split` or `dup`.
#[derive(Default)]
struct Table {
    /// Numbers of hooks around calls and of hooks around replays, which are read without the lock.
    around_calls: AtomicU64,
    around_replays: AtomicU64,
    /// Number of the last registered hook or created node.
    numbered: AtomicU64,
    /// Number of the last call for which hooks were called.
    called: AtomicU64,
    lists: RwLock<Arc<HookLists>>,
    /// The communicators, some of which may have been dropped.
    members: Mutex<Vec<Weak<Inner>>>,
}

impl Table {
    fn current(&self) -> Arc<HookLists> {
        Arc::clone(&self.lists.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change(&self, change: impl FnOnce(&mut HookLists)) {
        let mut lists = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        let mut changed = HookLists::clone(&lists);
        change(&mut changed);
        let around_calls = changed.before.len() + changed.after.len();
        self.around_calls
            .store(around_calls as u64, Ordering::Release);
        self.around_replays
            .store(changed.replay.len() as u64, Ordering::Release);
        let before = core::mem::replace(&mut *lists, Arc::new(changed));
        drop(lists);
        // Dropped after the lock is released, because the captures of a removed hook may use hooks
        // when they are dropped.
        drop(before);
    }

    fn number(&self) -> u64 {
        self.numbered.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Hooks of a communicator.
#[derive(Clone, Default)]
pub(crate) struct Hooks {
    table: Arc<Table>,
    /// Nodes whose hooks apply to the communicator, besides the root 0: those that it was created
    /// from, and its own node, which is the last one.
    nodes: Arc<[u64]>,
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks").finish_non_exhaustive()
    }
}

/// Handle of a registered hook. Dropping it does not remove the hook.
#[derive(Clone)]
pub struct HookHandle {
    id: u64,
    table: Weak<Table>,
}

impl fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookHandle").field("id", &self.id).finish()
    }
}

impl HookHandle {
    /// Removes the hook. A second call does nothing. Calls that were already made still call the
    /// hook.
    pub fn remove(&self) {
        if let Some(table) = self.table.upgrade() {
            table.change(|lists| lists.remove(self.id));
        }
    }
}

impl Hooks {
    /// Returns the hooks of a new part of the communicator: those of the communicator, and hooks
    /// that are registered on the part.
    pub(crate) fn of_part(&self) -> Self {
        let own = self.table.number();
        Self {
            table: Arc::clone(&self.table),
            nodes: self.nodes.iter().copied().chain([own]).collect(),
        }
    }

    /// Returns the hooks among `entries` that apply to the communicator.
    fn own<'a, T>(&self, entries: &'a [Entry<T>]) -> impl Iterator<Item = &'a T> {
        let applies = move |entry: &&Entry<T>| entry.node == 0 || self.nodes.contains(&entry.node);
        entries.iter().filter(applies).map(|entry| &entry.hook)
    }

    fn add<T>(
        &self,
        hook: T,
        list: impl FnOnce(&mut HookLists) -> &mut Vec<Entry<T>>,
    ) -> HookHandle {
        let id = self.table.number();
        let node = self.nodes.last().copied().unwrap_or(0);
        self.table
            .change(|lists| list(lists).push(Entry { id, node, hook }));
        HookHandle {
            id,
            table: Arc::downgrade(&self.table),
        }
    }

    pub(crate) fn add_before(&self, hook: CallHook) -> HookHandle {
        self.add(hook, |lists| &mut lists.before)
    }

    pub(crate) fn add_after(&self, hook: CallHook) -> HookHandle {
        self.add(hook, |lists| &mut lists.after)
    }

    /// Adds an abort hook, and starts the watchdogs of the communicators to which it applies.
    pub(crate) fn add_abort(&self, hook: AbortHook) -> HookHandle {
        let handle = self.add(hook, |lists| &mut lists.abort);
        let members = self.members().clone();
        members
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|member| Inner::watch(&member));
        handle
    }

    pub(crate) fn add_replay(&self, hook: ReplayHook) -> HookHandle {
        self.add(hook, |lists| &mut lists.replay)
    }

    fn members(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Inner>>> {
        let members = self.table.members.lock();
        members.unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a communicator that has these hooks.
    pub(crate) fn join(&self, member: &Arc<Inner>) {
        let mut members = self.members();
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(member));
    }

    /// Returns true if the communicator has abort hooks.
    pub(crate) fn has_abort_hooks(&self) -> bool {
        self.own(&self.table.current().abort).next().is_some()
    }

    /// Returns true if replays call hooks. Costs one load.
    #[inline]
    pub(crate) fn has_replay_hooks(&self) -> bool {
        self.table.around_replays.load(Ordering::Relaxed) != 0
    }

    /// Returns true if calls may have hooks. Costs one load.
    #[inline]
    pub(crate) fn has_call_hooks(&self) -> bool {
        self.table.around_calls.load(Ordering::Relaxed) != 0
    }

    /// Returns the hooks for a call that is made now.
    #[cold]
    pub(crate) fn current(&self) -> CurrentHooks<'_> {
        CurrentHooks {
            lists: self.table.current(),
            hooks: self,
            id: self.table.called.fetch_add(1, Ordering::Relaxed) + 1,
        }
    }

    /// Calls the abort hooks. On the CPU, calls them after the operation that this thread is
    /// executing, because they may use its tensors. If a hook panics, logs the panic: the caller
    /// must still write the flight record and end the process.
    pub(crate) fn abort(&self, error: &Error) {
        let (hooks, lists, error) = (self.clone(), self.table.current(), error.clone());
        if lists.abort.is_empty() {
            return;
        }
        crate::cpu::call_after_work(move || {
            for hook in hooks.own(&lists.abort) {
                if let Err(panic) = panic::catch_unwind(AssertUnwindSafe(|| hook(&error))) {
                    tracing::error!("an abort hook panicked: {}", message(&*panic));
                }
            }
        });
    }

    pub(crate) fn replay(&self, arguments: &ReplayArguments) {
        let lists = self.table.current();
        self.own(&lists.replay).for_each(|hook| hook(arguments));
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};

    use crate::store::MemoryStore;
    use crate::{Communicator, Device, HookHandle, Options, RecordState, Result};

    fn alone() -> Result<Communicator> {
        let store = Arc::new(MemoryStore::new());
        Communicator::new(Device::Cpu, 0, 1, store, "alone", Options::default())
    }

    /// Otherwise the stack would overflow.
    #[test]
    fn hooks_that_call_operations_without_end_are_refused() -> Result<()> {
        let comm = alone()?;
        let errors: Arc<Mutex<Vec<String>>> = Arc::default();
        let (inner, seen) = (comm.clone(), Arc::clone(&errors));
        let hook = comm.register_pre_hook(move |_| {
            if let Err(error) = inner.barrier() {
                seen.lock().expect("no panic").push(error.to_string());
            }
        });
        comm.barrier()?;
        hook.remove();
        let records = comm.flight_records();
        let failed = records
            .iter()
            .filter(|record| record.state == RecordState::Failed);
        let failures = failed.count();
        let inner = comm.clone();
        let hook = comm.register_post_hook(move |_| drop(inner.barrier()));
        comm.barrier()?;
        hook.remove();
        let errors = errors.lock().expect("no panic");
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(errors[0].contains("must end the recursion"), "{errors:?}");
        assert_eq!(failures, 1, "the refused operation has failed");
        Ok(())
    }

    #[test]
    fn a_hook_may_remove_itself_and_register_others() -> Result<()> {
        let comm = alone()?;
        let calls = Arc::new([const { AtomicU64::new(0) }; 2]);
        let handle: Arc<Mutex<Option<HookHandle>>> = Arc::default();
        let (seen, own, inner) = (Arc::clone(&calls), Arc::clone(&handle), comm.clone());
        let hook = comm.register_pre_hook(move |_| {
            seen[0].fetch_add(1, Ordering::Relaxed);
            if let Some(own) = own.lock().expect("no panic").take() {
                own.remove();
            }
            let seen = Arc::clone(&seen);
            inner.register_post_hook(move |_| {
                seen[1].fetch_add(1, Ordering::Relaxed);
            });
        });
        *handle.lock().expect("no panic") = Some(hook);
        for (before, after) in [(1, 0), (1, 1), (1, 2)] {
            comm.barrier()?;
            let seen = calls.each_ref().map(|calls| calls.load(Ordering::Relaxed));
            assert_eq!(seen, [before, after]);
        }
        comm.finalize()
    }

    #[test]
    fn both_sides_of_an_operation_have_one_number() -> Result<()> {
        let comm = alone()?;
        let seen: Arc<Mutex<Vec<(char, u64, bool)>>> = Arc::default();
        let push = |side| {
            let seen = Arc::clone(&seen);
            move |arguments: &crate::HookArguments<'_>| {
                let has_work = arguments.work.is_some();
                let entry = (side, arguments.id, has_work);
                seen.lock().expect("no panic").push(entry);
            }
        };
        comm.register_pre_hook(push('<'));
        let after = comm.register_post_hook(push('>'));
        comm.barrier()?;
        comm.barrier_async()?.wait_blocking()?;
        after.remove();
        after.remove();
        comm.barrier()?;
        let expected = [
            ('<', 1, false),
            ('>', 1, false),
            ('<', 2, false),
            ('>', 2, true),
            ('<', 3, false),
        ];
        assert_eq!(*seen.lock().expect("no panic"), expected);
        comm.finalize()
    }
}
