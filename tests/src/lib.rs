//! Tests of the public interface. The conformance lists run unchanged on every device and with
//! every way to start ranks. The other modules are helpers for the tests in `tests/`.
//!
//! | module | subject |
//! |---|---|
//! | [`cases`] | the conformance lists: cases as data |
//! | [`call`] | calls of one operation |
//! | [`backends`] | the backends of this build |
//! | [`device`](mod@device) | the device that the tests run on |
//! | [`factor`] | scaled sums with the factor in device memory |
//! | [`fake`] | control of the fake of the CUDA driver |
//! | [`grid`] | every operation in every mode, on any communicator |
//! | [`mix`] | a mix of all operations for graphs, with contents that change each round |
//! | [`oracle`] | inputs of every rank and expected outputs |
//! | [`norm`], [`vocab`](mod@vocab) | expected results of fused norms and of sampling |
//! | [`rank`] | one rank's run of cases, checked byte for byte |
//! | [`runner`] | ways to start ranks: threads and processes |
//! | [`process`] | ranks as processes of the test binary |
//! | [`alloc`], [`syscall`] | allocation counts, system call filters |
//! | [`skip`] | skipped tests with a reason, and requirements |
//! | [`rng`] | seeded random numbers, the same on all ranks |

pub mod alloc;
pub mod backends;
pub mod call;
pub mod cases;
pub mod device;
pub mod factor;
pub mod fake;
pub mod grid;
pub mod mix;
pub mod moe;
pub mod netns;
pub mod norm;
pub mod oracle;
pub mod overlap_programs;
pub mod process;
pub mod rank;
pub mod rng;
pub mod runner;
pub mod safe_programs;
pub mod seeded_bugs;
pub mod skip;
pub mod syscall;
pub mod vocab;

pub use self::device::device;
