//! C interface of Fusewire: the functions that `include/fusewire.h` declares. The header documents
//! them; the items of this crate have the same names.
//!
//! - Functions return one of the [`codes`]. A failed call stores a message for its thread
//!   ([`fusewire_last_error`]). No panic unwinds into C: a panic becomes
//!   [`codes::FUSEWIRE_ERROR_INTERNAL`].
//! - A handle is a pointer to a boxed value. A null handle is an error; using a destroyed handle
//!   is undefined behaviour.
//! - A buffer consists of an address, a count and a type. Blocking calls use the memory directly.
//!   Enqueued calls wrap it in a tensor (`Tensor::adopt`), which copies nothing. The tensor keeps
//!   memory of [`fusewire_alloc`] alive; the caller keeps other memory alive.
//!
//! # Safety
//! The header states the preconditions of every function: pointers are null or valid for the call,
//! text ends with a zero byte, a struct is readable for its `struct_size` bytes, and handles are
//! alive.
//!
//! The buffers of an operation are valid memory of the communicator's device until the call
//! returns; those of an `_async` function, until the work is done and every graph that contains it
//! is destroyed. `work` is null or writable.

mod batch;
mod bytes;
mod call;
mod comm;
mod error;
mod handle;
mod memory;
mod moe;
mod norm;
mod operations;
mod overlap;
mod region;
mod types;
mod vector;
mod vocab;
mod window;
mod work;

pub use self::batch::{FusewireP2p, fusewire_batch, fusewire_batch_async};
pub use self::bytes::{
    FusewireBytes, fusewire_all_gather_bytes, fusewire_broadcast_bytes, fusewire_bytes_count,
    fusewire_bytes_destroy, fusewire_bytes_part, fusewire_gather_bytes, fusewire_recv_bytes,
    fusewire_scatter_bytes, fusewire_send_bytes,
};
pub use self::comm::{
    FusewireComm, fusewire_comm_abort, fusewire_comm_create, fusewire_comm_destroy,
    fusewire_comm_failure, fusewire_comm_from_env, fusewire_comm_on_new_stream,
    fusewire_comm_on_own_stream, fusewire_comm_on_stream, fusewire_comm_rank, fusewire_comm_size,
    fusewire_comm_split, fusewire_comm_synchronize, fusewire_comm_warm_up,
    fusewire_comm_workspace_bytes, fusewire_workspace_bytes,
};
pub use self::error::{codes, fusewire_last_error};
pub use self::memory::{
    fusewire_alloc, fusewire_deregister, fusewire_download, fusewire_free, fusewire_register,
    fusewire_upload,
};
pub use self::moe::{
    FusewireMoe, FusewireMoeConfig, FusewireMoeDispatched, FusewireMoeInfo, fusewire_moe_combine,
    fusewire_moe_combine_receive, fusewire_moe_combine_send, fusewire_moe_create,
    fusewire_moe_destroy, fusewire_moe_dispatch, fusewire_moe_dispatch_receive,
    fusewire_moe_dispatch_send, fusewire_moe_free, fusewire_moe_mask, fusewire_moe_missing,
    fusewire_moe_placement, fusewire_moe_query, fusewire_moe_redispatch,
    fusewire_moe_redispatch_send, fusewire_moe_set_blocking, fusewire_moe_set_placement,
    fusewire_moe_tokens_per_expert, fusewire_moe_wait_ns,
};
pub use self::norm::{
    fusewire_all_reduce_norm, fusewire_all_reduce_norm_async, fusewire_reduce_scatter_norm,
    fusewire_reduce_scatter_norm_async,
};
pub use self::operations::{
    fusewire_all_gather, fusewire_all_gather_async, fusewire_all_reduce, fusewire_all_reduce_async,
    fusewire_all_reduce_premul_sum, fusewire_all_reduce_premul_sum_async, fusewire_all_to_all,
    fusewire_all_to_all_async, fusewire_barrier, fusewire_barrier_async, fusewire_broadcast,
    fusewire_broadcast_async, fusewire_gather, fusewire_gather_async, fusewire_recv,
    fusewire_recv_async, fusewire_reduce, fusewire_reduce_async, fusewire_reduce_premul_sum,
    fusewire_reduce_premul_sum_async, fusewire_reduce_scatter, fusewire_reduce_scatter_async,
    fusewire_reduce_scatter_premul_sum, fusewire_reduce_scatter_premul_sum_async, fusewire_scatter,
    fusewire_scatter_async, fusewire_send, fusewire_send_async,
};
pub use self::overlap::{
    FusewireOverlap, FusewireReadyFlags, fusewire_all_gather_with_flags, fusewire_ready_flags_add,
    fusewire_ready_flags_create, fusewire_ready_flags_destroy, fusewire_ready_flags_stream_wait,
    fusewire_ready_flags_stream_write, fusewire_ready_flags_wait, fusewire_ready_flags_words,
    fusewire_reduce_scatter_on_arrival,
};
pub use self::types::{FusewireNorm, FusewireOptions, FusewireVocab, numbers};
pub use self::vector::{
    fusewire_all_gather_v, fusewire_all_gather_v_async, fusewire_all_gather_v_device,
    fusewire_all_gather_v_device_async, fusewire_all_to_all_v, fusewire_all_to_all_v_async,
    fusewire_all_to_all_v_device, fusewire_all_to_all_v_device_async, fusewire_reduce_scatter_v,
    fusewire_reduce_scatter_v_async,
};
pub use self::vocab::{fusewire_vocab_parallel, fusewire_vocab_parallel_async};
pub use self::window::{
    FusewireWindow, FusewireWindowOptions, fusewire_window_alloc, fusewire_window_create,
    fusewire_window_destroy, fusewire_window_device, fusewire_window_free, fusewire_window_get,
    fusewire_window_get_async, fusewire_window_memory, fusewire_window_peer_memory,
    fusewire_window_put, fusewire_window_put_async, fusewire_window_put_signal,
    fusewire_window_put_signal_async, fusewire_window_raise, fusewire_window_raise_async,
    fusewire_window_read_counter, fusewire_window_read_signal, fusewire_window_reset_counter,
    fusewire_window_reset_signal, fusewire_window_signal, fusewire_window_signal_async,
    fusewire_window_wait_raised, fusewire_window_wait_raised_async, fusewire_window_wait_signal,
    fusewire_window_wait_signal_async,
};
pub use self::work::{
    FusewireGraph, FusewireWork, fusewire_capture_begin, fusewire_capture_end,
    fusewire_graph_destroy, fusewire_graph_launch, fusewire_graph_run, fusewire_work_destroy,
    fusewire_work_join, fusewire_work_wait,
};

/// Returns the version of the library as a number: major * 10000 + minor * 100 + patch. The
/// header's `FUSEWIRE_VERSION` has the same encoding.
#[unsafe(no_mangle)]
pub extern "C" fn fusewire_version() -> u32 {
    const fn number(text: &str) -> u32 {
        let (bytes, mut at, mut value) = (text.as_bytes(), 0, 0);
        while at < bytes.len() {
            value = value * 10 + (bytes[at] - b'0') as u32;
            at += 1;
        }
        value
    }
    const {
        number(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
            + number(env!("CARGO_PKG_VERSION_MINOR")) * 100
            + number(env!("CARGO_PKG_VERSION_PATCH"))
    }
}
