//! Memory that operations read and write, with an element type that is known at run time.

use core::any::Any;
use core::fmt;
use core::ptr::NonNull;
use std::sync::Arc;

use fusewire_device::args::RawBuffer;
use fusewire_device::{DType, Element};

use crate::cpu::{self, Segment};
use crate::device::Device;
use crate::gpu;
use crate::memory::Memory;
use crate::usage::{Access, AccessList, Extent, InUse, Name, Usage, User};
use crate::{Error, Result};

/// Memory of tensors. Freed when all tensors, `Work` handles and graphs that use the memory have
/// been dropped.
pub(crate) struct Allocation {
    memory: Memory,
    usage: Arc<Usage>,
    /// Registration of the memory in a window, or the owner of adopted memory. Must live as long as
    /// `memory`.
    registration: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation")
            .field("bytes", &self.memory.bytes())
            .finish_non_exhaustive()
    }
}

impl Allocation {
    pub(crate) fn new(
        memory: Memory,
        registration: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            usage: Usage::of_memory(memory.ptr() as usize, memory.bytes()),
            memory,
            registration,
        })
    }
}

/// Bytes that [`Tensor::fill`] writes at once.
const FILL_BYTES: usize = 64 << 10;

/// Contiguous elements in device memory. Clones and slices share the memory.
///
/// ```
/// use fusewire::{DType, Tensor};
///
/// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0])?;
/// x.slice(2, 2)?.fill(9.0f32)?;
/// let y = Tensor::new(DType::F32, 4)?;
/// y.copy_from_tensor(&x)?;
/// assert_eq!(y.to_vec::<f32>()?, [1.0, 2.0, 9.0, 9.0]);
/// # Ok::<(), fusewire::Error>(())
/// ```
///
/// Memory from [`crate::Communicator::alloc`] lies in a window, so collectives use the memory
/// without a copy. Memory from [`Tensor::new`] lies in no window, so collectives copy the elements
/// through staging.
#[derive(Clone, Debug)]
pub struct Tensor {
    allocation: Arc<Allocation>,
    offset: u64,
    count: usize,
    dtype: DType,
    /// Bytes of the elements, as the allocation's usage counts them.
    extent: Extent,
}

/// A tensor that an operation uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TensorUse<'a> {
    /// The operation only reads the tensor.
    Read(&'a Tensor),
    /// The operation reads and writes the tensor.
    Write(&'a Tensor),
    /// The operation orders its accesses by signals or flags. Other operations and the host may
    /// access the tensor concurrently.
    Unordered(&'a Tensor),
}

impl<'a> TensorUse<'a> {
    pub(crate) const fn tensor(self) -> &'a Tensor {
        match self {
            Self::Read(tensor) | Self::Write(tensor) | Self::Unordered(tensor) => tensor,
        }
    }

    /// Returns the accesses that must be ordered.
    #[inline]
    pub(crate) fn accesses(uses: impl IntoIterator<Item = Self>) -> AccessList<'a> {
        let mut accesses = AccessList::new();
        uses.into_iter().for_each(|it| it.add_to(&mut accesses));
        accesses
    }

    /// Adds the access to `accesses`, if it must be ordered.
    #[inline]
    pub(crate) fn add_to(self, accesses: &mut AccessList<'a>) {
        match self {
            Self::Read(tensor) => tensor.add_access(accesses, false),
            Self::Write(tensor) => tensor.add_access(accesses, true),
            Self::Unordered(_) => {}
        }
    }
}

impl Tensor {
    /// An empty list of tensors, for list operations in which this rank has no tensors.
    pub const NONE: &'static [Self] = &[];

    /// Allocates `count` zeroed elements of ordinary CPU memory, outside any window.
    ///
    /// # Errors
    /// [`Error::MemoryMap`] if the system cannot map the memory, [`Error::InvalidArgument`] if the
    /// size overflows.
    pub fn new(dtype: DType, count: usize) -> Result<Self> {
        Self::on_device(Device::Cpu, dtype, count)
    }

    /// Copies `values` to new CPU memory, outside any window. [`crate::Communicator::tensor_from`]
    /// does the same on the communicator's device.
    ///
    /// # Errors
    /// The errors of [`Tensor::new`].
    pub fn from_slice<T: Element>(values: &[T]) -> Result<Self> {
        let tensor = Self::new(T::DTYPE, values.len())?;
        tensor.copy_from(values)?;
        Ok(tensor)
    }

