//! Tests that go through public faces only: one conformance list that every device and every way to
//! start ranks runs unchanged, and what the tests in `tests/` share.
//!
//! | module | subject |
//! |---|---|
//! | [`cases`] | the conformance list: cases as data |
//! | [`call`] | one operation, called |
//! | [`backends`] | which backends are there |
//! | [`device`](mod@device) | the device that the tests run on |
//! | [`fake`] | the fake of the CUDA driver, as tests control it |
//! | [`grid`] | every operation in every way to call it, over any communicator |
//! | [`mix`] | one of everything, for graphs: issued, filled anew and checked |
//! | [`oracle`] | what every rank puts in, and what must come out |
//! | [`norm`], [`vocab`](mod@vocab) | what fused norms and sampling must give |
//! | [`rank`] | one rank's part of a case, checked byte for byte |
//! | [`runner`] | ways to start ranks: threads and processes |
//! | [`process`] | the test binary as its own ranks |
//! | [`alloc`], [`syscall`] | counters and filters that show that a call does nothing else |
//! | [`skip`] | what is not there is skipped with a reason, or refused |
//! | [`rng`] | seeded random numbers, the same on all ranks |

pub mod alloc;
pub mod backends;
pub mod call;
pub mod cases;
pub mod device;
pub mod fake;
pub mod grid;
pub mod mix;
pub mod netns;
pub mod norm;
pub mod oracle;
pub mod process;
pub mod rank;
pub mod rng;
pub mod runner;
pub mod seeded_bugs;
pub mod skip;
pub mod syscall;
pub mod vocab;

pub use self::device::device;
