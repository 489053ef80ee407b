//! Mixture of experts: dispatch of tokens to the ranks of their experts, and combine of the
//! experts' results.

mod config;

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use fusewire::{DType, Dispatched, MicroBatch, Moe, MoeLayout, Tensor};

pub use self::config::FusewireMoeConfig;
use self::config::config_of;
use crate::call::{Call, operate};
use crate::comm::{FusewireComm, Shared};
use crate::error::{Outcome, argument, give, guard};
use crate::handle::{destroy, live};
use crate::memory::refuse_capture;
use crate::types::{VersionedStruct, numbers as n, read, struct_size, write};

/// `fusewire_moe_info`: sizes of a mixture of experts.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireMoeInfo {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// Number of rows of [`FusewireMoeDispatched::x`].
    pub rows: u64,
    /// Number of rows of the experts' results.
    pub results: u64,
    /// Distance in elements between the first elements of adjacent rows.
    pub x_stride: u64,
    /// Distance in elements between the first scales of adjacent rows; 0 without scales.
    pub scales_stride: u64,
    /// Size in bytes of a row that one rank sends to another.
    pub row_bytes: u64,
    /// Size in bytes of the memory of this rank, for all micro-batches.
    pub bytes: u64,
    /// Maximum number of experts of a rank.
    pub local_experts: u32,
    /// Number of blocks of a launch.
    pub blocks: u32,
}

