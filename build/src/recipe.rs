//! Flags of the tools that make an image. Changing a flag can change every image, so the tokens of
//! this file are part of [`crate::sources::hash`].

use core::fmt::Write as _;

use crate::{Options, Target, Vendor};

/// Settings of cargo's release profile. They override the profile of the crate's workspace.
///
/// `check` uses the line tables in its messages. Images are optimised without them.
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

/// Arguments of cargo. `-Ztrim-paths` keeps paths of this machine out of images.
pub(crate) const CARGO: [&str; 6] = [
    "rustc",
    "--lib",
    "-Zbuild-std=core",
    "--release",
    "--crate-type=staticlib",
    "-Ztrim-paths",
];

/// Flag that removes the line tables before the first pass.
pub(crate) const STRIP: &str = "--strip-debug";

/// Passes over all kernels together.
pub(crate) const PASSES: &str = "internalize,default<O3>";

/// Passes that extract a family from the optimised module.
pub(crate) const SPLIT: &str = "internalize,globaldce";

/// Disables run-time unrolling of loops with an unknown trip count. With unrolling, a kernel with
/// dozens of such loops would need more registers than a lane has. Kernels batch loads explicitly
/// in their source instead.
pub(crate) const UNROLL: &str = "-unroll-runtime=false";

/// Returns the rustc flags that distinguish the variants of a build.
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

/// Returns all flags of rustc. `-Zlocation-detail=none` keeps source lines out of images that can
/// panic.
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

/// Version of the code objects for AMD GPUs. LLVM's default, version 6, adds only generic targets,
/// and ROCm before 6.3 refuses it.
pub(crate) const CODE_OBJECT: u32 = 5;

/// Returns the arguments of llc, except the file names.
pub(crate) fn llc(target: Target) -> Vec<String> {
    let mut arguments = vec![
        "-O3".to_owned(),
        "-fp-contract=off".to_owned(),
        format!("-mcpu={target}"),
        format!("-mattr={}", target.features()),
        "-filetype=asm".to_owned(),
        // Omits comments from PTX, because drivers load the text and a third of it would be
        // comments.
        format!("-asm-verbose={}", target.vendor() == Vendor::Amd),
    ];
    if target.vendor() == Vendor::Amd {
        arguments.push(format!("--amdhsa-code-object-version={CODE_OBJECT}"));
    }
    arguments
}

/// Returns the arguments of llvm-mc for an AMD target, except the file names.
pub(crate) fn llvm_mc(target: Target) -> [String; 3] {
    [
        format!("-triple={}", target.vendor().triple()),
        format!("-mcpu={target}"),
        "-filetype=obj".to_owned(),
    ]
}
