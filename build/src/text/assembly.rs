//! The types and functions that the parsers of PTX and AMD assembly share.

/// A function of an assembly text.
#[derive(Clone, Debug, Default)]
pub struct AsmFunction {
    /// Symbol of the function.
    pub name: String,
    /// `true` for a kernel.
    pub kernel: bool,
    /// Parameters of a kernel; empty for other functions.
    pub parameters: Vec<Parameter>,
    /// Instructions, labels and directives, without comments and surrounding space.
    pub lines: Vec<String>,
    /// Number of each line's debug location, 0 if unknown. Empty without line tables.
    pub locations: Vec<u32>,
    /// Index of each line in the lines of the text. Empty for AMD.
    pub rows: Vec<usize>,
}

/// Offset and size of a kernel's parameter in the argument buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Byte offset.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// Registers and memory of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Resources {
    /// Registers per lane. On AMD, counts only VGPRs.
    pub registers: u32,
    /// Scalar registers (SGPRs) per warp. AMD only; 0 for NVIDIA.
    pub scalar_registers: u32,
    /// Bytes of static shared memory per block.
    pub shared: u32,
    /// Bytes of local memory (stack, scratch) per lane.
    pub local: u32,
    /// Spills, in bytes on NVIDIA and in VGPRs on AMD.
    pub spills: u32,
}

impl AsmFunction {
    /// Returns the opcode and the whole line of each instruction, in order.
    pub fn instructions(&self) -> impl Iterator<Item = (&str, &str)> {
        self.located().map(|(code, line, _)| (code, line))
    }

    /// Returns the opcode, the whole line and the number of the debug location of each instruction.
    pub fn located(&self) -> impl Iterator<Item = (&str, &str, u32)> {
        self.lines.iter().enumerate().filter_map(|(index, line)| {
            let location = self.locations.get(index).copied().unwrap_or(0);
            Some((opcode(line)?, line.as_str(), location))
        })
    }
}

/// Returns the opcode of a line, without a predicate; `None` for labels, directives and braces.
pub fn opcode(line: &str) -> Option<&str> {
    let mut rest = line;
    if rest.starts_with('@') {
        rest = rest.split_once(char::is_whitespace)?.1.trim_start();
    }
    let code = rest.split([' ', '\t', ';']).next()?;
    let first = code.bytes().next()?;
    (first.is_ascii_lowercase() && !code.ends_with(':')).then_some(code)
}

#[cfg(test)]
mod tests {
    use super::opcode;

    #[test]
    fn opcodes() {
        assert_eq!(opcode("@%p1 bra \t$L__BB0_2;"), Some("bra"));
        assert_eq!(opcode("bar.sync \t0;"), Some("bar.sync"));
        assert_eq!(opcode("ret;"), Some("ret"));
        assert_eq!(opcode("$L__BB0_2:"), None);
        assert_eq!(opcode(".reg .b64 %rd<4>;"), None);
        assert_eq!(opcode("s_barrier"), Some("s_barrier"));
        assert_eq!(opcode("label:"), None);
    }
}
