//! Rule against panics.

use super::Violation;
use crate::{Image, edit};

pub(super) const PANICS: &str = "panic";

/// Finds calls to panic functions, from kernels and from functions that are not inlined. Such a
/// call costs registers in the hot path, and the trap of a panic leaves the process's GPU context
/// unusable. The panic handler of `fusewire-device` is never inlined, so calls to it are visible in
/// the assembly.
pub(super) fn panics(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    let all = image.functions.iter();
    for function in all.filter(|function| !edit::is_panic(&function.name)) {
        for (code, line, location) in function.located() {
            if matches!(code, "trap" | "s_trap") || edit::is_panic(line) {
                out.push(Violation::new(PANICS, &function.name, line).at(location));
            }
        }
    }
    out
}