    /// Allocates `count` zeroed elements of `device`'s memory, outside any window.
    ///
    /// # Errors
    /// The errors of [`Tensor::new`], [`Error::NoDevice`] if the device does not exist, and
    /// [`Error::Driver`].
    pub fn on_device(device: Device, dtype: DType, count: usize) -> Result<Self> {
        let bytes = bytes_of("tensor", dtype, count)?;
        let memory = Memory::create(device, bytes, "fusewire-tensor")?;
        Ok(Self::from_allocation(
            Allocation::new(memory, None),
            dtype,
            count,
        ))
    }

    /// Creates a tensor over memory that other code (PyTorch, candle, C, C++) allocated: `count`
    /// elements at address `at`. Fusewire drops `keep`, which may free the memory, when no tensor,
    /// `Work` handle or graph uses the memory any more. GPU memory can be registered in a window.
    /// Peers cannot map CPU memory that is in no window, so operations copy it through staging.
    ///
    /// # Safety
    /// Until `keep` is dropped, `at` must be valid memory of `device` for `count` elements, and
    /// other code that reads or writes the memory must synchronize with the operations that use the
    /// tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the size overflows, or if the address is null on the CPU or
    /// not aligned to the type; [`Error::NoDevice`].
    pub unsafe fn adopt(
        device: Device,
        at: *mut u8,
        dtype: DType,
        count: usize,
        keep: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self> {
        let bytes = bytes_of("adopt tensor", dtype, count)?;
        if !(at as usize).is_multiple_of(dtype.size()) {
            return Err(Error::InvalidArgument {
                operation: "adopt tensor",
                detail: format!("address {at:p} is not aligned to {}", dtype.name()),
            });
        }
        let memory = match (device, NonNull::new(at)) {
            (Device::Cpu, Some(at)) => {
                // SAFETY: the caller keeps the memory valid until `keep` is dropped. The allocation
                // below owns both the segment and `keep`.
                Memory::Host(unsafe { Segment::adopt(at, bytes) })
            }
            (Device::Cpu, None) => {
                return Err(Error::InvalidArgument {
                    operation: "adopt tensor",
                    detail: "the address is null".to_owned(),
                });
            }
            _ => Memory::Device(gpu::Memory::adopt(
                &crate::gpus::open(device)?,
                at as u64,
                bytes,
            )),
        };
        Ok(Self::from_allocation(
            Allocation::new(memory, keep),
            dtype,
            count,
        ))
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> Device {
        self.allocation
            .memory
            .gpu()
            .map_or(Device::Cpu, |gpu| gpu.device())
    }

    pub(crate) fn from_allocation(allocation: Arc<Allocation>, dtype: DType, count: usize) -> Self {
        Self::at(allocation, 0, dtype, count)
    }

    /// Creates a tensor of `count` elements at byte `offset` of `allocation`. The elements must lie
    /// within the allocation.
    pub(crate) fn at(allocation: Arc<Allocation>, offset: u64, dtype: DType, count: usize) -> Self {
        let end = offset + (count * dtype.size()) as u64;
        Self {
            extent: allocation.usage.extent(offset, end),
            allocation,
            offset,
            count,
            dtype,
        }
    }

    /// Returns one tensor that covers all tensors of `list`, if they are contiguous and in order.
    pub(crate) fn joined(list: &[&Self]) -> Option<Self> {
        let first = *list.first()?;
        let mut end = first.offset;
        for part in list {
            if !Arc::ptr_eq(&part.allocation, &first.allocation) || part.offset != end {
                return None;
            }
            end += (part.count * part.dtype.size()) as u64;
        }
        let (allocation, count) = (&first.allocation, list.iter().map(|part| part.len()).sum());
        Some(Self::at(
            Arc::clone(allocation),
            first.offset,
            first.dtype,
            count,
        ))
    }

    /// Returns the memory that contains the tensor, and the tensor's byte offset in this memory.
    pub(crate) fn memory(&self) -> (Memory, u64) {
        (self.allocation.memory.clone(), self.offset)
    }

    /// Adds the access of an operation that reads, or reads and writes, the tensor.
    #[inline]
    fn add_access<'a>(&'a self, accesses: &mut AccessList<'a>, writes: bool) {
        if let Some(access) = Access::of(&self.allocation.usage, self.extent, writes) {
            accesses.push(access);
        }
    }

    /// Calls `body` while this thread accesses the tensor.
    fn while_used<R>(
        &self,
        writes: bool,
        operation: &'static str,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let mut accesses = AccessList::new();
        self.add_access(&mut accesses, writes);
        let user = cpu::replaying(cpu::executing(User::this_thread()));
        let _held = InUse::begin(&accesses, user, Name::Text(operation))?;
        body()
    }

    /// Returns the owner of memory that other code allocated.
    pub(crate) fn foreign_owner(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        match self.allocation.memory.is_foreign_on_gpu() {
            true => self.allocation.registration.clone(),
            false => None,
        }
    }

    pub(crate) fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.allocation) as _
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns true if the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the address of the first element.
    pub fn as_ptr(&self) -> *mut u8 {
        self.allocation
            .memory
            .ptr()
            .wrapping_add(self.offset as usize)
    }

