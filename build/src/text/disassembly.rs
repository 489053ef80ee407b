//! Parser of the disassembly of AMD code objects, in the format of `llvm-objdump`.

use std::collections::HashMap;

/// Arguments with which `llvm-objdump` must be called, except the file name.
pub const OBJDUMP: [&str; 3] = ["-d", "--symbolize-operands", "--no-show-raw-insn"];

/// An instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instruction {
    /// Address in the code object.
    pub address: u64,
    /// Mnemonic.
    pub code: String,
    /// Operands and modifiers.
    pub operands: String,
    /// Index of the instruction to which a branch jumps.
    pub target: Option<usize>,
}

/// A kernel.
#[derive(Clone, Debug, Default)]
pub struct Disassembly {
    /// Symbol of the kernel.
    pub name: String,
    /// Instructions in the order of their addresses.
    pub instructions: Vec<Instruction>,
}

impl Instruction {
    /// Returns `true` if the instruction has the modifier `word`, such as `sc1`.
    pub fn has(&self, word: &str) -> bool {
        self.operands.split([' ', ',']).any(|part| part == word)
    }

    /// Returns `true` for branches, which end a basic block.
    pub fn is_branch(&self) -> bool {
        self.code == "s_branch" || self.code.starts_with("s_cbranch")
    }

    /// Returns `true` if the next instruction is not executed after this one, unless it is the
    /// target of a branch.
    pub fn is_last(&self) -> bool {
        self.code == "s_branch" || self.code == "s_endpgm"
    }
}

/// Parses the output of `llvm-objdump` with the arguments [`OBJDUMP`].
pub fn parse(text: &str) -> Vec<Disassembly> {
    let mut out: Vec<Disassembly> = Vec::new();
    // Labels are numbered per kernel.
    let mut labels: HashMap<(usize, &str), usize> = HashMap::new();
    for line in text.lines() {
        let own = out.len();
        match (symbol(line), out.last_mut()) {
            (Some(label), Some(kernel)) if is_label(label) => {
                labels.insert((own, label), kernel.instructions.len());
            }
            (Some(name), _) => out.push(Disassembly {
                name: name.to_owned(),
                ..Disassembly::default()
            }),
            (None, Some(kernel)) => kernel.instructions.extend(instruction(line)),
            (None, None) => {}
        }
    }
    for (index, kernel) in out.iter_mut().enumerate() {
        for it in kernel.instructions.iter_mut().filter(|it| it.is_branch()) {
            it.target = labels.get(&(index + 1, it.operands.as_str())).copied();
        }
    }
    out
}

/// Returns the symbol of a line such as `0000000000001800 <barrier>:`.
fn symbol(line: &str) -> Option<&str> {
    let (address, symbol) = line.strip_suffix(">:")?.split_once(" <")?;
    u64::from_str_radix(address, 16).ok().map(|_| symbol)
}

fn is_label(symbol: &str) -> bool {
    let number = symbol.strip_prefix('L');
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Parses a line such as `s_endpgm   // 000000001800: BF810000`.
fn instruction(line: &str) -> Option<Instruction> {
    let (text, comment) = line.split_once("//")?;
    let (address, _) = comment.split_once(':')?;
    let text = text.trim();
    let (code, operands) = text.split_once(' ').unwrap_or((text, ""));
    Some(Instruction {
        address: u64::from_str_radix(address.trim(), 16).ok()?,
        code: code.to_owned(),
        operands: operands.trim().to_owned(),
        target: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_labels_and_addresses() {
        let text = "\nx.co:\tfile format elf64-amdgpu\n\n0000000000001800 <first>:\n\
            \ts_cbranch_execz L0          // 000000001800: BF88002A\n\
            \n0000000000001804 <L0>:\n\
            \tglobal_load_dword v1, v[2:3], off sc0 sc1  // 000000001804: DE548000 047F0004\n\
            \ts_branch L0 // 00000000180C: BF880000\n\
            0000000000001900 <second>:\n\
            \ts_branch L0 // 000000001900: BF880000\n";
        let kernels = parse(text);
        let names: Vec<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(names, ["first", "second"]);
        let [branch, load, back] = &kernels[0].instructions[..] else {
            panic!("{kernels:?}");
        };
        assert_eq!((branch.target, back.target), (Some(1), Some(1)));
        assert_eq!(
            (load.address, load.code.as_str()),
            (0x1804, "global_load_dword")
        );
        assert!(load.has("sc1") && load.has("off") && !load.has("sc"));
        assert_eq!(kernels[1].instructions[0].target, None);
    }
}
