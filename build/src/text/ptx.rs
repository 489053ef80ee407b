//! Parser of PTX in the format of llc.

use std::collections::HashMap;

use super::assembly::{AsmFunction, Parameter, Resources};
use crate::{Error, Result};

/// Splits PTX into functions. If a line has several statements, as in inline assembly, they become
/// separate lines.
///
/// # Errors
/// [`Error::Parse`] for a parameter whose type is unknown.
pub fn parse(text: &str) -> Result<Vec<AsmFunction>> {
    let mut out = Vec::new();
    let mut lines = text.lines().map(code).enumerate();
    while let Some((_, line)) = lines.next() {
        let kernel = line.contains(".entry ");
        if !kernel && !line.starts_with(".func") && !line.contains(" .func") {
            continue;
        }
        let mut head = line.to_owned();
        while !head.ends_with('{') && !head.ends_with(';') {
            let Some((_, next)) = lines.next() else { break };
            head.push(' ');
            head.push_str(next);
        }
        if !head.ends_with('{') {
            continue; // a declaration
        }
        let mut function = AsmFunction {
            kernel,
            ..AsmFunction::default()
        };
        if kernel {
            let (_, rest) = head.split_once(".entry ").unwrap_or_default();
            let (name, rest) = rest.split_once('(').unwrap_or((rest, ""));
            function.name = name.trim().to_owned();
            let list = rest.split_once(')').map_or(rest, |(list, _)| list);
            function.parameters = parameters(list)?;
        } else {
            function.name = function_name(&head);
        }
        let mut depth = 1;
        for (row, line) in lines.by_ref() {
            for part in line.split_inclusive([';', '{', '}']).map(str::trim) {
                // Braces also group vector operands, but then both braces are in the same
                // statement.
                match part {
                    "{" => depth += 1,
                    "}" => depth -= 1,
                    _ => {}
                }
            }
            if depth == 0 {
                break;
            }
            push_statements(line, &mut function.lines);
            function.rows.resize(function.lines.len(), row);
        }
        out.push(function);
    }
    Ok(out)
}

/// Returns a line without its comment and surrounding space.
fn code(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code).trim()
}

/// Returns the name in a head such as `.func (.param .b32 r) name( ...`, where a list of results
/// may precede the name.
fn function_name(head: &str) -> String {
    let (_, rest) = head.split_once(".func").unwrap_or_default();
    let rest = rest.trim_start();
    let rest = match rest.strip_prefix('(') {
        Some(results) => results.split_once(')').map_or("", |(_, rest)| rest),
        None => rest,
    };
    rest.trim_start()
        .split(['(', ' ', '{', '\t'])
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn push_statements(line: &str, out: &mut Vec<String>) {
    if line.is_empty() {
        return;
    }
    let mut inner = line;
    if let Some(rest) = inner.strip_prefix('{')
        && rest.contains(';')
    {
        inner = rest.trim_end().strip_suffix('}').unwrap_or(rest);
    }
    for statement in inner
        .split_inclusive(';')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        out.push(statement.to_owned());
    }
}

/// Returns the offset and size of each parameter in `list`. As in C, each offset is the next
/// multiple of the parameter's alignment.
fn parameters(list: &str) -> Result<Vec<Parameter>> {
    let mut out = Vec::new();
    let mut end = 0usize;
    for parameter in list
        .split(',')
        .map(str::trim)
        .filter(|parameter| !parameter.is_empty())
    {
        let mut align = 0;
        let mut size = 0;
        let mut words = parameter.split_whitespace().peekable();
        let mut pointee = false;
        while let Some(word) = words.next() {
            match word {
                ".ptr" => pointee = true,
                ".align" => {
                    let value = words
                        .next()
                        .and_then(|value| value.parse().ok())
                        .unwrap_or(1);
                    if !pointee {
                        align = value; // an alignment after `.ptr` is that of the pointee
                    }
                }
                ".b8" | ".u8" | ".s8" => size = 1,
                ".b16" | ".u16" | ".s16" | ".f16" => size = 2,
                ".b32" | ".u32" | ".s32" | ".f32" => size = 4,
                ".b64" | ".u64" | ".s64" | ".f64" => size = 8,
                _ => {}
            }
        }
        if size == 0 {
            return Err(Error::Parse {
                what: "PTX parameter".into(),
                detail: parameter.into(),
            });
        }
        let align = if align == 0 { size } else { align };
        if let Some((_, count)) = parameter.split_once('[') {
            size *= count.trim_end_matches(']').parse::<usize>().unwrap_or(1);
        }
        let offset = end.next_multiple_of(align);
        end = offset + size;
        out.push(Parameter { offset, size });
    }
    Ok(out)
}

