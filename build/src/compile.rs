//! From a crate to an image: rustc, link with the shims, optimise, generate code.

use core::fmt::Write as _;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::project::Project;
use crate::text::ir;
use crate::toolchain::Toolchain;
use crate::{Error, Result, Target, Vendor, edit, files, process};

/// How to compile.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Leaves rustc's jump threading on, which clones barriers into divergent branches: for the gate's
    /// control only.
    pub jump_threading: bool,
    /// Exports the grid form of every kernel, `NAME__grid`, in place of `NAME`: for tests in which all ranks share one grid.
    pub one_grid: bool,
}

/// What compiling gave, on disk.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// For which GPU.
    pub target: Target,
    /// Content hash of everything that went in.
    pub key: String,
    /// Whether nothing had to be compiled.
    pub cached: bool,
    /// Optimised LLVM IR.
    pub ir: PathBuf,
    /// PTX, or AMD assembly.
    pub assembly: PathBuf,
    /// What a driver loads: PTX, or a code object. Absent for AMD without `ld.lld`.
    pub image: Option<PathBuf>,
    /// Warnings of the compiler.
    pub warnings: String,
}

impl Options {
    /// What stands behind the package's name in names of files and folders.
    pub const fn suffix(&self) -> &'static str {
        match (self.jump_threading, self.one_grid) {
            (false, false) => "",
            (true, false) => "-threaded",
            (false, true) => "-one-grid",
            (true, true) => "-threaded-one-grid",
        }
    }

    const fn flags(&self) -> &'static str {
        match (self.jump_threading, self.one_grid) {
            (false, false) => "-Zmir-enable-passes=-JumpThreading",
            (true, false) => "",
            (false, true) => "-Zmir-enable-passes=-JumpThreading --cfg=fusewire_one_grid",
            (true, true) => "--cfg=fusewire_one_grid",
        }
    }
}

const PASSES: &str = "internalize,default<O3>";

/// Loops of unknown length stay as they are written: unrolled, kernels that hold dozens of them need more
/// registers than there are. Kernels batch their loads in the source.
const UNROLL: &str = "-unroll-runtime=false";

/// Compiles `project` for `target`, or finds what an earlier call with the same content left.
///
/// # Errors
/// [`Error::Command`] with what the failing tool wrote.
pub fn compile(
    toolchain: &Toolchain,
    project: &Project,
    target: Target,
    options: &Options,
) -> Result<Compiled> {
    let name = format!("{}{}", project.name, options.suffix());
    let folder = project
        .gpu_folder()
        .join("images")
        .join(&name)
        .join(target.name());
    files::create_directory(&folder)?;
    let key = key(toolchain, project, target, options)?;
    let assembly = folder.join(if target.vendor() == Vendor::Amd {
        "image.s"
    } else {
        "image.ptx"
    });
    let image = match (target.vendor(), &toolchain.lld) {
        (Vendor::Nvidia, _) => Some(assembly.clone()),
        (Vendor::Amd, Ok(_)) => Some(folder.join("image.co")),
        (Vendor::Amd, Err(_)) => None,
    };
    let mut compiled = Compiled {
        target,
        key,
        cached: true,
        ir: folder.join("image.ll"),
        assembly,
        image,
        warnings: String::new(),
    };
    let stamp = folder.join("key");
    if files::read(&stamp).is_ok_and(|found| found == compiled.key)
        && compiled.image.iter().all(|image| image.exists())
    {
        return Ok(compiled);
    }
    // A failure below must not leave an old stamp beside new files.
    let _ = std::fs::remove_file(&stamp);
    compiled.cached = false;
    let bitcode = folder.join("crate.bc");
    compiled.warnings = rustc(toolchain, project, target, options, &bitcode)?;
    let linked = link(toolchain, project, target, &folder, &bitcode)?;
    generate(toolchain, project, &folder, &linked, &compiled)?;
    files::write(&stamp, &compiled.key)?;
    Ok(compiled)
}

