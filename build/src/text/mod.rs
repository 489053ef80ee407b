//! Parsers of compiler output: LLVM IR, PTX, AMD assembly.

pub mod amd;
pub mod assembly;
pub mod disassembly;
pub mod ir;
pub mod ptx;
