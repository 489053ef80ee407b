//! A fake driver that runs grid forms natively in host memory. A launch returns after the grid is
//! complete.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Mutex;

use fusewire_device::multi_rank_grid::{GridParams, kernel_name};
use fusewire_device::native::{Isa, KernelInfo};

use super::super::super::driver::*;
use crate::cpu::run_multi_rank_grid;
use fusewire_driver::{Error, Result};

/// A call that the fake driver received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Write(u64),
    Record(RawEvent, RawStream),
    Wait(RawStream, RawEvent),
    Launch(LaunchShape, RawStream),
}

#[derive(Debug)]
pub(super) struct Fake {
    properties: Properties,
    kernels: Vec<KernelInfo>,
    handles: AtomicUsize,
    pub(super) calls: Mutex<Vec<Call>>,
    /// Number of allocated bytes.
    pub(super) allocated: AtomicU64,
    /// Number of live streams and events.
    pub(super) live: AtomicUsize,
    /// If set, launches fail.
    pub(super) refuses: AtomicBool,
    /// If set, events never complete.
    pub(super) hangs: AtomicBool,
    /// If set, all streams report that they are capturing.
    pub(super) captures: AtomicBool,
    /// Seeded bug: all blocks run as blocks of rank 0. The test of `grid_barrier` must detect this
    /// bug.
    pub(super) miscounts: AtomicBool,
    /// Seeded bug: the driver reports that every grid form has only one argument. The
    /// `MultiRankGrid` must detect this bug.
    pub(super) mistakes: AtomicBool,
}

impl Fake {
    pub(super) fn new(multiprocessors: u32, kernels: &[KernelInfo]) -> Self {
        Self {
            properties: Properties {
                ordinal: 0,
                name: "fake".to_owned(),
                architecture: "sm_80".to_owned(),
                uuid: [0; 16],
                memory: 1 << 20,
                multiprocessors,
                warp: 32,
                max_threads: 1024,
                shared_bytes: 16 << 10,
                version: 0,
                descriptors: false,
                fabric: false,
                domain: None,
                multicast: false,
                cooperative: true,
            },
            kernels: kernels.to_vec(),
            handles: AtomicUsize::new(1),
            calls: Mutex::default(),
            allocated: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            refuses: AtomicBool::new(false),
            hangs: AtomicBool::new(false),
            captures: AtomicBool::new(false),
            miscounts: AtomicBool::new(false),
            mistakes: AtomicBool::new(false),
        }
    }

    fn handle(&self) -> usize {
        self.live.fetch_add(1, Ordering::Relaxed);
        self.handles.fetch_add(1, Ordering::Relaxed)
    }

    fn log(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn refuse<T>(&self, call: &'static str) -> Result<T> {
        Err(Error::Driver {
            library: self.library(),
            call,
            detail: "refused".to_owned(),
        })
    }
}

impl DeviceDriver for Fake {
    fn library(&self) -> &'static str {
        "fake"
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }
}

impl MemoryDriver for Fake {
    fn allocate(&self, bytes: u64, _: MemoryKind) -> Result<RawMemory> {
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        let words = vec![0u64; bytes.div_ceil(8) as usize].into_boxed_slice();
        let address = Box::into_raw(words).cast::<u64>() as u64;
        Ok(RawMemory::at_address(address, bytes))
    }

    fn enable_peer_access(&self, _: u32) -> Result<()> {
        unreachable!("a multi-rank grid is on one device")
    }

    unsafe fn release(&self, memory: RawMemory) -> Result<()> {
        self.allocated.fetch_sub(memory.bytes, Ordering::Relaxed);
        let words = core::ptr::slice_from_raw_parts_mut(
            memory.address as *mut u64,
            memory.bytes.div_ceil(8) as usize,
        );
        // SAFETY: `allocate` leaked a box with this number of words, and the memory is released
        // once.
        drop(unsafe { Box::from_raw(words) });
        Ok(())
    }

    fn export(&self, _: &RawMemory) -> Result<Export> {
        self.refuse("export")
    }

    fn export_foreign(&self, _: u64) -> Result<(Export, u64, u64)> {
        self.refuse("export_foreign")
    }

    fn import(&self, _: Import<'_>, _: u64) -> Result<RawMemory> {
        self.refuse("import")
    }

    fn allocate_host(&self, _: usize) -> Result<HostMemory> {
        self.refuse("allocate_host")
    }

    unsafe fn release_host(&self, _: HostMemory) -> Result<()> {
        self.refuse("release_host")
    }
}

impl CopyDriver for Fake {
    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        self.log(Call::Write(to));
        // SAFETY: a `MultiRankGrid` writes only to its table, which `allocate` returned.
        unsafe { core::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn read(&self, _: &mut [u8], _: u64) -> Result<()> {
        self.refuse("read")
    }

    unsafe fn copy(&self, _: u64, _: u64, _: u64, _: RawStream) -> Result<()> {
        self.refuse("copy")
    }
}

impl ModuleDriver for Fake {
    fn load(&self, _: &[u8]) -> Result<RawModule> {
        self.refuse("load")
    }

