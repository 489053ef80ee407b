//! A minimal all_reduce program. Its time is a lower bound for the time of a library. The ranks
//! share one mapping. The program does not check that calls match, does not bound waits, does not
//! detect failures and has no other operations. User memory is in the mapping, so nothing is
//! copied.
//!
//! - Inputs of at most [`PACKET_BYTES`]: every rank writes its input, and then a flag, to a slot of
//!   every other rank. Two sets of slots alternate.
//! - Larger inputs: between two signals, rank r reads shard r of all inputs and writes the sum to
//!   all outputs.

use core::sync::atomic::{AtomicU64, Ordering, fence};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};

use crate::measure::Peer;
use crate::reduce::{self, Sum};

/// Largest input, in bytes, that is sent as a packet.
const PACKET_BYTES: usize = 256;
/// Size in bytes of a cache line plus the adjacent line that the prefetcher fetches with it.
const LINE: usize = 128;
/// Size of a packet slot in bytes. Up to 56 bytes of data share a line with the flag; longer data
/// follows that line.
const SLOT: usize = LINE + PACKET_BYTES;
/// Smallest output, in bytes, that is written with non-temporal stores.
const STREAMING_BYTES: usize = 4 << 20;

/// Purpose of a signal line.
#[derive(Clone, Copy)]
enum Signal {
    Barrier,
    Ready,
    Done,
    Total,
}
const SIGNALS: usize = 4;

/// Computes the offsets of signals, slots and buffers in the mapping.
#[derive(Clone, Copy, Debug)]
struct Layout {
    ranks: usize,
    buffer: usize,
}

impl Layout {
    fn new(ranks: usize, longest: usize) -> Self {
        Self {
            ranks,
            buffer: longest.next_multiple_of(4096).max(4096),
        }
    }

    /// Returns the offset of the line that rank `from` writes and rank `at` reads.
    fn line(self, signal: Signal, at: usize, from: usize) -> usize {
        ((at * self.ranks + from) * SIGNALS + signal as usize) * LINE
    }

    fn slot(self, epoch: u64, at: usize, from: usize) -> usize {
        let slots = self.ranks * self.ranks;
        let set = (epoch % 2) as usize * slots;
        slots * SIGNALS * LINE + (set + at * self.ranks + from) * SLOT
    }

    /// Returns the offset of the input (`which` 0) or output (1) of `rank`.
    fn data(self, rank: usize, which: usize) -> usize {
        let control = self.slot(0, 0, 0) + 2 * self.ranks * self.ranks * SLOT;
        control.next_multiple_of(4096) + (rank * 2 + which) * self.buffer
    }

    fn bytes(self) -> usize {
        self.data(self.ranks, 0)
    }
}

/// Creates shared memory for `ranks` ranks with inputs of at most `longest` bytes. Child processes
/// inherit the descriptor.
pub(crate) fn memory(ranks: usize, longest: usize) -> Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated string literal.
    let fd = unsafe { libc::memfd_create(c"fusewire-bare".as_ptr(), 0) };
    ensure!(fd >= 0, "memfd_create: {}", io::Error::last_os_error());
    // SAFETY: `memfd_create` returned this descriptor just now, so nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let bytes = Layout::new(ranks, longest).bytes();
    // SAFETY: `ftruncate` touches no memory.
    let result = unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) };
    ensure!(result == 0, "ftruncate: {}", io::Error::last_os_error());
    Ok(fd)
}

/// One rank of the bare program. The mapping is never unmapped.
#[derive(Debug)]
pub(crate) struct Rank {
    base: *mut u8,
    layout: Layout,
    rank: usize,
    count: usize,
    spins: u32,
    barriers: u64,
    packets: u64,
    rounds: u64,
}

