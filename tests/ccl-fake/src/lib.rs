//! A recording fake of the NCCL C interface. Ranks are threads of one process, memory is host memory,
//! streams are ignored: an operation is done when its call, or the end of its group, returns. A send returns
//! when it was received; calls of a group are all begun before one is waited for. Handles are never freed:
//! use after an abort answers with an error.
//!
//! `FUSEWIRE_CCL_FAKE_VERSION`, or `fusewireCclFakeSetVersion`, sets the version (2.28.0 otherwise). Symbols
//! that a version does not have yet are there nevertheless, and fail: who looks only for symbols is found
//! out.

#![allow(non_upper_case_globals)] // the names of nccl.h stand in patterns

mod api;
mod comm;
mod ops;
mod record;
mod reduce;
