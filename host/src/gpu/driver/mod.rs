//! The interface to GPU driver libraries, implemented for CUDA and HIP.
//!
//! Handles such as [`RawStream`] are the driver library's handles as integers. They are `Copy`, and
//! dropping a handle frees nothing. A handle that is passed to a method must be live: it comes from
//! this driver (or, for a stream, from the same primary context) and has not been destroyed. The
//! owning types of this crate guarantee that their handles are live.
//!
//! Every method makes the device's primary context current on the calling thread. A method
//! allocates device memory, waits for the device or uses the legacy default stream only if its
//! documentation says so.
//!
//! Every error is [`Error::Driver`] with the name of the library function that failed and the
//! library's message. Methods that query or wait for a stream or an event also report earlier
//! asynchronous failures on the device.

mod forward;
mod handles;
mod kernel;
mod memory;
mod properties;

use core::ffi::{CStr, c_void};
use core::fmt;

pub(crate) use self::forward::driver_by_methods;
pub use self::handles::{RawEvent, RawFunction, RawGraph, RawGraphExec, RawModule, RawStream};
pub use self::kernel::{FunctionProperties, LaunchShape};
pub use self::memory::{
    Export, HANDLE_BYTES, HostMemory, Import, MemoryKind, Origin, RawMemory, RawMulticast,
};
pub use self::properties::Properties;
use crate::{Error, Result};

/// The capture state of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Not capturing.
    None,
    /// Capturing: the driver's number of the capture, and the graph under construction.
    Active(u64, RawGraph),
    /// Capturing, but an earlier call invalidated the capture. The only permitted operation is to
    /// end the capture.
    Invalidated,
}

/// A function that the driver library calls. The argument is the `data` pointer that was registered
/// together with the function.
pub type Callback = unsafe extern "C" fn(*mut c_void);

