//! Rule for local memory.

use super::Violation;
use crate::{Image, Vendor};

pub(super) const LOCAL: &str = "local-memory";

/// Finds local arrays, stack frames and register spills. Their traffic competes with the kernel's
/// data for memory bandwidth.
pub(super) fn local(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    let mut add = |kernel: &str, detail: String| {
        out.push(Violation::new(LOCAL, kernel, detail));
    };
    if image.target.vendor() == Vendor::Nvidia {
        for function in &image.functions {
            for line in function
                .lines
                .iter()
                .filter(|line| line.starts_with(".local"))
            {
                add(&function.name, line.clone());
            }
        }
    }
    for kernel in &image.kernels {
        let Some(used) = kernel.resources else {
            continue;
        };
        if used.local > 0 {
            add(
                &kernel.name,
                format!("{} bytes of local memory", used.local),
            );
        }
        if used.spills > 0 {
            add(&kernel.name, format!("spills: {}", used.spills));
        }
    }
    out
}
