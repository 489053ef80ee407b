//! GEMMs on the CPU with the crate `matrixmultiply`, enqueued as host functions on a stream.

use std::sync::Arc;

use fusewire::{Result, Stream, Tensor};

use crate::Gemm;

/// GEMMs on the CPU.
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
            // SAFETY: the tensors have at least these sizes, as asserted above, and the closure
            // owns references to the tensors. The ready flags and the stream order exclude
            // concurrent writes to `a` and `b` and any concurrent access to `c`.
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
