//! Reads PTX text: declarations of a module, and the statements of function bodies.

mod body;
mod lexer;
mod module;

pub(crate) use body::{Body, Item, Operand, Statement};
pub(crate) use module::{FunctionText, Initializer, Source, Variable, shared_bytes};
