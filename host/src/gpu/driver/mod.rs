//! What a GPU's driver library does for this crate: one thin face, two libraries behind it (CUDA, HIP).
//!
//! Handles are the library's own, as integers; nobody frees them by dropping. Every method makes the
//! device's primary context current on the calling thread by itself. No method allocates device memory, waits for
//! the device or touches the legacy default stream, where its description does not say so.

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

/// Whether a stream is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// It is not.
    None,
    /// It is: the number of the capture, and the graph that grows.
    Active(u64, RawGraph),
    /// It was, and became invalid; only ending it is possible.
    Invalidated,
}

/// A function that the library calls once with its data.
pub type Callback = unsafe extern "C" fn(*mut c_void);

/// A driver library with one of its devices.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Name of the library: `CUDA`, `HIP`.
    fn library(&self) -> &'static str;

    /// What is known of the device.
    fn properties(&self) -> &Properties;

    /// Allocates at least `bytes` bytes, zeroed. May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver` when there is not enough memory.
    fn allocate(&self, bytes: u64, kind: MemoryKind) -> Result<RawMemory>;

    /// Frees or unmaps memory. May wait for the device.
    ///
    /// # Safety
    /// Nothing uses it any more; it came from `allocate` or `import` of this driver, and was not released before.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release(&self, memory: RawMemory) -> Result<()>;

    /// What another process imports to reach memory that `allocate` made with [`MemoryKind::Shared`].
    ///
    /// # Errors
    /// `Error::Driver`.
    fn export(&self, memory: &RawMemory) -> Result<Export>;

    /// As [`Driver::export`], for any memory of the device that somebody else allocated, by IPC; and base and bytes of the
    /// allocation that it lies in.
    ///
    /// # Errors
    /// `Error::Driver` when `address` is not device memory, or of a kind that has no IPC handle.
    fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)>;

    /// Maps a peer's memory of `bytes` bytes (its [`RawMemory::bytes`]).
    ///
    /// # Errors
    /// `Error::Driver` when it is not what it is said to be, or is gone.
    fn import(&self, import: Import<'_>, bytes: u64) -> Result<RawMemory>;

    /// Page-locked zeroed host memory. May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn allocate_host(&self, bytes: usize) -> Result<HostMemory>;

    /// Frees it. May wait for the device.
    ///
    /// # Safety
    /// As [`Driver::release`].
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release_host(&self, memory: HostMemory) -> Result<()>;

    /// Copies host bytes to the device and waits for that: on a stream of the driver's own, beside whatever runs.
    /// Eight aligned bytes arrive in one piece.
    ///
    /// # Safety
    /// The device memory is mapped, and nobody else uses it in a way that races with this.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Copies device bytes to the host and waits for that, as [`Driver::write`].
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()>;

    /// Copies `bytes` from device (or page-locked host) memory to such, in the order of a stream.
    ///
    /// # Safety
    /// Both ranges stay mapped until the copy is done.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()>;

    /// Loads PTX (text with its zero byte), a cubin or a code object, and all of its functions at once.
    /// May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver` with what the library's compiler said.
    fn load(&self, image: &[u8]) -> Result<RawModule>;

    /// A kernel by its symbol; `None` where the module has none of that name.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn function(&self, module: RawModule, name: &CStr) -> Result<Option<RawFunction>>;

    /// Offset and size of each parameter, by the image's own metadata; `None` if the library does
    /// not report them.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn parameters(&self, function: RawFunction) -> Result<Option<Vec<(usize, usize)>>>;

    /// What a kernel needs.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn function_properties(&self, function: RawFunction) -> Result<FunctionProperties>;

    /// How many blocks of that many threads and dynamic shared bytes are resident on one multiprocessor at once.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn resident_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32>;

    /// Launches a kernel; `parameters` are the addresses of its arguments, in order.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and fulfil its requirements.
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

    /// A new stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn create_stream(&self) -> Result<RawStream>;

    /// Ends a stream once its work is done.
    ///
    /// # Safety
    /// It came from `create_stream`, and nobody uses it any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Whether all work of a stream is done.
    ///
    /// # Errors
    /// `Error::Driver` with what has failed on the device.
    fn query_stream(&self, stream: RawStream) -> Result<bool>;

    /// Waits for all work of a stream.
    ///
    /// # Errors
    /// `Error::Driver` with what has failed on the device.
    fn synchronize_stream(&self, stream: RawStream) -> Result<()>;

    /// Has a stream call `callback` with `data`, once (or at each replay of the graph that captures it). It must not call
    /// the driver.
    ///
    /// # Safety
    /// `data` is whatever `callback` needs, at every call.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn host_function(
        &self,
        stream: RawStream,
        callback: Callback,
        data: *mut c_void,
    ) -> Result<()>;

    /// Has the work of a stream behind this wait until the u32 at device address `at` is not less than `value`, as the
    /// difference of both, signed, says. Nothing bounds the wait but whoever writes the word.
    ///
    /// # Safety
    /// `at` is mapped, aligned to 4 bytes, and stays so until the stream has come past this.
    ///
    /// # Errors
    /// `Error::Driver`, also where the driver has no stream memory operations.
    unsafe fn wait_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let _ = (stream, at, value);
        Err(self.no_stream_memory())
    }

    /// Has a stream write `value` to the u32 at device address `at`, behind all that its work before this has written.
    ///
    /// # Safety
    /// As [`Driver::wait_value`].
    ///
    /// # Errors
    /// As there.
    unsafe fn write_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let _ = (stream, at, value);
        Err(self.no_stream_memory())
    }

    /// The error of the two methods above where they do not exist.
    fn no_stream_memory(&self) -> Error {
        Error::Driver {
            library: self.library(),
            call: "stream memory operations",
            detail: "this library has none; have a kernel wait for the word, or write it"
                .to_owned(),
        }
    }

    /// A new event; with `timed`, two of them give a duration.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn create_event(&self, timed: bool) -> Result<RawEvent>;

    /// Ends an event.
    ///
    /// # Safety
    /// It came from `create_event`, and nobody uses it any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()>;

    /// Records an event behind all work of a stream.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Whether the latest record of an event is complete (also when there was none).
    ///
    /// # Errors
    /// `Error::Driver` with what has failed on the device.
    fn query_event(&self, event: RawEvent) -> Result<bool>;

    /// Has the work of a stream behind this wait for the latest record of an event.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Milliseconds between two timed events that are complete.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32>;

    /// Begins to capture a stream; other threads may go on with calls that a capture forbids.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn begin_capture(&self, stream: RawStream) -> Result<()>;

    /// Ends a capture.
    ///
    /// # Errors
    /// `Error::Driver` when the capture became invalid.
    fn end_capture(&self, stream: RawStream) -> Result<RawGraph>;

    /// Whether a stream is being captured.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// Gives `data` to a graph: `callback` is called with it once, when the graph, its clones and all that was instantiated
    /// from them are gone. It must not call the driver.
    ///
    /// # Safety
    /// `callback` may be called with `data` on any thread.
    ///
    /// # Errors
    /// `Error::Driver`; `callback` is then not called.
    unsafe fn retain(&self, graph: RawGraph, callback: Callback, data: *mut c_void) -> Result<()>;

    /// Number of nodes.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn graph_nodes(&self, graph: RawGraph) -> Result<usize>;

    /// Makes a graph ready to be launched. May allocate device memory.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn instantiate(&self, graph: RawGraph) -> Result<RawGraphExec>;

    /// Launches a graph on a stream.
    ///
    /// # Safety
    /// The requirements of everything that it holds are fulfilled.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn launch_graph(&self, exec: RawGraphExec, stream: RawStream) -> Result<()>;

    /// Ends a graph.
    ///
    /// # Safety
    /// It came from `end_capture`, and nobody uses it any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<()>;

    /// Ends an instantiated graph. It may still run.
    ///
    /// # Safety
    /// It came from `instantiate`, and nobody uses it any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_exec(&self, exec: RawGraphExec) -> Result<()>;

    /// A multicast object of at least `bytes` bytes for that many devices.
    ///
    /// # Errors
    /// `Error::Driver`, also where the device has none.
    fn create_multicast(&self, bytes: u64, devices: u32) -> Result<RawMulticast> {
        let _ = (bytes, devices);
        Err(self.no_multicast())
    }

    /// What another process imports to take part.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn export_multicast(&self, multicast: &RawMulticast) -> Result<Export> {
        let _ = multicast;
        Err(self.no_multicast())
    }

    /// Another process' multicast object.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn import_multicast(&self, import: Import<'_>, bytes: u64) -> Result<RawMulticast> {
        let _ = (import, bytes);
        Err(self.no_multicast())
    }

    /// Adds this device. All devices must have been added before any memory is bound.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn join_multicast(&self, multicast: &RawMulticast) -> Result<()> {
        let _ = multicast;
        Err(self.no_multicast())
    }

    /// Binds this device's memory, from its beginning, and maps the object: gives the multicast address.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn bind_multicast(&self, multicast: &RawMulticast, memory: &RawMemory) -> Result<u64> {
        let _ = (multicast, memory);
        Err(self.no_multicast())
    }

    /// Unbinds, unmaps (`address` as `bind_multicast` gave it, or 0) and lets go.
    ///
    /// # Safety
    /// As [`Driver::release`].
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release_multicast(&self, multicast: RawMulticast, address: u64) -> Result<()> {
        let _ = (multicast, address);
        Err(self.no_multicast())
    }

    /// The error of the methods above where there is no multicast.
    fn no_multicast(&self) -> Error {
        Error::Driver {
            library: self.library(),
            call: "multicast",
            detail: "this device has no multicast objects".to_owned(),
        }
    }
}
