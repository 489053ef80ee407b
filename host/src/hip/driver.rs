//! The face that the crate sees: each method is in the file of its subject.

use core::ffi::{CStr, c_void};

use super::device::Hip;
use super::error::LIBRARY;
use crate::Result;
use crate::gpu::driver::{
    Callback, CaptureStatus, Driver, Export, FunctionProperties, HostMemory, Import, LaunchShape,
    MemoryKind, Properties, RawEvent, RawFunction, RawGraph, RawGraphExec, RawMemory, RawModule,
    RawStream,
};

impl Driver for Hip {
    fn library(&self) -> &'static str {
        LIBRARY
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: u64, kind: MemoryKind) -> Result<RawMemory> {
        self.allocate(bytes, kind)
    }

    unsafe fn release(&self, memory: RawMemory) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.release(memory) }
    }

    fn export(&self, memory: &RawMemory) -> Result<Export> {
        self.export_foreign(memory.address)
            .map(|(export, _, _)| export)
    }

    fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)> {
        self.export_foreign(address)
    }

    fn import(&self, import: Import<'_>, bytes: u64) -> Result<RawMemory> {
        self.import(import, bytes)
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostMemory> {
        self.allocate_host(bytes)
    }

    unsafe fn release_host(&self, memory: HostMemory) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.release_host(memory) }
    }

    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.write(to, from) }
    }

    unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.read(to, from) }
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.copy(to, from, bytes, stream) }
    }

    fn load(&self, image: &[u8]) -> Result<RawModule> {
        self.load(image)
    }

    fn function(&self, module: RawModule, name: &CStr) -> Result<Option<RawFunction>> {
        self.function(module, name)
    }

    fn parameters(&self, function: RawFunction) -> Result<Option<Vec<(usize, usize)>>> {
        self.parameters(function)
    }

    fn function_properties(&self, function: RawFunction) -> Result<FunctionProperties> {
        self.function_properties(function)
    }

    fn resident_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        self.resident_blocks(function, threads, shared_bytes)
    }

    unsafe fn launch(
        &self,
        function: RawFunction,
        shape: &LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(function, shape, parameters, stream) }
    }

    fn create_stream(&self) -> Result<RawStream> {
        self.create_stream()
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.destroy_stream(stream) }
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.query_stream(stream)
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.synchronize_stream(stream)
    }

    unsafe fn host_function(
        &self,
        stream: RawStream,
        callback: Callback,
        data: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host_function(stream, callback, data) }
    }

    fn create_event(&self, timed: bool) -> Result<RawEvent> {
        self.create_event(timed)
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.destroy_event(event) }
    }

    fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.record_event(event, stream)
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.query_event(event)
    }

    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.wait_event(stream, event)
    }

    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32> {
        self.elapsed(start, end)
    }

    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        self.begin_capture(stream)
    }

    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        self.end_capture(stream)
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        self.capture_status(stream)
    }

    unsafe fn retain(&self, graph: RawGraph, callback: Callback, data: *mut c_void) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.retain(graph, callback, data) }
    }

    fn graph_nodes(&self, graph: RawGraph) -> Result<usize> {
        self.graph_nodes(graph)
    }

    fn instantiate(&self, graph: RawGraph) -> Result<RawGraphExec> {
        self.instantiate(graph)
    }

    unsafe fn launch_graph(&self, exec: RawGraphExec, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_graph(exec, stream) }
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.destroy_graph(graph) }
    }

    unsafe fn destroy_exec(&self, exec: RawGraphExec) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.destroy_exec(exec) }
    }
}
