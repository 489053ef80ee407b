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
        self.code == "s_branch" || self.code.starts_with("s_cbranch") || self.is_long_branch()
    }

    /// Returns `true` for a branch to an address in registers. Compilers use it for targets that
    /// are more than 128 KiB away.
    fn is_long_branch(&self) -> bool {
        self.code == "s_setpc_b64"
    }

    /// Returns `true` if the next instruction is not executed after this one, unless it is the
    /// target of a branch.
    pub fn is_last(&self) -> bool {
        self.code == "s_branch" || self.code == "s_endpgm" || self.is_long_branch()
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
        let labels = labels.iter().filter(|((own, _), _)| *own == index + 1);
        let starts: Vec<usize> = labels.map(|(_, start)| *start).collect();
        for at in 3..kernel.instructions.len() {
            // The four instructions are executed together.
            if !starts.iter().any(|start| (at - 2..=at).contains(start)) {
                let code = &kernel.instructions;
                let target = long_target(&code[at - 3..=at])
                    .and_then(|target| code.binary_search_by_key(&target, |it| it.address).ok());
                kernel.instructions[at].target = kernel.instructions[at].target.or(target);
            }
        }
    }
    out
}

/// Returns the address to which four instructions jump, if they are those of a long branch: the
/// address of the second one, plus 64 bits, is the one of the target.
fn long_target(code: &[Instruction]) -> Option<u64> {
    let [getpc, add, carry, setpc] = code else {
        return None;
    };
    let names = [&getpc.code, &add.code, &carry.code, &setpc.code];
    if names != ["s_getpc_b64", "s_add_u32", "s_addc_u32", "s_setpc_b64"] {
        return None;
    }
    let pair = &getpc.operands;
    let (low, high) = pair
        .strip_prefix("s[")?
        .strip_suffix(']')?
        .split_once(':')?;
    let number = |operands: &str, register: &str| -> Option<u32> {
        let own = format!("s{register}, s{register}, ");
        let word = operands.strip_prefix(&own)?;
        let word = word
            .strip_prefix("lit(")
            .unwrap_or(word)
            .trim_end_matches(')');
        match word.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => word.parse::<i32>().ok().map(|word| word as u32),
        }
    };
    let offset =
        u64::from(number(&add.operands, low)?) | u64::from(number(&carry.operands, high)?) << 32;
    (setpc.operands == *pair).then(|| add.address.wrapping_add(offset))
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

    #[test]
    fn long_branches() {
        let text = "0000000000001800 <k>:\n\
            \ts_nop 0 // 000000001800: BF800000\n\
            \ts_getpc_b64 s[98:99] // 000000001804: BEE21C00\n\
            \ts_add_u32 s98, s98, 0x18 // 000000001808: 8062FF62 00000018\n\
            \ts_addc_u32 s99, s99, lit(0x0) // 000000001810: 8263FF63 00000000\n\
            \ts_setpc_b64 s[98:99] // 000000001818: BE801D62\n\
            \ts_nop 0 // 00000000181C: BF800000\n\
            \ts_endpgm // 000000001820: BF810000\n";
        let target = |text: &str| {
            let code = &parse(text)[0].instructions;
            let branch = code.iter().find(|it| it.is_branch()).expect("a branch");
            assert!(branch.is_last());
            branch.target
        };
        assert_eq!(target(text), Some(6));
        let back = text.replace("0x18 ", "-8 ").replace("lit(0x0)", "-1");
        assert_eq!(target(&back), Some(0));
        // Between two instructions, from other registers, and into the middle.
        assert_eq!(target(&text.replace("0x18 ", "0x16 ")), None);
        assert_eq!(
            target(&text.replace("s_setpc_b64 s[98:99]", "s_setpc_b64 s[96:97]")),
            None
        );
        assert_eq!(target(&text.replace("s98, s98", "s98, s96")), None);
        let label = "\n0000000000001810 <L0>:\n\ts_addc_u32";
        assert_eq!(target(&text.replace("\ts_addc_u32", label)), None);
    }
}
