//! Parser of LLVM IR: the functions, blocks and names that control-flow and data-flow analysis
//! needs.

use std::collections::HashMap;

use crate::Vendor;

/// A function of a module.
#[derive(Clone, Debug, Default)]
pub struct IrFunction {
    /// Symbol of the function.
    pub name: String,
    /// `true` for a kernel.
    pub kernel: bool,
    /// Names of the parameters.
    pub parameters: Vec<String>,
    /// Basic blocks. The first is the entry block.
    pub blocks: Vec<Block>,
}

/// A basic block.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// Label of the block.
    pub label: String,
    /// Instructions. The last one is the terminator.
    pub instructions: Vec<String>,
    /// Indices of the successor blocks.
    pub successors: Vec<usize>,
}

impl IrFunction {
    /// Returns all instructions, in order.
    pub fn instructions(&self) -> impl Iterator<Item = &str> {
        self.blocks
            .iter()
            .flat_map(|block| &block.instructions)
            .map(String::as_str)
    }
}

/// Returns the names of the kernels that a module defines.
pub fn kernel_names(text: &str, vendor: Vendor) -> Vec<String> {
    text.lines()
        .filter(|line| line.starts_with("define ") && is_kernel(line, vendor))
        .map(defined_name)
        .collect()
}

fn is_kernel(define: &str, vendor: Vendor) -> bool {
    let head = define.split('@').next().unwrap_or_default();
    head.split_whitespace()
        .any(|word| word == vendor.calling_convention())
}

fn defined_name(define: &str) -> String {
    let (_, rest) = define.split_once('@').unwrap_or_default();
    rest.split('(')
        .next()
        .unwrap_or_default()
        .trim_matches('"')
        .to_owned()
}

/// Returns the functions that a module defines.
pub fn parse(text: &str, vendor: Vendor) -> Vec<IrFunction> {
    let mut out = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if !line.starts_with("define ") {
            continue;
        }
        let mut function = IrFunction {
            name: defined_name(line),
            kernel: is_kernel(line, vendor),
            parameters: names(line.split_once('@').map_or("", |(_, rest)| rest))
                .map(str::to_owned)
                .collect(),
            blocks: Vec::new(),
        };
        let mut labels: HashMap<String, usize> = HashMap::new();
        let mut open = Block::default();
        let mut label = String::new();
        let mut close = |label: &mut String, open: &mut Block, blocks: &mut Vec<Block>| {
            if !open.instructions.is_empty() {
                open.label = core::mem::take(label);
                labels.insert(open.label.clone(), blocks.len());
                blocks.push(core::mem::take(open));
            }
        };
        for line in lines.by_ref() {
            if line == "}" {
                break;
            }
            let code = line.trim();
            if code.is_empty() || code.starts_with(';') {
                continue;
            }
            if !line.starts_with(' ') {
                close(&mut label, &mut open, &mut function.blocks);
                label = code
                    .split(':')
                    .next()
                    .unwrap_or_default()
                    .trim_matches('"')
                    .to_owned();
            } else if line.starts_with("    ") || code == "]" || code.starts_with("], !") {
                // The cases of a switch are on separate lines.
                if let Some(last) = open.instructions.last_mut() {
                    last.push(' ');
                    last.push_str(code);
                }
            } else {
                open.instructions.push(code.to_owned());
            }
        }
        close(&mut label, &mut open, &mut function.blocks);
        for block in &mut function.blocks {
            let last = block.instructions.last().map_or("", String::as_str);
            block.successors = targets(last)
                .filter_map(|target| labels.get(target).copied())
                .collect();
            block.successors.dedup();
        }
        out.push(function);
    }
    out
}

/// Returns the names of the labels in a terminator.
fn targets(terminator: &str) -> impl Iterator<Item = &str> {
    terminator.split("label %").skip(1).map(|rest| {
        let rest = rest.strip_prefix('"').unwrap_or(rest);
        rest.split([',', ' ', '"', ']']).next().unwrap_or_default()
    })
}

/// Returns every `%name` of a text.
pub fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split('%')
        .skip(1)
        .map(|rest| match rest.strip_prefix('"') {
            Some(quoted) => quoted.split('"').next().unwrap_or_default(),
            None => {
                let end = rest
                    .find(|c: char| {
                        !c.is_ascii_alphanumeric() && !matches!(c, '.' | '_' | '$' | '-')
                    })
                    .unwrap_or(rest.len());
                &rest[..end]
            }
        })
}

/// Splits `%result = operation` into the name of the result and the operation. The name is empty if
/// the instruction has no result.
pub fn split(instruction: &str) -> (&str, &str) {
    match instruction.split_once(" = ") {
        Some((result, operation)) if result.starts_with('%') => {
            (result.trim_start_matches('%').trim_matches('"'), operation)
        }
        _ => ("", instruction),
    }
}

/// Splits an instruction into its text and the number of its debug location, 0 if there is none.
pub fn location(instruction: &str) -> (&str, u32) {
    let Some((code, number)) = instruction.split_once(", !dbg !") else {
        return (instruction, 0);
    };
    let end = number.find(|c: char| !c.is_ascii_digit());
    let number = &number[..end.unwrap_or(number.len())];
    (code, number.parse().unwrap_or(0))
}

/// Returns the name of the callee of a direct call.
pub fn callee(operation: &str) -> Option<&str> {
    let is_call = ["call ", "tail call ", "musttail call ", "notail call "]
        .iter()
        .any(|prefix| operation.starts_with(prefix));
    if !is_call || operation.contains(" asm ") {
        return None;
    }
    let (_, rest) = operation.split_once('@')?;
    Some(rest.split('(').next()?.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
define ptx_kernel void @k(ptr noundef %to, i32 noundef %n) #0 {
start:
  %0 = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %c = icmp ult i32 %0, %n
  br i1 %c, label %bb1, label %exit

bb1:                                              ; preds = %start
  switch i32 %n, label %exit [
    i32 1, label %one
    i32 2, label %exit
  ]

one:                                              ; preds = %bb1
  ret void

exit:                                             ; preds = %bb1, %start
  ret void
}

define internal void @\"quoted\"() {
  unreachable
}
";

    #[test]
    fn control_flow() {
        let functions = parse(TEXT, Vendor::Nvidia);
        assert_eq!(functions.len(), 2);
        let k = &functions[0];
        assert!(k.kernel && k.name == "k");
        assert_eq!(k.parameters, ["to", "n"]);
        assert_eq!(k.blocks.len(), 4);
        assert_eq!(k.blocks[0].successors, [1, 3]);
        assert_eq!(k.blocks[1].successors, [3, 2, 3]);
        assert_eq!(functions[1].name, "quoted");
        assert_eq!(kernel_names(TEXT, Vendor::Nvidia), ["k"]);
        assert_eq!(
            split("%c = icmp ult i32 %0, %n"),
            ("c", "icmp ult i32 %0, %n")
        );
        assert_eq!(names("icmp ult i32 %0, %n").collect::<Vec<_>>(), ["0", "n"]);
        assert_eq!(callee("tail call i32 @f(i32 %x)"), Some("f"));
    }
}
