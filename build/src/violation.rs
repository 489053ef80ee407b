//! Violations of rules by compiled kernels.

use core::fmt;

use crate::text::ir;

/// A violation of a rule by a kernel or an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Name of the rule.
    pub rule: &'static str,
    /// Name of the kernel or function; empty if the violation concerns the whole image.
    pub kernel: String,
    /// Description of the violation.
    pub detail: String,
    /// Debug locations. The first is the location of the instruction that breaks the rule. For a
    /// barrier in divergent code, the second is the location of the branch.
    pub locations: Vec<u32>,
}

impl Violation {
    /// Returns a violation of `rule` by `kernel`, without a location.
    pub fn new(rule: &'static str, kernel: &str, detail: impl Into<String>) -> Self {
        Self {
            rule,
            kernel: kernel.to_owned(),
            detail: detail.into(),
            locations: Vec::new(),
        }
    }

    /// Returns a violation by an instruction of the IR.
    pub(crate) fn of_ir(rule: &'static str, kernel: &str, instruction: &str) -> Self {
        let (code, location) = ir::location(ir::split(instruction).1);
        Self::new(rule, kernel, code).at(location)
    }

    /// Adds a debug location, unless it is 0, which means unknown.
    pub(crate) fn at(mut self, location: u32) -> Self {
        if location != 0 {
            self.locations.push(location);
        }
        self
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.rule, self.kernel, self.detail)
    }
}