/// `fusewire_moe_dispatched`: the tokens that a rank has received for its experts.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireMoeDispatched {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// Number of the handle in the process.
    pub moe: u64,
    /// Number of the dispatch of the micro-batch.
    pub number: u64,
    /// Micro-batch of the dispatch.
    pub micro_batch: u32,
    /// Type of `x`.
    pub dtype: u32,
    /// Type of `scales`; 0 without scales.
    pub scale_dtype: u32,
    /// Number of elements of `ids` and `weights` for each row.
    pub ids_per_row: u32,
    /// Number of rows.
    pub rows: u64,
    /// Distance in elements between the first elements of adjacent rows.
    pub x_stride: u64,
    /// Distance in elements between the first scales of adjacent rows; 0 without scales.
    pub scales_stride: u64,
    /// The rows.
    pub x: *mut c_void,
    /// The scales of the rows, or null.
    pub scales: *mut c_void,
    /// Rows of each expert, or from each rank.
    pub counts: *const u32,
    /// First row of each expert or from each rank, and the end of the last one; null in rank-major
    /// order in low latency mode.
    pub offsets: *const u32,
    /// The rank and the token of each row.
    pub sources: *const u32,
    /// The experts of each row.
    pub ids: *const i32,
    /// The weights of each row.
    pub weights: *const f32,
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireMoeInfo {
    const NAME: &'static str = "fusewire_moe_info";
    const FIRST: usize = 64;
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireMoeDispatched {
    const NAME: &'static str = "fusewire_moe_dispatched";
    const FIRST: usize = 120;
}

const _: () = assert!(size_of::<FusewireMoeInfo>() >= FusewireMoeInfo::FIRST);
const _: () = assert!(size_of::<FusewireMoeDispatched>() >= FusewireMoeDispatched::FIRST);

/// A mixture of experts: the type `fusewire_moe`.
#[derive(Debug)]
pub struct FusewireMoe {
    moe: Moe,
    /// State of the communicator that it belongs to. Weak, because the last handle of the
    /// communicator ends it.
    comm: Weak<Shared>,
    /// Number of this handle in the process, which its dispatches contain.
    number: u64,
    batches: Vec<Mutex<Latest>>,
    is_blocking: AtomicBool,
    is_freed: AtomicBool,
}

/// The last dispatch of a micro-batch.
#[derive(Debug, Default)]
struct Latest {
    /// Number of dispatches so far.
    number: u64,
    /// The last one, or `None` before the first one.
    dispatch: Option<Dispatch>,
}

#[derive(Debug)]
struct Dispatch {
    dispatched: Dispatched,
    tokens: u64,
}

impl Latest {
    /// Stores a new dispatch, and returns its description for C code.
    fn replace(
        &mut self,
        held: &FusewireMoe,
        micro_batch: u32,
        dispatch: Dispatch,
    ) -> FusewireMoeDispatched {
        self.number += 1;
        let value = describe(held, micro_batch, self.number, &dispatch.dispatched);
        self.dispatch = Some(dispatch);
        value
    }
}

/// Number of handles that the process has created.
static HANDLES: AtomicU64 = AtomicU64::new(0);

impl FusewireMoe {
    /// Returns the `Moe` on the stream of a call.
    fn on(&self, call: &Call<'_>) -> Moe {
        let moe = self.moe.on(call.handle.comm.stream());
        match self.is_blocking.load(Ordering::Relaxed) {
            true => moe.blocking(),
            false => moe,
        }
    }

    fn latest(&self, micro_batch: u32) -> Option<MutexGuard<'_, Latest>> {
        let batch = self.batches.get(micro_batch as usize)?;
        Some(batch.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the value of a handle, unless it was freed.
///
/// # Safety
/// `moe` is null or a handle that lives as long as the result is used.
unsafe fn moe_of<'a>(operation: &str, moe: *const FusewireMoe) -> Outcome<&'a FusewireMoe> {
    // SAFETY: the caller passes null or a live handle.
    let held = unsafe { live(operation, "the mixture of experts is", moe)? };
    if held.is_freed.load(Ordering::Acquire) {
        return Err(argument(operation, "the mixture of experts was freed"));
    }
    Ok(held)
}

/// Returns the value of a handle, if it belongs to the communicator of `comm`.
///
/// # Safety
/// `moe` is null or a handle that lives as long as the result is used.
unsafe fn moe_on<'a>(
    operation: &str,
    comm: &FusewireComm,
    moe: *const FusewireMoe,
) -> Outcome<&'a FusewireMoe> {
    // SAFETY: the caller passes null or a live handle.
    let held = unsafe { moe_of(operation, moe)? };
    if !ptr::eq(held.comm.as_ptr(), Arc::as_ptr(&comm.shared)) {
        let detail = "the mixture of experts belongs to another communicator";
        return Err(argument(operation, detail));
    }
    Ok(held)
}

/// Allocates the memory of a mixture of experts, and loads the kernels. All ranks must call this
/// function, with the same configuration.
///
/// # Safety
/// `comm` is null or a live handle; `config` is null or readable for its `struct_size` bytes; `moe`
/// is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_create(
    comm: *const FusewireComm,
    config: *const FusewireMoeConfig,
    moe: *mut *mut FusewireMoe,
) -> c_int {
    const NAME: &str = "fusewire_moe_create";
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "moe", moe, ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let config = unsafe { config_of(NAME, config)? };
        let made = Box::new(FusewireMoe {
            moe: Moe::new(&handle.comm, &config)?,
            comm: Arc::downgrade(&handle.shared),
            number: HANDLES.fetch_add(1, Ordering::Relaxed) + 1,
            batches: (0..config.in_flight).map(|_| Mutex::default()).collect(),
            is_blocking: AtomicBool::new(false),
            is_freed: AtomicBool::new(false),
        });
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "moe", moe, Box::into_raw(made)) }
    })
}

/// Frees the memory that peers can write. All ranks must call this function. The handle stays
/// valid.
///
/// # Safety
/// `comm` and `moe` are null or live handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_free(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
) -> c_int {
    const NAME: &str = "fusewire_moe_free";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { moe_on(NAME, handle, moe)? };
        refuse_capture(handle)?;
        held.moe.on(handle.comm.stream()).free()?;
        held.is_freed.store(true, Ordering::Release);
        // The last dispatches keep memory of the caller alive.
        for batch in &held.batches {
            batch
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .dispatch = None;
        }
        Ok(())
    })
}