    fn function(&self, _: RawModule, name: &CStr) -> Result<Option<RawFunction>> {
        let name = kernel_name(name.to_str().unwrap()).expect("only grid forms are asked for");
        let index = self.kernels.iter().position(|kernel| kernel.name == name);
        // SAFETY: the fake driver uses the handle as an index.
        Ok(index.map(|index| unsafe { RawFunction::from_raw(index) }))
    }

    fn parameters(&self, _: RawFunction) -> Result<Option<Vec<(usize, usize)>>> {
        Ok(Some(if self.mistakes.load(Ordering::Relaxed) {
            vec![(0, 8)]
        } else {
            vec![(0, 8), (8, 4)]
        }))
    }

    fn function_properties(&self, _: RawFunction) -> Result<FunctionProperties> {
        self.refuse("function_properties")
    }

    fn resident_blocks(&self, _: RawFunction, _: u32, _: u32) -> Result<u32> {
        Ok(1)
    }

    unsafe fn launch(
        &self,
        function: RawFunction,
        shape: &LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        if self.refuses.load(Ordering::Relaxed) {
            return self.refuse("launch");
        }
        self.log(Call::Launch(*shape, stream));
        // SAFETY: the first argument of a grid form is a u64, the address of the table.
        let table = unsafe { *parameters[0].cast::<u64>() };
        // SAFETY: the second argument of a grid form is a u32, the number of blocks per rank.
        let blocks = unsafe { *parameters[1].cast::<u32>() };
        let params = GridParams {
            parameters: table as *const u8,
            blocks_per_rank: if self.miscounts.load(Ordering::Relaxed) {
                shape.blocks
            } else {
                blocks
            },
        };
        let ranks = shape.blocks / params.blocks_per_rank;
        let kernel = &self.kernels[function.as_raw()];
        // SAFETY: the table contains one parameter struct per rank. If `miscounts` is set, the grid
        // has one rank, so only the struct of rank 0 is read.
        let ran =
            unsafe { run_multi_rank_grid(kernel, Isa::Baseline, &params, ranks, shape.threads) };
        ran.map_err(|error| Error::Driver {
            library: "fake",
            call: "launch",
            detail: error.to_string(),
        })
    }
}

impl StreamDriver for Fake {
    fn is_blocking(&self, _: RawStream) -> Result<bool> {
        unreachable!("only adopted streams are asked")
    }

    fn create_stream(&self, _: StreamPriority) -> Result<RawStream> {
        // SAFETY: the fake driver only counts handles.
        Ok(unsafe { RawStream::from_raw(self.handle()) })
    }

    unsafe fn destroy_stream(&self, _: RawStream) -> Result<()> {
        self.live.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn query_stream(&self, _: RawStream) -> Result<bool> {
        Ok(true)
    }

    fn synchronize_stream(&self, _: RawStream) -> Result<()> {
        Ok(())
    }

    unsafe fn host_function(&self, _: RawStream, _: Callback, _: *mut c_void) -> Result<()> {
        self.refuse("host_function")
    }
}

impl EventDriver for Fake {
    fn create_event(&self, _: bool) -> Result<RawEvent> {
        // SAFETY: the fake driver only counts handles.
        Ok(unsafe { RawEvent::from_raw(self.handle()) })
    }

    unsafe fn destroy_event(&self, _: RawEvent) -> Result<()> {
        self.live.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.log(Call::Record(event, stream));
        Ok(())
    }

    fn query_event(&self, _: RawEvent) -> Result<bool> {
        Ok(!self.hangs.load(Ordering::Relaxed))
    }

    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.log(Call::Wait(stream, event));
        Ok(())
    }

    fn elapsed(&self, _: RawEvent, _: RawEvent) -> Result<f32> {
        self.refuse("elapsed")
    }
}

impl GraphDriver for Fake {
    fn begin_capture(&self, _: RawStream) -> Result<()> {
        self.refuse("begin_capture")
    }

    fn end_capture(&self, _: RawStream) -> Result<RawGraph> {
        self.refuse("end_capture")
    }

    fn capture_status(&self, _: RawStream) -> Result<CaptureStatus> {
        Ok(if self.captures.load(Ordering::Relaxed) {
            // SAFETY: the fake driver has no graphs.
            CaptureStatus::Active(1, unsafe { RawGraph::from_raw(1) })
        } else {
            CaptureStatus::None
        })
    }

    unsafe fn retain(&self, _: RawGraph, _: Callback, _: *mut c_void) -> Result<()> {
        self.refuse("retain")
    }

    fn graph_nodes(&self, _: RawGraph) -> Result<usize> {
        self.refuse("graph_nodes")
    }

    fn instantiate(&self, _: RawGraph) -> Result<RawGraphExec> {
        self.refuse("instantiate")
    }

    unsafe fn launch_graph(&self, _: RawGraphExec, _: RawStream) -> Result<()> {
        self.refuse("launch_graph")
    }

    unsafe fn destroy_graph(&self, _: RawGraph) -> Result<()> {
        self.refuse("destroy_graph")
    }

    unsafe fn destroy_exec(&self, _: RawGraphExec) -> Result<()> {
        self.refuse("destroy_exec")
    }
}

impl MulticastDriver for Fake {}
