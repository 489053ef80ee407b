//! Bindings of libibverbs, which is opened at run time.
//!
//! The module [`bindings`] is generated from rdma-core's header `infiniband/verbs.h`. Its type
//! `Library` holds the functions that the library exports. The header defines four more functions
//! inline, which call the driver through the context; this crate implements them in Rust.
//!
//! ```no_run
//! use core::ptr;
//!
//! let verbs = fusewire_verbs_sys::open().map_err(String::as_str)?;
//! let mut count = 0;
//! // SAFETY: `count` is writable. The list is freed once, and not used afterwards.
//! unsafe {
//!     let list = verbs.ibv_get_device_list(&raw mut count);
//!     if !list.is_null() {
//!         verbs.ibv_free_device_list(list);
//!     }
//! }
//! println!("{count} devices");
//! # Ok::<(), &str>(())
//! ```

/// Types, constants and exported functions of `infiniband/verbs.h`. rdma-core documents them in its
/// manual pages, such as `ibv_post_send(3)`.
#[allow(
    clippy::all,
    clippy::std_instead_of_core,
    clippy::undocumented_unsafe_blocks,
    clippy::use_self,
    missing_debug_implementations,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals
)]
#[rustfmt::skip]
pub mod bindings;

use core::ffi::c_int;
use std::sync::OnceLock;

use self::bindings::{Library, ibv_cq, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_wc};

/// Name of the library. The environment variable `FUSEWIRE_VERBS_PATH` overrides it.
pub const SONAME: &str = "libibverbs.so.1";

/// Returns the functions of the library. The first call opens the library; it stays open until the
/// process ends.
///
/// # Errors
/// The loader's message, if the library or one of its functions is missing.
pub fn open() -> Result<&'static Library, &'static String> {
    static OPENED: OnceLock<Result<Library, String>> = OnceLock::new();
    let opened = OPENED.get_or_init(|| {
        let path = std::env::var_os("FUSEWIRE_VERBS_PATH").unwrap_or_else(|| SONAME.into());
        // SAFETY: initialisers of libibverbs have no preconditions. The symbols have the signatures
        // of the header, because the library's ABI is versioned by its soname.
        unsafe { Library::new(&path) }.map_err(|error| {
            format!(
                "{}: {error}; install libibverbs1 and ibverbs-providers (rdma-core 34 or later), \
                 or set FUSEWIRE_VERBS_PATH",
                path.display()
            )
        })
    });
    opened.as_ref()
}

/// Takes up to `count` completions from a completion queue. Returns the number of completions, or a
/// negative value after a failure.
///
/// # Safety
/// `cq` must be a live completion queue, and `completions` valid for writes of `count` elements.
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, count: c_int, completions: *mut ibv_wc) -> c_int {
    // SAFETY: a live completion queue refers to a live context, whose driver sets the function. The
    // caller guarantees the rest.
    unsafe {
        let poll = (*(*cq).context).ops.poll_cq;
        poll.map_or(-1, |poll| poll(cq, count, completions))
    }
}

/// Requests an event on the queue's completion channel for the next completion. Returns 0, or an
/// error number.
///
/// # Safety
/// `cq` must be a live completion queue.
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: see `ibv_poll_cq`.
    unsafe {
        let request = (*(*cq).context).ops.req_notify_cq;
        request.map_or(libc::ENOSYS, |request| request(cq, solicited_only))
    }
}

/// Posts a chain of requests to the send queue. Returns 0, or an error number; `bad` then points to
/// the first request that was not posted.
///
/// # Safety
/// `qp` must be a live queue pair, and `requests` a chain of valid requests. The memory to which
/// the requests refer must stay valid and registered until they have completed.
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    requests: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a live queue pair refers to a live context, whose driver sets the function. The
    // caller guarantees the rest.
    unsafe {
        let post = (*(*qp).context).ops.post_send;
        post.map_or(libc::ENOSYS, |post| post(qp, requests, bad))
    }
}

/// Posts a chain of requests to the receive queue. Returns 0, or an error number; `bad` then points
/// to the first request that was not posted.
///
/// # Safety
/// As for [`ibv_post_send`].
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    requests: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: see `ibv_post_send`.
    unsafe {
        let post = (*(*qp).context).ops.post_recv;
        post.map_or(libc::ENOSYS, |post| post(qp, requests, bad))
    }
}
