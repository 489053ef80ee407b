//! Tests images, functions and launches.

use core::ffi::{CStr, c_uint, c_void};
use core::ptr::null_mut;
use std::ffi::CString;

use cudarc::driver::sys::{self, CUfunction_attribute, CUjit_option, CUlaunchAttributeID};

use crate::support::*;

fn stand_in() -> CString {
    let lists = fusewire_cuda_fake_library::kernels_of("fusewire_kernels");
    CString::new(fusewire_cuda_fake_library::stand_in(lists, 90)).unwrap()
}

fn load(image: &CStr) -> sys::CUmodule {
    let mut module = null_mut();
    let image = image.as_ptr().cast();
    ok!(cuModuleLoadDataEx(
        &raw mut module,
        image,
        0,
        null_mut(),
        null_mut()
    ));
    module
}

fn function(module: sys::CUmodule, name: &CStr) -> sys::CUfunction {
    let mut function = null_mut();
    ok!(cuModuleGetFunction(
        &raw mut function,
        module,
        name.as_ptr()
    ));
    function
}

/// Loads an image. Returns the result code and the error log.
fn refused(image: &CStr) -> (sys::CUresult, String) {
    let mut log = [0u8; 200];
    let mut options = [
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
    let mut module = null_mut();
    let code = code!(cuModuleLoadDataEx(
        &raw mut module,
        image.as_ptr().cast(),
        2,
        options.as_mut_ptr(),
        values.as_mut_ptr()
    ));
    let text = CStr::from_bytes_until_nul(&log).unwrap().to_str().unwrap();
    assert_eq!(text.len(), values[1] as usize);
    (code, text.to_owned())
}

/// Launches `quantize(source, target, count, seed)`.
fn quantize(
    function: sys::CUfunction,
    (blocks, threads, shared): (c_uint, c_uint, c_uint),
    stream: sys::CUstream,
    (source, target): (u64, u64),
) -> sys::CUresult {
    let (mut source, mut target, mut count, mut seed) = (source, target, 4u64, 7u32);
    let mut arguments: [*mut c_void; 4] = [
        (&raw mut source).cast(),
        (&raw mut target).cast(),
        (&raw mut count).cast(),
        (&raw mut seed).cast(),
    ];
    code!(cuLaunchKernel(
        function,
        blocks,
        1,
        1,
        threads,
        1,
        1,
        shared,
        stream,
        arguments.as_mut_ptr(),
        null_mut()
    ))
}

driver_test! {
    /// Kernels with several blocks read their arguments in stream order, eagerly and in a graph.
    launches() {
        start();
        let stream = stream();
        let function = function(load(&stand_in()), c"quantize");
        let (source, target) = (block(64), block(64));
        let numbers = [1.0f32, -2.0, 0.5, 4.0];
        let exact: Vec<u64> = numbers
            .chunks(2)
            .map(|pair| u64::from(pair[0].to_bits()) | u64::from(pair[1].to_bits()) << 32)
            .collect();
        let expected = [0x3f80u64, 0xc000, 0x3f00, 0x4080];
        let expected = expected.iter().rev().fold(0, |word, half| word << 16 | half);
        for blocks in [1, 3] {
            write(target, &[0; 2]);
            write(source, &[0; 2]);
            let switch = Switch::new();
            switch.block(stream);
            assert_eq!(quantize(function, (blocks, 64, 0), stream, (source, target)), CUDA_SUCCESS);
            write(source, &exact);
            assert_eq!(read(target, 1), [0]);
            switch.open();
            ok!(cuStreamSynchronize(stream));
            assert_eq!(read(target, 2), [expected, 0]);
        }
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        ok!(cuStreamBeginCapture_v2(stream, mode));
        assert_eq!(quantize(function, (2, 64, 0), stream, (source, target)), CUDA_SUCCESS);
        let (mut graph, mut exec) = (null_mut(), null_mut());
        ok!(cuStreamEndCapture(stream, &raw mut graph));
        ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        write(target, &[0]);
        ok!(cuGraphLaunch(exec, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(target, 1), [expected]);
    }
}

driver_test! {
    /// A module has the entries that the image declares, with the parameter offsets of the image.
    functions() {
        start();
        let module = load(&stand_in());
        let mut found = null_mut();
        let missing = c"no_such_kernel".as_ptr();
        fails!(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&raw mut found, module, missing));
        let other = load(c".version 8.0\n.target sm_80\n.address_size 64\n\
            .visible .entry quantize(.param .u32 a, .param .u64 b) { ret; }\n\
            .visible .entry unknown() .reqntid 64 { ret; }\n\
            .visible .entry sum_rows(.param .u64 a) { ret; }");
        let barrier = c"barrier".as_ptr();
        fails!(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&raw mut found, other, barrier));
        let out = |function, index| {
            let (mut offset, mut size) = (0, 0);
            let code = code!(cuFuncGetParamInfo(function, index, &raw mut offset, &raw mut size));
            (code, offset, size)
        };
        let real = function(module, c"quantize");
        assert_eq!(out(real, 3), (CUDA_SUCCESS, 24, 4));
        assert_eq!(out(real, 4).0, CUDA_ERROR_INVALID_VALUE);
        let odd = function(other, c"quantize");
        assert_eq!((out(odd, 0), out(odd, 1)), ((CUDA_SUCCESS, 0, 4), (CUDA_SUCCESS, 8, 8)));
        assert_eq!(function(other, c"quantize"), odd);
        let mut count = 0;
        ok!(cuModuleGetFunctionCount(&raw mut count, other));
        let mut all = [null_mut(); 3];
        ok!(cuModuleEnumerateFunctions(all.as_mut_ptr(), count, other));
        assert!(count == 3 && all.contains(&odd));
        // The parameters of `odd` differ from those of the native entry. `unknown` has no native
        // entry.
        assert_eq!(quantize(odd, (1, 32, 0), null_mut(), (0, 0)), CUDA_ERROR_INVALID_IMAGE);
        let unknown = function(other, c"unknown");
        assert_eq!(quantize(unknown, (1, 32, 0), null_mut(), (0, 0)), CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!(quantize(unknown, (1, 65, 0), null_mut(), (0, 0)), CUDA_ERROR_INVALID_VALUE);
        ok!(cuModuleUnload(module));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuFuncLoad(real));
        ok!(cuFuncLoad(odd));
    }
}

