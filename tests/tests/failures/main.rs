//! Tests ranks that fail, the errors on the other ranks, and communicators of the remaining ranks.

mod flight_recorder;
mod host_calls;
mod moe;
mod moe_masked;
mod overlap;
mod ranks;
mod reconfigure;
mod watchdog;