    /// Returns a tensor of the elements `start..start + count`, which shares the memory of this
    /// tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range exceeds the tensor.
    pub fn slice(&self, start: usize, count: usize) -> Result<Self> {
        if start.checked_add(count).is_none_or(|end| end > self.count) {
            return Err(Error::InvalidArgument {
                operation: "slice",
                detail: format!(
                    "elements {start}..{} of a tensor of {}",
                    start.saturating_add(count),
                    self.count
                ),
            });
        }
        let offset = self.offset + (start * self.dtype.size()) as u64;
        let allocation = Arc::clone(&self.allocation);
        Ok(Self::at(allocation, offset, self.dtype, count))
    }

    /// Returns a tensor of `count` elements of another type at byte `offset` of this tensor, which
    /// shares its memory.
    ///
    /// # Panics
    /// If the elements exceed the tensor, or are not aligned.
    pub(crate) fn view(&self, offset: usize, dtype: DType, count: usize) -> Self {
        let end = offset + count * dtype.size();
        assert!(end <= self.count * self.dtype.size() && offset.is_multiple_of(dtype.size()));
        let allocation = Arc::clone(&self.allocation);
        Self::at(allocation, self.offset + offset as u64, dtype, count)
    }

    /// Copies `values` into the tensor. Waits until operations of this process that use the tensor
    /// have ended. Operations enqueued after the call see the new elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if type or length differ from the tensor's.
    pub fn copy_from<T: Element>(&self, values: &[T]) -> Result<()> {
        self.check::<T>("copy_from", values.len())?;
        // SAFETY: `T: Element` is plain data without padding, and the slice covers exactly
        // `values`.
        let bytes = unsafe {
            core::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values))
        };
        self.write("copy_from", bytes)
    }

    /// Sets every element to `value`, like [`Tensor::copy_from`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `T` is not the type of the elements.
    pub fn fill<T: Element>(&self, value: T) -> Result<()> {
        self.check::<T>("fill", self.count)?;
        let chunk = vec![value; self.count.min(FILL_BYTES / size_of::<T>())];
        // SAFETY: `T: Element` is plain data without padding, and the slice covers exactly `chunk`.
        let bytes = unsafe {
            core::slice::from_raw_parts(chunk.as_ptr().cast::<u8>(), size_of_val(&*chunk))
        };
        let end = self.offset + (self.count * size_of::<T>()) as u64;
        self.while_used(true, "fill", || {
            let mut at = self.offset;
            while at < end {
                let part = &bytes[..bytes.len().min((end - at) as usize)];
                // SAFETY: `while_used` excludes all operations of this process that use the memory.
                unsafe { self.allocation.memory.write(at, part)? };
                at += part.len() as u64;
            }
            Ok(())
        })
    }

    /// Copies the elements of `source`, which has the same type and length. The tensors may be on
    /// different devices, and may overlap. Waits until operations of this process that use the
    /// tensors have ended. The elements pass through host memory, so this function is for set-up
    /// and tests.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if types or lengths differ; [`Error::Driver`].
    pub fn copy_from_tensor(&self, source: &Self) -> Result<()> {
        if (source.dtype, source.count) != (self.dtype, self.count) {
            return Err(Error::InvalidArgument {
                operation: "copy_from_tensor",
                detail: format!(
                    "{} elements of {} for a tensor of {} elements of {}",
                    source.count,
                    source.dtype.name(),
                    self.count,
                    self.dtype.name()
                ),
            });
        }
        self.write("copy_from_tensor", &source.to_bytes()?)
    }

    /// Copies `bytes` into the memory of the tensor.
    fn write(&self, operation: &'static str, bytes: &[u8]) -> Result<()> {
        self.while_used(true, operation, || {
            // SAFETY: `while_used` excludes all operations of this process that use the memory.
            unsafe { self.allocation.memory.write(self.offset, bytes) }
        })
    }

    /// Fills `bytes` from the memory of the tensor.
    fn read(&self, operation: &'static str, bytes: &mut [u8]) -> Result<()> {
        self.while_used(false, operation, || {
            // SAFETY: `while_used` excludes all operations of this process that write the memory.
            unsafe { self.allocation.memory.read(self.offset, bytes) }
        })
    }

    /// Returns a copy of the elements. Waits until operations of this process that write the tensor
    /// have ended.
    ///
    /// A peer may write registered memory at any time by [`crate::Window::put`]. Bytes that a peer
    /// writes during this call are the old or the new ones.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `T` is not the type of the elements.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.check::<T>("to_vec", self.count)?;
        let mut values = Vec::<T>::with_capacity(self.count);
        // SAFETY: the vector's capacity is `count` elements. `write_bytes` initializes all of them
        // before the slice is created, and any bit pattern is a valid `T: Element`.
        unsafe {
            values.as_mut_ptr().write_bytes(0, self.count);
            let bytes = core::slice::from_raw_parts_mut(
                values.as_mut_ptr().cast::<u8>(),
                self.count * size_of::<T>(),
            );
            self.read("to_vec", bytes)?;
            values.set_len(self.count);
        }
        Ok(values)
    }

    /// Copies `bytes` into the tensor, like [`Tensor::copy_from`]. `bytes` must have the tensor's
    /// size.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the sizes differ; [`Error::Driver`].
    pub fn copy_from_bytes(&self, bytes: &[u8]) -> Result<()> {
        let needed = self.count * self.dtype.size();
        if bytes.len() != needed {
            return Err(Error::InvalidArgument {
                operation: "copy_from_bytes",
                detail: format!("{} bytes for a tensor of {needed} bytes", bytes.len()),
            });
        }
        self.write("copy_from_bytes", bytes)
    }

    /// Returns a copy of the elements' bytes, like [`Tensor::to_vec`].
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.count * self.dtype.size()];
        self.read("to_bytes", &mut bytes)?;
        Ok(bytes)
    }

    fn check<T: Element>(&self, operation: &'static str, count: usize) -> Result<()> {
        if T::DTYPE == self.dtype && count == self.count {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            operation,
            detail: format!(
                "{count} elements of {} for a tensor of {} elements of {}",
                T::DTYPE.name(),
                self.count,
                self.dtype.name()
            ),
        })
    }
}

