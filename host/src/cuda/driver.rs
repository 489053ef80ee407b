//! Implementation of [`Driver`](crate::gpu::driver::Driver) for CUDA, which calls the methods of
//! the modules by subject.

use super::context::Cuda;
use crate::gpu::driver::driver_by_methods;

driver_by_methods!(Cuda, "CUDA", multicast);
