//! Functions of the user's that are called around operations.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::session::Operation;

use super::OpInfo;
use crate::{Error, Work};

/// What a hook before or after an operation gets.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HookArguments<'a> {
    /// The operation.
    pub operation: Operation,
    /// Number of the operation on this communicator and rank, from 1: the same before and after.
    pub id: u64,
    /// Element type, where it has one.
    pub dtype: Option<DType>,
    /// Reduction, where it has one.
    pub reduction: Option<ReductionCode>,
    /// Root or peer, where it has one.
    pub peer: Option<u32>,
    /// Elements of this rank's input.
    pub input_count: u64,
    /// Elements of this rank's output.
    pub output_count: u64,
    /// Whether it is enqueued, or run before the call returns.
    pub is_async: bool,
    /// After an enqueued operation: its handle.
    pub work: Option<&'a Work>,
    /// After an operation that failed: why.
    pub error: Option<&'a Error>,
}

/// Which edge of a replayed operation a hook is called at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayEdge {
    /// Just before it runs.
    Start,
    /// Just after.
    End,
}

/// What a hook on graph replay gets; it is called on the thread that replays.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ReplayArguments {
    /// The graph, by a number that no other graph of the process has.
    pub graph_id: u64,
    /// How often the graph has been replayed, from 1.
    pub replay_id: u64,
    /// WindowAddr of the operation among the graph's nodes.
    pub index: u64,
    /// The operation.
    pub operation: Operation,
    /// Start or end.
    pub edge: ReplayEdge,
}

type CallHook = Arc<dyn Fn(&HookArguments<'_>) + Send + Sync>;
type AbortHook = Arc<dyn Fn(&Error) + Send + Sync>;
type ReplayHook = Arc<dyn Fn(&ReplayArguments) + Send + Sync>;

/// A kind of hook, each with its number.
type HookList<T> = Vec<(u64, T)>;

/// The hooks at one moment. An operation calls those that were there when it was issued, without a
/// lock, so that they may register and remove hooks.
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

    pub(crate) fn before(&self, arguments: &HookArguments<'_>) {
        self.before.iter().for_each(|(_, hook)| hook(arguments));
    }

    pub(crate) fn after(&self, arguments: &HookArguments<'_>) {
        self.after.iter().for_each(|(_, hook)| hook(arguments));
    }
}

#[derive(Default)]
struct Table {
    /// How many hooks there are: read without the lock.
    count: AtomicU64,
    /// The last number given.
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
        // What a hook that goes has captured may use hooks when it is dropped.
        drop(before);
    }
}

/// A communicator's hooks.
#[derive(Clone, Default)]
pub(crate) struct Hooks(Arc<Table>);

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks")
            .field("count", &self.0.count.load(Ordering::Relaxed))
            .finish()
    }
}

/// A registered hook. Dropping it leaves the hook in place.
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
    /// Takes the hook out; a second call does nothing. An operation that has begun still calls it.
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

    /// Whether there are none: one load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Relaxed) == 0
    }

    /// The hooks of an operation that is issued now, if there are any.
    #[inline]
    pub(crate) fn current(&self) -> Option<Arc<HookLists>> {
        (!self.is_empty()).then(|| self.0.current())
    }

    pub(crate) fn abort(&self, error: &Error) {
        let lists = self.0.current();
        lists.abort.iter().for_each(|(_, hook)| hook(error));
    }

    pub(crate) fn replay(&self, arguments: &ReplayArguments) {
        let lists = self.0.current();
        lists.replay.iter().for_each(|(_, hook)| hook(arguments));
    }
}

impl<'a> HookArguments<'a> {
    pub(crate) fn new(op_info: &OpInfo, id: u64, is_async: bool) -> Self {
        let call = op_info.call();
        // The code of a user kernel takes the place of type and reduction.
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
    use crate::{Communicator, Device, HookHandle, Options, Result};

    fn alone() -> Result<Communicator> {
        let store = Arc::new(MemoryStore::new());
        Communicator::new(Device::Cpu, 0, 1, store, "alone", Options::default())
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
