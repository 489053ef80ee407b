//! Implements [`Driver`](crate::gpu::driver::Driver) for [`Cuda`]. Each trait method calls the
//! inherent method of the same name, which is defined in the file of its subject.

use super::context::Cuda;
use crate::gpu::driver::driver_by_methods;

driver_by_methods!(Cuda, "CUDA", multicast);
