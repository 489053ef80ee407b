//! Releases, and the positions of threads in scopes.

use std::sync::Arc;

use super::clock::{Knowledge, Thread, join};
use crate::program::Scope;

/// The position of a thread in the scopes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) thread: Thread,
    pub(crate) device: u32,
}

impl Position {
    /// Returns true if a scope of this thread contains another thread.
    fn reaches(self, scope: Scope, other: Self) -> bool {
        match scope {
            Scope::Cta => self.thread.block == other.thread.block,
            Scope::Gpu => self.device == other.device,
            Scope::Sys => true,
        }
    }

    /// Returns true if the scopes of two operations contain each other's thread.
    pub(crate) fn mutual(self, scope: Scope, other: Self, others: Scope) -> bool {
        self.reaches(scope, other) && other.reaches(others, self)
    }
}

/// A release by a thread, or by several threads of a block: what happens before it, and its scope.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) by: Position,
    pub(crate) scope: Scope,
    pub(crate) knowledge: Arc<Knowledge>,
}

/// Adds a release to a list, which has one entry for each block and scope.
pub(crate) fn add_release(list: &mut Vec<Arc<Release>>, release: &Arc<Release>) {
    let same = |it: &&mut Arc<Release>| {
        it.by.thread.block == release.by.thread.block && it.scope == release.scope
    };
    match list.iter_mut().find(same) {
        Some(known) if Arc::ptr_eq(known, release) => {}
        Some(known) => {
            let mut both = (**known).clone();
            join(&mut both.knowledge, &release.knowledge);
            *known = Arc::new(both);
        }
        None => list.push(Arc::clone(release)),
    }
}
