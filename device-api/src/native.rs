//! Kernels on the CPU: how a block and its lanes are described to a native entry, and the typed
//! value [`Kernel`] that a host launches.
//!
//! In production a block has one lane ([`crate::group::Single`]). For tests the same body also runs
//! with 32 or 64 lanes, each a real thread ([`crate::group::Lanes`]); then [`BlockShared`] is the
//! barrier, the shuffle network and the shared memory of the block.

use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;

use crate::arch;
use crate::mem::prim::{AtomicU32, AtomicU64, Ordering};

/// Most lanes that an emulated block can have; few in a loom model, where each costs an atomic.
pub const MAX_LANES: usize = if cfg!(loom) { 2 } else { 64 };

/// Identity of one lane, as a native entry receives it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LaneContext {
    /// Index of the block in the launch.
    pub block: u32,
    /// Blocks in the launch.
    pub blocks: u32,
    /// Index of the lane in its block.
    pub lane: u32,
    /// Lanes in the block: 1 in production.
    pub lanes: u32,
    /// State that the lanes of this block share.
    pub shared: *const BlockShared,
}

/// A kernel's native entry: runs one lane of one block.
///
/// # Safety
/// The context must describe a lane whose block shares one [`BlockShared`], and the second argument
/// must point at the kernel's parameter struct.
pub type NativeEntry = unsafe fn(*const LaneContext, *const u8);

/// Shared state of the lanes of one emulated block: a barrier, an exchange area, shared memory.
pub struct BlockShared {
    lanes: u32,
    arrived: AtomicU32,
    phase: AtomicU32,
    gone: AtomicU32,
    exchange: [AtomicU64; MAX_LANES],
    shared: UnsafeCell<*mut u8>,
}

// SAFETY: the pointer is written at construction only; the memory behind it is shared by the rules
// of block-shared memory (lanes synchronise by the barrier), everything else is atomic.
unsafe impl Send for BlockShared {}
// SAFETY: as above.
unsafe impl Sync for BlockShared {}

impl fmt::Debug for BlockShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockShared")
            .field("lanes", &self.lanes)
            .finish_non_exhaustive()
    }
}

impl BlockShared {
    /// Creates a block of `lanes` lanes whose shared memory is at `shared` ([`arch::SHARED_BYTES`]
    /// bytes, 128-byte aligned, alive as long as this value).
    pub fn new(lanes: u32, shared: *mut u8) -> Self {
        Self {
            lanes,
            arrived: AtomicU32::new(0),
            phase: AtomicU32::new(0),
            gone: AtomicU32::new(0),
            exchange: core::array::from_fn(|_| AtomicU64::new(0)),
            shared: UnsafeCell::new(shared),
        }
    }

    /// Returns the start of the block's shared memory.
    #[inline(always)]
    pub fn shared(&self) -> *mut u8 {
        // SAFETY: written at construction only.
        unsafe { *self.shared.get() }
    }