/// Returns the size of `count` elements in bytes, or an error if the size exceeds 2^47 bytes.
pub(crate) fn bytes_of(operation: &'static str, dtype: DType, count: usize) -> Result<u64> {
    count
        .checked_mul(dtype.size())
        .filter(|&bytes| bytes <= (1 << 47))
        .map(|bytes| bytes as u64)
        .ok_or_else(|| Error::InvalidArgument {
            operation,
            detail: format!(
                "{count} elements of {} are more than memory can hold",
                dtype.name()
            ),
        })
}

/// Memory that an operation reads.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub(crate) ptr: *const u8,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) tensor: Option<&'a Tensor>,
    /// True if this value was created from a Rust slice, which is host memory even if the
    /// communicator's device is a GPU.
    pub(crate) is_slice: bool,
}

/// Memory that an operation writes, or reads and writes.
#[derive(Debug)]
pub struct Output<'a> {
    pub(crate) ptr: *mut u8,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) tensor: Option<&'a Tensor>,
    /// True if this value was created from a Rust slice, which is host memory even if the
    /// communicator's device is a GPU.
    pub(crate) is_slice: bool,
}

impl Input<'_> {
    /// Input of an operation that reads no memory.
    pub(crate) const EMPTY: Self = Self {
        ptr: core::ptr::null(),
        count: 0,
        dtype: DType::U8,
        tensor: None,
        is_slice: false,
    };

    /// Creates an input of `count` elements of type `dtype` at `ptr`.
    ///
    /// # Safety
    /// The memory must be readable as long as operations use the input.
    pub const unsafe fn from_raw(ptr: *const u8, count: usize, dtype: DType) -> Self {
        Self {
            ptr,
            count,
            dtype,
            tensor: None,
            is_slice: false,
        }
    }

    /// Returns the address of the first element.
    pub const fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Returns true if the input has no elements.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the type of the elements.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the elements as parameters of a kernel.
    pub(crate) fn raw(&self) -> RawBuffer {
        RawBuffer {
            at: self.ptr.cast_mut(),
            len: self.count as u64,
        }
    }

    /// Returns the bytes as parameters of a kernel.
    pub(crate) fn raw_bytes(&self) -> RawBuffer {
        RawBuffer {
            at: self.ptr.cast_mut(),
            len: (self.count * self.dtype.size()) as u64,
        }
    }
}

impl<'a> Output<'a> {
    /// Output of an operation that writes no memory.
    pub(crate) const EMPTY: Self = Self {
        ptr: core::ptr::null_mut(),
        count: 0,
        dtype: DType::U8,
        tensor: None,
        is_slice: false,
    };

