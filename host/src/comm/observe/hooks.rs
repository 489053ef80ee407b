//! Functions of the user's that are called around operations.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::session::Operation;

use super::Note;
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
    /// Place of the operation among the graph's nodes.
    pub index: u64,
    /// The operation.
    pub operation: Operation,
    /// Start or end.
    pub edge: ReplayEdge,
}

type Around = Arc<dyn Fn(&HookArguments<'_>) + Send + Sync>;
type OnAbort = Arc<dyn Fn(&Error) + Send + Sync>;
type OnReplay = Arc<dyn Fn(&ReplayArguments) + Send + Sync>;

enum Hook {
    Before(Around),
    After(Around),
    Abort(OnAbort),
    Replay(OnReplay),
}

#[derive(Default)]
struct Table {
    next: u64,
    hooks: Vec<(u64, Hook)>,
}

/// A communicator's hooks.
#[derive(Clone, Default)]
pub(crate) struct Hooks {
    /// How many there are: read without the lock.
    count: Arc<AtomicU64>,
    table: Arc<RwLock<Table>>,
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks")
            .field("count", &self.count.load(Ordering::Relaxed))
            .finish()
    }
}

/// A registered hook. Dropping it leaves the hook in place.
#[derive(Clone)]
pub struct HookHandle {
    id: u64,
    count: Weak<AtomicU64>,
    table: Weak<RwLock<Table>>,
}

impl fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookHandle").field("id", &self.id).finish()
    }
}

impl HookHandle {
    /// Takes the hook out; a second call does nothing. A call of the hook that has begun goes on.
    pub fn remove(&self) {
        let (Some(table), Some(count)) = (self.table.upgrade(), self.count.upgrade()) else {
            return;
        };
        let mut table = table.write().unwrap_or_else(PoisonError::into_inner);
        table.hooks.retain(|(id, _)| *id != self.id);
        count.store(table.hooks.len() as u64, Ordering::Release);
    }
}

impl Hooks {
    fn add(&self, hook: Hook) -> HookHandle {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.next += 1;
        let id = table.next;
        table.hooks.push((id, hook));
        self.count
            .store(table.hooks.len() as u64, Ordering::Release);
        HookHandle {
            id,
            count: Arc::downgrade(&self.count),
            table: Arc::downgrade(&self.table),
        }
    }

    pub(crate) fn add_before(&self, hook: Around) -> HookHandle {
        self.add(Hook::Before(hook))
    }

    pub(crate) fn add_after(&self, hook: Around) -> HookHandle {
        self.add(Hook::After(hook))
    }

    pub(crate) fn add_abort(&self, hook: OnAbort) -> HookHandle {
        self.add(Hook::Abort(hook))
    }

    pub(crate) fn add_replay(&self, hook: OnReplay) -> HookHandle {
        self.add(Hook::Replay(hook))
    }

    /// Whether there are none: one load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Calls the hooks that `pick` chooses, without the lock, so that they may register and remove hooks.
    fn call<T>(&self, pick: impl Fn(&Hook) -> Option<T>, run: impl Fn(T)) {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let chosen: Vec<T> = table
            .hooks
            .iter()
            .filter_map(|(_, hook)| pick(hook))
            .collect();
        drop(table);
        chosen.into_iter().for_each(run);
    }

    pub(crate) fn before(&self, arguments: &HookArguments<'_>) {
        let pick = |hook: &Hook| match hook {
            Hook::Before(hook) => Some(Arc::clone(hook)),
            _ => None,
        };
        self.call(pick, |hook| hook(arguments));
    }

    pub(crate) fn after(&self, arguments: &HookArguments<'_>) {
        let pick = |hook: &Hook| match hook {
            Hook::After(hook) => Some(Arc::clone(hook)),
            _ => None,
        };
        self.call(pick, |hook| hook(arguments));
    }

    pub(crate) fn abort(&self, error: &Error) {
        let pick = |hook: &Hook| match hook {
            Hook::Abort(hook) => Some(Arc::clone(hook)),
            _ => None,
        };
        self.call(pick, |hook| hook(error));
    }

    pub(crate) fn replay(&self, arguments: &ReplayArguments) {
        let pick = |hook: &Hook| match hook {
            Hook::Replay(hook) => Some(Arc::clone(hook)),
            _ => None,
        };
        self.call(pick, |hook| hook(arguments));
    }
}

impl<'a> HookArguments<'a> {
    pub(crate) fn new(note: &Note, id: u64, is_async: bool) -> Self {
        let call = note.call();
        Self {
            operation: call.operation(),
            id,
            dtype: DType::from_code(call.dtype())
                .filter(|_| call.operation() != Operation::Barrier),
            reduction: ReductionCode::ALL
                .into_iter()
                .find(|code| *code as u8 == call.reduction()),
            peer: (call.root() != 0xffff).then(|| call.root()),
            input_count: note.input_count,
            output_count: note.output_count,
            is_async,
            work: None,
            error: None,
        }
    }
}
