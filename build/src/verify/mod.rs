//! The verifier: rules that every image must follow.
//!
//! Every rule is a function from an [`Image`] to violations. Every rule has a negative control
//! ([`crate::controls`]): a kernel that breaks the rule, which the rule must report.

pub mod amd;
mod arguments;
mod atomics;
mod barriers;
mod budget;
mod chains;
mod floats;
mod local;
mod multicast;
mod panics;
mod reads;
mod vectors;

use std::collections::BTreeMap;

use crate::host::GRID_SUFFIX;
use crate::project::{Exemption, fits};
use crate::{Image, native};

pub use self::atomics::SCOPE;
pub use crate::violation::Violation;

/// A rule of the verifier.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Name of the rule, by which exemptions refer to it.
    pub name: &'static str,
    /// The property that an image must have.
    pub demand: &'static str,
    /// Advice to the author of a kernel that breaks the rule.
    pub advice: &'static str,
    /// Finds the violations in an image.
    pub check: fn(&Image) -> Vec<Violation>,
}

/// All rules.
pub const RULES: &[Rule] = &[
    Rule {
        name: atomics::UNSCOPED,
        demand: "every atomic names its ordering and its scope",
        advice: "use the atomics of fusewire_device::mem: those of core lose their ordering and \
                 their scope in PTX",
        check: atomics::unscoped,
    },
    Rule {
        name: atomics::SCOPE,
        demand: "synchronisation has system scope or block scope, unless the crate gives a reason",
        advice: "give words that peers read or write Scope::System; for words of this GPU alone \
                 give the reason in [[package.metadata.fusewire.allow]]",
        check: atomics::scope,
    },
    Rule {
        name: vectors::VECTORS,
        demand: "a kernel that copies moves 16 bytes at once",
        advice: "copy by bulk::copy, or by mem::read_16 and mem::write_16",
        check: vectors::vectors,
    },
    Rule {
        name: local::LOCAL,
        demand: "no local memory, no spills",
        advice: "index no local array by a run-time value, keep fewer values at once, remove paths \
                 into panics, or bound the lanes in [[package.metadata.fusewire.threads]]",
        check: local::local,
    },
    Rule {
        name: panics::PANICS,
        demand: "no call of panic code",
        advice: "replace the indexing, division or unwrap that can panic: get_unchecked after one \
                 check, checked_div, wrapping_add, or a failure of the session",
        check: panics::panics,
    },
    Rule {
        name: barriers::BARRIERS,
        demand: "no barrier in divergent code or in a function that is not inlined, none \
                 predicated, none cloned",
        advice: "a lane may have returned before this barrier, or taken another branch: collect a \
                 flag, then let block.any decide for all lanes; in a function with \
                 #[inline(never)], remove the attribute",
        check: barriers::barriers,
    },
    Rule {
        name: floats::ROUNDING,
        demand: "floating point rounds to nearest, nothing is contracted or re-associated",
        advice: "multiply and add in two operations, without mul_add and without fast-math \
                 intrinsics",
        check: floats::rounding,
    },
    Rule {
        name: floats::APPROXIMATIONS,
        demand: "no approximations, no flushing of subnormals",
        advice: "use the functions of fusewire_device::math and arch, which round as on the CPU",
        check: floats::approximations,
    },
    Rule {
        name: reads::NONCOHERENT,
        demand: "no non-coherent load of anything but constants",
        advice: "take memory that others write as a raw pointer, not as a reference, and read it \
                 by fusewire_device::mem",
        check: reads::noncoherent,
    },
    Rule {
        name: multicast::MULTICAST,
        demand: "multicast by 16 bytes and between alias fences, in the kernels that the crate \
                 lists and on GPUs that have it",
        advice: "use fusewire_device::multimem, and list the kernel under multicast in \
                 [package.metadata.fusewire]",
        check: multicast::multicast,
    },
    Rule {
        name: arguments::ARGUMENTS,
        demand: "the image's parameters lie where the host puts them",
        advice: "build fusewire-build and the kernel crate from the same version of \
                 fusewire-device",
        check: arguments::arguments,
    },
    Rule {
        name: arguments::ENTRIES,
        demand: "the image has the host's entries, no more and no less, and no open symbol",
        advice: "give every kernel a name of its own, and compile images and host from one source",
        check: arguments::entries,
    },
    Rule {
        name: budget::BUDGET,
        demand: "a kernel stays within the instructions, registers, chains of loads and alias \
                 fences that its crate states",
        advice: "look for code that is compiled several times, for tables that are read through \
                 tables, or raise the budget in [[package.metadata.fusewire.budget]]",
        check: budget::budget,
    },
    Rule {
        name: ASSEMBLER,
        demand: "the vendor's assembler accepts the image",
        advice: "look at the asm! of the crate first: the rest of the PTX is written by the \
                 compiler",
        check: assembler,
    },
];

