//! One GPU: its state in this process, and the calls that set the current device and the capture
//! mode of the calling thread.

use core::ffi::c_uint;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::bindings::{self as hip, Int};
use super::error::driver_error;
use super::library::Functions;
use super::memory::Staging;
use super::modules::Modules;
use super::properties;
use crate::environment::DeviceStreams;
use crate::gpu::Properties;
use crate::{Error, Result};

/// A GPU that the HIP runtime reports.
#[derive(Debug)]
pub(super) struct Hip {
    pub(super) functions: &'static Functions,
    pub(super) ordinal: Int,
    pub(super) properties: Properties,
    /// Live streams of this object.
    pub(super) streams: DeviceStreams,
    staging: Mutex<Staging>,
    modules: Mutex<Modules>,
}

impl Hip {
    pub(super) fn open(functions: &'static Functions, ordinal: u32) -> Result<Self> {
        let count = count(functions)?;
        let number = Int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(number) = number else {
            return Err(Error::NoDevice {
                device: format!("hip:{ordinal}"),
                detail: format!(
                    "the process sees {count} AMD GPUs, numbered from 0 (HIP_VISIBLE_DEVICES and \
                     ROCR_VISIBLE_DEVICES choose among them)"
                ),
            });
        };
        let hip = Self {
            functions,
            ordinal: number,
            properties: properties::of(functions, number)?,
            streams: DeviceStreams::default(),
            staging: Mutex::new(Staging::default()),
            modules: Mutex::new(Modules::default()),
        };
        let staging = hip.create_staging()?;
        *hip.staging() = staging;
        Ok(hip)
    }

    /// Makes the device current on this thread until the returned guard is dropped. Launches and
    /// queries use the thread's current device.
    pub(super) fn current(&self) -> Result<CurrentDevice> {
        CurrentDevice::enter(self.functions, self.ordinal)
    }

    /// Makes the device current. Until the returned guard is dropped, this thread may make calls
    /// that a capture forbids.
    pub(super) fn relaxed(&self) -> Result<RelaxedCapture> {
        RelaxedCapture::enter(self.current()?)
    }

    /// Locks the copy buffer and its stream.
    pub(super) fn staging(&self) -> MutexGuard<'_, Staging> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn modules(&self) -> MutexGuard<'_, Modules> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the number of GPUs that are visible to the process, or an error if no GPU is visible.
pub(super) fn count(functions: &Functions) -> Result<u32> {
    let none = |error: Error| Error::NoDevice {
        device: "hip".to_owned(),
        detail: format!("the HIP runtime finds no AMD GPU: {error}"),
    };
    // SAFETY: the function takes only an integer.
    let status = unsafe { (functions.hipInit)(0) };
    functions.check("hipInit", status).map_err(none)?;
    let mut count: Int = 0;
    // SAFETY: `count` is writable.
    let status = unsafe { (functions.hipGetDeviceCount)(&mut count) };
    functions.check("hipGetDeviceCount", status).map_err(none)?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(none(driver_error("hipGetDeviceCount", "there are 0"))),
    }
}

/// Guard that keeps a device current on the calling thread. Dropping the guard restores the
/// previously current device.
#[derive(Debug)]
pub(super) struct CurrentDevice {
    functions: &'static Functions,
    /// The device to restore, if another device was current.
    before: Option<Int>,
    // Makes the guard `!Send`, because the current device belongs to the thread.
    _thread: core::marker::PhantomData<*const ()>,
}

impl CurrentDevice {
    fn enter(functions: &'static Functions, ordinal: Int) -> Result<Self> {
        let mut before: Int = 0;
        // SAFETY: `before` is writable.
        let status = unsafe { (functions.hipGetDevice)(&mut before) };
        functions.check("hipGetDevice", status)?;
        if before != ordinal {
            // SAFETY: the function takes only an integer.
            let status = unsafe { (functions.hipSetDevice)(ordinal) };
            functions.check("hipSetDevice", status)?;
        }
        Ok(Self {
            functions,
            before: (before != ordinal).then_some(before),
            _thread: core::marker::PhantomData,
        })
    }
}

impl Drop for CurrentDevice {
    fn drop(&mut self) {
        let Some(before) = self.before else { return };
        // SAFETY: the function takes only an integer.
        let status = unsafe { (self.functions.hipSetDevice)(before) };
        if status != hip::SUCCESS {
            tracing::warn!(status, "cannot restore the thread's current device");
            self.functions.forget();
        }
    }
}

/// Guard that keeps the calling thread in relaxed capture mode until the guard is dropped.
#[derive(Debug)]
pub(super) struct RelaxedCapture {
    before: c_uint,
    device: CurrentDevice,
}

impl RelaxedCapture {
    fn enter(device: CurrentDevice) -> Result<Self> {
        let functions = device.functions;
        let mut mode = hip::CAPTURE_RELAXED;
        // SAFETY: `mode` is readable and writable.
        let status = unsafe { (functions.hipThreadExchangeStreamCaptureMode)(&mut mode) };
        functions.check("hipThreadExchangeStreamCaptureMode", status)?;
        Ok(Self {
            before: mode,
            device,
        })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        let functions = self.device.functions;
        let mut mode = self.before;
        // SAFETY: `mode` is readable and writable, and holds a mode that the runtime returned.
        let status = unsafe { (functions.hipThreadExchangeStreamCaptureMode)(&mut mode) };
        if status != hip::SUCCESS {
            tracing::error!(status, "hipThreadExchangeStreamCaptureMode");
            functions.forget();
        }
    }
}
