//! Ranks that fail, the errors on other ranks, and communicators of the remaining ranks.

mod flight_recorder;
mod overlap;
mod ranks;
mod reconfigure;