    /// Waits until all lanes of the block stand here.
    ///
    /// # Panics
    /// When a lane has left the kernel ([`BlockShared::leave`]) while this one waits: on a GPU that
    /// is a hang or undefined behaviour.
    pub fn sync(&self) {
        let phase = self.phase.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.lanes {
            self.arrived.store(0, Ordering::Relaxed);
            self.phase.store(phase.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut polls = 0u32;
        while self.phase.load(Ordering::Acquire) == phase {
            assert!(
                self.gone.load(Ordering::Acquire) == 0
                    || self.phase.load(Ordering::Acquire) != phase,
                "a lane left the kernel while others of its block stand at a barrier"
            );
            polls += 1;
            if polls < 8 {
                arch::pause()
            } else {
                arch::nap(0)
            }
        }
    }

    /// Contributes `value`; every lane gets what `pick` makes of all contributions.
    pub fn exchange<R>(
        &self,
        lane: u32,
        value: u64,
        pick: impl FnOnce(&dyn Fn(u32) -> u64) -> R,
    ) -> R {
        self.exchange[lane as usize].store(value, Ordering::Relaxed);
        self.sync();
        let picked = pick(&|from| self.exchange[from as usize % MAX_LANES].load(Ordering::Relaxed));
        self.sync();
        picked
    }

    /// Records that a lane has returned from the kernel. The last one to leave resets the block, so
    /// that the value can serve another launch.
    pub fn leave(&self) {
        if self.gone.fetch_add(1, Ordering::AcqRel) + 1 == self.lanes {
            self.gone.store(0, Ordering::Release);
        }
    }
}

/// One parameter of a kernel: its offset in the parameter struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamField {
    /// Name of the argument.
    pub name: &'static str,
    /// Byte offset in the parameter struct, and in the GPU's argument buffer.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// The native entries of one kernel instance.
#[derive(Clone, Copy, Debug)]
pub struct NativeEntries {
    /// Any CPU of the target.
    pub baseline: NativeEntry,
    /// x86-64 with AVX2, FMA and F16C.
    pub avx2: NativeEntry,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    pub avx512: NativeEntry,
    /// Several lanes a block (tests).
    pub lanes: NativeEntry,
}

impl NativeEntries {
    /// Returns the entry for `isa` when a block has one lane, else the entry for several lanes.
    #[inline(always)]
    pub const fn entry(&self, isa: Isa, lanes: u32) -> NativeEntry {
        match (lanes, isa) {
            (1, Isa::Baseline) => self.baseline,
            (1, Isa::Avx2) => self.avx2,
            (1, Isa::Avx512) => self.avx512,
            _ => self.lanes,
        }
    }
}

/// Instruction set of the native entry that this machine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// The target's baseline.
    Baseline,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

/// One kernel instance without its parameter type, as lists of kernels hold it.
#[derive(Clone, Copy, Debug)]
pub struct KernelInfo {
    /// Exported symbol in a GPU image.
    pub name: &'static str,
    /// Path of the module that defines it, `crate::module`: kernels of one module are one family,
    /// and share a GPU image.
    pub module: &'static str,
    /// Parameters, in order.
    pub params: &'static [ParamField],
    /// Native entries.
    pub native: NativeEntries,
}

impl KernelInfo {
    /// Returns the family that the kernel belongs to: the module of the crate that defines it, or
    /// the crate itself.
    pub fn family(&self) -> &'static str {
        let mut parts = self.module.split("::");
        let krate = parts.next().unwrap_or_default();
        parts.next().unwrap_or(krate)
    }
}

/// A kernel instance that can be launched with parameters `P`.
pub struct Kernel<P> {
    info: KernelInfo,
    params: PhantomData<fn(&P)>,
}

impl<P> Clone for Kernel<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Kernel<P> {}

impl<P> fmt::Debug for Kernel<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.info.name).finish()
    }
}

impl KernelInfo {
    /// Returns the bytes of the parameter struct, with the padding after its last field: the
    /// distance of two of them in a table.
    pub const fn param_bytes(&self) -> usize {
        // Scalars of natural alignment; `#[kernel]` refuses anything else.
        let (mut end, mut align, mut index) = (0usize, 1, 0);
        while index < self.params.len() {
            let ParamField { offset, size, .. } = self.params[index];
            end = offset + size;
            if size > align {
                align = size;
            }
            index += 1;
        }
        end.next_multiple_of(align)
    }
}

impl<P> Kernel<P> {
    /// Binds an instance to its parameter type. Called by `#[kernel]`.
    ///
    /// # Safety
    /// `info` must describe a kernel whose parameter struct is `P`.
    pub const unsafe fn new(info: KernelInfo) -> Self {
        Self {
            info,
            params: PhantomData,
        }
    }

    /// Returns the instance's description.
    pub const fn info(&self) -> &KernelInfo {
        &self.info
    }

    /// Returns the entry for `isa` when a block has one lane, else the entry for several lanes.
    #[inline(always)]
    pub const fn entry(&self, isa: Isa, lanes: u32) -> NativeEntry {
        self.info.native.entry(isa, lanes)
    }
}

/// Expands to the body of a native entry of a kernel.
#[cfg(not(any(loom, shuttle)))]
#[doc(hidden)]
#[macro_export]
macro_rules! native_body {
    ($context:ident, $params:ident, $body:block) => {
        $body
    };
}

/// Leaves out the body: a model calls the kernel itself, and entries take a minute to compile.
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
#[macro_export]
macro_rules! native_body {
    ($context:ident, $params:ident, $body:block) => {{
        let _ = ($context, $params);
        unreachable!("models call kernels, not their native entries")
    }};
}
