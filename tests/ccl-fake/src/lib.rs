//! Recording fake of the NCCL C interface.
//!
//! Ranks are threads of one process, and memory is host memory. Streams are ignored: an operation
//! is complete when its call returns, or when `ncclGroupEnd` returns if the call is in a group. A
//! send returns when the peer has received the message. The fake starts all calls of a group before
//! it waits for any of them. Handles are never freed, so a call after an abort returns an error.
//!
//! `FUSEWIRE_CCL_FAKE_VERSION` or `fusewireCclFakeSetVersion` sets the version. The default is
//! 2.28.0. The fake also exports functions that are newer than the version, but they return an
//! error. This detects callers that only check whether a symbol exists.

#![allow(non_upper_case_globals)] // the names of nccl.h in patterns

mod api;
mod comm;
mod last_error;
mod ops;
mod record;
mod reduce;
