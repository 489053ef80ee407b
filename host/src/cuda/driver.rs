//! [`Driver`](crate::gpu::driver::Driver) for CUDA: the methods, by subject in the files beside this one.

use super::context::Cuda;
use crate::gpu::driver::driver_by_methods;

driver_by_methods!(Cuda, "CUDA", multicast);
