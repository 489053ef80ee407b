//! Matrix products on the CPU: functions of a stream, by the crate `matrixmultiply`.

use std::sync::Arc;

use fusewire::{Result, Stream, Tensor};

use crate::Gemm;

/// The CPU.
pub(crate) struct Cpu;

impl Gemm for Cpu {
    fn enqueue(
        &self,
        stream: &Stream,
        [a, b, c]: [&Tensor; 3],
        [m, k, n]: [usize; 3],
    ) -> Result<()> {
        assert!(a.len() >= m * k && b.len() >= k * n && c.len() >= m * n);
        let (a, b, c) = (a.clone(), b.clone(), c.clone());
        let product = move || {
            let (row, column) = (|elements: usize| elements as isize, 1);
            // SAFETY: the matrices have these sizes, as asserted; the closure keeps them alive; by the words and the stream's order
            // nobody else writes `a` or `b`, or touches `c`, meanwhile.
            unsafe {
                matrixmultiply::sgemm(
                    m,
                    k,
                    n,
                    1.0,
                    a.as_ptr().cast(),
                    row(k),
                    column,
                    b.as_ptr().cast(),
                    row(n),
                    column,
                    0.0,
                    c.as_ptr().cast(),
                    row(n),
                    column,
                );
            }
            Ok(())
        };
        stream.host_fn(Arc::new(product)).map(drop)
    }
}
