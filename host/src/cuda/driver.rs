//! [`Driver`] for CUDA: the methods, by subject in the files beside this one.

use core::ffi::{CStr, c_void};

use super::context::Cuda;
use crate::Result;
use crate::gpu::driver::{
    Callback, CaptureStatus, Driver, Export, FunctionProperties, HostMemory, Import, LaunchShape,
    MemoryKind, Properties, RawEvent, RawFunction, RawGraph, RawGraphExec, RawMemory, RawModule,
    RawMulticast, RawStream,
};

impl Driver for Cuda {
    fn library(&self) -> &'static str {
        "CUDA"
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: u64, kind: MemoryKind) -> Result<RawMemory> {
        self.allocate_memory(bytes, kind)
    }

    unsafe fn release(&self, memory: RawMemory) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.release_memory(memory) }
    }

    fn export(&self, memory: &RawMemory) -> Result<Export> {
        self.export_memory(memory)
    }

    fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)> {
        self.export_foreign_memory(address)
    }

    fn import(&self, import: Import<'_>, bytes: u64) -> Result<RawMemory> {
        self.import_memory(import, bytes)
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostMemory> {
        self.allocate_host_memory(bytes)
    }

    unsafe fn release_host(&self, memory: HostMemory) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.release_host_memory(memory) }
    }

    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.write_bytes(to, from) }
    }

    unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.read_bytes(to, from) }
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.copy_on_stream(to, from, bytes, stream) }
    }

    fn load(&self, image: &[u8]) -> Result<RawModule> {
        self.load_module(image)
    }

    fn function(&self, module: RawModule, name: &CStr) -> Result<Option<RawFunction>> {
        self.find_function(module, name)
    }

    fn parameters(&self, function: RawFunction) -> Result<Option<Vec<(usize, usize)>>> {
        self.function_parameters(function)
    }

    fn function_properties(&self, function: RawFunction) -> Result<FunctionProperties> {
        self.needs(function)
    }

    fn resident_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        self.blocks_at_once(function, threads, shared_bytes)
    }

    unsafe fn launch(
        &self,
        function: RawFunction,
        shape: &LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.launch_function(function, shape, parameters, stream) }
    }

    fn create_stream(&self) -> Result<RawStream> {
        self.new_stream()
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.end_stream(stream) }
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.stream_done(stream)
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.wait_stream(stream)
    }

    unsafe fn host_function(
        &self,
        stream: RawStream,
        callback: Callback,
        data: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.call_from_stream(stream, callback, data) }
    }

    fn create_event(&self, timed: bool) -> Result<RawEvent> {
        self.new_event(timed)
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.end_event(event) }
    }

    fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.record(event, stream)
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.event_done(event)
    }

    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.wait_for(stream, event)
    }

    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32> {
        self.milliseconds(start, end)
    }

    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        self.capture(stream)
    }

    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        self.captured(stream)
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        self.status_of_capture(stream)
    }

    unsafe fn retain(&self, graph: RawGraph, callback: Callback, data: *mut c_void) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.give_to_graph(graph, callback, data) }
    }

    fn graph_nodes(&self, graph: RawGraph) -> Result<usize> {
        self.nodes_of(graph)
    }

    fn instantiate(&self, graph: RawGraph) -> Result<RawGraphExec> {
        self.make_exec(graph)
    }

    unsafe fn launch_graph(&self, exec: RawGraphExec, stream: RawStream) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.launch_exec(exec, stream) }
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.end_graph(graph) }
    }

    unsafe fn destroy_exec(&self, exec: RawGraphExec) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.end_exec(exec) }
    }

    fn create_multicast(&self, bytes: u64, devices: u32) -> Result<RawMulticast> {
        self.new_multicast(bytes, devices)
    }

    fn export_multicast(&self, multicast: &RawMulticast) -> Result<Export> {
        self.multicast_export(multicast)
    }

    fn import_multicast(&self, import: Import<'_>, bytes: u64) -> Result<RawMulticast> {
        self.multicast_import(import, bytes)
    }

    fn join_multicast(&self, multicast: &RawMulticast) -> Result<()> {
        self.multicast_join(multicast)
    }

    fn bind_multicast(&self, multicast: &RawMulticast, memory: &RawMemory) -> Result<u64> {
        self.multicast_bind(multicast, memory)
    }

    unsafe fn release_multicast(&self, multicast: RawMulticast, address: u64) -> Result<()> {
        // SAFETY: the requirement is the same.
        unsafe { self.multicast_release(multicast, address) }
    }
}
