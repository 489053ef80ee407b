//! reduce_scatter: rank r reduces row r of every rank's input. Protocol: rounds (`exchange`).
//!
//! In place (the output is row r of the input), no staging is needed: only rank r reads that row.

use crate::reducer::reduction_kernel;

reduction_kernel!(
    /// Runs a reduce_scatter: `count` elements per rank. The input has a row for each rank.
    reduce_scatter,
    reduce_scatter_any,
    params = crate::all_reduce::AllReduceSignalParams,
    any_params = crate::all_reduce::AllReduceSignalParams,
    rows
);
