//! Implementation of the driver trait, which calls the methods of the modules by subject.

use super::device::Hip;
use super::error::LIBRARY;
use crate::gpu::driver::driver_by_methods;

driver_by_methods!(Hip, LIBRARY);
