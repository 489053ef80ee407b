//! Flags of the tools that make an image. A change here can change every image, so the tokens of
//! this file are part of [`crate::sources::hash`].

use core::fmt::Write as _;

use crate::{Options, Target, Vendor};

/// Settings of cargo's release profile, which replace those of the crate's workspace.
///
/// Line tables are for messages of `check`; they are removed before the optimiser runs on an image.
pub(crate) const PROFILE: [(&str, &str); 8] = [
    ("lto", "\"fat\""),
    ("panic", "\"abort\""),
    ("codegen-units", "1"),
    ("debug", "\"line-tables-only\""),
    ("opt-level", "3"),
    ("overflow-checks", "false"),
    ("debug-assertions", "false"),
    ("trim-paths", "\"all\""),
];

/// Arguments of cargo. `-Ztrim-paths`: no path of this machine gets into an image.
pub(crate) const CARGO: [&str; 6] = [
    "rustc",
    "--lib",
    "-Zbuild-std=core",
    "--release",
    "--crate-type=staticlib",
    "-Ztrim-paths",
];

/// Removes line tables before anything else.
pub(crate) const STRIP: &str = "--strip-debug";

/// Passes over all kernels at once.
pub(crate) const PASSES: &str = "internalize,default<O3>";

/// Passes that take a family out of the optimised whole.
pub(crate) const SPLIT: &str = "internalize,globaldce";

/// Keeps loops of unknown length as they are written. Unrolled, kernels that hold dozens of them
/// need more registers than there are. Kernels batch their loads in the source.
pub(crate) const UNROLL: &str = "-unroll-runtime=false";

/// Flags of rustc that tell builds apart.
pub(crate) fn variant_flags(options: &Options) -> String {
    let parts = [
        // Jump threading clones barriers into divergent branches (rust-lang/rust#149637).
        (
            !options.jump_threading,
            "-Zmir-enable-passes=-JumpThreading",
        ),
        (options.multi_rank_grid, "--cfg=fusewire_multi_rank_grid"),
        (options.unbounded, "--cfg=fusewire_unbounded"),
    ];
    let given = parts.into_iter().filter(|(given, _)| *given);
    given.map(|(_, flag)| flag).collect::<Vec<_>>().join(" ")
}

/// All flags of rustc. Without locations a line that moves does not change an image that can panic.
pub(crate) fn rustflags(target: Target, options: &Options) -> String {
    let mut flags = format!(
        "-Ctarget-cpu={} -Zlocation-detail=none {}",
        target.name(),
        variant_flags(options)
    );
    if !target.features().is_empty() {
        let _ = write!(flags, " -Ctarget-feature={}", target.features());
    }
    flags
}

/// Arguments of llc, without files.
pub(crate) fn llc(target: Target, kind: &str) -> [String; 6] {
    [
        "-O3".to_owned(),
        "-fp-contract=off".to_owned(),
        format!("-mcpu={target}"),
        format!("-mattr={}", target.features()),
        format!("-filetype={kind}"),
        // Drivers load PTX as text, and comments are a third of it.
        format!("-asm-verbose={}", target.vendor() == Vendor::Amd),
    ]
}