driver_test! {
    images_that_are_refused() {
        start();
        let head = ".version 8.0\n.target sm_90\n.address_size 64\n";
        let image = |text: String| CString::new(text).unwrap();
        let (code, log) = refused(&image(format!("{head}.visible .entry k(.param .u64 a")));
        assert_eq!(code, CUDA_ERROR_INVALID_PTX);
        assert!(log.contains("line 4"), "{log}");
        assert_eq!(refused(c"hello").0, CUDA_ERROR_INVALID_PTX);
        assert_eq!(refused(c"").0, CUDA_ERROR_INVALID_PTX);
        let (code, log) = refused(&image(head.replace("sm_90", "sm_100")));
        assert_eq!(code, CUDA_ERROR_INVALID_PTX);
        assert!(log.contains("sm_100"), "{log}");
        assert_eq!(refused(&image(head.replace("sm_90", "sm_80a"))).0, CUDA_ERROR_INVALID_PTX);
        let newer = refused(&image(head.replace("8.0", "8.8"))).0;
        assert_eq!(newer, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
        let missing = format!("{head}.extern .func elsewhere();");
        assert!(refused(&image(missing)).1.contains("elsewhere"));
        assert_eq!(refused(c"\x7fELF\x02").0, CUDA_ERROR_NO_BINARY_FOR_GPU);
        // The same images load once their errors are removed.
        for good in ["sm_90", "sm_90a", "sm_80"] {
            assert_eq!(refused(&image(head.replace("sm_90", good))), (CUDA_SUCCESS, String::new()));
        }
        assert_eq!(refused(&image(head.replace("8.0", "8.7"))).0, CUDA_SUCCESS);
        assert_eq!(live(c"module"), 4);
    }
}

driver_test! {
    /// Launch shapes that exceed a limit of the device fail. Launch shapes at the limit succeed.
    shapes() {
        start();
        let stream = stream();
        let function = function(load(&stand_in()), c"quantize");
        let (source, target) = (block(64), block(64));
        let shape = |shape| quantize(function, shape, stream, (source, target));
        assert_eq!(shape((1, 512, 48 << 10)), CUDA_SUCCESS);
        assert_eq!(shape((0, 32, 0)), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(shape((1, 0, 0)), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(shape((1, 513, 0)), CUDA_ERROR_INVALID_VALUE, ".maxntid is 512");
        assert_eq!(shape((1, 32, (48 << 10) + 1)), CUDA_ERROR_INVALID_VALUE);
        let dynamic = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        fails!(CUDA_ERROR_INVALID_VALUE, cuFuncSetAttribute(function, dynamic, 228 << 10));
        ok!(cuFuncSetAttribute(function, dynamic, 227 << 10));
        assert_eq!(shape((1, 32, 227 << 10)), CUDA_SUCCESS);
        let resident = |threads, shared| {
            let mut blocks = -1;
            ok!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                function,
                threads,
                shared
            ));
            blocks
        };
        assert_eq!((resident(512, 0), resident(32, 0), resident(32, 100 << 10)), (4, 32, 2));
        assert_eq!(resident(1024, 0), 0);
        let null = null_mut();
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, null, null)
        );
        ok!(cuStreamSynchronize(stream));
    }
}

