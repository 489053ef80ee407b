//! GPU devices: memory, streams, events, graphs and modules over a driver library that is opened at run time.

pub mod driver;
pub mod one_grid;
