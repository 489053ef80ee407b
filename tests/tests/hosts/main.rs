//! Tests ranks on several hosts: hosts that differ only in their names, and network namespaces.

mod cable;
mod failures;
mod names;
