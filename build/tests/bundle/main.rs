//! The bundle's script: what it makes of programs that pass, fail, hang or are missing (stand-ins, within seconds), and, asked for
//! by CI, a bundle of the real ones.

mod fake;
mod real;
mod script;
