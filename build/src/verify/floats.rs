//! Rules for floating point: every operation rounds once, with the same result on all devices.

use super::Violation;
use crate::text::ir;
use crate::{Image, Vendor};

pub(super) const APPROXIMATIONS: &str = "approximation";
pub(super) const ROUNDING: &str = "rounding";

const FLOATS: [&str; 8] = [
    "f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64", "tf32",
];

/// Finds arithmetic that may be contracted. Without `.rn`, ptxas may fuse a multiplication and an
/// addition into an FMA, which rounds once instead of twice. Fast-math flags in the IR permit
/// contraction for both vendors.
pub(super) fn rounding(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    if image.target.vendor() == Vendor::Nvidia {
        for function in &image.functions {
            for (code, line, location) in function.located() {
                let mut parts = code.split('.');
                let operation = parts.next().unwrap_or_default();
                let parts: Vec<&str> = parts.collect();
                if !parts.iter().any(|part| FLOATS.contains(part)) {
                    continue;
                }
                let wrong = match operation {
                    "add" | "sub" | "mul" | "div" | "sqrt" | "rcp" => !parts.contains(&"rn"),
                    "fma" | "mad" => true,
                    _ => false,
                };
                if wrong {
                    out.push(Violation::new(ROUNDING, &function.name, line).at(location));
                }
            }
        }
    }
    for function in &image.ir {
        for line in function.instructions() {
            let operation = ir::split(line).1;
            let arithmetic = ["fadd ", "fsub ", "fmul ", "fdiv ", "frem ", "fneg "]
                .iter()
                .any(|name| operation.starts_with(name));
            let callee = ir::callee(operation).unwrap_or_default();
            let head = operation.split(['%', '@', '(']).next().unwrap_or_default();
            let fast = ["fast", "reassoc", "contract", "arcp", "afn"]
                .iter()
                .any(|flag| head.split_whitespace().any(|word| word == *flag));
            let fused = callee.starts_with("llvm.fma.") || callee.starts_with("llvm.fmuladd.");
            if (arithmetic || callee.starts_with("llvm.")) && fast
                || fused
                || operation.contains("!fpmath")
            {
                out.push(Violation::of_ir(ROUNDING, &function.name, line));
            }
        }
    }
    out
}

/// Finds approximations. In PTX, these are `.approx`, `.ftz` and `.full`. For AMD, these are the
/// hardware's transcendental functions, reciprocals outside correctly rounded divisions and integer
/// divisions, and modes that flush subnormals or do not round to nearest.
pub(super) fn approximations(image: &Image) -> Vec<Violation> {
    match image.target.vendor() {
        Vendor::Amd => amd(image),
        Vendor::Nvidia => nvidia(image),
    }
}

fn nvidia(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    for function in &image.functions {
        for (code, line, location) in function.located() {
            if code
                .split('.')
                .any(|part| matches!(part, "approx" | "ftz" | "full"))
            {
                out.push(Violation::new(APPROXIMATIONS, &function.name, line).at(location));
            }
        }
    }
    out
}

fn amd(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    for function in &image.functions {
        let count = |prefix: &str| {
            function
                .instructions()
                .filter(|(code, _)| code.starts_with(prefix))
                .count()
        };
        let body = image.ir.iter().find(|other| other.name == function.name);
        let has = |words: &[&str]| {
            body.is_some_and(|body| {
                body.instructions().any(|line| {
                    let operation = ir::split(line).1;
                    words.iter().any(|word| operation.contains(word))
                })
            })
        };
        for (code, line, location) in function.located() {
            const NEVER: [&str; 4] = ["v_exp_", "v_log_", "v_sin_", "v_cos_"];
            if NEVER.iter().any(|prefix| code.starts_with(prefix)) {
                out.push(Violation::new(APPROXIMATIONS, &function.name, line).at(location));
            }
        }
        // Each correctly rounded division has one reciprocal and one v_div_fixup. The expansion of
        // an integer division also contains reciprocals, whose results it corrects.
        let reciprocals = count("v_rcp_f");
        let divides = has(&["udiv ", "urem ", "sdiv ", "srem "]);
        if reciprocals > count("v_div_fixup_") && !divides {
            let detail = format!("{reciprocals} v_rcp, {} v_div_fixup", count("v_div_fixup_"));
            out.push(Violation::new(APPROXIMATIONS, &function.name, detail));
        }
        // A correctly rounded square root expands to v_sqrt or v_rsq with corrections.
        if count("v_sqrt_f") + count("v_rsq_f") > 0 && !has(&["@llvm.sqrt."]) {
            let detail = "v_sqrt or v_rsq without llvm.sqrt";
            out.push(Violation::new(APPROXIMATIONS, &function.name, detail));
        }
        for line in body.into_iter().flat_map(|body| body.instructions()) {
            let name = ir::callee(ir::split(line).1).unwrap_or_default();
            let raw = ["rcp", "rsq", "sqrt", "exp2", "log", "sin", "cos"];
            if name
                .strip_prefix("llvm.amdgcn.")
                .is_some_and(|rest| raw.iter().any(|word| rest.starts_with(&format!("{word}."))))
            {
                out.push(Violation::of_ir(APPROXIMATIONS, &function.name, line));
            }
        }
    }
    let mut kernel = "";
    for line in image.assembly.lines().map(str::trim) {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some(".amdhsa_kernel"), Some(name)) => kernel = name,
            (
                Some(".amdhsa_float_denorm_mode_32" | ".amdhsa_float_denorm_mode_16_64"),
                Some(mode),
            ) if mode != "3" => out.push(Violation::new(APPROXIMATIONS, kernel, line)),
            (
                Some(".amdhsa_float_round_mode_32" | ".amdhsa_float_round_mode_16_64"),
                Some(mode),
            ) if mode != "0" => out.push(Violation::new(APPROXIMATIONS, kernel, line)),
            _ => {}
        }
    }
    out
}
