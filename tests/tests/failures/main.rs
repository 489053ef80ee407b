//! Ranks that fail, what the others report, and communicators made of those that remain.

mod flight_recorder;
mod overlap;
mod ranks;
mod reconfigure;
