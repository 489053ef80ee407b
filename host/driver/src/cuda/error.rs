//! Conversion of CUDA result codes to errors.

use core::ffi::c_int;

use cudarc::driver::sys::CUresult;

use super::symbols;
use crate::Error;

pub(super) const SUCCESS: c_int = CUresult::CUDA_SUCCESS as c_int;
pub(super) const NOT_READY: c_int = CUresult::CUDA_ERROR_NOT_READY as c_int;
pub(super) const NOT_FOUND: c_int = CUresult::CUDA_ERROR_NOT_FOUND as c_int;
pub(super) const INVALID_VALUE: c_int = CUresult::CUDA_ERROR_INVALID_VALUE as c_int;
pub(super) const PEER_ACCESS_ALREADY_ENABLED: c_int =
    CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as c_int;
pub(super) const CAPTURE_IMPLICIT: c_int = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as c_int;
pub(super) const OUT_OF_MEMORY: c_int = CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;

/// Creates an error for a failure of the library function `call`.
pub(super) fn driver(call: &'static str, detail: impl Into<String>) -> Error {
    Error::Driver {
        library: "CUDA",
        call,
        detail: detail.into(),
    }
}

/// Appends `more` to the message of an error.
pub(super) fn with(error: Error, more: &str) -> Error {
    match error {
        Error::Driver {
            library,
            call,
            detail,
        } => Error::Driver {
            library,
            call,
            detail: format!("{detail}; {more}"),
        },
        other => other,
    }
}

/// Formats a result code. Adds `text`, the name and the description from the library, if the
/// library knows the code, and a remedy if there is one.
pub(super) fn describe(code: c_int, text: Option<(String, String)>) -> String {
    let mut detail = match text {
        Some((name, text)) if text.is_empty() => format!("{name} ({code})"),
        Some((name, text)) => format!("{name} ({code}): {text}"),
        None => format!("error {code}, which this driver does not describe"),
    };
    if let Some(hint) = hint(code) {
        detail.push_str("; ");
        detail.push_str(hint);
    }
    detail
}

/// Returns true for result codes after which the context is lost: all later calls of the process on
/// the device fail.
const fn context_is_lost(code: c_int) -> bool {
    use CUresult as R;
    code == R::CUDA_ERROR_ILLEGAL_ADDRESS as c_int
        || code == R::CUDA_ERROR_LAUNCH_TIMEOUT as c_int
        || code == R::CUDA_ERROR_LAUNCH_FAILED as c_int
        || code == R::CUDA_ERROR_HARDWARE_STACK_ERROR as c_int
        || code == R::CUDA_ERROR_ILLEGAL_INSTRUCTION as c_int
        || code == R::CUDA_ERROR_MISALIGNED_ADDRESS as c_int
        || code == R::CUDA_ERROR_INVALID_ADDRESS_SPACE as c_int
        || code == R::CUDA_ERROR_INVALID_PC as c_int
        || code == R::CUDA_ERROR_ASSERT as c_int
        || code == R::CUDA_ERROR_ECC_UNCORRECTABLE as c_int
        || code == R::CUDA_ERROR_NVLINK_UNCORRECTABLE as c_int
        || code == R::CUDA_ERROR_EXTERNAL_DEVICE as c_int
        || code == R::CUDA_ERROR_CONTAINED as c_int
        || code == R::CUDA_ERROR_TENSOR_MEMORY_LEAK as c_int
        || code == R::CUDA_ERROR_MPS_CLIENT_TERMINATED as c_int
}

