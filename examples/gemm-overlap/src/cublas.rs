//! GEMMs on an NVIDIA GPU with cuBLAS, on any stream. cuBLAS is opened at run time.

use core::ptr;
use std::sync::Arc;

use cudarc::cublas::sys;
use cudarc::driver::CudaContext;
use fusewire::{Error, Result, Stream, Tensor};

use crate::Gemm;

/// Returns true if cuBLAS can be opened. If cuBLAS cannot be opened, calls of cudarc panic.
pub(crate) fn is_there() -> bool {
    // SAFETY: opening cuBLAS runs only the library's initializers, which may run on any thread.
    unsafe { sys::is_culib_present() }
}

/// A cuBLAS handle of one thread on one GPU.
pub(crate) struct Cublas {
    handle: sys::cublasHandle_t,
    /// The GPU's primary context, which Fusewire also uses.
    _context: Arc<CudaContext>,
}

fn failed(call: &'static str, detail: String) -> Error {
    Error::Driver {
        library: "cuBLAS",
        call,
        detail,
    }
}

fn check(call: &'static str, status: sys::cublasStatus_t) -> Result<()> {
    if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(failed(call, format!("{status:?}")))
}

fn int(number: usize) -> Result<i32> {
    i32::try_from(number).map_err(|_| {
        failed(
            "cublasSgemm",
            format!("{number} rows or columns are too many"),
        )
    })
}

impl Cublas {
    /// Creates a handle for this thread.
    pub(crate) fn new(ordinal: u32) -> Result<Self> {
        let context = CudaContext::new(ordinal as usize)
            .map_err(|error| failed("the primary context", error.to_string()))?;
        context
            .bind_to_thread()
            .map_err(|error| failed("the primary context", error.to_string()))?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a local variable, valid for writes, and the primary context is
        // current.
        check("cublasCreate", unsafe {
            sys::cublasCreate_v2(&raw mut handle)
        })?;
        Ok(Self {
            handle,
            _context: context,
        })
    }
}

impl Gemm for Cublas {
    fn enqueue(
        &self,
        stream: &Stream,
        [a, b, c]: [&Tensor; 3],
        [m, k, n]: [usize; 3],
    ) -> Result<()> {
        assert!(a.len() >= m * k && b.len() >= k * n && c.len() >= m * n);
        // SAFETY: `stream` is live and belongs to the GPU's primary context, in which the handle
        // was created.
        check("cublasSetStream", unsafe {
            sys::cublasSetStream_v2(self.handle, stream.as_raw().cast())
        })?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let (m, k, n) = (int(m)?, int(k)?, int(n)?);
        let plain = sys::cublasOperation_t::CUBLAS_OP_N;
        // cuBLAS is column-major, so the row-major c = a b is computed as c^T = b^T a^T.
        // SAFETY: the tensors have at least these sizes, as asserted above, and are on this GPU.
        // `Layer` owns them and waits for the stream. The scalars are read before the call returns
        // (host pointer mode).
        check("cublasSgemm", unsafe {
            sys::cublasSgemm_v2(
                self.handle,
                plain,
                plain,
                n,
                m,
                k,
                &raw const one,
                b.as_ptr().cast(),
                n,
                a.as_ptr().cast(),
                k,
                &raw const zero,
                c.as_ptr().cast(),
                n,
            )
        })
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // SAFETY: `new` created the handle, and no code uses the handle after `drop`.
        let _ = unsafe { sys::cublasDestroy_v2(self.handle) };
    }
}
