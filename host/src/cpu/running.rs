//! The kernel that a thread runs, for messages about invalid memory accesses.
//!
//! A kernel with raw pointers can end its process by a null or wild one. Before the first launch of
//! such a kernel, [`report_faults`] installs a handler that writes the name of the kernel and the
//! rank to stderr. The previous handler, or the default action, then handles the signal.

use core::cell::Cell;
use core::fmt::{self, Write};
use core::mem::MaybeUninit;
use std::sync::OnceLock;

/// A kernel and the rank that runs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunningKernel {
    pub(crate) name: &'static str,
    pub(crate) rank: u32,
}

thread_local! {
    static RUNNING: Cell<Option<RunningKernel>> = const { Cell::new(None) };
}

/// Marks this thread as running `kernel` until the result is dropped.
#[inline]
pub(crate) fn enter(kernel: RunningKernel) -> impl Drop {
    struct Guard;
    impl Drop for Guard {
        #[inline]
        fn drop(&mut self) {
            RUNNING.set(None);
        }
    }
    RUNNING.set(Some(kernel));
    Guard
}

const SIGNALS: [(libc::c_int, &str); 2] = [(libc::SIGSEGV, "SIGSEGV"), (libc::SIGBUS, "SIGBUS")];

/// The previous actions of [`SIGNALS`].
static PREVIOUS: [OnceLock<libc::sigaction>; 2] = [const { OnceLock::new() }; 2];

/// Installs the handler, once in a process.
pub(crate) fn report_faults() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        for (&(signal, _), previous) in SIGNALS.iter().zip(&PREVIOUS) {
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                on_fault;
            // SAFETY: all zeros is a valid value of this plain struct.
            let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            // SAFETY: as above.
            let mut before: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
            // SAFETY: asks for the current action, which is written to a valid struct.
            if unsafe { libc::sigaction(signal, core::ptr::null(), &raw mut before) } != 0 {
                continue;
            }
            let _ = previous.set(before);
            // SAFETY: the handler calls only functions that are safe in a signal handler.
            unsafe { libc::sigaction(signal, &raw const action, core::ptr::null_mut()) };
        }
    });
}

/// Writes a message if the thread runs a kernel, and restores the previous action. The faulting
/// instruction then runs again, and the signal goes to that action.
extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let at = SIGNALS.iter().position(|(of, _)| *of == signal);
    // SAFETY: the system passes a valid description.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr()) };
    let is_fault = code > 0;
    if let Ok(Some(kernel)) = RUNNING.try_with(Cell::get)
        && let Some(at) = at
        && is_fault
    {
        let mut text = Text::default();
        let RunningKernel { name, rank } = kernel;
        let _ = writeln!(
            text,
            "fusewire: rank {rank} in kernel {name}: {} at address {address:p}; a null or wild \
             pointer among its arguments, or an access beyond the memory of one",
            SIGNALS[at].1
        );
        // SAFETY: writes the bytes of a buffer, which is safe in a signal handler.
        unsafe { libc::write(libc::STDERR_FILENO, text.bytes.as_ptr().cast(), text.len) };
    }
    // SAFETY: all zeros is the default action.
    let default: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    let previous = at.and_then(|at| PREVIOUS[at].get()).unwrap_or(&default);
    // SAFETY: an action that the system has given, or the default one.
    unsafe { libc::sigaction(signal, previous, core::ptr::null_mut()) };
    if !is_fault {
        // Sent by a process, so it does not occur again by itself.
        // SAFETY: the signal is delivered after this handler.
        unsafe { libc::raise(signal) };
    }
}

/// A message without an allocation. Text that does not fit is cut off.
struct Text {
    bytes: [u8; 512],
    len: usize,
}

impl Default for Text {
    fn default() -> Self {
        Self {
            bytes: [0; 512],
            len: 0,
        }
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.len..];
        let count = text.len().min(room.len());
        room[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.len += count;
        Ok(())
    }
}
