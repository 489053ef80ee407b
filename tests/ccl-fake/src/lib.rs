//! Recording fake of the NCCL C interface.
//!
//! Ranks are threads of one process, and memory is host memory. Streams are ignored: an operation
//! is complete when its call, or the end of its group, returns. A send returns when it has been
//! received. All calls of a group are started before the fake waits for one. Handles are never
//! freed, so that a call after an abort returns an error.
//!
//! `FUSEWIRE_CCL_FAKE_VERSION`, or `fusewireCclFakeSetVersion`, sets the version (2.28.0
//! otherwise). Functions that are newer than the version are exported, but fail. This catches
//! callers that check only for the symbol.

#![allow(non_upper_case_globals)] // the names of nccl.h in patterns

mod api;
mod comm;
mod ops;
mod record;
mod reduce;