/// Destroys a handle. Memory that peers can write and that was not freed stays until the
/// communicator ends.
///
/// # Safety
/// `moe` is null or a live handle that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_destroy(moe: *mut FusewireMoe) -> c_int {
    // SAFETY: the caller passes null or a handle that nothing uses any more.
    unsafe { destroy(moe) }
}

/// Stores the sizes in `info`.
///
/// # Safety
/// `moe` is null or a live handle; `info` is null or writable for its `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_query(
    moe: *const FusewireMoe,
    info: *mut FusewireMoeInfo,
) -> c_int {
    const NAME: &str = "fusewire_moe_query";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let sizes = unsafe { moe_of(NAME, moe)? }.moe.info();
        let value = FusewireMoeInfo {
            struct_size: size_of::<FusewireMoeInfo>(),
            rows: sizes.rows as u64,
            results: sizes.results as u64,
            x_stride: sizes.x_stride as u64,
            scales_stride: sizes.scales_stride as u64,
            row_bytes: sizes.row_bytes as u64,
            bytes: sizes.bytes as u64,
            local_experts: sizes.local_experts,
            blocks: sizes.blocks,
        };
        // SAFETY: the caller passes null or a struct that is writable for `struct_size` bytes.
        unsafe { write(NAME, info, value) }
    })
}

/// Sets the rank of each expert. Waits until launches that use the placement have ended.
///
/// # Safety
/// `moe` is null or a live handle; `ranks` is null or has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_set_placement(
    moe: *const FusewireMoe,
    ranks: *const u32,
    count: u64,
) -> c_int {
    const NAME: &str = "fusewire_moe_set_placement";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { moe_of(NAME, moe)? };
        let experts = held.moe.config().experts;
        if count != u64::from(experts) {
            return Err(argument(
                NAME,
                format!("{count} ranks for {experts} experts"),
            ));
        }
        if ranks.is_null() {
            return Err(argument(NAME, "ranks is NULL"));
        }
        // SAFETY: `ranks` is not null; the caller guarantees `count` readable elements, and
        // `count == experts` (checked above).
        let ranks = unsafe { core::slice::from_raw_parts(ranks, experts as usize) };
        Ok(held.moe.set_placement(ranks)?)
    })
}

/// Makes later operations return once they have completed, or, if `blocking` is 0, once they are
/// enqueued.
///
/// # Safety
/// `moe` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_set_blocking(
    moe: *const FusewireMoe,
    blocking: c_int,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { moe_of("fusewire_moe_set_blocking", moe)? };
        held.is_blocking.store(blocking != 0, Ordering::Relaxed);
        Ok(())
    })
}

/// Stores the address of one of the tensors of a mixture of experts in `to`.
///
/// # Safety
/// `moe` is null or a live handle; `to` is null or writable.
unsafe fn address<T>(
    operation: &str,
    moe: *const FusewireMoe,
    what: &str,
    to: *mut *mut T,
    tensor: impl FnOnce(&Moe) -> &Tensor,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { moe_of(operation, moe)? };
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(operation, what, to, tensor(&held.moe).as_ptr().cast()) }
    })
}

/// Stores in `places` the device address of the place of each expert.
///
/// # Safety
/// `moe` is null or a live handle; `places` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_placement(
    moe: *const FusewireMoe,
    places: *mut *mut u32,
) -> c_int {
    const NAME: &str = "fusewire_moe_placement";
    // SAFETY: the preconditions of `address` are also preconditions of this function.
    unsafe { address(NAME, moe, "places", places, Moe::placement) }
}

/// Stores in `tokens` the device address of the number of selections of each expert of this rank.
///
/// # Safety
/// `moe` is null or a live handle; `tokens` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_tokens_per_expert(
    moe: *const FusewireMoe,
    tokens: *mut *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_moe_tokens_per_expert";
    // SAFETY: the preconditions of `address` are also preconditions of this function.
    unsafe { address(NAME, moe, "tokens", tokens, Moe::tokens_per_expert) }
}