driver_test! {
    /// All blocks of a cooperative launch must be resident at once. The grid must be a multiple of
    /// the cluster size.
    attributes("MULTIPROCESSORS" = "2") {
        start();
        let stream = stream();
        let function = function(load(&stand_in()), c"quantize");
        let (mut source, mut target) = (block(64), block(64));
        let (mut count, mut seed) = (1u64, 0u32);
        let mut launch = |blocks, cooperative, cluster| {
            // SAFETY: zero is a valid value of every field.
            let mut attributes: [sys::CUlaunchAttribute; 3] = unsafe { core::mem::zeroed() };
            attributes[0].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attributes[0].value.cooperative = cooperative;
            attributes[1].id =
                CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[1].value.programmaticStreamSerializationAllowed = 1;
            attributes[2].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[2].value.clusterDim.x = cluster;
            attributes[2].value.clusterDim.y = 1;
            attributes[2].value.clusterDim.z = 1;
            let config = sys::CUlaunchConfig {
                gridDimX: blocks,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: 512,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: 0,
                hStream: stream,
                attrs: attributes.as_mut_ptr(),
                numAttrs: if cluster == 0 { 2 } else { 3 },
            };
            let mut arguments: [*mut c_void; 4] = [
                (&raw mut source).cast(),
                (&raw mut target).cast(),
                (&raw mut count).cast(),
                (&raw mut seed).cast(),
            ];
            code!(cuLaunchKernelEx(&config, function, arguments.as_mut_ptr(), null_mut()))
        };
        assert_eq!(launch(8, 1, 0), CUDA_SUCCESS);
        assert_eq!(launch(9, 1, 0), CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
        assert_eq!(launch(9, 0, 0), CUDA_SUCCESS);
        assert_eq!(launch(4, 1, 2), CUDA_SUCCESS);
        assert_eq!(launch(3, 1, 2), CUDA_ERROR_INVALID_VALUE);
        ok!(cuStreamSynchronize(stream));
    }
}

driver_test! {
    /// An argument that points to memory without access rights causes a sticky error, and later
    /// work does not run.
    faults() {
        start();
        let stream = stream();
        let function = function(load(&stand_in()), c"quantize");
        let (source, mut reserved) = (block(64), 0);
        assert_eq!(quantize(function, (1, 32, 0), stream, (source, source + 32)), CUDA_SUCCESS);
        ok!(cuStreamSynchronize(stream));
        ok!(cuMemAddressReserve(&raw mut reserved, 2 << 20, 0, 0, 0));
        assert_eq!(quantize(function, (1, 32, 0), stream, (source, reserved)), CUDA_SUCCESS);
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamQuery(stream));
        let code = quantize(function, (1, 32, 0), stream, (source, source + 32));
        assert_eq!(code, CUDA_ERROR_ILLEGAL_ADDRESS);
    }
}
