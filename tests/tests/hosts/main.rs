//! Ranks on several hosts: hosts by name only, and hosts that are network namespaces.

mod cable;
mod names;
