//! The verifier: what no image may contain.
//!
//! Every rule is a function from an [`Image`] to violations, and has a negative control
//! ([`crate::controls`]): a kernel that breaks it and must be caught.

mod arguments;
mod atomics;
mod barriers;
mod floats;
mod local;
mod multicast;
mod panics;
mod reads;
mod vectors;

use core::fmt;
use std::collections::BTreeMap;

use crate::Image;
use crate::host::GRID_SUFFIX;
use crate::project::{Exemption, fits};

/// A rule that a kernel breaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Name of the rule.
    pub rule: &'static str,
    /// The kernel, or the function, or empty for the image.
    pub kernel: String,
    /// What was seen.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.rule, self.kernel, self.detail)
    }
}

/// A rule of the verifier.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Its name, as in an exception.
    pub name: &'static str,
    /// What it demands.
    pub demand: &'static str,
    /// Finds where an image breaks it.
    pub check: fn(&Image) -> Vec<Violation>,
}

/// All rules.
pub const RULES: &[Rule] = &[
    Rule {
        name: atomics::UNSCOPED,
        demand: "every atomic names its ordering and its scope",
        check: atomics::unscoped,
    },
    Rule {
        name: atomics::SCOPE,
        demand: "what synchronises has system scope, or block scope, unless the crate says why not",
        check: atomics::scope,
    },
    Rule {
        name: vectors::VECTORS,
        demand: "a kernel that copies moves 16 bytes at once",
        check: vectors::vectors,
    },
    Rule {
        name: local::LOCAL,
        demand: "no local memory, no spills",
        check: local::local,
    },
    Rule {
        name: panics::PANICS,
        demand: "no way into panic code",
        check: panics::panics,
    },
    Rule {
        name: barriers::BARRIERS,
        demand: "no barrier in divergent code, none predicated, none cloned",
        check: barriers::barriers,
    },
    Rule {
        name: floats::ROUNDING,
        demand: "floating point rounds to nearest, nothing is contracted or re-associated",
        check: floats::rounding,
    },
    Rule {
        name: floats::APPROXIMATIONS,
        demand: "no approximations, no flushing of subnormals",
        check: floats::approximations,
    },
    Rule {
        name: reads::NONCOHERENT,
        demand: "no non-coherent load of anything but constants",
        check: reads::noncoherent,
    },
    Rule {
        name: multicast::MULTICAST,
        demand: "multicast by 16 bytes and between alias fences, in the kernels that the crate lists and on GPUs that have it",
        check: multicast::multicast,
    },
    Rule {
        name: arguments::ARGUMENTS,
        demand: "the image's parameters lie where the host puts them",
        check: arguments::arguments,
    },
    Rule {
        name: arguments::ENTRIES,
        demand: "the image has the host's entries, no more and no less, and no open symbol",
        check: arguments::entries,
    },
    Rule {
        name: ASSEMBLER,
        demand: "the vendor's assembler accepts the image",
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
        .map(|said| Violation {
            rule: ASSEMBLER,
            kernel: String::new(),
            detail: first(said),
        })
        .collect()
}

/// Checks all rules, without what the crate allows itself.
pub fn check(image: &Image) -> Vec<Violation> {
    let all = RULES.iter().flat_map(|rule| (rule.check)(image)).collect();
    without_allowed(all, &image.allow)
}

/// The kernel behind an entry: an exception for a kernel is one for its grid form.
fn kernel(entry: &str) -> &str {
    entry.strip_suffix(GRID_SUFFIX).unwrap_or(entry)
}

/// Drops what the exceptions cover: all violations of a rule by a kernel, or as many as the limit.
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

/// Violations of one kernel and rule, counted: the first with how many there are.
pub fn summary(violations: &[Violation]) -> Vec<(Violation, usize)> {
    let mut out: Vec<(Violation, usize)> = Vec::new();
    for violation in violations {
        match out
            .iter_mut()
            .find(|(first, _)| first.rule == violation.rule && first.kernel == violation.kernel)
        {
            Some((_, count)) => *count += 1,
            None => out.push((violation.clone(), 1)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_have_limits() {
        let violation = |kernel: &str| Violation {
            rule: "scope",
            kernel: kernel.to_owned(),
            detail: "ld.relaxed.gpu".to_owned(),
        };
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
        let violation = |kernel: &str| Violation {
            rule: "scope",
            kernel: kernel.to_owned(),
            detail: String::new(),
        };
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
