//! Calls of every kind: arguments that are refused, objects, random cases, long runs, and the
//! negative controls of the checkers.

mod arguments;
mod controls;
mod objects;
mod properties;
mod smoke;
mod stress;
