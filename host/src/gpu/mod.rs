//! GPU devices: memory, streams, events, graphs and modules over a driver library that is opened at run time.

pub mod driver;
#[allow(
    dead_code,
    unused_imports,
    reason = "used by devices whose memory is exported as descriptors"
)]
pub(crate) mod share;
