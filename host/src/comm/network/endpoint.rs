//! The part of a rank that ranks of other processes access: they write its windows, and send it
//! notices of their progress, their failure, and their departure.
//!
//! A notice consists of a byte, which is a [`Notice`], and of 64-bit words.

use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, Ordering};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{ABORT, CommConst, FailureRecord, Mirror, Progress, WorkspaceLayout};
use fusewire_net::mesh;

use super::ring::Ring;
use crate::comm::peers::mark_dead;
use crate::comm::windows::Windows;
use crate::comm::words::{ABORT_AT, FAILURE_AT};
use crate::memory::Memory;

/// Words of a [`Progress`].
pub(super) type ProgressWords = [u64; size_of::<Progress>() / 8];
/// Words of a [`FailureRecord`].
pub(super) type FailureWords = [u64; size_of::<FailureRecord>() / 8];

/// Kind of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Notice {
    /// The progress of block 0 of the sender.
    Progress = 1,
    /// The failure record of the sender, which stops this rank.
    Failure = 2,
    /// The sender has left the communicator.
    Leave = 3,
}

/// A rank of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::comm) struct RemoteRank {
    pub(in crate::comm) rank: u32,
    /// The process.
    pub(in crate::comm) peer: mesh::Peer,
    /// Number of its endpoint.
    pub(in crate::comm) endpoint: u64,
}

/// Memory of a rank that the proxy of its process accesses.
pub(super) struct Endpoint {
    pub(super) ring: Ring,
    pub(super) rank: u32,
    pub(super) windows: Arc<Windows>,
    workspace: Memory,
    layout: WorkspaceLayout,
    /// Ranks by the numbers of their endpoints.
    ranks: HashMap<u64, u32>,
    /// Reasons why ranks can no longer be reached.
    losses: Mutex<BTreeMap<u32, String>>,
    /// Set when this rank leaves the communicator without a failure.
    has_left: AtomicBool,
}

impl Endpoint {
    pub(super) fn new(
        ring: Ring,
        constants: &CommConst,
        windows: Arc<Windows>,
        workspace: Memory,
        remotes: &[RemoteRank],
    ) -> Self {
        Self {
            ring,
            rank: constants.rank,
            windows,
            workspace,
            layout: constants.workspace,
            ranks: remotes
                .iter()
                .map(|remote| (remote.endpoint, remote.rank))
                .collect(),
            losses: Mutex::default(),
            has_left: AtomicBool::new(false),
        }
    }

    /// Returns the abort word, or 0 if this rank has left before.
    pub(super) fn abort_word(&self) -> u64 {
        match self.has_left() {
            true => 0,
            false => self.workspace.load(ABORT_AT),
        }
    }

    /// Notes that this rank leaves the communicator without a failure. Returns false if it has
    /// failed or left before.
    pub(super) fn leave(&self) -> bool {
        if self.workspace.load(ABORT_AT) != 0 || self.has_left.swap(true, Ordering::AcqRel) {
            return false;
        }
        if self.workspace.load(ABORT_AT) != 0 {
            // It has failed meanwhile.
            self.has_left.store(false, Ordering::Release);
            return false;
        }
        true
    }

    /// Returns true if this rank has left the communicator without a failure.
    pub(super) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    /// Returns true if `rank` has left the communicator, or can no longer be reached.
    pub(super) fn is_gone(&self, rank: u32) -> bool {
        let word = self.layout.dead + u64::from(rank / 64) * 8;
        self.workspace.load(word) >> (rank % 64) & 1 == 1
    }

    /// Returns the notice of this rank's progress, and its words.
    pub(super) fn progress(&self) -> (Vec<u8>, ProgressWords) {
        let words = self.words(self.layout.progress);
        (encode(Notice::Progress, &words), words)
    }

    /// Returns the notice of this rank's failure.
    pub(super) fn failure(&self) -> Vec<u8> {
        let words: FailureWords = self.words(FAILURE_AT);
        encode(Notice::Failure, &words)
    }

    /// Returns the notice that this rank leaves.
    pub(super) fn departure() -> Vec<u8> {
        encode(Notice::Leave, &[])
    }

    fn words<const N: usize>(&self, at: u64) -> [u64; N] {
        core::array::from_fn(|index| self.workspace.load(at + 8 * index as u64))
    }

    /// Notes that `rank` can no longer be reached, unless it has left before.
    pub(super) fn lose(&self, rank: u32, reason: &str) {
        if self.mark(rank) {
            let mut losses = self.losses.lock().unwrap_or_else(PoisonError::into_inner);
            losses.insert(rank, reason.to_owned());
        }
    }

    /// Returns the reason why `rank` can no longer be reached, unless it has left.
    pub(super) fn reason_of_loss(&self, rank: u32) -> Option<String> {
        let losses = self.losses.lock().unwrap_or_else(PoisonError::into_inner);
        losses.get(&rank).cloned()
    }

    /// Marks `rank` as dead. Returns false if it was marked before.
    fn mark(&self, rank: u32) -> bool {
        mark_dead(&self.workspace, &self.layout, rank)
    }

    /// Writes words of the mirror of `rank`. Writes the first word last, so that a reader that sees
    /// the first word also sees the others.
    fn mirror(&self, rank: u32, offset: usize, words: &[u64]) {
        let mirror = u64::from(rank) * size_of::<Mirror>() as u64 + offset as u64;
        for (index, word) in words.iter().enumerate().rev() {
            let at = self.layout.mirrors + mirror + 8 * index as u64;
            // Memory of the CPU: the store does not fail.
            let _ = self.workspace.store(at, *word);
        }
    }
}

// SAFETY: windows are mapped while the table lists them, and `Windows::remove` calls `Mesh::forget`
// before it unmaps one. The communicator closes the endpoint before it drops the table. Kernels and
// hosts access the memory as the kernels' protocols demand.
unsafe impl mesh::Endpoint for Endpoint {
    fn locate(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        self.windows.range(WindowAddr(address), self.rank, bytes)
    }

    fn is_closed(&self) -> bool {
        self.abort_word() != 0
    }

    fn notice(&self, sender: u64, message: &[u8]) {
        let Some((rank, (notice, words))) = self.ranks.get(&sender).zip(decode(message)) else {
            return;
        };
        match notice {
            Notice::Progress if words.len() == size_of::<ProgressWords>() / 8 => {
                self.mirror(*rank, offset_of!(Mirror, progress), &words);
            }
            Notice::Failure if words.len() == size_of::<FailureWords>() / 8 => {
                self.mirror(*rank, offset_of!(Mirror, failure), &words);
                let word = ABORT | u64::from(*rank);
                self.workspace.compare_exchange(ABORT_AT, 0, word);
                if self.has_left() {
                    // `await_others` need not wait for the failed rank.
                    self.mark(*rank);
                }
            }
            Notice::Leave => {
                self.mark(*rank);
            }
            _ => {}
        }
    }
}

fn encode(notice: Notice, words: &[u64]) -> Vec<u8> {
    let mut message = vec![notice as u8];
    message.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    message
}

fn decode(message: &[u8]) -> Option<(Notice, Vec<u64>)> {
    let (first, rest) = message.split_first()?;
    let notices = [Notice::Progress, Notice::Failure, Notice::Leave];
    let notice = notices.into_iter().find(|notice| *notice as u8 == *first)?;
    let (words, rest) = rest.as_chunks();
    let words = words.iter().map(|word| u64::from_le_bytes(*word));
    rest.is_empty().then(|| (notice, words.collect()))
}