/// Stores in `nanoseconds` the device address of the time of waiting for the rows of each rank.
///
/// # Safety
/// `moe` is null or a live handle; `nanoseconds` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_wait_ns(
    moe: *const FusewireMoe,
    nanoseconds: *mut *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_moe_wait_ns";
    // SAFETY: the preconditions of `address` are also preconditions of this function.
    unsafe { address(NAME, moe, "nanoseconds", nanoseconds, Moe::wait_ns) }
}

/// Stores in `mask` the device address of the ranks that this rank has masked.
///
/// # Safety
/// `moe` is null or a live handle; `mask` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_mask(moe: *const FusewireMoe, mask: *mut *mut u32) -> c_int {
    const NAME: &str = "fusewire_moe_mask";
    // SAFETY: the preconditions of `address` are also preconditions of this function.
    unsafe { address(NAME, moe, "mask", mask, Moe::mask) }
}

/// Stores in `missing` the device address of the results that the last combine of a micro-batch
/// lacks.
///
/// # Safety
/// `moe` is null or a live handle; `missing` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_missing(
    moe: *const FusewireMoe,
    micro_batch: u32,
    missing: *mut *mut u32,
) -> c_int {
    const NAME: &str = "fusewire_moe_missing";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { moe_of(NAME, moe)? };
        let batch = held.moe.micro_batch(micro_batch as usize)?;
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "missing", missing, batch.missing().as_ptr().cast()) }
    })
}

/// Returns the description of a dispatch for C code.
fn describe(
    held: &FusewireMoe,
    micro_batch: u32,
    number: u64,
    dispatched: &Dispatched,
) -> FusewireMoeDispatched {
    let (config, info) = (held.moe.config(), held.moe.info());
    let scales = dispatched.scales.as_ref();
    let is_expert_major = config.layout == MoeLayout::ExpertMajor;
    FusewireMoeDispatched {
        struct_size: size_of::<FusewireMoeDispatched>(),
        moe: held.number,
        number,
        micro_batch,
        dtype: dispatched.x.dtype() as u32,
        scale_dtype: scales.map_or(n::FUSEWIRE_DTYPE_DEFAULT, |scales| scales.dtype() as u32),
        ids_per_row: if is_expert_major { 1 } else { config.top_k },
        rows: info.rows as u64,
        x_stride: info.x_stride as u64,
        scales_stride: info.scales_stride as u64,
        x: dispatched.x.as_ptr().cast(),
        scales: scales.map_or(ptr::null_mut(), |scales| scales.as_ptr().cast()),
        counts: dispatched.counts.as_ptr().cast(),
        offsets: (dispatched.offsets.as_ref())
            .map_or(ptr::null(), |offsets| offsets.as_ptr().cast_const().cast()),
        sources: dispatched.sources.as_ptr().cast(),
        ids: dispatched.ids.as_ptr().cast(),
        weights: dispatched.weights.as_ptr().cast(),
    }
}

/// Tokens of a rank, and their experts.
struct Tokens {
    x: *const c_void,
    ids: *const i32,
    weights: *const f32,
    count: u64,
}

