//! Functions of the user that are called around operations.

use core::cell::Cell;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::session::Operation;

use super::OpInfo;
use crate::{Error, Result, Work};

/// Arguments of a hook before or after an operation.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HookArguments<'a> {
    /// The operation.
    pub operation: Operation,
    /// Number of the operation on this communicator and rank, from 1; the same before and after.
    pub id: u64,
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
    /// True if the operation is enqueued, false if it runs before the call returns.
    pub is_async: bool,
    /// Handle of an enqueued operation, after it was enqueued.
    pub work: Option<&'a Work>,
    /// Error of a failed operation, after it has run.
    pub error: Option<&'a Error>,
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

type CallHook = Arc<dyn Fn(&HookArguments<'_>) + Send + Sync>;
type AbortHook = Arc<dyn Fn(&Error) + Send + Sync>;
type ReplayHook = Arc<dyn Fn(&ReplayArguments) + Send + Sync>;

/// Most hooks that are in progress on a thread, each in an operation of the one before.
const MAX_DEPTH: u32 = 16;

/// Hooks of one kind, each with its number.
type HookList<T> = Vec<(u64, T)>;

/// Snapshot of the hooks. An operation calls the hooks that were registered when it was issued,
/// without holding a lock, so hooks may register and remove hooks.
#[derive(Clone, Default)]
pub(crate) struct HookLists {
    before: HookList<CallHook>,
    after: HookList<CallHook>,
    abort: HookList<AbortHook>,
    replay: HookList<ReplayHook>,
}

impl HookLists {
    fn len(&self) -> usize {
        self.before.len() + self.after.len() + self.abort.len() + self.replay.len()
    }

    fn remove(&mut self, id: u64) {
        self.before.retain(|hook| hook.0 != id);
        self.after.retain(|hook| hook.0 != id);
        self.abort.retain(|hook| hook.0 != id);
        self.replay.retain(|hook| hook.0 != id);
    }

    /// Calls the pre-hooks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if hooks call operations without end.
    pub(crate) fn before(&self, arguments: &HookArguments<'_>) -> Result<()> {
        call(&self.before, arguments)
    }

    /// Calls the post-hooks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if hooks call operations without end.
    pub(crate) fn after(&self, arguments: &HookArguments<'_>) -> Result<()> {
        call(&self.after, arguments)
    }
}

/// Calls hooks, which may call operations, whose hooks may call operations.
fn call(hooks: &HookList<CallHook>, arguments: &HookArguments<'_>) -> Result<()> {
    thread_local!(static DEPTH: Cell<u32> = const { Cell::new(0) });
    struct Inside;
    impl Drop for Inside {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
    if hooks.is_empty() {
        return Ok(());
    }
    DEPTH.set(DEPTH.get() + 1);
    let _inside = Inside;
    if DEPTH.get() > MAX_DEPTH {
        return Err(Error::InvalidArgument {
            operation: arguments.operation.name(),
            detail: format!(
                "hooks have called operations in {MAX_DEPTH} levels; a hook that calls an \
                 operation is called for that operation too, and must end the recursion"
            ),
        });
    }
    hooks.iter().for_each(|(_, hook)| hook(arguments));
    Ok(())
}

#[derive(Default)]
struct Table {
    /// Number of hooks, which is read without the lock.
    count: AtomicU64,
    /// Number of the last registered hook.
    numbered: AtomicU64,
    lists: RwLock<Arc<HookLists>>,
}

impl Table {
    fn current(&self) -> Arc<HookLists> {
        Arc::clone(&self.lists.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change(&self, change: impl FnOnce(&mut HookLists)) {
        let mut lists = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        let mut changed = HookLists::clone(&lists);
        change(&mut changed);
        self.count.store(changed.len() as u64, Ordering::Release);
        let before = core::mem::replace(&mut *lists, Arc::new(changed));
        drop(lists);
        // Dropped after the lock is released, because the captures of a removed hook may use hooks
        // when they are dropped.
        drop(before);
    }
}

/// Hooks of a communicator.
#[derive(Clone, Default)]
pub(crate) struct Hooks(Arc<Table>);

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks")
            .field("count", &self.0.count.load(Ordering::Relaxed))
            .finish()
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
    /// Removes the hook. A second call does nothing. Operations that were already issued still call
    /// the hook.
    pub fn remove(&self) {
        if let Some(table) = self.table.upgrade() {
            table.change(|lists| lists.remove(self.id));
        }
    }
}

impl Hooks {
    fn add(&self, add: impl FnOnce(&mut HookLists, u64)) -> HookHandle {
        let id = self.0.numbered.fetch_add(1, Ordering::Relaxed) + 1;
        self.0.change(|lists| add(lists, id));
        HookHandle {
            id,
            table: Arc::downgrade(&self.0),
        }
    }

    pub(crate) fn add_before(&self, hook: CallHook) -> HookHandle {
        self.add(|lists, id| lists.before.push((id, hook)))
    }

    pub(crate) fn add_after(&self, hook: CallHook) -> HookHandle {
        self.add(|lists, id| lists.after.push((id, hook)))
    }

    pub(crate) fn add_abort(&self, hook: AbortHook) -> HookHandle {
        self.add(|lists, id| lists.abort.push((id, hook)))
    }

    pub(crate) fn add_replay(&self, hook: ReplayHook) -> HookHandle {
        self.add(|lists, id| lists.replay.push((id, hook)))
    }

    /// Returns true if no hook is registered. Costs one load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Relaxed) == 0
    }

    /// Returns the hooks for an operation that is issued now, if there are any.
    #[inline]
    pub(crate) fn current(&self) -> Option<Arc<HookLists>> {
        (!self.is_empty()).then(|| self.0.current())
    }

    /// Calls the abort hooks. On the CPU, calls them after the operation that this thread is
    /// executing, because they may use its tensors.
    pub(crate) fn abort(&self, error: &Error) {
        if self.is_empty() {
            return;
        }
        let (lists, error) = (self.0.current(), error.clone());
        crate::cpu::call_after_work(move || {
            lists.abort.iter().for_each(|(_, hook)| hook(&error));
        });
    }

    pub(crate) fn replay(&self, arguments: &ReplayArguments) {
        let lists = self.0.current();
        lists.replay.iter().for_each(|(_, hook)| hook(arguments));
    }
}

impl<'a> HookArguments<'a> {
    pub(crate) fn new(op_info: &OpInfo, id: u64, is_async: bool) -> Self {
        let call = op_info.call();
        // User kernels use the bits of type and reduction for their code.
        let is_user = call.operation() == Operation::User;
        Self {
            operation: call.operation(),
            id,
            dtype: DType::from_code(call.dtype())
                .filter(|_| call.operation() != Operation::Barrier && !is_user),
            reduction: ReductionCode::ALL
                .into_iter()
                .find(|code| *code as u8 == call.reduction() && !is_user),
            peer: (call.root() != 0xffff).then(|| call.root()),
            input_count: op_info.input_count,
            output_count: op_info.output_count,
            is_async,
            work: None,
            error: None,
        }
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