/// A driver library, bound to one device.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Returns the name of the library: `CUDA`, `HIP`.
    fn library(&self) -> &'static str;

    /// Returns the properties of the device.
    fn properties(&self) -> &Properties;

    /// Returns true if kernels of this device can execute atomics natively in the memory of the GPU
    /// with the identifier `peer`, another one; `None` if the process does not see that GPU. The
    /// default implementation sees no other GPU.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn native_atomics(&self, peer: &[u8; 16]) -> Result<Option<bool>> {
        let _ = peer;
        Ok(None)
    }

    /// Allocates at least `bytes` bytes, zeroed. May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver` if there is not enough memory.
    fn allocate(&self, bytes: u64, kind: MemoryKind) -> Result<RawMemory>;

    /// Frees or unmaps memory. May wait for the device.
    ///
    /// # Safety
    /// `memory` must come from `allocate` or `import` of this driver, must not be in use, and must
    /// not have been released before.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release(&self, memory: RawMemory) -> Result<()>;

    /// Exports memory that `allocate` returned for [`MemoryKind::Shared`]. Another process passes
    /// the handle to [`Driver::import`].
    ///
    /// # Errors
    /// `Error::Driver`.
    fn export(&self, memory: &RawMemory) -> Result<Export>;

    /// Exports device memory that other code allocated. Also returns the base address and the size
    /// in bytes of the allocation that contains `address`. The handle is an IPC handle if the
    /// memory has one, and a file descriptor or a fabric handle otherwise.
    ///
    /// # Errors
    /// `Error::Driver` if `address` is not device memory, or if memory of this kind cannot be
    /// exported.
    fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)>;

    /// Maps a peer's memory. `bytes` is the peer's [`RawMemory::bytes`].
    ///
    /// # Errors
    /// `Error::Driver` if the handle is invalid, if the memory has another size, or if the peer has
    /// freed the memory.
    fn import(&self, import: Import<'_>, bytes: u64) -> Result<RawMemory>;

    /// Allocates zeroed page-locked host memory. May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn allocate_host(&self, bytes: usize) -> Result<HostMemory>;

    /// Frees page-locked host memory. May wait for the device.
    ///
    /// # Safety
    /// `memory` must come from `allocate_host` of this driver, must not be in use, and must not
    /// have been released before.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release_host(&self, memory: HostMemory) -> Result<()>;

    /// Copies host bytes to the device and blocks until the copy is complete. The copy runs on an
    /// internal stream of the driver object, concurrently with other work. Every aligned group of
    /// eight bytes is written atomically.
    ///
    /// # Safety
    /// The device memory must be mapped, and no concurrent access may race with the copy.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Copies device bytes to the host and blocks until the copy is complete. The copy runs on the
    /// same internal stream as [`Driver::write`]. Every aligned group of eight bytes is read
    /// atomically.
    ///
    /// # Safety
    /// The device memory must be mapped, and no concurrent access may race with the copy.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes to device memory from device memory or page-locked host
    /// memory.
    ///
    /// # Safety
    /// Both ranges must stay mapped until the copy is complete.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()>;

    /// Loads PTX (zero-terminated text), a cubin or a code object, including all of the kernels in
    /// it. May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver` with the log of the library's compiler.
    fn load(&self, image: &[u8]) -> Result<RawModule>;

    /// Returns the kernel with the symbol `name`, or `None` if the module has no such kernel.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn function(&self, module: RawModule, name: &CStr) -> Result<Option<RawFunction>>;

    /// Returns the offset and size in bytes of each parameter of a kernel, as the image declares
    /// them, or `None` if the driver library does not report parameters.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn parameters(&self, function: RawFunction) -> Result<Option<Vec<(usize, usize)>>>;

    /// Returns the resource usage of a kernel.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn function_properties(&self, function: RawFunction) -> Result<FunctionProperties>;

    /// Returns the maximum number of blocks that one SM can hold at once. Each block has `threads`
    /// threads and `shared_bytes` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn resident_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32>;

    /// Launches a kernel. `parameters` holds the addresses of the kernel's arguments, in order.
    ///
    /// # Safety
    /// The number and types of the arguments must be those of the kernel's parameters. The
    /// arguments must fulfil the kernel's safety requirements until the kernel has finished.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn launch(
        &self,
        function: RawFunction,
        shape: &LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()>;

    /// Creates a stream that does not synchronise with the legacy default stream.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn create_stream(&self) -> Result<RawStream>;

    /// Destroys a stream after its work is complete.
    ///
    /// # Safety
    /// `stream` must come from `create_stream` and must not be used any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Returns whether all work of a stream is complete.
    ///
    /// # Errors
    /// `Error::Driver`, also for an earlier failure on the device.
    fn query_stream(&self, stream: RawStream) -> Result<bool>;

    /// Blocks until all work of a stream is complete.
    ///
    /// # Errors
    /// `Error::Driver`, also for an earlier failure on the device.
    fn synchronize_stream(&self, stream: RawStream) -> Result<()>;

    /// Enqueues a call of `callback` with `data`. The driver makes the call once, or once per
    /// replay if the stream is capturing. The callback must not call the driver.
    ///
    /// # Safety
    /// `data` must be valid for `callback` at every call.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn host_function(
        &self,
        stream: RawStream,
        callback: Callback,
        data: *mut c_void,
    ) -> Result<()>;

    /// Makes later work of a stream wait until the u32 at device address `at` has reached `value`:
    /// until the wrapping difference `*at - value`, interpreted as an i32, is not negative. The
    /// wait has no time limit.
    ///
    /// # Safety
    /// `at` must be aligned to 4 bytes and must stay mapped until the stream has executed the
    /// operation.
    ///
    /// # Errors
    /// `Error::Driver`, also if the driver has no stream memory operations.
    unsafe fn wait_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let _ = (stream, at, value);
        Err(self.no_stream_memory())
    }

    /// Enqueues a write of `value` to the u32 at device address `at`, ordered after all writes of
    /// the stream's earlier work.
    ///
    /// # Safety
    /// `at` must be aligned to 4 bytes and must stay mapped until the stream has executed the
    /// operation.
    ///
    /// # Errors
    /// `Error::Driver`, also if the driver has no stream memory operations.
    unsafe fn write_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let _ = (stream, at, value);
        Err(self.no_stream_memory())
    }

    /// Returns the error for a library without stream memory operations.
    fn no_stream_memory(&self) -> Error {
        Error::Driver {
            library: self.library(),
            call: "stream memory operations",
            detail: "this library has none; have a kernel wait for the word, or write it"
                .to_owned(),
        }
    }

    /// Creates an event. `timed` must be true for events that are passed to [`Driver::elapsed`].
    ///
    /// # Errors
    /// `Error::Driver`.
    fn create_event(&self, timed: bool) -> Result<RawEvent>;

    /// Destroys an event.
    ///
    /// # Safety
    /// `event` must come from `create_event` and must not be used any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()>;

    /// Records an event after all earlier work of a stream.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Returns whether the latest record of an event is complete. An event that was never recorded
    /// counts as complete.
    ///
    /// # Errors
    /// `Error::Driver`, also for an earlier failure on the device.
    fn query_event(&self, event: RawEvent) -> Result<bool>;

    /// Makes later work of a stream wait for the latest record of an event.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Returns the milliseconds from `start` to `end`. Both events must be timed and complete.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32>;

    /// Begins a capture of a stream. CUDA captures in relaxed mode. HIP captures in thread-local
    /// mode, so the thread that begins the capture must also end it.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn begin_capture(&self, stream: RawStream) -> Result<()>;

    /// Ends the capture of a stream and returns the captured graph.
    ///
    /// # Errors
    /// `Error::Driver` if the capture is invalid.
    fn end_capture(&self, stream: RawStream) -> Result<RawGraph>;

    /// Returns the capture state of a stream.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// Attaches `data` to a graph. After the graph, all its clones and all their instances have
    /// been destroyed, the driver calls `callback` once with `data`. The callback must not call the
    /// driver.
    ///
    /// # Safety
    /// `callback` must be callable with `data` on any thread.
    ///
    /// # Errors
    /// `Error::Driver`. If the call fails, `callback` is never called.
    unsafe fn retain(&self, graph: RawGraph, callback: Callback, data: *mut c_void) -> Result<()>;

    /// Returns the number of nodes of a graph.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn graph_nodes(&self, graph: RawGraph) -> Result<usize>;

    /// Instantiates a graph for launches. May allocate device memory.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn instantiate(&self, graph: RawGraph) -> Result<RawGraphExec>;

    /// Launches a graph on a stream.
    ///
    /// # Safety
    /// The safety requirements of every kernel and copy in the graph must hold until the replay has
    /// finished.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn launch_graph(&self, exec: RawGraphExec, stream: RawStream) -> Result<()>;

    /// Destroys a graph.
    ///
    /// # Safety
    /// `graph` must come from `end_capture` and must not be used any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<()>;

    /// Destroys an instantiated graph. A running replay is not affected.
    ///
    /// # Safety
    /// `exec` must come from `instantiate` and must not be used any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_exec(&self, exec: RawGraphExec) -> Result<()>;

    /// Creates a multicast object of at least `bytes` bytes for `devices` devices.
    ///
    /// # Errors
    /// `Error::Driver`, also if the device has no multicast support.
    fn create_multicast(&self, bytes: u64, devices: u32) -> Result<RawMulticast> {
        let _ = (bytes, devices);
        Err(self.no_multicast())
    }

    /// Exports a multicast object. Another process passes the handle to
    /// [`Driver::import_multicast`].
    ///
    /// # Errors
    /// `Error::Driver`.
    fn export_multicast(&self, multicast: &RawMulticast) -> Result<Export> {
        let _ = multicast;
        Err(self.no_multicast())
    }

    /// Imports the multicast object of another process.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn import_multicast(&self, import: Import<'_>, bytes: u64) -> Result<RawMulticast> {
        let _ = (import, bytes);
        Err(self.no_multicast())
    }

    /// Adds this device to a multicast object. All devices must be added before any memory is
    /// bound.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn join_multicast(&self, multicast: &RawMulticast) -> Result<()> {
        let _ = multicast;
        Err(self.no_multicast())
    }

    /// Binds memory of this device to a multicast object at offset 0 and maps the object. Returns
    /// the address of the mapping.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn bind_multicast(&self, multicast: &RawMulticast, memory: &RawMemory) -> Result<u64> {
        let _ = (multicast, memory);
        Err(self.no_multicast())
    }

    /// Unbinds, unmaps and releases a multicast object. `address` is the result of
    /// `bind_multicast`, or 0 if nothing is bound.
    ///
    /// # Safety
    /// `multicast` must come from this driver, must not be in use, and must not have been released
    /// before.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release_multicast(&self, multicast: RawMulticast, address: u64) -> Result<()> {
        let _ = (multicast, address);
        Err(self.no_multicast())
    }

    /// Returns the error for a device without multicast support.
    fn no_multicast(&self) -> Error {
        Error::Driver {
            library: self.library(),
            call: "multicast",
            detail: "this device has no multicast objects".to_owned(),
        }
    }
}