const ASSEMBLER: &str = "assembler";

fn assembler(image: &Image) -> Vec<Violation> {
    let first = |said: &String| {
        said.lines()
            .find(|line| line.contains("error") || line.contains("fatal"))
            .map_or_else(|| said.trim().to_owned(), |line| line.trim().to_owned())
    };
    image
        .refused
        .iter()
        .map(|said| Violation::new(ASSEMBLER, "", first(said)))
        .collect()
}

/// Returns the violations that the crate does not exempt.
pub fn check(image: &Image) -> Vec<Violation> {
    without_allowed(all(image), &image.allow)
}

/// Returns all violations, including exempt ones.
pub fn all(image: &Image) -> Vec<Violation> {
    RULES.iter().flat_map(|rule| (rule.check)(image)).collect()
}

/// Returns the advice for a violation of `rule`, in one sentence.
pub fn advice(rule: &str) -> &'static str {
    let device = RULES.iter().map(|rule| (rule.name, rule.advice));
    device
        .chain(native::ADVICE.iter().copied())
        .chain(amd::ADVICE.iter().copied())
        .find(|(name, _)| *name == rule)
        .map_or("", |(_, advice)| advice)
}

/// Returns the name of the kernel to which an entry belongs: the name of the entry without the
/// suffix of grid forms. An exemption for a kernel also covers its grid form.
fn kernel(entry: &str) -> &str {
    entry.strip_suffix(GRID_SUFFIX).unwrap_or(entry)
}

/// Drops the violations that an exemption covers. If a kernel has more violations than the limit of
/// the exemption, keeps all of them.
pub fn without_allowed(all: Vec<Violation>, allow: &[Exemption]) -> Vec<Violation> {
    let covered = |violation: &Violation, allow: &Exemption| {
        allow.rule == violation.rule
            && (fits(&allow.kernel, &violation.kernel)
                || fits(&allow.kernel, kernel(&violation.kernel)))
            && violation.detail.contains(&allow.containing)
    };
    let mut counts: BTreeMap<(usize, &str), usize> = BTreeMap::new();
    for violation in &all {
        for (index, exception) in allow.iter().enumerate() {
            if covered(violation, exception) {
                *counts.entry((index, &violation.kernel)).or_default() += 1;
            }
        }
    }
    let allowed: Vec<bool> = all
        .iter()
        .map(|violation| {
            allow.iter().enumerate().any(|(index, exception)| {
                covered(violation, exception)
                    && exception
                        .limit
                        .is_none_or(|limit| counts[&(index, violation.kernel.as_str())] <= limit)
            })
        })
        .collect();
    let mut allowed = allowed.into_iter();
    let mut all = all;
    all.retain(|_| !allowed.next().unwrap_or(false));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_have_limits() {
        let violation = |kernel: &str| Violation::new("scope", kernel, "ld.relaxed.gpu");
        let allow = Exemption {
            rule: "scope".to_owned(),
            kernel: "*".to_owned(),
            containing: "relaxed".to_owned(),
            limit: Some(1),
            reason: String::new(),
        };
        let all = vec![violation("a"), violation("b"), violation("b")];
        let left = without_allowed(all, &[allow]);
        assert_eq!(left.len(), 2);
        assert!(left.iter().all(|violation| violation.kernel == "b"));
    }

    #[test]
    fn an_exception_covers_the_grid_form() {
        let violation = |kernel: &str| Violation::new("scope", kernel, "");
        let allow = Exemption {
            rule: "scope".to_owned(),
            kernel: "a".to_owned(),
            containing: String::new(),
            limit: None,
            reason: String::new(),
        };
        let all = ["a", "a__grid", "b__grid", "a__grid_else"].map(violation);
        let left = without_allowed(all.into(), &[allow]);
        let left: Vec<&str> = left.iter().map(|left| left.kernel.as_str()).collect();
        assert_eq!(left, ["b__grid", "a__grid_else"]);
    }
}
