//! A recording double of the NCCL C interface. Ranks are threads of one process, memory is host memory,
//! streams are ignored: an operation is done when its call, or the end of its group, returns. Sends are
//! buffered, so no pattern deadlocks. Handles are never freed: use after an abort answers with an error.

#![allow(non_upper_case_globals)] // the names of nccl.h stand in patterns

mod api;
mod reduce;
mod world;