/// cargo and rustc: all of the crate and its dependencies in one bitcode file.
fn rustc(
    toolchain: &Toolchain,
    project: &Project,
    target: Target,
    options: &Options,
    bitcode: &Path,
) -> Result<String> {
    let mut flags = format!("-Ctarget-cpu={} {}", target.name(), options.flags());
    if !target.features().is_empty() {
        let _ = write!(flags, " -Ctarget-feature={}", target.features());
    }
    let folder = project
        .gpu_folder()
        .join(format!("{target}{}", options.suffix()));
    let run = |fresh: bool| {
        let mut command = process::clean(&toolchain.cargo);
        command
            .current_dir(&project.folder)
            .env("RUSTC", &toolchain.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", &flags)
            .env("CARGO_TARGET_DIR", &folder)
            .args([
                "rustc",
                "--lib",
                "-Zbuild-std=core",
                "--release",
                "--crate-type=staticlib",
            ])
            .args(["--target", target.vendor().triple()]);
        for (name, value) in [
            ("lto", "\"fat\""),
            ("panic", "\"abort\""),
            ("codegen-units", "1"),
            ("debug", "false"),
            ("opt-level", "3"),
            ("overflow-checks", "false"),
            ("debug-assertions", "false"),
        ] {
            command
                .arg("--config")
                .arg(format!("profile.release.{name}={value}"));
        }
        command
            .arg("--")
            .arg(format!("--emit=llvm-bc={}", bitcode.display()));
        if fresh {
            // cargo does not know this output; a flag without effect makes it run rustc again.
            command.arg(format!("--cfg=fusewire_again_{}", std::process::id()));
        }
        process::run(&format!("rustc for {target}"), &mut command)
    };
    let mut output = run(false)?;
    if !bitcode.exists() {
        output = run(true)?;
    }
    Ok(output.stderr)
}

/// Links the shims, and rewrites attributes.
fn link(
    toolchain: &Toolchain,
    project: &Project,
    target: Target,
    folder: &Path,
    bitcode: &Path,
) -> Result<PathBuf> {
    let step = format!("linking the shims for {target}");
    let plain = folder.join("crate.ll");
    process::run(
        &step,
        process::clean(&toolchain.llvm_dis)
            .arg(bitcode)
            .arg("-o")
            .arg(&plain),
    )?;
    let layout = files::read(&plain)?
        .lines()
        .find(|line| line.starts_with("target datalayout"))
        .unwrap_or_default()
        .to_owned();
    let linked = folder.join("linked.ll");
    let mut command = process::clean(&toolchain.llvm_link);
    command.arg("-S").arg(&plain);
    for (index, shim) in project.shims(target.vendor()).iter().enumerate() {
        // The data layout changes with LLVM: a shim takes the crate's.
        let with_layout = folder.join(format!("shim{index}.ll"));
        files::write(&with_layout, format!("{layout}\n{}", files::read(shim)?))?;
        command.arg(with_layout);
    }
    process::run(&step, command.arg("-o").arg(&linked))?;
    let text = edit::prepare(
        &files::read(&linked)?,
        target.vendor(),
        project.max_threads(),
    );
    files::write(&linked, text)?;
    Ok(linked)
}

/// opt, llc and, for AMD, ld.lld.
fn generate(
    toolchain: &Toolchain,
    project: &Project,
    folder: &Path,
    linked: &Path,
    compiled: &Compiled,
) -> Result<()> {
    let target = compiled.target;
    let kernels = ir::kernel_names(&files::read(linked)?, target.vendor());
    if kernels.is_empty() {
        return Err(Error::Project(format!(
            "{} exports no kernel for {target}",
            project.name
        )));
    }
    process::run(
        &format!("opt for {target}"),
        process::clean(&toolchain.opt)
            .arg(format!("-mcpu={target}"))
            .arg(format!(
                "--internalize-public-api-list={}",
                kernels.join(",")
            ))
            .args(["-passes", PASSES, UNROLL, "-S"])
            .arg(linked)
            .arg("-o")
            .arg(&compiled.ir),
    )?;
    let llc = |kind: &str, to: &Path| {
        process::run(
            &format!("llc for {target}"),
            process::clean(&toolchain.llc)
                .args(["-O3", "-fp-contract=off"])
                .arg(format!("-mcpu={target}"))
                .arg(format!("-mattr={}", target.features()))
                .arg(format!("-filetype={kind}"))
                .arg(&compiled.ir)
                .arg("-o")
                .arg(to),
        )
    };
    llc("asm", &compiled.assembly)?;
    if let (Vendor::Amd, Ok(lld), Some(image)) = (target.vendor(), &toolchain.lld, &compiled.image)
    {
        let object = folder.join("image.o");
        llc("obj", &object)?;
        process::run(
            &format!("ld.lld for {target}"),
            process::clean(lld)
                .arg("-shared")
                .arg(&object)
                .arg("-o")
                .arg(image),
        )?;
    }
    Ok(())
}

/// Hash of the sources of the crate and of its path dependencies, the lock file, the shims, the tools
/// and the flags.
fn key(
    toolchain: &Toolchain,
    project: &Project,
    target: Target,
    options: &Options,
) -> Result<String> {
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    for text in [
        env!("CARGO_PKG_VERSION"),
        edit::VERSION,
        options.flags(),
        PASSES,
        UNROLL,
        target.name(),
        target.features(),
        &toolchain.version,
        &project.max_threads().to_string(),
    ] {
        add(text.as_bytes());
    }
    for tool in [&toolchain.opt, &toolchain.llc] {
        // A tool that is replaced changes its size or its time.
        if let Ok(about) = tool.canonicalize().and_then(|path| path.metadata()) {
            add(format!("{}{:?}", about.len(), about.modified().ok()).as_bytes());
        }
    }
    let mut all = vec![
        project.workspace.join("Cargo.lock"),
        project.workspace.join("Cargo.toml"),
    ];
    all.extend(project.shims(target.vendor()).iter().cloned());
    for folder in &project.sources {
        collect(folder, &mut all)?;
    }
    all.sort();
    all.dedup();
    for path in all.iter().filter(|path| path.exists()) {
        add(path.as_os_str().as_encoded_bytes());
        add(&files::read_bytes(path)?);
    }
    Ok(hash
        .finalize()
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        }))
}

/// Rust and IR files and manifests under `folder`, without those that cargo writes.
fn collect(folder: &Path, out: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(|source| Error::File {
        action: "list",
        path: folder.to_owned(),
        source,
    })?;
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() {
            if name != "target" && name != ".git" {
                collect(&path, out)?;
            }
        } else if path
            .extension()
            .is_some_and(|e| e == "rs" || e == "ll" || e == "toml")
        {
            out.push(path);
        }
    }
    Ok(())
}
