//! A macro that implements [`Driver`](super::Driver) for a type by calling inherent methods with
//! the names of the trait methods. Unlike a trait implementation, inherent methods can be spread
//! over several files.

/// Implements [`Driver`](super::Driver) for `$type`. `$library` is the name of the driver library.
/// The type must have a field `properties` and an inherent method for every method that is listed
/// below. The third argument `multicast` also forwards the methods of multicast objects.
macro_rules! driver_by_methods {
    ($type:ident, $library:expr $(, $multicast:ident)?) => {
        const _: () = {
            use core::ffi::{CStr, c_void};

            use $crate::Result;
            use $crate::gpu::driver::*;

            // If the type lacks an inherent method, `Self::name` resolves to the trait method,
            // which then calls itself. This lint turns the infinite recursion into a compile error.
            #[deny(unconditional_recursion)]
            impl Driver for $type {
                fn library(&self) -> &'static str {
                    $library
                }

                fn properties(&self) -> &Properties {
                    &self.properties
                }

                driver_by_methods! { @forward
                    fn native_atomics(peer: &[u8; 16]) -> Result<Option<bool>>;
                    fn allocate(bytes: u64, kind: MemoryKind) -> Result<RawMemory>;
                    unsafe fn release(memory: RawMemory) -> Result<()>;
                    fn export(memory: &RawMemory) -> Result<Export>;
                    fn export_foreign(address: u64) -> Result<(Export, u64, u64)>;
                    fn import(import: Import<'_>, bytes: u64) -> Result<RawMemory>;
                    fn allocate_host(bytes: usize) -> Result<HostMemory>;
                    unsafe fn release_host(memory: HostMemory) -> Result<()>;
                    unsafe fn write(to: u64, from: &[u8]) -> Result<()>;
                    unsafe fn read(to: &mut [u8], from: u64) -> Result<()>;
                    unsafe fn copy(to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()>;

                    fn load(image: &[u8]) -> Result<RawModule>;
                    fn function(module: RawModule, name: &CStr) -> Result<Option<RawFunction>>;
                    fn parameters(function: RawFunction) -> Result<Option<Vec<(usize, usize)>>>;
                    fn function_properties(function: RawFunction) -> Result<FunctionProperties>;
                    fn resident_blocks(
                        function: RawFunction,
                        threads: u32,
                        shared_bytes: u32
                    ) -> Result<u32>;
                    unsafe fn launch(
                        function: RawFunction,
                        shape: &LaunchShape,
                        parameters: &mut [*mut c_void],
                        stream: RawStream
                    ) -> Result<()>;

                    fn create_stream() -> Result<RawStream>;
                    unsafe fn destroy_stream(stream: RawStream) -> Result<()>;
                    fn query_stream(stream: RawStream) -> Result<bool>;
                    fn synchronize_stream(stream: RawStream) -> Result<()>;
                    unsafe fn host_function(
                        stream: RawStream,
                        callback: Callback,
                        data: *mut c_void
                    ) -> Result<()>;
                    unsafe fn wait_value(stream: RawStream, at: u64, value: u32) -> Result<()>;
                    unsafe fn write_value(stream: RawStream, at: u64, value: u32) -> Result<()>;

                    fn create_event(timed: bool) -> Result<RawEvent>;
                    unsafe fn destroy_event(event: RawEvent) -> Result<()>;
                    fn record_event(event: RawEvent, stream: RawStream) -> Result<()>;
                    fn query_event(event: RawEvent) -> Result<bool>;
                    fn wait_event(stream: RawStream, event: RawEvent) -> Result<()>;
                    fn elapsed(start: RawEvent, end: RawEvent) -> Result<f32>;

                    fn begin_capture(stream: RawStream) -> Result<()>;
                    fn end_capture(stream: RawStream) -> Result<RawGraph>;
                    fn capture_status(stream: RawStream) -> Result<CaptureStatus>;
                    unsafe fn retain(
                        graph: RawGraph,
                        callback: Callback,
                        data: *mut c_void
                    ) -> Result<()>;
                    fn graph_nodes(graph: RawGraph) -> Result<usize>;
                    fn instantiate(graph: RawGraph) -> Result<RawGraphExec>;
                    unsafe fn launch_graph(exec: RawGraphExec, stream: RawStream) -> Result<()>;
                    unsafe fn destroy_graph(graph: RawGraph) -> Result<()>;
                    unsafe fn destroy_exec(exec: RawGraphExec) -> Result<()>;
                }

                $(driver_by_methods! { @$multicast })?
            }
        };
    };

    (@multicast) => {
        driver_by_methods! { @forward
            fn create_multicast(bytes: u64, devices: u32) -> Result<RawMulticast>;
            fn export_multicast(multicast: &RawMulticast) -> Result<Export>;
            fn import_multicast(import: Import<'_>, bytes: u64) -> Result<RawMulticast>;
            fn join_multicast(multicast: &RawMulticast) -> Result<()>;
            fn bind_multicast(multicast: &RawMulticast, memory: &RawMemory) -> Result<u64>;
            unsafe fn release_multicast(multicast: RawMulticast, address: u64) -> Result<()>;
        }
    };

    // `Self::name` resolves to the inherent method, which has priority over the trait method.
    (@forward $(fn $safe:ident($($a:ident: $A:ty),*) -> $R:ty;)*
        $(unsafe fn $name:ident($($b:ident: $B:ty),*) -> $S:ty; $($rest:tt)*)?) => {
        $(
            fn $safe(&self, $($a: $A),*) -> $R {
                Self::$safe(self, $($a),*)
            }
        )*
        $(
            unsafe fn $name(&self, $($b: $B),*) -> $S {
                // SAFETY: the inherent method has the same safety contract as the trait method, and
                // the caller of the trait method fulfils the contract.
                unsafe { Self::$name(self, $($b),*) }
            }

            driver_by_methods! { @forward $($rest)* }
        )?
    };
}

pub(crate) use driver_by_methods;
