//! Rule for accesses through multicast addresses.

use super::Violation;
use crate::project::fits;
use crate::text::assembly::AsmFunction;
use crate::{Image, Vendor};

pub(super) const MULTICAST: &str = "multicast";

/// Finds wrong uses of `multimem` instructions. On GPUs that support multicast, the kernels that
/// the crate lists must contain `multimem` instructions, and no other kernel may. Each instruction
/// must access 16 bytes with system scope and accumulate 16-bit floats in f32. Alias fences must
/// precede and follow the instructions, because PTX does not otherwise order them with accesses
/// through unicast addresses.
pub(super) fn multicast(image: &Image) -> Vec<Violation> {
    if image.target.vendor() != Vendor::Nvidia {
        return Vec::new();
    }
    image
        .functions
        .iter()
        .flat_map(|function| {
            let listed = image
                .multicast
                .iter()
                .any(|pattern| fits(pattern, super::kernel(&function.name)));
            wrong(function, listed, image.target.has_multicast())
                .into_iter()
                .map(|detail| Violation::new(MULTICAST, &function.name, detail))
        })
        .collect()
}

/// Returns descriptions of the violations in a function. `listed` is true if the crate lists the
/// function as a user of multicast. `exists` is true if the GPU supports multicast.
fn wrong(function: &AsmFunction, listed: bool, exists: bool) -> Vec<String> {
    let mut out = Vec::new();
    let mut accesses = 0;
    let mut fences = 0;
    for (code, line) in function.instructions() {
        fences += usize::from(code.starts_with("fence.proxy.alias"));
        if !code.starts_with("multimem.") {
            continue;
        }
        accesses += 1;
        let parts: Vec<&str> = code.split('.').collect();
        let has = |word: &str| parts.contains(&word);
        let kind = parts.last().copied().unwrap_or_default();
        let small = matches!(kind, "f16x2" | "bf16x2");
        if !exists {
            out.push(format!("the GPU has no multicast: {line}"));
        } else if !listed {
            out.push(format!("the crate does not list this kernel: {line}"));
        }
        if !has("v4") || !(small || kind == "f32") {
            out.push(format!("not 16 bytes at once: {line}"));
        }
        if !has("sys") || !(has("relaxed") || has("acquire") || has("release")) {
            out.push(format!("not ordered with system scope: {line}"));
        }
        if has("ld_reduce") && has("add") && small && !has("acc::f32") {
            out.push(format!("not accumulated in f32: {line}"));
        }
    }
    if accesses > 0 && !function.kernel {
        return vec!["a multicast access in a function that is not inlined".to_owned()];
    }
    if accesses > 0 && fences < 2 {
        out.push(format!(
            "{fences} alias fences; the multicast accesses need one before and one after them"
        ));
    }
    if function.kernel && listed && exists && accesses == 0 {
        out.push("no multicast access, but the crate lists this kernel".to_owned());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::ptx;

    const LOAD: &str = "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%r1, %r2, \
        %r3, %r4}, [%rd1];";
    const STORE: &str = "multimem.st.relaxed.sys.global.v4.f32 [%rd2], {%r1, %r2, %r3, %r4};";
    const FENCE: &str = "fence.proxy.alias;";

    fn seen(statements: &[&str], listed: bool, exists: bool) -> Vec<String> {
        let body = statements.join("\n\t");
        let text =
            format!(".visible .entry k(\n\t.param .u64 k_param_0\n)\n{{\n\t{body}\n\tret;\n}}\n");
        let functions = ptx::parse(&text).expect("PTX");
        wrong(&functions[0], listed, exists)
    }

    #[test]
    fn correct_uses_are_clean() {
        assert!(seen(&[FENCE, LOAD, STORE, FENCE], true, true).is_empty());
        let whole = LOAD.replace(".acc::f32.v4.bf16x2", ".v4.f32");
        assert!(seen(&[FENCE, &whole, FENCE], true, true).is_empty());
        let least = LOAD.replace("add.acc::f32.v4.bf16x2", "min.v4.f16x2");
        assert!(seen(&[FENCE, &least, FENCE], true, true).is_empty());
        assert!(seen(&[], false, true).is_empty());
        assert!(seen(&[], true, false).is_empty());
        let inline = "{ .reg .b64 global; cvta.to.global.u64 global, %rd1; \
                      multimem.st.relaxed.sys.global.v4.f32 [global], {%r1, %r2, %r3, %r4}; }";
        assert!(seen(&[FENCE, inline, FENCE], true, true).is_empty());
        assert_eq!(seen(&[FENCE, inline, FENCE], false, true).len(), 1);
    }

    #[test]
    fn every_fault_is_found() {
        let one = |statements: &[&str], listed, exists, what: &str| {
            let found = seen(statements, listed, exists);
            assert!(
                found.len() == 1 && found[0].contains(what),
                "{what}: {found:?}"
            );
        };
        one(&[FENCE, LOAD, FENCE], false, true, "does not list");
        one(&[FENCE, LOAD, FENCE], true, false, "has no multicast");
        one(&[FENCE, FENCE], true, true, "no multicast access");
        one(&[LOAD, STORE], true, true, "0 alias fences");
        let called = ptx::parse(&format!(".func f()\n{{\n\t{LOAD}\n\tret;\n}}\n")).expect("PTX");
        assert!(wrong(&called[0], true, true)[0].contains("not inlined"));
        one(&[FENCE, LOAD, STORE], true, true, "1 alias fences");
        let with = |from: &str, to: &str, what: &str| {
            let (load, store) = (LOAD.replace(from, to), STORE.replace(from, to));
            let changed = if load == LOAD { &store } else { &load };
            one(&[FENCE, changed, FENCE], true, true, what);
        };
        with(".v4.bf16x2", ".bf16x2", "not 16 bytes");
        with(".v4.bf16x2", ".v2.bf16x2", "not 16 bytes");
        with(".global.v4.f32", ".global.f32", "not 16 bytes");
        with(".acc::f32", "", "not accumulated");
        with(
            "ld_reduce.relaxed.sys",
            "ld_reduce.relaxed.gpu",
            "system scope",
        );
        with("ld_reduce.relaxed.sys", "ld_reduce.weak", "system scope");
        with("st.relaxed.sys", "st.relaxed.cta", "system scope");
    }
}