/// Parses the output of `ptxas -v`. Returns the resources of each kernel.
pub fn resources(said: &str) -> HashMap<String, Resources> {
    let mut out = HashMap::new();
    let mut name = None;
    let mut properties_of = None;
    let mut current = Resources::default();
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            name = rest.split('\'').next().map(str::to_owned);
            current = Resources::default();
        } else if let Some((_, rest)) = line.split_once("Function properties for ") {
            properties_of = Some(rest.trim().to_owned());
        } else if line.contains("bytes stack frame") && properties_of == name {
            current.local = number_before(line, " bytes stack frame");
            current.spills = number_before(line, " bytes spill stores")
                + number_before(line, " bytes spill loads");
        } else if line.contains("Used ") && line.contains(" registers") {
            current.registers = number_before(line, " registers");
            current.shared = number_before(line, " bytes smem");
            current.local = current
                .local
                .max(number_before(line, " bytes cumulative stack size"));
            if let Some(name) = name.take() {
                out.insert(name, current);
            }
        }
    }
    out
}

/// Returns the number before `words`; 0 if there is none.
fn number_before(line: &str, words: &str) -> u32 {
    line.split_once(words)
        .and_then(|(before, _)| before.rsplit([' ', ',']).next()?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
.visible .entry copy(
\t.param .u64 .ptr .align 1 copy_param_0,
\t.param .u32 copy_param_1,
\t.param .u8 copy_param_2,
\t.param .align 8 .b8 copy_param_3[24]
)                                       // @copy
.maxntid 512
{
\t.reg .pred \t%p<3>;
// %bb.0:
\tld.param.b64 \t%rd1, [copy_param_0];
\t{ .reg .b64 global; cvta.to.global.u64 global, %rd1; ld.acquire.sys.global.u64 %rd2, [global]; }
\tst.global.v2.b64 [%rd1], {%rd2, %rd3};
\t@%p1 bra \t$L__BB0_1;
$L__BB0_1:
\t{ // callseq 0, 0
\tcall.uni fusewire_panic, ();
\t}
\tret;
}
.func  (.param .b32 func_retval0) helper(
\t.param .b64 helper_param_0
)
{
\tret;
}
";

    #[test]
    fn functions_and_parameters() {
        let functions = parse(TEXT).unwrap();
        assert_eq!(functions.len(), 2);
        let copy = &functions[0];
        assert!(copy.kernel);
        assert_eq!(copy.name, "copy");
        let fields: Vec<_> = copy.parameters.iter().map(|p| (p.offset, p.size)).collect();
        assert_eq!(fields, [(0, 8), (8, 4), (12, 1), (16, 24)]);
        let codes: Vec<_> = copy.instructions().map(|(code, _)| code).collect();
        assert_eq!(
            codes,
            [
                "ld.param.b64",
                "cvta.to.global.u64",
                "ld.acquire.sys.global.u64",
                "st.global.v2.b64",
                "bra",
                "call.uni",
                "ret"
            ]
        );
        assert_eq!(functions[1].name, "helper");
        assert!(!functions[1].kernel);
    }

    #[test]
    fn ptxas() {
        let said = "\
ptxas info    : Compiling entry function 'send' for 'sm_80'
ptxas info    : Function properties for send
    136 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 136 bytes cumulative stack size, \
    16384 bytes smem, 392 bytes cmem[0]
ptxas info    : Function properties for helper
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
";
        let all = resources(said);
        let send = all["send"];
        assert_eq!(
            (send.registers, send.shared, send.local, send.spills),
            (80, 16384, 136, 12)
        );
    }
}
