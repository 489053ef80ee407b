//! The typed arguments of a launch.
//!
//! `#[kernel]` makes a struct for each kernel with a session, such as `Scale { x, factor }`. Its
//! fields for memory are [`Buffer`], [`WindowBuffer`] and [`QueueBuffer`], which a host makes from
//! its tensors, windows and queues. A host checks them against the kernel's [`Contract`] before it
//! launches.

use core::any::Any;
use core::fmt;
use core::marker::PhantomData;

use super::Kernel;
use crate::args::RawBuffer;
use crate::element::DType;
use crate::layout::LaunchHeader;
use crate::window::DeviceWindow;

/// Requirements of a kernel on its launch, and what messages about it need.
#[derive(Debug)]
pub struct Contract {
    /// True if the kernel waits for the launches that it depends on, so that it may begin before
    /// they end.
    pub dependent: bool,
    /// True if all blocks of a launch must run at the same time.
    pub grid: bool,
    /// True if the kernel is a safe function.
    pub safe: bool,
    /// Threads of a block on a GPU; 0 for any number.
    pub threads: u32,
    /// Blocks of the launch; 0 for any number.
    pub blocks: u32,
    /// Bytes of block-shared memory that the kernel uses.
    pub shared_bytes: u32,
    /// Signals that each window must have.
    pub signals: u32,
    /// The arguments, in order.
    pub arguments: &'static [ArgumentInfo],
    /// Texts of the failures that the author records, by code; `{a}` and `{b}` are the values.
    pub failures: &'static [(u32, &'static str)],
}

impl Contract {
    /// The contract of a kernel without requirements.
    pub const NONE: &'static Self = &Self {
        dependent: false,
        grid: false,
        safe: false,
        threads: 0,
        blocks: 0,
        shared_bytes: 0,
        signals: 0,
        arguments: &[],
        failures: &[],
    };
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct ArgumentInfo {
    /// Its name.
    pub name: &'static str,
    /// Its element type, if it is memory.
    pub dtype: Option<DType>,
    /// False for `In<T>`, which the kernel only reads.
    pub writes: bool,
}

/// Memory of this rank as an argument of a launch: a tensor of the host. A host implements
/// `From<&Tensor>`.
///
/// `T` is the kernel's element type; `()` where the instance decides. The element type of the
/// tensor is compared with it at the launch.
#[derive(Clone, Copy)]
pub struct Buffer<'a, T = ()> {
    address: *mut u8,
    len: u64,
    dtype: DType,
    owner: &'a dyn Any,
    element: PhantomData<fn() -> T>,
}

impl<'a, T> Buffer<'a, T> {
    /// Wraps `len` elements of type `dtype` at `address`, which belong to `owner`.
    ///
    /// # Safety
    /// The elements must be valid as long as `owner` or a clone of it lives, and aligned.
    pub const unsafe fn new(address: *mut u8, len: u64, dtype: DType, owner: &'a dyn Any) -> Self {
        Self {
            address,
            len,
            dtype,
            owner,
            element: PhantomData,
        }
    }

    /// Returns the address for the device.
    pub const fn address(&self) -> *mut u8 {
        self.address
    }

    /// Returns the address and the number of elements, as the parameters of a kernel hold them.
    pub const fn raw(&self) -> RawBuffer {
        RawBuffer {
            at: self.address,
            len: self.len,
        }
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the host's value that the memory belongs to.
    pub const fn owner(&self) -> &'a dyn Any {
        self.owner
    }

    /// Returns the same memory without the kernel's element type.
    pub const fn untyped(&self) -> Buffer<'a> {
        Buffer {
            address: self.address,
            len: self.len,
            dtype: self.dtype,
            owner: self.owner,
            element: PhantomData,
        }
    }
}

impl<T> fmt::Debug for Buffer<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

/// A window as an argument of a launch. A host implements `From<&Window>`. `T` is as for
/// [`Buffer`].
#[derive(Clone, Copy)]
pub struct WindowBuffer<'a, T = ()> {
    description: *const DeviceWindow,
    len: u64,
    dtype: DType,
    signals: u32,
    owner: &'a dyn Any,
    element: PhantomData<fn() -> T>,
}

