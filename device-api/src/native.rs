//! Kernels on the CPU: how a block and its lanes are described to a native entry, and the typed
//! value [`Kernel`] that a host launches.
//!
//! In production a block has one lane ([`crate::group::Single`]). For tests the same body also runs
//! with 32 or 64 lanes, each a real thread ([`crate::group::Lanes`]); then [`BlockShared`] is the
//! barrier, the shuffle network and the shared memory of the block.

mod arguments;

use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::panic::Location;

use crate::arch;
use crate::mem::prim::{AtomicU32, AtomicU64, Ordering};

pub use self::arguments::{
    ArgumentInfo, ArgumentValue, Buffer, Contract, KernelArguments, QueueBuffer, SafeKernel,
    ScalarWord, WindowBuffer,
};

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
    calls: [CallSite; MAX_LANES],
    /// Two lanes that entered one barrier from different places, plus 1 each; 0 if there are none.
    /// Outside of the model: it decides nothing but a panic.
    diverged: [core::sync::atomic::AtomicU32; 2],
}

/// The collective call that a lane has entered last. The block's barrier orders the accesses, so
/// they are not part of the model.
struct CallSite {
    location: core::sync::atomic::AtomicPtr<Location<'static>>,
    /// Hash of the arguments that must be equal on all lanes.
    arguments: core::sync::atomic::AtomicU64,
}

impl CallSite {
    fn new() -> Self {
        Self {
            location: core::sync::atomic::AtomicPtr::new(core::ptr::null_mut()),
            arguments: core::sync::atomic::AtomicU64::new(0),
        }
    }

    fn location(&self) -> Option<&'static Location<'static>> {
        let location = self.location.load(core::sync::atomic::Ordering::Relaxed);
        // SAFETY: null, or written from a `&'static Location` by `BlockShared::sync`.
        unsafe { location.cast_const().as_ref() }
    }

