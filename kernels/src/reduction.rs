//! all_reduce, reduce and reduce_scatter over rounds. Protocol: rounds (`exchange`).
//!
//! - **One shot** (all_reduce, reduce): every rank with a result reads every rank's input.
//! - **Two shots** (all_reduce, reduce): rank r reduces shard r of all inputs and writes it to all
//!   outputs (for reduce, only to the root's): 2 (P - 1) / P times the data.
//! - **Rows** (reduce_scatter): rank r reduces row r of every rank's input. In place (the output is
//!   row r of the input), no staging is needed: only rank r reads that row.
//!
//! All reduce each element in rank order, so the results are equal bit for bit. One shot and rows
//! are one kernel, which selects by the call.

use core::marker::PhantomData;

use fusewire_device::element::{Average, Max, Reduction, Sum};
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Bf16, Element, F16, In, Machine, Out, kernel};

use crate::exchange::{Exchange, Memory};
use crate::reducer::{self, DynReducer, StaticReducer};

/// Parameters of every kernel that reduces over rounds.
pub type ReductionParams = ReduceWholeParams;

/// Defines the kernels of a reduction: `$name`, compiled for the frequent types and reductions, and
/// `$any`, which selects all others at run time.
macro_rules! reduction_kernel {
    (
        $(#[$doc:meta])*
        $name:ident, $any:ident, $(params = $params:path,)? any_params = $any_params:path,
        $plan:path
    ) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// `exchange` must have the window addresses of the buffers, and a chunk of each row must
        /// fit staging. During the launch, nothing else may write the input or access the output.
        #[kernel(
            $(params = $params,)?
            each(T: f32 = f32, f16 = F16, bf16 = Bf16),
            each(O: sum = Sum, average = Average, max = Max)
        )]
        pub unsafe fn $name<T: Element, O: Reduction<T>>(
            session: &mut Session<impl Machine>,
            source: In<u8>,
            target: Out<u8>,
            #[words(6)] exchange: Exchange,
        ) -> Result<(), Aborted> {
            let reducer = StaticReducer::<T, O>(PhantomData);
            let (layout, body) = $plan(session, reducer, &exchange);
            // SAFETY: the precondition of this function.
            let memory = unsafe { Memory::new(session, source, target, layout)? };
            memory.run(session, exchange.policy(), &body)
        }

        /// Does what the kernel without `_any` in its name does, for the types and reductions for
        /// which that kernel has no instance. They are selected at run time.
        ///
        /// # Safety
        /// As for the kernel without `_any` in its name. The factor of `exchange`, if there is one,
        /// must be an element of the call's type that is not written during the launch.
        #[kernel(params = $any_params)]
        pub unsafe fn $any(
            session: &mut Session<impl Machine>,
            source: In<u8>,
            target: Out<u8>,
            #[words(6)] exchange: Exchange,
        ) -> Result<(), Aborted> {
            let Some(reducer) = DynReducer::of(session.call()) else {
                return session.settle(false);
            };
            // SAFETY: the precondition of this function.
            let exchange = unsafe { exchange.with_factor(reducer.dtype()) };
            let (layout, body) = $plan(session, reducer, &exchange);
            // SAFETY: the precondition of this function.
            let memory = unsafe { Memory::new(session, source, target, layout)? };
            memory.run(session, exchange.policy(), &body)
        }
    };
}

reduction_kernel!(
    /// Runs an all_reduce (root 0xffff) or reduce in one shot, or a reduce_scatter of `count`
    /// elements per rank, for which the input has a row for each rank.
    reduce_whole,
    reduce_whole_any,
    any_params = ReduceWholeParams,
    reducer::whole
);

reduction_kernel!(
    /// Runs an all_reduce (root 0xffff), or a reduce to the call's root, in two shots.
    reduce_shards,
    reduce_shards_any,
    params = ReduceWholeParams,
    any_params = ReduceWholeParams,
    reducer::shards
);
