//! The kernels that the threads run, for messages about invalid memory accesses.
//!
//! A kernel with raw pointers can end its process by a null or wild one. Before the first launch of
//! such a kernel on the CPU, [`report_faults`] installs a handler for `SIGSEGV` and `SIGBUS`, which
//! writes the name of the kernel and the rank to stderr. The previous handler, or the default
//! action, then handles the signal. `FUSEWIRE_REPORT_FAULTS=0` prevents it.

use core::fmt::{self, Write};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::OnceLock;

/// A kernel and the rank that runs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunningKernel {
    pub(crate) name: &'static str,
    pub(crate) rank: u32,
}

/// Entry of the table of running kernels. The table is not thread-local memory, because a signal
/// handler cannot use that of a library that was loaded at run time.
struct Slot {
    /// Thread, or 0 if the slot is free.
    thread: AtomicU32,
    rank: AtomicU32,
    name: AtomicPtr<u8>,
    len: AtomicUsize,
}

/// Threads that can be named at the same time.
const SLOTS: usize = 1024;

static RUNNING: [Slot; SLOTS] = [const {
    Slot {
        thread: AtomicU32::new(0),
        rank: AtomicU32::new(0),
        name: AtomicPtr::new(core::ptr::null_mut()),
        len: AtomicUsize::new(0),
    }
}; SLOTS];

/// True after the handler has been installed.
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// Returns the number of the calling thread.
fn thread() -> u32 {
    // SAFETY: the call has no preconditions.
    unsafe { libc::gettid() as u32 }
}

/// Marks this thread as running `kernel` until the result is dropped, if faults are reported.
#[inline]
pub(crate) fn enter(kernel: RunningKernel) -> Mark {
    if !IS_INSTALLED.load(Ordering::Relaxed) {
        return Mark(None);
    }
    Mark(mark(kernel))
}

#[cold]
fn mark(kernel: RunningKernel) -> Option<&'static Slot> {
    let thread = thread();
    let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
    // Threads of a launch have successive numbers, so they rarely look for the same slot.
    let slot = (0..SLOTS)
        .map(|distance| &RUNNING[(thread as usize + distance) % SLOTS])
        .find(|slot| {
            let claimed = slot.thread.compare_exchange(0, thread, acquire, relaxed);
            claimed.is_ok()
        })?;
    slot.rank.store(kernel.rank, relaxed);
    slot.len.store(kernel.name.len(), relaxed);
    // Only this thread reads the name, in the handler.
    slot.name.store(kernel.name.as_ptr().cast_mut(), relaxed);
    Some(slot)
}

/// A thread that runs a kernel.
pub(crate) struct Mark(Option<&'static Slot>);

impl Drop for Mark {
    #[inline]
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.name.store(core::ptr::null_mut(), Ordering::Relaxed);
            slot.thread.store(0, Ordering::Release);
        }
    }
}

/// Returns what this thread runs. Safe in a signal handler.
fn running() -> Option<RunningKernel> {
    let thread = thread();
    let relaxed = Ordering::Relaxed;
    let slot = RUNNING
        .iter()
        .find(|slot| slot.thread.load(relaxed) == thread)?;
    let (name, len) = (slot.name.load(relaxed), slot.len.load(relaxed));
    if name.is_null() {
        return None;
    }
    // SAFETY: this thread has stored the parts of a `&'static str`.
    let name = unsafe { str::from_utf8_unchecked(core::slice::from_raw_parts(name, len)) };
    let rank = slot.rank.load(relaxed);
    Some(RunningKernel { name, rank })
}

/// Code of a fault whose address the processor does not report.
const SI_KERNEL: libc::c_int = 0x80;

const SIGNALS: [(libc::c_int, &str); 2] = [(libc::SIGSEGV, "SIGSEGV"), (libc::SIGBUS, "SIGBUS")];

/// The previous actions of [`SIGNALS`].
static PREVIOUS: [OnceLock<libc::sigaction>; 2] = [const { OnceLock::new() }; 2];

/// Installs the handler, once in a process.
pub(crate) fn report_faults() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        if std::env::var("FUSEWIRE_REPORT_FAULTS").is_ok_and(|value| value == "0") {
            return;
        }
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
        IS_INSTALLED.store(true, Ordering::Relaxed);
    });
}

/// Writes a message if the thread runs a kernel, and restores the previous action. The faulting
/// instruction then runs again, and the signal goes to that action.
extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the location is that of this thread.
    let errno = unsafe { *libc::__errno_location() };
    let at = SIGNALS.iter().position(|(of, _)| *of == signal);
    // SAFETY: the system passes a valid description.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr()) };
    // Also a signal that another handler has sent again.
    let is_fault = code > 0;
    if let Some(kernel) = running()
        && let Some(at) = at
    {
        let mut text = Text::default();
        let RunningKernel { name, rank } = kernel;
        let _ = write!(
            text,
            "fusewire: rank {rank} in kernel {name}: {}",
            SIGNALS[at].1
        );
        let _ = match code {
            SI_KERNEL => write!(text, " at an address that no memory can have"),
            code if code > 0 => write!(text, " at address {address:p}"),
            _ => Ok(()),
        };
        let _ = writeln!(
            text,
            "; a null or wild pointer among its arguments, or an access beyond the memory of one"
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
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
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