/// Returns a remedy for the result code, if the failure is a common one.
fn hint(code: c_int) -> Option<&'static str> {
    use CUresult as R;
    const TABLE: &[(CUresult, &str)] = &[
        (
            R::CUDA_ERROR_OUT_OF_MEMORY,
            "the device's memory is exhausted: free some, use a smaller workspace, or find other \
                users with nvidia-smi",
        ),
        (
            R::CUDA_ERROR_NOT_INITIALIZED,
            "CUDA does not survive fork: open the device in the process that uses it (Python: \
                start method spawn)",
        ),
        (
            R::CUDA_ERROR_DEINITIALIZED,
            "the process is ending: release everything before main returns",
        ),
        (
            R::CUDA_ERROR_STUB_LIBRARY,
            "this is the toolkit's stub, not a driver: remove its folder stubs from \
                LD_LIBRARY_PATH",
        ),
        (
            R::CUDA_ERROR_DEVICE_UNAVAILABLE,
            "another process uses the device exclusively: see nvidia-smi -q -d COMPUTE",
        ),
        (
            R::CUDA_ERROR_NO_DEVICE,
            "the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES; a container \
                needs --gpus all",
        ),
        (
            R::CUDA_ERROR_INVALID_CONTEXT,
            "the device's context was destroyed or is not current; an IPC handle cannot be opened \
                in the process that created it",
        ),
        (
            R::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            "the program destroyed the device's primary context (cudaDeviceReset, \
                cuDevicePrimaryCtxReset): start the process again without that",
        ),
        (
            R::CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
            "the primary context is already in use",
        ),
        (
            R::CUDA_ERROR_NO_BINARY_FOR_GPU,
            "the image has no code for this GPU: build it for its architecture, or as PTX",
        ),
        (
            R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
            "the PTX is newer than the driver: install a newer driver, or build for an older PTX \
                version",
        ),
        (
            R::CUDA_ERROR_INVALID_PTX,
            "the driver's compiler rejects the PTX: check it with ptxas; a driver older than \
                its PTX version may be the reason",
        ),
        (
            R::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
            "the driver's PTX compiler (libnvidia-ptxjitcompiler.so.1) is missing: a container \
                needs the capability compute and utility",
        ),
        (
            R::CUDA_ERROR_JIT_COMPILATION_DISABLED,
            "CUDA_DISABLE_PTX_JIT is set: unset it, or use an image built for this GPU",
        ),
        (
            R::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            "the GPUs cannot access each other's memory: see nvidia-smi topo -p2p rw",
        ),
        (
            R::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            "too many threads, registers or shared memory for a block of this kernel",
        ),
        (
            R::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
            "not all blocks fit on the device at once: launch fewer, or with less shared memory",
        ),
        (
            R::CUDA_ERROR_INVALID_CLUSTER_SIZE,
            "blocks must be a multiple of the cluster, and a cluster has at most 8 blocks on every \
                GPU",
        ),
        (
            R::CUDA_ERROR_NOT_PERMITTED,
            "not permitted here: a host function may not call the driver, and a fabric handle \
                needs an IMEX channel (/dev/nvidia-caps-imex-channels)",
        ),
        (
            R::CUDA_ERROR_NOT_SUPPORTED,
            "the device, the driver or the container does not support this",
        ),
        (
            R::CUDA_ERROR_SYSTEM_NOT_READY,
            "not ready: check that nvidia-fabricmanager runs and has the driver's version",
        ),
        (
            R::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
            "library and kernel module of the driver have different versions: restart the machine, \
                or match the container to the host",
        ),
        (
            R::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
            "the forward compatibility package does not support this GPU: remove its folder compat \
                from LD_LIBRARY_PATH",
        ),
        (
            R::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            "the call is not permitted while the stream is captured",
        ),
        (
            R::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            "a call before this one was not permitted in the capture and made it invalid; end it",
        ),
        (
            R::CUDA_ERROR_STREAM_CAPTURE_MERGE,
            "an event joins two unrelated captures",
        ),
        (
            R::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
            "the capture began on another stream",
        ),
        (
            R::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            "a stream that was forked into the capture was not joined to it again by an event",
        ),
        (
            R::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            "work of the capture would wait for work outside the capture",
        ),
        (
            R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            "the legacy default stream would wait for the capture: use another stream",
        ),
        (
            R::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
            "a capture that another thread began must end there, unless it began as relaxed",
        ),
        (
            R::CUDA_ERROR_CAPTURED_EVENT,
            "the event was last recorded in a capture; only that capture can wait for it",
        ),
    ];
    if context_is_lost(code) {
        return Some(if symbols::is_replaced() {
            "the device's context is lost, and every later call of this process on it fails; \
                 stderr has the error of the kernel"
        } else {
            "the device's context is lost, and every later call of this process on it fails: \
                 end the process; compute-sanitizer finds the kernel that caused it"
        });
    }
    TABLE
        .iter()
        .find(|(known, _)| *known as c_int == code)
        .map(|(_, hint)| *hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_numbers() {
        assert_eq!((SUCCESS, INVALID_VALUE, OUT_OF_MEMORY), (0, 1, 2));
        assert_eq!((NOT_FOUND, NOT_READY), (500, 600));
    }

    #[test]
    fn text_names_code_and_remedy() {
        let text = Some((
            "CUDA_ERROR_OUT_OF_MEMORY".to_owned(),
            "out of memory".to_owned(),
        ));
        let detail = describe(2, text);
        assert!(detail.starts_with("CUDA_ERROR_OUT_OF_MEMORY (2): out of memory; "));
        assert!(detail.contains("nvidia-smi"));
    }

    #[test]
    fn unknown_codes_are_numbers() {
        assert_eq!(
            describe(77_777, None),
            "error 77777, which this driver does not describe"
        );
    }

    #[test]
    fn a_lost_context_is_distinguished_from_a_refused_call() {
        for lost in [
            214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911,
        ] {
            let hint = hint(lost);
            assert!(
                hint.is_some_and(|hint| hint.contains("context is lost")),
                "{lost}: {hint:?}"
            );
        }
        for refused in [1, 2, 800, 900, 720] {
            assert!(!hint(refused).is_some_and(|hint| hint.contains("context is lost")));
        }
    }

    #[test]
    fn more_is_appended() {
        let error = with(driver("cuMemCreate", "no"), "asked for 8 bytes");
        assert_eq!(
            error.to_string(),
            "CUDA: cuMemCreate: no; asked for 8 bytes"
        );
    }
}
