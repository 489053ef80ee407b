//! Rule against non-coherent loads.

use std::collections::{HashMap, HashSet};

use super::Violation;
use crate::Image;
use crate::text::assembly::{AsmFunction, opcode};

pub(super) const NONCOHERENT: &str = "non-coherent-load";

/// Finds non-coherent loads. `ld.global.nc` may hit a cache that is not invalidated while the
/// kernel runs, so it may never return the value that a peer has written. Reads through `&T`
/// parameters compile to non-coherent loads. These loads are permitted only for constant tables in
/// the image.
pub(super) fn noncoherent(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    for function in &image.functions {
        let mut definitions: Option<HashMap<&str, Vec<&str>>> = None;
        for (code, line, location) in function.located() {
            if !code.starts_with("ld.") || !code.split('.').any(|part| part == "nc") {
                continue;
            }
            let definitions = definitions.get_or_insert_with(|| by_register(function));
            let base = line.split_once('[').map_or("", |(_, rest)| rest);
            let base = base.split(['+', ']']).next().unwrap_or_default();
            if !is_constant(base, definitions) {
                out.push(Violation::new(NONCOHERENT, &function.name, line).at(location));
            }
        }
    }
    out
}

/// Returns the lines that write each register.
fn by_register(function: &AsmFunction) -> HashMap<&str, Vec<&str>> {
    let mut out: HashMap<&str, Vec<&str>> = HashMap::new();
    for line in &function.lines {
        if let Some(code) = opcode(line)
            && let Some((_, rest)) = line.split_once(code)
            && let Some(register) = rest.trim_start().split([',', ';']).next()
            && register.starts_with('%')
        {
            out.entry(register).or_default().push(line);
        }
    }
    out
}

/// Returns `true` if an address is computed only from symbols of the image, without parameters or
/// loaded pointers.
fn is_constant(base: &str, definitions: &HashMap<&str, Vec<&str>>) -> bool {
    if !base.starts_with('%') {
        return true; // a symbol, not a register
    }
    let mut seen = HashSet::new();
    let mut open = vec![base];
    let mut symbol = false;
    while let Some(register) = open.pop() {
        if !seen.insert(register) {
            continue;
        }
        for line in definitions.get(register).into_iter().flatten() {
            let code = opcode(line).unwrap_or_default();
            if code.starts_with("ld.") {
                // An index may be loaded, but the base pointer must not be. A loaded 64-bit value
                // may be a pointer. A loaded index is narrower and is widened before use.
                if code.ends_with("64") {
                    return false;
                }
                continue;
            }
            let (_, operands) = line.split_once(',').unwrap_or_default();
            for operand in operands.trim_end_matches(';').split(',').map(str::trim) {
                if operand.starts_with('%') {
                    // A value that is widened, masked or shifted right is an index, not a pointer.
                    let widened = ["cvt.", "mul.wide", "bfe.", "and.", "shr."]
                        .iter()
                        .any(|prefix| code.starts_with(prefix));
                    if !widened {
                        open.push(operand);
                    }
                } else if operand
                    .starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '$')
                {
                    symbol = true;
                }
            }
        }
    }
    symbol
}
