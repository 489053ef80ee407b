//! Tests the exchange of memory between processes.

use core::fmt::Write as _;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::process::Command;

use cudarc::driver::sys::{self, CUmemAllocationHandleType};

use crate::memory::{map, properties};
use crate::support::*;

/// Environment variable with the input of the other process.
const GIVEN: &str = "CUDA_FAKE_GIVEN";

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Runs the same test in another process, with `text` as its input.
fn other_process(name: &str, text: &str) {
    let name = name.split_once("::").unwrap().1;
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(GIVEN, text)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

const DESCRIPTORS: &str = concat!(module_path!(), "::descriptors");

driver_test! {
    /// Another process imports a descriptor and maps the same memory, even after this process has
    /// released the exported handle.
    descriptors() {
        start();
        if let Ok(given) = std::env::var(GIVEN) {
            let fd: RawFd = given.parse().unwrap();
            let mut handle = 0;
            ok!(cuMemImportFromShareableHandle(&raw mut handle, fd as usize as _, DESCRIPTOR));
            // SAFETY: this process has inherited the open descriptor, and no other value owns it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            let address = map(handle);
            assert_eq!(read(address, 1), [41]);
            write(address, &[42]);
            return;
        }
        let mut handle = 0;
        ok!(cuMemCreate(&raw mut handle, 2 << 20, &properties(DESCRIPTOR), 0));
        let mut fd: RawFd = -1;
        ok!(cuMemExportToShareableHandle((&raw mut fd).cast(), handle, DESCRIPTOR, 0));
        ok!(cuMemRelease(handle));
        let mut again = 0;
        ok!(cuMemImportFromShareableHandle(&raw mut again, fd as usize as _, DESCRIPTOR));
        let address = map(again);
        write(address, &[41]);
        // SAFETY: `fcntl` with `F_SETFD` accesses no memory. The descriptor is open, and child
        // processes must inherit it.
        assert!(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } >= 0);
        other_process(DESCRIPTORS, &fd.to_string());
        assert_eq!(read(address, 1), [42]);
    }
}

const HANDLES: &str = concat!(module_path!(), "::ipc_handles");

fn open(handle: sys::CUipcMemHandle) -> (sys::CUresult, u64) {
    let mut address = 0;
    let code = code!(cuIpcOpenMemHandle_v2(&raw mut address, handle, 1));
    (code, address)
}

driver_test! {
    /// Another process can open an IPC handle several times. The exporting process cannot open the
    /// handle. No process can open the handle after the memory is freed.
    ipc_handles() {
        start();
        if let Ok(given) = std::env::var(GIVEN) {
            let handles: Vec<sys::CUipcMemHandle> = given
                .split(',')
                .map(|text| {
                    let byte = |at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
                    sys::CUipcMemHandle { reserved: core::array::from_fn(|at| byte(at) as _) }
                })
                .collect();
            let (code, address) = open(handles[0]);
            assert_eq!(code, CUDA_SUCCESS);
            assert_eq!(open(handles[0]), (CUDA_SUCCESS, address));
            assert_eq!(read(address, 1), [41]);
            write(address, &[42]);
            fails!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address));
            ok!(cuIpcCloseMemHandle(address));
            assert_eq!(read(address, 1), [42]);
            ok!(cuIpcCloseMemHandle(address));
            fails!(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle(address));
            assert_eq!(open(handles[1]).0, CUDA_ERROR_INVALID_HANDLE);
            let mut wild = handles[0];
            wild.reserved[0] ^= 1;
            assert_eq!(open(wild).0, CUDA_ERROR_INVALID_VALUE);
            assert_eq!(live(c"ipc"), 0);
            return;
        }
        let (kept, freed) = (block(100), block(100));
        let mut text = String::new();
        for address in [kept, freed] {
            let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
            ok!(cuIpcGetMemHandle(&raw mut handle, address + 8));
            assert_eq!(open(handle).0, CUDA_ERROR_INVALID_CONTEXT);
            for byte in handle.reserved {
                write!(text, "{:02x}", byte as u8).unwrap();
            }
            text.push(',');
        }
        let mut mapped = 0;
        ok!(cuMemCreate(&raw mut mapped, 2 << 20, &properties(DESCRIPTOR), 0));
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        fails!(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&raw mut handle, map(mapped)));
        write(kept, &[41]);
        ok!(cuMemFree_v2(freed));
        other_process(HANDLES, text.trim_end_matches(','));
        assert_eq!(read(kept, 1), [42]);
    }
}
