//! Rules for the interface between host and image: entries and their parameters.

use std::collections::BTreeSet;

use super::Violation;
use crate::Image;

pub(super) const ARGUMENTS: &str = "arguments";
pub(super) const ENTRIES: &str = "entries";

/// Maximum number of entries of a crate's images for one target. Limits the number of instances of
/// generic kernels.
const MOST_ENTRIES: usize = 150;

/// Finds kernels whose parameters have other offsets or sizes in the image (PTX `.param` or AMD
/// kernarg) than in the host's parameter struct.
pub(super) fn arguments(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    for function in image.entries() {
        let Some(host) = image
            .host
            .iter()
            .flatten()
            .find(|host| host.name == function.name)
        else {
            continue;
        };
        let device: Vec<_> = function
            .parameters
            .iter()
            .map(|p| (p.offset, p.size))
            .collect();
        let passed: Vec<_> = host.params.iter().map(|p| (p.offset, p.size)).collect();
        if device == passed {
            continue;
        }
        let index = device.iter().zip(&passed).position(|(a, b)| a != b);
        let detail = match index {
            Some(index) => format!(
                "{}: the host puts {} bytes at {}, the image reads {} at {}",
                host.params[index].name,
                passed[index].1,
                passed[index].0,
                device[index].1,
                device[index].0
            ),
            None => format!(
                "the host passes {}, the image reads {}",
                passed.len(),
                device.len()
            ),
        };
        out.push(Violation::new(ARGUMENTS, &function.name, detail));
    }
    out
}

/// Finds differences between the host's list and the entries of the image, too many entries, and
/// undefined symbols.
pub(super) fn entries(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    let mut add = |kernel: &str, detail: &str| {
        out.push(Violation::new(ENTRIES, kernel, detail));
    };
    let exported: BTreeSet<&str> = image.entries().map(|entry| entry.name.as_str()).collect();
    if let Some(host) = &image.host {
        let listed: BTreeSet<&str> = host.iter().map(|kernel| kernel.name.as_str()).collect();
        if listed.len() < host.len() {
            add("", "the host lists an entry twice");
        }
        for name in listed.difference(&exported) {
            add(name, "the host lists it, the image lacks it");
        }
        for name in exported.difference(&listed) {
            add(name, "the image has it, the host does not list it");
        }
    }
    if exported.len() > MOST_ENTRIES {
        add(
            "",
            &format!("{} entries, at most {MOST_ENTRIES}", exported.len()),
        );
    }
    let mut lines = image.assembly.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if line.starts_with(".extern .func") {
            let rest = lines.next().unwrap_or_default();
            add("", &format!("open symbol: {line} {rest}"));
        }
    }
    out
}