/// Enqueues a dispatch, or its sending half, through `run`. Stores the description of its result in
/// `to`.
///
/// # Safety
/// The preconditions of [`fusewire_moe_dispatch`].
unsafe fn dispatch(
    name: &'static str,
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    micro_batch: u32,
    given: Tokens,
    to: *mut FusewireMoeDispatched,
    run: impl FnOnce(&MicroBatch, &Tensor, &Tensor, &Tensor) -> fusewire::Result<Dispatched>,
) -> c_int {
    let body = |call: &Call<'_>| {
        // SAFETY: every bit pattern is valid (`VersionedStruct`).
        let none = unsafe { core::mem::zeroed::<FusewireMoeDispatched>() };
        // SAFETY: the caller passes null or a struct that is writable for `struct_size` bytes.
        unsafe { write(name, to, none)? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { moe_on(name, call.handle, moe)? };
        let moe = held.on(call);
        let batch = moe.micro_batch(micro_batch as usize)?;
        let (config, tokens) = (moe.config(), given.count);
        if tokens > config.max_tokens as u64 {
            let most = config.max_tokens;
            let detail = format!("{tokens} tokens; max_tokens of the configuration is {most}");
            return Err(argument(name, detail));
        }
        let selections = tokens.checked_mul(u64::from(config.top_k));
        let elements = tokens.checked_mul(config.hidden as u64);
        let (ids, weights) = (given.ids.cast(), given.weights.cast());
        let x = call.tensor("x", given.x, elements, config.input)?;
        let ids = call.tensor("ids", ids, selections, DType::I32)?;
        let weights = call.tensor("weights", weights, selections, DType::F32)?;
        let Some(mut latest) = held.latest(micro_batch) else {
            let detail = format!("micro-batch {micro_batch} does not exist");
            return Err(argument(name, detail));
        };
        let dispatched = run(&batch, &x, &ids, &weights)?;
        let value = latest.replace(held, micro_batch, Dispatch { dispatched, tokens });
        // SAFETY: the caller passes null or a struct that is writable for `struct_size` bytes.
        unsafe { write(name, to, value)? };
        Ok(None)
    };
    // SAFETY: the preconditions of `operate` are also preconditions of this function.
    unsafe { operate(name, comm, Some(ptr::null_mut()), body) }
}

/// Enqueues the dispatch of the tokens of this rank to the ranks of their experts.
///
/// # Safety
/// `comm` and `moe` are null or live handles. `x`, `ids` and `weights` are null or valid device
/// memory for `tokens` tokens until the work is done and every graph that contains it is destroyed;
/// `ids` and `weights` until this also holds for every combine of the dispatch. `dispatched` is
/// null or writable for its `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_dispatch(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    micro_batch: u32,
    x: *const c_void,
    ids: *const i32,
    weights: *const f32,
    tokens: u64,
    dispatched: *mut FusewireMoeDispatched,
) -> c_int {
    const NAME: &str = "fusewire_moe_dispatch";
    let given = Tokens {
        x,
        ids,
        weights,
        count: tokens,
    };
    let run = MicroBatch::dispatch;
    // SAFETY: the preconditions of `dispatch` are those of this function.
    unsafe { dispatch(NAME, comm, moe, micro_batch, given, dispatched, run) }
}

/// Enqueues the sending half of [`fusewire_moe_dispatch`].
///
/// # Safety
/// The preconditions of [`fusewire_moe_dispatch`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_dispatch_send(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    micro_batch: u32,
    x: *const c_void,
    ids: *const i32,
    weights: *const f32,
    tokens: u64,
    dispatched: *mut FusewireMoeDispatched,
) -> c_int {
    const NAME: &str = "fusewire_moe_dispatch_send";
    let given = Tokens {
        x,
        ids,
        weights,
        count: tokens,
    };
    let run = MicroBatch::dispatch_send;
    // SAFETY: the preconditions of `dispatch` are those of this function.
    unsafe { dispatch(NAME, comm, moe, micro_batch, given, dispatched, run) }
}

