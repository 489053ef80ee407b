//! Streams of two emulated devices wait for each other. Without the wait, the emulator reports a
//! race.

use core::ffi::c_void;
use core::ptr::null_mut;

use cudarc::driver::sys;

use crate::support::*;

/// The kernels get the address of a flag, which the data follow.
const PTX: &core::ffi::CStr = c"
.version 8.3
.target sm_90
.address_size 64

.visible .entry raise(.param .u64 at)
{
    .reg .b64 %d<1>;
    ld.param.u64 %d0, [at];
    st.global.u32 [%d0+4], 1;
    st.release.sys.global.u32 [%d0], 1;
    ret;
}

.visible .entry poll(.param .u64 at)
{
    .reg .pred %p<1>;
    .reg .b32 %r<1>;
    .reg .b64 %d<1>;
    ld.param.u64 %d0, [at];
wait:
    ld.acquire.sys.global.u32 %r0, [%d0];
    setp.eq.u32 %p0, %r0, 1;
    @%p0 bra done;
    bra wait;
done:
    st.global.u32 [%d0+4], 2;
    ret;
}

.visible .entry write(.param .u64 at)
{
    .reg .b64 %d<1>;
    ld.param.u64 %d0, [at];
    st.global.u32 [%d0+4], 3;
    ret;
}
";

/// A device with a stream.
struct Gpu {
    context: sys::CUcontext,
    module: sys::CUmodule,
    stream: sys::CUstream,
}