    fn arguments(&self) -> u64 {
        self.arguments.load(core::sync::atomic::Ordering::Relaxed)
    }
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
            calls: core::array::from_fn(|_| CallSite::new()),
            diverged: [const { core::sync::atomic::AtomicU32::new(0) }; 2],
        }
    }

    /// Returns the start of the block's shared memory.
    #[inline(always)]
    pub fn shared(&self) -> *mut u8 {
        // SAFETY: written at construction only.
        unsafe { *self.shared.get() }
    }

    /// Waits until all lanes of the block have entered.
    ///
    /// # Panics
    /// If lanes have entered from different places, or with different arguments
    /// ([`BlockShared::uniform`]). If a lane has left the kernel ([`BlockShared::leave`]) while
    /// this one waits. On a GPU both are a hang or undefined behaviour.
    #[track_caller]
    pub fn sync(&self, lane: u32) {
        let call = &self.calls[lane as usize % MAX_LANES];
        let location = core::ptr::from_ref(Location::caller()).cast_mut();
        call.location
            .store(location, core::sync::atomic::Ordering::Relaxed);
        let phase = self.phase.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.lanes {
            self.compare_calls();
            self.arrived.store(0, Ordering::Relaxed);
            self.phase.store(phase.wrapping_add(1), Ordering::Release);
        } else {
            self.await_phase(phase);
        }
        self.check_diverged();
    }

    fn await_phase(&self, phase: u32) {
        let mut polls = 0u32;
        while self.phase.load(Ordering::Acquire) == phase {
            assert!(
                self.gone.load(Ordering::Acquire) == 0
                    || self.phase.load(Ordering::Acquire) != phase,
                "a lane left the kernel while others of its block wait at a barrier"
            );
            polls += 1;
            if polls < 8 {
                arch::pause()
            } else {
                arch::nap(0)
            }
        }
    }

    /// Adds `value` to the arguments of this lane's next barrier, which must be equal on all lanes.
    pub fn uniform(&self, lane: u32, value: u64) {
        let arguments = &self.calls[lane as usize % MAX_LANES].arguments;
        let before = arguments.load(core::sync::atomic::Ordering::Relaxed);
        let next = (before.rotate_left(7) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        arguments.store(next.wrapping_add(1), core::sync::atomic::Ordering::Relaxed);
    }

    /// Compares the calls of all lanes. By the last lane that enters a barrier.
    fn compare_calls(&self) {
        use core::sync::atomic::Ordering::Relaxed;
        if cfg!(loom) {
            return;
        }
        let [first, others @ ..] = &self.calls[..self.lanes as usize] else {
            return;
        };
        let differs = others.iter().position(|call| {
            call.location() != first.location() || call.arguments() != first.arguments()
        });
        if let Some(other) = differs {
            self.diverged[0].store(1, Relaxed);
            self.diverged[1].store(other as u32 + 2, Relaxed);
            return;
        }
        for call in &self.calls {
            call.arguments.store(0, Relaxed);
        }
    }

    /// Panics if lanes of the block have made different calls.
    fn check_diverged(&self) {
        use core::sync::atomic::Ordering::Relaxed;
        let lanes = [0, 1].map(|i| self.diverged[i].load(Relaxed));
        if lanes[0] == 0 {
            return;
        }
        let lanes = lanes.map(|lane| lane as usize - 1);
        let [one, other] = lanes.map(|lane| self.calls[lane].location());
        if let (Some(one), Some(other)) = (one, other) {
            let [a, b] = lanes;
            assert!(
                one == other,
                "lanes of a block have diverged: lane {a} makes the collective call at {one}, lane \
                 {b} the one at {other}; all lanes of a block must make the same calls"
            );
            panic!(
                "lanes of a block pass different arguments to the collective call at {one}, such \
                 as the rank or the signal: lanes {a} and {b} differ"
            );
        }
    }

    /// Contributes `value`; every lane gets what `pick` makes of all contributions.
    #[track_caller]
    pub fn exchange<R>(
        &self,
        lane: u32,
        value: u64,
        pick: impl FnOnce(&dyn Fn(u32) -> u64) -> R,
    ) -> R {
        self.exchange[lane as usize].store(value, Ordering::Relaxed);
        self.sync(lane);
        let picked = pick(&|from| self.exchange[from as usize % MAX_LANES].load(Ordering::Relaxed));
        self.sync(lane);
        picked
    }

    /// Records that a lane has returned from the kernel. The last one to leave resets the block, so
    /// that the value can serve another launch.
    pub fn leave(&self) {
        if self.gone.fetch_add(1, Ordering::AcqRel) + 1 == self.lanes {
            for lane in &self.diverged {
                lane.store(0, core::sync::atomic::Ordering::Relaxed);
            }
            self.arrived.store(0, Ordering::Relaxed);
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

/// Every kernel that is linked into the program, in no particular order.
#[cfg(feature = "kernel-list")]
#[linkme::distributed_slice]
pub static KERNELS: [KernelInfo];

/// For the macro [`crate::register_kernel`].
#[cfg(feature = "kernel-list")]
#[doc(hidden)]
pub use linkme;

/// Returns the kernels of a crate that is linked into the program, in no particular order. `name`
/// is the crate's name in Rust, with underscores. The feature `kernel-list` makes the list.
#[cfg(feature = "kernel-list")]
pub fn kernels_of(name: &str) -> impl Iterator<Item = &'static KernelInfo> {
    KERNELS
        .iter()
        .filter(move |kernel| kernel.module.split("::").next() == Some(name))
}

/// Adds a kernel to [`native::KERNELS`](crate::native::KERNELS). Called by `#[kernel]`.
#[cfg(feature = "kernel-list")]
#[doc(hidden)]
#[macro_export]
macro_rules! register_kernel {
    ($kernel:expr) => {
        const _: () = {
            #[$crate::native::linkme::distributed_slice($crate::native::KERNELS)]
            #[linkme(crate = $crate::native::linkme)]
            static KERNEL: $crate::native::KernelInfo = *$kernel.info();
        };
    };
}

/// Does nothing: the program has no list of kernels.
#[cfg(not(feature = "kernel-list"))]
#[doc(hidden)]
#[macro_export]
macro_rules! register_kernel {
    ($kernel:expr) => {};
}

/// Returns true if `fields` have these names and sizes, in this order. `#[kernel]` demands it where
/// kernels share a parameter struct.
pub const fn has_fields(fields: &[ParamField], expected: &[(&str, usize)]) -> bool {
    const fn equal(a: &[u8], b: &[u8]) -> bool {
        let mut index = 0;
        while index < a.len() && index < b.len() {
            if a[index] != b[index] {
                return false;
            }
            index += 1;
        }
        a.len() == b.len()
    }
    let mut index = 0;
    while index < fields.len() && index < expected.len() {
        let (name, size) = expected[index];
        if fields[index].size != size || !equal(fields[index].name.as_bytes(), name.as_bytes()) {
            return false;
        }
        index += 1;
    }
    fields.len() == expected.len()
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
    /// Requirements on a launch.
    pub contract: &'static Contract,
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
