//! Descriptions of failed completions.

use fusewire_verbs_sys::bindings::*;

/// Describes the status of a failed completion, of a receive or of a request, and names the likely
/// cause.
pub(super) fn describe(status: ibv_wc_status, is_receive: bool) -> &'static str {
    match status {
        // Requests of the peer that fail complete no receive, but they stop the queue pair.
        IBV_WC_WR_FLUSH_ERR if is_receive => {
            "the device refused a request of the peer, and stopped the queue pair"
        }
        IBV_WC_LOC_LEN_ERR => "the peer sent a message that no receive accepts",
        IBV_WC_LOC_QP_OP_ERR => "the device rejected a request as malformed",
        IBV_WC_LOC_PROT_ERR => "the request's own memory is not registered",
        IBV_WC_WR_FLUSH_ERR => "the queue pair was stopped before the request was executed",
        IBV_WC_BAD_RESP_ERR => "the peer's device sent an invalid response",
        IBV_WC_LOC_ACCESS_ERR => "a peer's request violated the protection of this side's memory",
        IBV_WC_REM_INV_REQ_ERR => "the peer's device rejected the request as invalid",
        IBV_WC_REM_ACCESS_ERR => {
            "the peer's device refused access: the memory was dropped during the request, or the \
             range exceeds it"
        }
        IBV_WC_REM_OP_ERR => "the peer's device could not complete the request",
        IBV_WC_RETRY_EXC_ERR => {
            "the peer's device does not answer: its host is down or unreachable, its link is down, \
             or its queue pair is gone"
        }
        IBV_WC_RNR_RETRY_EXC_ERR => "the peer takes no notifications; it is stopped or overloaded",
        IBV_WC_REM_ABORT_ERR => "the peer aborted the request",
        IBV_WC_FATAL_ERR => "the device failed; see the kernel's log",
        IBV_WC_RESP_TIMEOUT_ERR => "the peer's response did not arrive in time",
        IBV_WC_GENERAL_ERR => "the device reported a general error; see the kernel's log",
        _ => "the device reported an error",
    }
}