impl Gpu {
    fn new(device: i32) -> Self {
        let mut context = null_mut();
        ok!(cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok!(cuCtxSetCurrent(context));
        let mut module = null_mut();
        let image = PTX.as_ptr().cast();
        ok!(cuModuleLoadData(&raw mut module, image));
        Self {
            context,
            module,
            stream: stream(),
        }
    }

    fn enter(&self) {
        ok!(cuCtxSetCurrent(self.context));
    }

    fn launch(&self, kernel: &core::ffi::CStr, mut at: u64) {
        self.enter();
        let mut function = null_mut();
        let name = kernel.as_ptr();
        ok!(cuModuleGetFunction(&raw mut function, self.module, name));
        let mut arguments: [*mut c_void; 1] = [(&raw mut at).cast()];
        ok!(cuLaunchKernel(
            function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            self.stream,
            arguments.as_mut_ptr(),
            null_mut()
        ));
    }

    fn finish(&self) -> sys::CUresult {
        self.enter();
        code!(cuStreamSynchronize(self.stream))
    }
}

/// Returns two devices, and the address of a flag and data on device 0.
fn gpus() -> (Gpu, Gpu, u64) {
    ok!(cuInit(0));
    let (first, second) = (Gpu::new(0), Gpu::new(1));
    ok!(cuCtxEnablePeerAccess(first.context, 0));
    first.enter();
    let flag = block(8);
    write(flag, &[0]);
    (first, second, flag)
}

/// Runs `body` with two devices. All launches must succeed or, if `is_ordered` is false, one must
/// fail because of a race.
fn check(is_ordered: bool, body: fn(&Gpu, &Gpu, u64, bool)) {
    let (first, second, flag) = gpus();
    body(&first, &second, flag, is_ordered);
    let codes = [first.finish(), second.finish()];
    if is_ordered {
        assert_eq!(codes, [CUDA_SUCCESS; 2]);
    } else {
        let failed = |it: &&sys::CUresult| **it == CUDA_ERROR_LAUNCH_FAILED;
        assert_eq!(codes.iter().filter(failed).count(), 1, "{codes:?}");
    }
}

macro_rules! order_test {
    ($(#[$meta:meta])* $name:ident, $without:ident, $body:expr) => {
        driver_test! {
            $(#[$meta])*
            $name("FUSEWIRE_FAKE_GPU" = "ptx", "DEVICES" = "2") {
                check(true, $body);
            }
        }
        driver_test! {
            $without("FUSEWIRE_FAKE_GPU" = "ptx", "DEVICES" = "2") {
                check(false, $body);
            }
        }
    };
}

order_test! {
    /// A stream waits for a flag that a kernel of the other device raises.
    waits_order, no_wait_races, |first, second, flag, orders| {
        first.launch(c"raise", flag);
        assert_eq!(first.finish(), CUDA_SUCCESS);
        second.enter();
        if orders {
            ok!(cuStreamWaitValue32_v2(second.stream, flag, 1, 0));
        }
        second.launch(c"write", flag);
    }
}

order_test! {
    /// A kernel waits for a flag that a stream of the other device raises after a kernel.
    writes_order, writes_before_the_kernel_race, |first, second, flag, orders| {
        second.launch(c"poll", flag);
        let raise = || {
            first.enter();
            ok!(cuStreamWriteValue32_v2(first.stream, flag, 1, 0));
        };
        if !orders {
            raise();
        }
        first.launch(c"write", flag);
        if orders {
            raise();
        }
    }
}

order_test! {
    /// A stream waits for an event of the other device.
    events_order, no_event_races, |first, second, flag, orders| {
        first.launch(c"write", flag);
        let event = event();
        ok!(cuEventRecord(event, first.stream));
        assert_eq!(first.finish(), CUDA_SUCCESS);
        second.enter();
        if orders {
            ok!(cuStreamWaitEvent(second.stream, event, 0));
        }
        second.launch(c"write", flag);
    }
}

/// Captures a graph with the kernel `write` of `second` in a branch. If `has_first` is true, the
/// graph also has the kernel `write` of `first`: before the branch if `is_after` is true, or else
/// beside it.
fn capture(
    first: &Gpu,
    second: &Gpu,
    at: u64,
    has_first: bool,
    is_after: bool,
) -> sys::CUgraphExec {
    first.enter();
    let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let (fork, written) = (event(), event());
    ok!(cuStreamBeginCapture_v2(first.stream, relaxed));
    ok!(cuEventRecord(fork, first.stream));
    if has_first {
        first.launch(c"write", at);
    }
    ok!(cuEventRecord(written, first.stream));
    second.enter();
    let join = event();
    let after = if is_after { written } else { fork };
    ok!(cuStreamWaitEvent(second.stream, after, 0));
    second.launch(c"write", at);
    ok!(cuEventRecord(join, second.stream));
    first.enter();
    ok!(cuStreamWaitEvent(first.stream, join, 0));
    let (mut graph, mut exec) = (null_mut(), null_mut());
    ok!(cuStreamEndCapture(first.stream, &raw mut graph));
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    exec
}

order_test! {
    /// A graph has an edge between kernels of two devices.
    edges_order, no_edge_races, |first, second, flag, orders| {
        let graph = capture(first, second, flag, true, orders);
        ok!(cuGraphLaunch(graph, first.stream));
    }
}

driver_test! {
    /// A branch of a graph runs on another device. It is ordered after the work before the graph
    /// and before the work after it, also in replays.
    branches_order("FUSEWIRE_FAKE_GPU" = "ptx", "DEVICES" = "2") {
        check(true, |first, second, flag, _| {
            let graph = capture(first, second, flag, false, false);
            for _ in 0..3 {
                first.launch(c"write", flag);
                ok!(cuGraphLaunch(graph, first.stream));
            }
            first.launch(c"write", flag);
        });
    }
}

driver_test! {
    /// An event that no stream has recorded orders nothing, and later launches are not before an
    /// event.
    early_events_race("FUSEWIRE_FAKE_GPU" = "ptx", "DEVICES" = "2") {
        check(false, |first, second, flag, _| {
            first.enter();
            let (early, never) = (event(), event());
            ok!(cuEventRecord(early, first.stream));
            first.launch(c"write", flag);
            assert_eq!(first.finish(), CUDA_SUCCESS);
            second.enter();
            ok!(cuStreamWaitEvent(second.stream, early, 0));
            ok!(cuStreamWaitEvent(second.stream, never, 0));
            second.launch(c"write", flag);
        });
    }
}
