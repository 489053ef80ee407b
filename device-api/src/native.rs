//! Kernels as values that a host launches: their native entries for the CPU, their parameters and
//! requirements, and the typed value [`Kernel`].

mod arguments;

use core::fmt;
use core::marker::PhantomData;

use crate::group::cpu::LaneContext;

pub use self::arguments::{
    ArgumentInfo, ArgumentValue, Buffer, Contract, KernelArguments, QueueBuffer, SafeKernel,
    ScalarWord, WindowBuffer,
};

/// A kernel's native entry: runs one lane of one block.
///
/// # Safety
/// The context must describe a lane whose block shares one
/// [`BlockShared`](crate::group::cpu::BlockShared), and the second argument
/// must point at the kernel's parameter struct.
pub type NativeEntry = unsafe fn(*const LaneContext, *const u8);

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

/// Re-exported for the macro [`crate::register_kernel`].
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

/// Returns true if `fields` have these names and sizes, in this order. `#[kernel]` requires it of
/// kernels that share a parameter struct.
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
