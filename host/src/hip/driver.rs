//! The face that the crate sees: each method is in the file of its subject.

use super::device::Hip;
use super::error::LIBRARY;
use crate::gpu::driver::driver_by_methods;

driver_by_methods!(Hip, LIBRARY);
