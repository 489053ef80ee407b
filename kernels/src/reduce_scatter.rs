//! reduce_scatter: rank r reduces row r of every rank's input. Protocol: rounds.
//!
//! In place (the output is row r of the input) needs no staging: only rank r reads row r of rank r.

use crate::reducer::reduction_kernel;

reduction_kernel!(
    /// reduce_scatter: `count` elements a rank; the input has `count` times the number of ranks.
    reduce_scatter,
    reduce_scatter_any,
    params = crate::all_reduce::AllReduceSignalParams,
    any_params = crate::all_reduce::AllReduceSignalParams,
    rows
);
