//! Payload on a GPU: plain accesses in the global address space or, for elements of
//! [`Shared`](crate::Shared), in shared memory. They go through the shim that `fusewire-build`
//! links (`shims/*.ll`), so that the optimiser sees loads and stores.

use super::Policy;

// Defined in the shim with these signatures.
unsafe extern "unadjusted" {
    fn fusewire_read_8(at: *const u8) -> u8;
    fn fusewire_read_16(at: *const u8) -> u16;
    fn fusewire_read_32(at: *const u8) -> u32;
    fn fusewire_read_64(at: *const u8) -> u64;
    fn fusewire_read_128(at: *const u8) -> u128;
    fn fusewire_read_streaming(at: *const u8) -> u128;
    fn fusewire_write_8(at: *mut u8, value: u8);
    fn fusewire_write_16(at: *mut u8, value: u16);
    fn fusewire_write_32(at: *mut u8, value: u32);
    fn fusewire_write_64(at: *mut u8, value: u64);
    fn fusewire_write_128(at: *mut u8, value: u128);
    fn fusewire_write_streaming(at: *mut u8, value: u128);
    fn fusewire_shared_read_8(at: *const u8) -> u8;
    fn fusewire_shared_read_16(at: *const u8) -> u16;
    fn fusewire_shared_read_32(at: *const u8) -> u32;
    fn fusewire_shared_read_64(at: *const u8) -> u64;
    fn fusewire_shared_write_8(at: *mut u8, value: u8);
    fn fusewire_shared_write_16(at: *mut u8, value: u16);
    fn fusewire_shared_write_32(at: *mut u8, value: u32);
    fn fusewire_shared_write_64(at: *mut u8, value: u64);
}

#[inline(always)]
pub(super) const fn pair(value: u128) -> [u64; 2] {
    [value as u64, (value >> 64) as u64]
}

#[inline(always)]
pub(super) const fn wide(value: [u64; 2]) -> u128 {
    (value[1] as u128) << 64 | value[0] as u128
}

/// Size of the largest access to a `T`: its alignment, at most 16 bytes.
const fn unit<T>() -> usize {
    let align = align_of::<T>();
    if align < 16 { align } else { 16 }
}

/// Reads payload in global memory.
///
/// # Safety
/// `at` must be valid for `size_of::<T>()` bytes and aligned to `T`, and nothing may write them
/// meanwhile.
#[inline(always)]
pub unsafe fn read<T: Copy>(at: *const T) -> T {
    let mut out = core::mem::MaybeUninit::<T>::uninit();
    let to = out.as_mut_ptr().cast::<u8>();
    let from = at.cast::<u8>();
    let mut done = 0;
    // SAFETY: the range is valid by the precondition; the size of `T` is a multiple of its
    // alignment, so aligned accesses write every byte of `out`.
    unsafe {
        while done < size_of::<T>() {
            let (from, to) = (from.add(done), to.add(done));
            match unit::<T>() {
                1 => to.write(fusewire_read_8(from)),
                2 => to.cast::<u16>().write(fusewire_read_16(from)),
                4 => to.cast::<u32>().write(fusewire_read_32(from)),
                8 => to.cast::<u64>().write(fusewire_read_64(from)),
                _ => to.cast::<u128>().write(fusewire_read_128(from)),
            }
            done += unit::<T>();
        }
        out.assume_init()
    }
}

/// Writes payload in global memory.
///
/// # Safety
/// `at` must be valid for `size_of::<T>()` bytes and aligned to `T`, and nothing else may access
/// them meanwhile. `T` must have no padding.
#[inline(always)]
pub unsafe fn write<T: Copy>(at: *mut T, value: T) {
    let from = (&raw const value).cast::<u8>();
    let to = at.cast::<u8>();
    let mut done = 0;
    // SAFETY: the range is valid by the precondition, and the accesses are aligned.
    unsafe {
        while done < size_of::<T>() {
            let (from, to) = (from.add(done), to.add(done));
            match unit::<T>() {
                1 => fusewire_write_8(to, from.read()),
                2 => fusewire_write_16(to, from.cast::<u16>().read()),
                4 => fusewire_write_32(to, from.cast::<u32>().read()),
                8 => fusewire_write_64(to, from.cast::<u64>().read()),
                _ => fusewire_write_128(to, from.cast::<u128>().read()),
            }
            done += unit::<T>();
        }
    }
}

/// Reads a word of 1, 2, 4 or 8 bytes in the block's shared memory. If no lane has written it, or
/// if another lane writes it meanwhile, the word has some value.
///
/// # Safety
/// `at` must be valid, aligned and in shared memory.
#[inline(always)]
pub(crate) unsafe fn read_shared(at: *const u8, bytes: usize) -> u64 {
    // SAFETY: the precondition of this function.
    unsafe {
        match bytes {
            1 => fusewire_shared_read_8(at).into(),
            2 => fusewire_shared_read_16(at).into(),
            4 => fusewire_shared_read_32(at).into(),
            _ => fusewire_shared_read_64(at),
        }
    }
}

/// Writes the low bits of `value` to a word of 1, 2, 4 or 8 bytes in the block's shared memory.
///
/// # Safety
/// `at` must be valid, aligned and in shared memory.
#[inline(always)]
pub(crate) unsafe fn write_shared(at: *mut u8, bytes: usize, value: u64) {
    // SAFETY: the precondition of this function.
    unsafe {
        match bytes {
            1 => fusewire_shared_write_8(at, value as u8),
            2 => fusewire_shared_write_16(at, value as u16),
            4 => fusewire_shared_write_32(at, value as u32),
            _ => fusewire_shared_write_64(at, value),
        }
    }
}

/// Reads 16 bytes of payload in one access.
///
/// # Safety
/// As [`read`]; `at` must be 16-byte aligned.
#[inline(always)]
pub unsafe fn read_16(at: *const u8, policy: Policy) -> [u64; 2] {
    // SAFETY: the precondition of this function.
    pair(unsafe {
        match policy {
            Policy::Cached => fusewire_read_128(at),
            Policy::Streaming => fusewire_read_streaming(at),
        }
    })
}

/// Writes 16 bytes of payload in one access.
///
/// # Safety
/// As [`write`]; `at` must be 16-byte aligned.
#[inline(always)]
pub unsafe fn write_16(at: *mut u8, value: [u64; 2], policy: Policy) {
    // SAFETY: the precondition of this function.
    unsafe {
        match policy {
            Policy::Cached => fusewire_write_128(at, wide(value)),
            Policy::Streaming => fusewire_write_streaming(at, wide(value)),
        }
    }
}

/// Copies payload between ranges that do not overlap, by this lane alone; any alignment.
///
/// # Safety
/// Both ranges must be valid, and nothing else may write the source or access the target.
#[inline(always)]
pub unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    let mut done = 0;
    // SAFETY: the ranges are valid by the precondition; 16 bytes at once only if both are aligned.
    unsafe {
        if (to as usize | from as usize).is_multiple_of(16) {
            while done + 16 <= bytes {
                fusewire_write_128(to.add(done), fusewire_read_128(from.add(done)));
                done += 16;
            }
        }
        while done < bytes {
            fusewire_write_8(to.add(done), fusewire_read_8(from.add(done)));
            done += 1;
        }
    }
}

/// Does nothing: a release covers streaming stores.
#[inline(always)]
pub fn drain() {}