impl Rank {
    pub(crate) fn open(
        fd: i32,
        rank: usize,
        ranks: usize,
        longest: usize,
        spins: u32,
    ) -> Result<Self> {
        ensure!((1..=reduce::MAX).contains(&ranks), "{ranks} ranks");
        let layout = Layout::new(ranks, longest);
        // SAFETY: the address is null, so the call replaces no existing mapping. The
        // function `memory` sized the file of the descriptor with the same `Layout`.
        let base = unsafe {
            libc::mmap(
                core::ptr::null_mut(),
                layout.bytes(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        ensure!(base != libc::MAP_FAILED, "{}", io::Error::last_os_error());
        // SAFETY: the range is the mapping made above; MADV_HUGEPAGE does not change its contents.
        unsafe { libc::madvise(base, layout.bytes(), libc::MADV_HUGEPAGE) };
        let mut rank = Self {
            base: base.cast(),
            layout,
            rank,
            count: 0,
            spins,
            barriers: 0,
            packets: 0,
            rounds: 0,
        };
        rank.barrier().context("barrier")?;
        Ok(rank)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.layout.bytes());
        self.base.wrapping_add(offset)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: `offset` is a multiple of 8 within the mapping (see `Layout`), and the word is
        // only accessed atomically.
        unsafe { &*self.at(offset).cast::<AtomicU64>() }
    }

    #[inline(always)]
    fn wait(&self, offset: usize, value: u64) {
        let word = self.word(offset);
        let mut polls = 0;
        while word.load(Ordering::Acquire) < value {
            polls += 1;
            if polls < self.spins {
                core::hint::spin_loop();
            } else {
                // SAFETY: sched_yield has no preconditions.
                unsafe { libc::sched_yield() };
            }
        }
    }

    /// Signals `value` to every other rank and waits for the same value from every other rank.
    #[inline(always)]
    fn signal_and_wait(&self, signal: Signal, value: u64) {
        let (me, ranks) = (self.rank, self.layout.ranks);
        for step in 1..ranks {
            let peer = (me + step) % ranks;
            let line = self.layout.line(signal, peer, me);
            self.word(line).store(value, Ordering::Release);
        }
        for step in 1..ranks {
            let peer = (me + step) % ranks;
            self.wait(self.layout.line(signal, me, peer), value);
        }
    }

    fn data(&self, rank: usize, which: usize) -> *mut f32 {
        self.at(self.layout.data(rank, which)).cast()
    }

    #[inline]
    fn packet(&mut self) {
        self.packets += 1;
        let (me, ranks) = (self.rank, self.layout.ranks);
        let bytes = self.count * 4;
        // Up to 56 bytes of data are in the same line as the flag, before it. Longer data start
        // after that line.
        let data_at = if bytes <= 56 { 0 } else { LINE };
        let input = self.data(me, 0);
        for step in 1..ranks {
            let slot = self.layout.slot(self.packets, (me + step) % ranks, me);
            // SAFETY: the data end within the slot (`count * 4 <= PACKET_BYTES`). The slot may
            // hold packet `packets - 2`. The peer read that packet before it sent its packet
            // `packets - 1`, which this rank has acquired.
            unsafe {
                let to = self.at(slot + data_at).cast::<f32>();
                if bytes == 8 {
                    to.cast::<[f32; 2]>().write(input.cast::<[f32; 2]>().read());
                } else {
                    core::ptr::copy_nonoverlapping(input, to, self.count);
                }
            }
            self.word(slot + 56).store(self.packets, Ordering::Release);
        }
        let mut sources = [input.cast_const(); reduce::MAX];
        for step in 1..ranks {
            let peer = (me + step) % ranks;
            let slot = self.layout.slot(self.packets, me, peer);
            self.wait(slot + 56, self.packets);
            sources[peer] = self.at(slot + data_at).cast::<f32>().cast_const();
        }
        let sum = Sum {
            sources: &sources[..ranks],
            targets: &[self.data(me, 1)],
            count: self.count,
            streaming: false,
        };
        // SAFETY: the sources are this rank's input and slots whose flags this rank has acquired.
        // The target is this rank's output. All hold `count` elements at addresses that are
        // multiples of 64.
        unsafe { sum.run() }
    }

    #[inline]
    fn direct(&mut self) {
        self.rounds += 1;
        let (me, ranks) = (self.rank, self.layout.ranks);
        self.signal_and_wait(Signal::Ready, self.rounds);
        let blocks = self.count.div_ceil(64);
        let first = (blocks * me / ranks * 64).min(self.count);
        let last = (blocks * (me + 1) / ranks * 64).min(self.count);
        let mut sources = [core::ptr::null::<f32>(); reduce::MAX];
        let mut targets = [core::ptr::null_mut::<f32>(); reduce::MAX];
        for step in 0..ranks {
            sources[step] = self.data(step, 0).wrapping_add(first).cast_const();
            targets[step] = self.data((me + step) % ranks, 1).wrapping_add(first);
        }
        let sum = Sum {
            sources: &sources[..ranks],
            targets: &targets[..ranks],
            count: last - first,
            streaming: self.count * 4 >= STREAMING_BYTES,
        };
        // SAFETY: `last <= count` elements are within every buffer. The ready signals that this
        // rank acquired order these accesses after the peers' writes to inputs and their last reads
        // of outputs. Shards start at multiples of 64 elements.
        unsafe { sum.run() }
        fence(Ordering::Release);
        self.signal_and_wait(Signal::Done, self.rounds);
    }
}

impl Peer for Rank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.layout.ranks
    }

    fn prepare(&mut self, count: usize) -> Result<()> {
        self.count = count;
        self.barrier()
    }

    fn input(&mut self) -> &mut [f32] {
        // SAFETY: the buffer has at least `count` elements (`longest`); peers read it only while
        // `all_reduce` runs, which borrows `self` exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.data(self.rank, 0), self.count) }
    }

    fn output(&mut self) -> &mut [f32] {
        // SAFETY: the buffer has at least `count` elements (`longest`); peers write it only while
        // `all_reduce` runs, which borrows `self` exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.data(self.rank, 1), self.count) }
    }

    #[inline]
    fn barrier(&mut self) -> Result<()> {
        self.barriers += 1;
        self.signal_and_wait(Signal::Barrier, self.barriers);
        Ok(())
    }

    #[inline]
    fn all_reduce(&mut self) -> Result<()> {
        if self.count * 4 <= PACKET_BYTES {
            self.packet();
        } else {
            self.direct();
        }
        Ok(())
    }

    fn total(&mut self, value: u64) -> Result<u64> {
        let ranks = self.layout.ranks;
        let word = |rank| self.layout.line(Signal::Total, rank, rank);
        self.word(word(self.rank)).store(value, Ordering::Release);
        self.barrier()?;
        let sum = (0..ranks)
            .map(|rank| self.word(self.layout.line(Signal::Total, rank, rank)))
            .map(|word| word.load(Ordering::Acquire))
            .sum();
        self.barrier()?;
        Ok(sum)
    }
}
