//! Panics.

use super::Violation;
use crate::{Image, edit};

pub(super) const PANICS: &str = "panic";

/// Finds panics. A call of panic code costs registers in the hot path, and its trap kills the
/// process. `fusewire-device`'s panic handler is never inlined, so that it is visible here.
pub(super) fn panics(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    for function in image.entries() {
        for (code, line, location) in function.located() {
            if matches!(code, "trap" | "s_trap") || edit::is_panic(line) {
                out.push(Violation::new(PANICS, &function.name, line).at(location));
            }
        }
    }
    out
}