impl<'a, T> WindowBuffer<'a, T> {
    /// Wraps the window that `description`, an address for the device, describes: parts of `len`
    /// elements of type `dtype`, and `signals` signals.
    ///
    /// # Safety
    /// The description and the window must be valid as long as `owner` or a clone of it lives.
    pub const unsafe fn new(
        description: *const DeviceWindow,
        len: u64,
        dtype: DType,
        signals: u32,
        owner: &'a dyn Any,
    ) -> Self {
        Self {
            description,
            len,
            dtype,
            signals,
            owner,
            element: PhantomData,
        }
    }

    /// Returns the address of the description for the device.
    pub const fn description(&self) -> *const DeviceWindow {
        self.description
    }

    /// Returns the number of elements of a part.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the parts have no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of signals.
    pub const fn signals(&self) -> u32 {
        self.signals
    }

    /// Returns the host's value that the window belongs to.
    pub const fn owner(&self) -> &'a dyn Any {
        self.owner
    }

    /// Returns the same window without the kernel's element type.
    pub const fn untyped(&self) -> WindowBuffer<'a> {
        WindowBuffer {
            description: self.description,
            len: self.len,
            dtype: self.dtype,
            signals: self.signals,
            owner: self.owner,
            element: PhantomData,
        }
    }
}

impl<T> fmt::Debug for WindowBuffer<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WindowBuffer")
            .field("len", &self.len)
            .field("dtype", &self.dtype)
            .field("signals", &self.signals)
            .finish_non_exhaustive()
    }
}

/// A queue as an argument of a launch. A host implements `From<&Queue>`. `T` is as for [`Buffer`].
#[derive(Clone, Copy, Debug)]
pub struct QueueBuffer<'a, T = ()>(WindowBuffer<'a, T>);

impl<'a, T> QueueBuffer<'a, T> {
    /// Wraps the window of a queue.
    ///
    /// # Safety
    /// The window must have been made for a queue, with the rings that its description says.
    pub const unsafe fn new(window: WindowBuffer<'a, T>) -> Self {
        Self(window)
    }

    /// Returns the window.
    pub const fn window(&self) -> &WindowBuffer<'a, T> {
        &self.0
    }
}

/// An argument of a launch, as [`KernelArguments::visit`] shows it.
#[derive(Clone, Copy, Debug)]
pub enum ArgumentValue<'a> {
    /// Memory.
    Buffer(Buffer<'a>),
    /// A window.
    Window(WindowBuffer<'a>),
    /// A queue, by its window.
    Queue(WindowBuffer<'a>),
    /// Temporary memory: its number of elements.
    Scratch(u64),
    /// A scalar, a struct or a raw pointer.
    Value,
}

/// The typed arguments of a kernel. Implemented by `#[kernel]`.
///
/// # Safety
/// `params` must return the parameters of the kernel that `kernel` returns. The kernel must access
/// no memory but its communicator's and that of the arguments that `visit` shows, except through
/// raw pointers.
pub unsafe trait KernelArguments {
    /// The parameters, as the kernel's entries receive them.
    type Params: Copy;

    /// Returns the instance.
    fn kernel(&self) -> Kernel<Self::Params>;

    /// Returns the parameters for a launch.
    fn params(&self, header: LaunchHeader) -> Self::Params;

    /// Calls `visit` with every argument, in order.
    fn visit<'s>(&'s self, visit: &mut dyn FnMut(ArgumentValue<'s>));

    /// Calls `visit` with every value that must be equal on all ranks, in order.
    fn agreed(&self, visit: &mut dyn FnMut(u64));
}

/// Arguments of a kernel that is a safe function. Implemented by `#[kernel]`.
///
/// # Safety
/// No values of the arguments may make the kernel access other memory.
pub unsafe trait SafeKernel: KernelArguments {}

/// A scalar as a word. Used by `#[kernel]` for arguments that must be equal on all ranks.
pub trait ScalarWord {
    /// Returns the bits, extended to 64.
    fn word(self) -> u64;
}

macro_rules! integer_words {
    ($($ty:ty)*) => {$(
        impl ScalarWord for $ty {
            #[allow(clippy::cast_sign_loss, clippy::cast_lossless)]
            fn word(self) -> u64 {
                self as u64
            }
        }
    )*};
}

integer_words!(u8 i8 u16 i16 u32 i32 u64 i64);

impl ScalarWord for f32 {
    fn word(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl ScalarWord for f64 {
    fn word(self) -> u64 {
        self.to_bits()
    }
}