/// Enqueues an operation on the tokens of the dispatch that `given` describes, through `run`. If
/// the operation is another dispatch, `run` returns it, and its description is stored in `to`.
///
/// # Safety
/// `comm` and `moe` are null or live handles. `given` is null or readable for its `struct_size`
/// bytes. `to` is null or writable for its `struct_size` bytes.
unsafe fn after_dispatch(
    name: &'static str,
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    given: *const FusewireMoeDispatched,
    to: Option<*mut FusewireMoeDispatched>,
    run: impl FnOnce(&Call<'_>, &Moe, &Dispatch) -> Outcome<Option<Dispatch>>,
) -> c_int {
    let body = |call: &Call<'_>| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { moe_on(name, call.handle, moe)? };
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let given = unsafe { read(name, given)? };
        if let Some(to) = to {
            // SAFETY: the caller passes null or a struct whose first field is readable.
            unsafe { struct_size(name, to.cast_const())? };
        }
        let FusewireMoeDispatched {
            number,
            micro_batch,
            ..
        } = given;
        if given.moe == 0 {
            let detail = "the fusewire_moe_dispatched is not the result of a dispatch";
            return Err(argument(name, detail));
        }
        let latest = match given.moe == held.number {
            true => held.latest(micro_batch),
            false => None,
        };
        let Some(mut latest) = latest else {
            let detail = "the tokens were dispatched by another mixture of experts";
            return Err(argument(name, detail));
        };
        let last = latest.number;
        let dispatch = latest.dispatch.as_ref().filter(|_| number == last);
        let Some(dispatch) = dispatch else {
            let detail = format!(
                "the tokens are those of dispatch {number} of micro-batch {micro_batch}; after \
                 dispatch {last} they are no longer valid"
            );
            return Err(argument(name, detail));
        };
        let moe = held.on(call);
        let next = run(call, &moe, dispatch)?;
        if let (Some(next), Some(to)) = (next, to) {
            let value = latest.replace(held, micro_batch, next);
            // SAFETY: the caller passes null or a struct that is writable for `struct_size` bytes.
            unsafe { write(name, to, value)? };
        }
        Ok(None)
    };
    // SAFETY: the preconditions of `operate` are also preconditions of this function.
    unsafe { operate(name, comm, Some(ptr::null_mut()), body) }
}

/// Returns the experts' results at `y` as a tensor.
fn results(call: &Call<'_>, moe: &Moe, dispatch: &Dispatch, y: *const c_void) -> Outcome<Tensor> {
    let (config, x) = (moe.config(), &dispatch.dispatched.x);
    let count = moe.info().results * config.hidden;
    if y == x.as_ptr().cast() && x.dtype() == config.input && x.len() == count {
        // This tensor keeps the memory alive as long as work or a graph uses it.
        return Ok(x.clone());
    }
    call.tensor("y", y, Some(count as u64), config.input)
}

/// Returns the memory at `out` for the sums of the tokens of a dispatch as a tensor.
fn sums(call: &Call<'_>, moe: &Moe, dispatch: &Dispatch, out: *mut c_void) -> Outcome<Tensor> {
    let config = moe.config();
    let count = dispatch.tokens.checked_mul(config.hidden as u64);
    call.tensor("out", out, count, config.input)
}

/// Enqueues a dispatch of other tokens to the experts of `previous`, or its sending half, through
/// `run`.
///
/// # Safety
/// The preconditions of [`fusewire_moe_redispatch`].
unsafe fn redispatch(
    name: &'static str,
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    x: *const c_void,
    previous: *const FusewireMoeDispatched,
    to: *mut FusewireMoeDispatched,
    run: impl FnOnce(&Moe, &Tensor, &Dispatched) -> fusewire::Result<Dispatched>,
) -> c_int {
    let run = |call: &Call<'_>, moe: &Moe, dispatch: &Dispatch| {
        let (config, tokens) = (moe.config(), dispatch.tokens);
        let count = tokens.checked_mul(config.hidden as u64);
        let x = call.tensor("x", x, count, config.input)?;
        let dispatched = run(moe, &x, &dispatch.dispatched)?;
        Ok(Some(Dispatch { dispatched, tokens }))
    };
    // SAFETY: the preconditions of `after_dispatch` are also preconditions of this function.
    unsafe { after_dispatch(name, comm, moe, previous, Some(to), run) }
}

/// Enqueues the dispatch of other tokens to the same experts as `previous`.
///
/// # Safety
/// `comm` and `moe` are null or live handles. `x` is null or valid device memory for the tokens of
/// `previous` until the work is done and every graph that contains it is destroyed. `previous` is
/// null or readable, and `dispatched` null or writable, for its `struct_size` bytes; both may be
/// the same struct.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_redispatch(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    x: *const c_void,
    previous: *const FusewireMoeDispatched,
    dispatched: *mut FusewireMoeDispatched,
) -> c_int {
    const NAME: &str = "fusewire_moe_redispatch";
    let run = Moe::redispatch;
    // SAFETY: the preconditions of `redispatch` are those of this function.
    unsafe { redispatch(NAME, comm, moe, x, previous, dispatched, run) }
}

