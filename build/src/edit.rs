//! Edits the text of linked IR to set attributes that rustc cannot set: launch bounds of kernels,
//! inlining of other functions, and no jump tables.
//!
//! A call costs registers in the caller's hot path, so functions are inlined. There are two
//! exceptions:
//!
//! - On NVIDIA, a function with `#[inline(never)]` stays a function. `ptxas` assigns registers
//!   across calls, so such a function costs the caller only as many registers as the function
//!   uses, and the code of failures is compiled once. On AMD, a call would need a stack.
//! - Panic functions, because the verifier must see calls to them.

use core::fmt::Write as _;
use std::collections::HashMap;

use crate::Vendor;

/// Returns `true` if a function is part of the panic machinery.
pub(crate) fn is_panic(name: &str) -> bool {
    [
        "panicking",
        "rust_begin_unwind",
        "fusewire_panic",
        "unwrap_failed",
        "expect_failed",
    ]
    .iter()
    .any(|part| name.contains(part))
}

/// Sets the attributes of every function definition. `max_threads` returns the maximum number of
/// lanes per block of a kernel.
pub(crate) fn prepare(ir: &str, vendor: Vendor, max_threads: impl Fn(&str) -> u32) -> String {
    let groups: HashMap<&str, &str> = ir.lines().filter_map(group).collect();
    let mut next = groups
        .keys()
        .filter_map(|number| number.parse::<u32>().ok())
        .max()
        .unwrap_or(0)
        + 1;
    let mut made: HashMap<(String, Option<u32>), u32> = HashMap::new();
    let mut added = String::new();
    let mut out = String::with_capacity(ir.len() + 4096);
    for line in ir.lines() {
        if let Some((number, body)) = group(line)
            && !body.contains("noreturn")
        {
            // Also edits the attribute groups of call sites, which can forbid inlining.
            let _ = writeln!(out, "attributes #{number} = {{{}}}", without_noinline(body));
            continue;
        }
        let kernel = line.contains(vendor.calling_convention());
        let name = line
            .split_once('@')
            .map_or("", |(_, rest)| rest.split('(').next().unwrap_or_default());
        if !line.starts_with("define ") || is_panic(name) {
            out.push_str(line);
            out.push('\n');
            continue;
        }
        let (head, old, tail) = split_attributes(line);
        let body = old
            .and_then(|number| groups.get(number))
            .copied()
            .unwrap_or_default();
        let kernel = kernel.then(|| max_threads(name));
        let number = *made.entry((body.to_owned(), kernel)).or_insert_with(|| {
            // Functions that do not return are those of panics.
            let outlined = vendor == Vendor::Nvidia
                && kernel.is_none()
                && has(body, "noinline")
                && !has(body, "noreturn");
            let mut attributes = match outlined {
                true => body.to_owned(),
                false => without_noinline(body).replace(" cold ", " "),
            };
            if let Some(max_threads) = kernel {
                let _ = match vendor {
                    Vendor::Amd => {
                        write!(
                            attributes,
                            " \"amdgpu-flat-work-group-size\"=\"1,{max_threads}\""
                        )
                    }
                    Vendor::Nvidia => write!(
                        attributes,
                        // Requests a minimum of one block per SM. For a minimum of two, ptxas would
                        // spill registers.
                        " \"nvvm.maxntid\"=\"{max_threads}\" \"nvvm.minctasm\"=\"1\""
                    ),
                };
            } else if !outlined && !attributes.contains("alwaysinline") {
                attributes.push_str(" alwaysinline");
            }
            // Keeps opt from making tables of constants, which cost a trip to global memory. Tables
            // that rustc has made remain.
            attributes.push_str(" \"no-jump-tables\"=\"true\"");
            let _ = writeln!(added, "attributes #{next} = {{ {} }}", attributes.trim());
            next += 1;
            next - 1
        });
        let _ = writeln!(out, "{head} #{number}{tail}");
    }
    out + &added
}

fn group(line: &str) -> Option<(&str, &str)> {
    let (number, body) = line.strip_prefix("attributes #")?.split_once(" = {")?;
    Some((number, body.trim_end().strip_suffix('}')?))
}

fn has(attributes: &str, name: &str) -> bool {
    attributes.split_whitespace().any(|word| word == name)
}

fn without_noinline(body: &str) -> String {
    body.replace(" noinline", "")
}

/// Splits a definition into the text before the attribute group, the group's number, and the text
/// after it.
fn split_attributes(line: &str) -> (&str, Option<&str>, &str) {
    if let Some(at) = line.rfind(" #") {
        let rest = &line[at + 2..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        if digits > 0 {
            return (&line[..at], Some(&rest[..digits]), &rest[digits..]);
        }
    }
    match line.rfind(" {") {
        Some(at) => (&line[..at], None, &line[at..]),
        None => (line, None, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_get_bounds_and_functions_are_inlined() {
        let ir = "define ptx_kernel void @k(ptr %x) unnamed_addr #0 {\n\
            define internal void @_RNv4wait() #1 {\n\
            define void @_ZN4core9panicking5panic() #1 {\n\
            attributes #0 = { nounwind }\n\
            attributes #1 = { cold noinline nounwind }\n";
        let out = prepare(ir, Vendor::Nvidia, |_| 256);
        assert!(out.contains("@k(ptr %x) unnamed_addr #2 {"));
        assert!(out.contains("@_RNv4wait() #3 {"));
        assert!(out.contains("panic() #1 {"));
        assert!(
            out.contains(
                "attributes #2 = { nounwind  \"nvvm.maxntid\"=\"256\" \"nvvm.minctasm\"=\"1\" \
                 \"no-jump-tables\"=\"true\" }"
            ),
            "{out}"
        );
        assert!(
            out.contains("attributes #3 = { cold noinline nounwind  \"no-jump-tables\""),
            "{out}"
        );
        let inlined = "attributes #3 = { nounwind  alwaysinline \"no-jump-tables\"=\"true\" }";
        let out = prepare(&ir.replace("ptx_", "amdgpu_"), Vendor::Amd, |_| 256);
        assert!(out.contains(inlined), "{out}");
        let ir = ir.replace(" noinline", "");
        let out = prepare(&ir, Vendor::Nvidia, |_| 256);
        assert!(out.contains(inlined), "{out}");
    }
}