    /// Creates an output of `count` elements of type `dtype` at `ptr`.
    ///
    /// # Safety
    /// While operations use the output, the memory must be readable and writable, and no other
    /// code may access it.
    pub const unsafe fn from_raw(ptr: *mut u8, count: usize, dtype: DType) -> Self {
        Self {
            ptr,
            count,
            dtype,
            tensor: None,
            is_slice: false,
        }
    }

    /// Returns the address of the first element.
    pub const fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Returns true if the output has no elements.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the type of the elements.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn as_input(&self) -> Input<'a> {
        Input {
            ptr: self.ptr,
            count: self.count,
            dtype: self.dtype,
            tensor: self.tensor,
            is_slice: self.is_slice,
        }
    }
}

impl<'a, T: Element> From<&'a [T]> for Input<'a> {
    fn from(slice: &'a [T]) -> Self {
        Self {
            ptr: slice.as_ptr().cast(),
            count: slice.len(),
            dtype: T::DTYPE,
            tensor: None,
            is_slice: true,
        }
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for Input<'a> {
    fn from(vec: &'a Vec<T>) -> Self {
        vec.as_slice().into()
    }
}

impl<'a, T: Element, const N: usize> From<&'a [T; N]> for Input<'a> {
    fn from(array: &'a [T; N]) -> Self {
        array.as_slice().into()
    }
}

impl<'a> From<&'a Tensor> for Input<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self {
            ptr: tensor.as_ptr(),
            count: tensor.count,
            dtype: tensor.dtype,
            tensor: Some(tensor),
            is_slice: false,
        }
    }
}

/// `None` is the input of an operation that reads no memory on this rank.
impl<'a> From<Option<&'a Tensor>> for Input<'a> {
    fn from(tensor: Option<&'a Tensor>) -> Self {
        tensor.map_or(Self::EMPTY, Self::from)
    }
}

/// `None` is the output of an operation that writes no memory on this rank.
impl<'a> From<Option<&'a Tensor>> for Output<'a> {
    fn from(tensor: Option<&'a Tensor>) -> Self {
        tensor.map_or(Self::EMPTY, Self::from)
    }
}

impl<'a, T: Element> From<&'a mut [T]> for Output<'a> {
    fn from(slice: &'a mut [T]) -> Self {
        Self {
            ptr: slice.as_mut_ptr().cast(),
            count: slice.len(),
            dtype: T::DTYPE,
            tensor: None,
            is_slice: true,
        }
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for Output<'a> {
    fn from(vec: &'a mut Vec<T>) -> Self {
        vec.as_mut_slice().into()
    }
}

impl<'a, T: Element, const N: usize> From<&'a mut [T; N]> for Output<'a> {
    fn from(array: &'a mut [T; N]) -> Self {
        array.as_mut_slice().into()
    }
}

impl<'a> From<&'a Tensor> for Output<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self {
            ptr: tensor.as_ptr(),
            count: tensor.count,
            dtype: tensor.dtype,
            tensor: Some(tensor),
            is_slice: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_cpu_can_be_adopted() {
        let mut owned = vec![1.0_f32, 2.0, 3.0];
        let keep = Arc::new(());
        let at = owned.as_mut_ptr().cast::<u8>();
        let kept: Arc<dyn Any + Send + Sync> = Arc::clone(&keep) as _;
        // SAFETY: the vector `owned` outlives the tensor, and no other code accesses the vector
        // until the tensor is dropped.
        let x = unsafe { Tensor::adopt(Device::Cpu, at, DType::F32, 3, Some(kept)) }.unwrap();
        assert_eq!((x.as_ptr(), x.device()), (at, Device::Cpu));
        x.slice(1, 2).unwrap().copy_from(&[4.0_f32, 5.0]).unwrap();
        assert_eq!(x.to_vec::<f32>().unwrap(), [1.0, 4.0, 5.0]);
        let refused = x.memory().0.descriptor().unwrap_err();
        assert!(
            refused.to_string().contains("did not allocate"),
            "{refused}"
        );
        assert_eq!(Arc::strong_count(&keep), 2);
        drop(x);
        assert_eq!(Arc::strong_count(&keep), 1);
        // Dropping the tensor neither freed nor unmapped the vector.
        assert_eq!(owned, [1.0, 4.0, 5.0]);
        for wrong in [core::ptr::null_mut(), at.wrapping_add(1)] {
            // SAFETY: `adopt` refuses null and unaligned addresses before it uses them.
            assert!(unsafe { Tensor::adopt(Device::Cpu, wrong, DType::F32, 1, None) }.is_err());
        }
    }
}