/// Enqueues the sending half of [`fusewire_moe_redispatch`].
///
/// # Safety
/// The preconditions of [`fusewire_moe_redispatch`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_redispatch_send(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    x: *const c_void,
    previous: *const FusewireMoeDispatched,
    dispatched: *mut FusewireMoeDispatched,
) -> c_int {
    const NAME: &str = "fusewire_moe_redispatch_send";
    let run = Moe::redispatch_send;
    // SAFETY: the preconditions of `redispatch` are those of this function.
    unsafe { redispatch(NAME, comm, moe, x, previous, dispatched, run) }
}

/// Enqueues the receiving half of [`fusewire_moe_dispatch`].
///
/// # Safety
/// `comm` and `moe` are null or live handles. `dispatched` is null or readable for its
/// `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_dispatch_receive(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    dispatched: *const FusewireMoeDispatched,
) -> c_int {
    const NAME: &str = "fusewire_moe_dispatch_receive";
    let run = |_: &Call<'_>, moe: &Moe, dispatch: &Dispatch| {
        moe.dispatch_receive(&dispatch.dispatched)?;
        Ok(None)
    };
    // SAFETY: the preconditions of `after_dispatch` are also preconditions of this function.
    unsafe { after_dispatch(NAME, comm, moe, dispatched, None, run) }
}

/// Enqueues the return of the experts' results to the ranks of their tokens, and the weighted sums
/// of this rank's tokens.
///
/// # Safety
/// `comm` and `moe` are null or live handles. `dispatched` is null or readable for its
/// `struct_size` bytes. `y` and `out` are null or valid device memory until the work is done and
/// every graph that contains it is destroyed, as are `ids` and `weights` of the dispatch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_combine(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    y: *const c_void,
    dispatched: *const FusewireMoeDispatched,
    out: *mut c_void,
) -> c_int {
    const NAME: &str = "fusewire_moe_combine";
    let run = |call: &Call<'_>, moe: &Moe, dispatch: &Dispatch| {
        let y = results(call, moe, dispatch, y)?;
        let out = sums(call, moe, dispatch, out)?;
        moe.combine(&y, &dispatch.dispatched, &out)?;
        Ok(None)
    };
    // SAFETY: the preconditions of `after_dispatch` are also preconditions of this function.
    unsafe { after_dispatch(NAME, comm, moe, dispatched, None, run) }
}

/// Enqueues the sending half of [`fusewire_moe_combine`].
///
/// # Safety
/// The preconditions of [`fusewire_moe_combine`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_combine_send(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    y: *const c_void,
    dispatched: *const FusewireMoeDispatched,
) -> c_int {
    const NAME: &str = "fusewire_moe_combine_send";
    let run = |call: &Call<'_>, moe: &Moe, dispatch: &Dispatch| {
        let y = results(call, moe, dispatch, y)?;
        moe.combine_send(&y, &dispatch.dispatched)?;
        Ok(None)
    };
    // SAFETY: the preconditions of `after_dispatch` are also preconditions of this function.
    unsafe { after_dispatch(NAME, comm, moe, dispatched, None, run) }
}

/// Enqueues the receiving half of [`fusewire_moe_combine`].
///
/// # Safety
/// The preconditions of [`fusewire_moe_combine`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_moe_combine_receive(
    comm: *const FusewireComm,
    moe: *const FusewireMoe,
    dispatched: *const FusewireMoeDispatched,
    out: *mut c_void,
) -> c_int {
    const NAME: &str = "fusewire_moe_combine_receive";
    let run = |call: &Call<'_>, moe: &Moe, dispatch: &Dispatch| {
        let out = sums(call, moe, dispatch, out)?;
        moe.combine_receive(&dispatch.dispatched, &out)?;
        Ok(None)
    };
    // SAFETY: the preconditions of `after_dispatch` are also preconditions of this function.
    unsafe { after_dispatch(NAME, comm, moe, dispatched, None, run) }
}
