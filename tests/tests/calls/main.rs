//! Calls of all kinds: wrong arguments, objects, random cases, long runs, and negative controls of
//! the checkers.

mod arguments;
mod controls;
mod objects;
mod properties;
mod smoke;
mod stress;
