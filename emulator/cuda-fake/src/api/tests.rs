//! Registers two kernels and launches them: a kernel whose blocks wait for each other, and a kernel
//! that fails.

use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::ffi::CString;
use std::time::Instant;

use fusewire_device::group::cpu::LaneContext;
use fusewire_device::native::{Contract, KernelInfo, NativeEntries, NativeEntry, ParamField};

use super::device::{cuCtxSetCurrent, cuDevicePrimaryCtxRetain, cuInit};
use super::memory::{cuMemHostAlloc, cuMemcpyDtoH_v2};
use super::module::{cuLaunchKernel, cuModuleGetFunction, cuModuleLoadData};
use super::stream::{cuStreamCreate, cuStreamSynchronize};
use crate::status::{SUCCESS, Status};

/// Waits until all blocks of the grid have entered the barrier. Panics after 60 s.
unsafe fn counting_barrier(lane: *const LaneContext, params: *const u8) {
    // SAFETY: `NativeEntry` requires `lane` to point to a live context.
    let lane = unsafe { &*lane };
    // SAFETY: the only parameter is the address of a live counter.
    let counter = unsafe { &**params.cast::<*const AtomicU32>() };
    counter.fetch_add(1, Ordering::SeqCst);
    let start = Instant::now();
    while counter.load(Ordering::SeqCst) < lane.blocks {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the other blocks have not started"
        );
        std::thread::yield_now();
    }
}

unsafe fn fail(_: *const LaneContext, _: *const u8) {
    panic!("this kernel fails");
}

const fn kernel(name: &'static str, entry: NativeEntry) -> KernelInfo {
    KernelInfo {
        module: module_path!(),
        name,
        params: &[ParamField {
            name: "counter",
            offset: 0,
            size: 8,
        }],
        native: NativeEntries {
            baseline: entry,
            avx2: entry,
            avx512: entry,
            lanes: entry,
        },
        contract: Contract::NONE,
    }
}

static KERNELS: &[&[KernelInfo]] = &[&[
    kernel("counting_barrier", counting_barrier),
    kernel("fail", fail),
]];

fn launch(module: usize, name: &str, blocks: u32, stream: usize, counter: *mut c_void) -> u32 {
    let (name, mut function) = (CString::new(name).unwrap(), 0);
    // SAFETY: the pointers are to a live variable and a live C string.
    let code = unsafe { cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
    assert_eq!(code, SUCCESS);
    let mut argument = counter;
    let mut arguments = [(&raw mut argument).cast()];
    // SAFETY: the kernel has one argument, whose address `arguments` holds.
    unsafe {
        cuLaunchKernel(
            function,
            blocks,
            1,
            1,
            32,
            1,
            1,
            0,
            stream,
            arguments.as_mut_ptr(),
            null_mut(),
        )
    }
}

#[test]
fn blocks_run_at_once_and_a_failure_stays() {
    crate::testing::register(KERNELS);
    let image = CString::new(crate::testing::stand_in(KERNELS, 90)).unwrap();
    let (mut context, mut module, mut stream, mut counter) = (0, 0, 0, null_mut());
    // SAFETY: the result pointers are to live variables, and `image` is a C string. After its
    // allocation, `counter` points to four bytes of host memory.
    unsafe {
        assert_eq!(cuInit(0), SUCCESS);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), SUCCESS);
        assert_eq!(cuCtxSetCurrent(context), SUCCESS);
        let code = cuModuleLoadData(&raw mut module, image.as_ptr().cast());
        assert_eq!(code, SUCCESS);
        assert_eq!(cuStreamCreate(&raw mut stream, 1), SUCCESS);
        assert_eq!(cuMemHostAlloc(&raw mut counter, 4, 0), SUCCESS);
        counter.cast::<u32>().write(0);
    }
    assert_eq!(
        launch(module, "counting_barrier", 24, stream, counter),
        SUCCESS
    );
    // SAFETY: the function has no pointer arguments.
    assert_eq!(unsafe { cuStreamSynchronize(stream) }, SUCCESS);
    // SAFETY: the launch has completed, so only this thread accesses the counter.
    assert_eq!(unsafe { counter.cast::<u32>().read() }, 24);

    assert_eq!(launch(module, "fail", 2, stream, counter), SUCCESS);
    let failed = Status::LaunchFailed as u32;
    // SAFETY: the function has no pointer arguments.
    assert_eq!(unsafe { cuStreamSynchronize(stream) }, failed);
    let mut word = 0u32;
    let out = (&raw mut word).cast();
    // SAFETY: `word` and `counter` have four bytes each.
    assert_eq!(unsafe { cuMemcpyDtoH_v2(out, counter as u64, 4) }, failed);
    // SAFETY: `stream` is a live variable.
    let code = unsafe { cuStreamCreate(&raw mut stream, 1) };
    assert_eq!(code, failed);
}
