//! Implements [`Driver`](crate::gpu::driver::Driver) for [`Hip`]. Each trait method calls the
//! inherent method of the same name, which is defined in the file of its subject.

use super::device::Hip;
use super::error::LIBRARY;
use crate::gpu::driver::driver_by_methods;

driver_by_methods!(Hip, LIBRARY);
