//! Panics.

use super::Violation;
use crate::{Image, edit};

pub(super) const PANICS: &str = "panic";

/// A call into panic code costs registers in the hot path, and its trap kills the whole process.
/// `fusewire-device`'s panic handler is never inlined, so that it shows here.
pub(super) fn panics(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    for function in image.entries() {
        for line in &function.lines {
            // In AMD's expressions for resources callees are named again.
            let trap = matches!(line.as_str(), "trap;" | "s_trap 2");
            if (trap || edit::is_panic(line)) && !line.starts_with('.') {
                out.push(Violation {
                    rule: PANICS,
                    kernel: function.name.clone(),
                    detail: line.clone(),
                });
            }
        }
    }
    out
}
