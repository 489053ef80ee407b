//! Compiles a kernel crate to images. The steps: run rustc, link with the crate's LLVM IR files
//! (shims), optimise, split the kernels into families, generate code.

use std::path::{Path, PathBuf};

use crate::host::Family;
use crate::project::Project;
use crate::sources::{self, Hash};
use crate::text::ir;
use crate::toolchain::Toolchain;
use crate::{Error, Options, Result, Target, Vendor, edit, files, process, recipe, unroll, waits};

/// The files that a compilation wrote.
#[derive(Clone, Debug)]
pub struct Compilation {
    /// The GPU architecture.
    pub target: Target,
    /// Content hash of all inputs.
    pub key: String,
    /// `true` if the files were reused from an earlier compilation.
    pub cached: bool,
    /// Optimised LLVM IR of all kernels.
    pub ir: PathBuf,
    /// The images.
    pub parts: Vec<Part>,
    /// Warnings of the compiler.
    pub warnings: String,
}

/// One image. It holds one family of kernels, the kernels outside all families, or all kernels.
#[derive(Clone, Debug)]
pub struct Part {
    /// The family, or the package for kernels of no family.
    pub name: String,
    /// PTX, or AMD assembly.
    pub assembly: PathBuf,
    /// The file that a driver loads: PTX or a code object. `None` for an AMD target if
    /// [`Toolchain::amd`] is missing.
    pub image: Option<PathBuf>,
}

/// Compiles `project` for `target`. If an earlier call had the same inputs, returns the files of
/// that call.
///
/// An image depends only on the sources, the tools and the flags. It does not depend on the folder,
/// the machine or the number of jobs.
///
/// # Errors
/// [`Error::Command`] with the output of the tool that failed.
pub fn compile(
    toolchain: &Toolchain,
    project: &Project,
    target: Target,
    options: &Options,
) -> Result<Compilation> {
    let name = format!("{}{}", project.name, options.suffix());
    let folder = project
        .gpu_folder()
        .join("images")
        .join(&name)
        .join(target.name());
    files::create_directory(&folder)?;
    let mut compiled = Compilation {
        target,
        key: key(toolchain, project, target, options)?,
        cached: true,
        ir: folder.join("image.ll"),
        parts: Vec::new(),
        warnings: String::new(),
    };
    // Contains the key, followed by the names of the parts.
    let stamp = folder.join("key");
    let part = |name: &str| Part::new(toolchain, target, &folder, name);
    if let Ok(text) = files::read(&stamp)
        && let Some(names) = text.strip_prefix(&format!("{}\n", compiled.key))
    {
        compiled.parts = names.lines().map(part).collect();
        if compiled.parts.iter().all(Part::exists) {
            return Ok(compiled);
        }
    }
    // Removes the stamp first, so that a failure below cannot leave an old stamp next to new files.
    let _ = std::fs::remove_file(&stamp);
    compiled.cached = false;
    let bitcode = folder.join("crate.bc");
    compiled.warnings = rustc(toolchain, project, target, options, &bitcode)?;
    let linked = link(toolchain, project, target, &folder, &bitcode)?;
    let families = optimise(toolchain, project, options, &folder, &linked, &compiled)?;
    compiled.parts = families.iter().map(|family| part(&family.name)).collect();
    for (family, part) in families.iter().zip(&compiled.parts) {
        generate(toolchain, &folder, target, family, part)?;
    }
    let names: Vec<&str> = families.iter().map(|family| family.name.as_str()).collect();
    files::write(&stamp, format!("{}\n{}\n", compiled.key, names.join("\n")))?;
    Ok(compiled)
}

impl Part {
    fn new(toolchain: &Toolchain, target: Target, folder: &Path, name: &str) -> Self {
        let file = |extension: &str| folder.join(format!("{name}.{extension}"));
        match target.vendor() {
            Vendor::Nvidia => Self {
                name: name.to_owned(),
                assembly: file("ptx"),
                image: Some(file("ptx")),
            },
            Vendor::Amd => Self {
                name: name.to_owned(),
                assembly: file("s"),
                image: toolchain.amd.is_ok().then(|| file("co")),
            },
        }
    }

    fn exists(&self) -> bool {
        self.assembly.exists() && self.image.iter().all(|image| image.exists())
    }
}

/// Runs cargo and rustc, which write the crate and its dependencies to one bitcode file. Returns
/// the compiler's messages.
fn rustc(
    toolchain: &Toolchain,
    project: &Project,
    target: Target,
    options: &Options,
    bitcode: &Path,
) -> Result<String> {
    let flags = recipe::rustflags(target, options);
    let folder = project.gpu_folder().join(if options.jump_threading {
        format!("{target}{}", options.suffix())
    } else {
        target.to_string()
    });
    let run = |fresh: bool| {
        let mut command = process::clean(&toolchain.cargo);
        command
            .current_dir(&project.folder)
            .env("RUSTC", &toolchain.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", &flags)
            .env("CARGO_TARGET_DIR", &folder)
            .args(recipe::CARGO)
            .args(["--target", target.vendor().triple()]);
        for (name, value) in recipe::PROFILE {
            command
                .arg("--config")
                .arg(format!("profile.release.{name}={value}"));
        }
        command
            .arg("--")
            .arg(format!("--emit=llvm-bc={}", bitcode.display()));
        if fresh {
            // Cargo does not track the bitcode file, so it may not run rustc although the file is
            // missing. This flag does not affect the code. Its value differs between processes, so
            // cargo runs rustc again.
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

/// Links the bitcode with the shims and edits function attributes. Returns the path of the linked
/// IR.
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
    let linked = folder.join(LINKED);
    let mut command = process::clean(&toolchain.llvm_link);
    command.arg("-S").arg(&plain);
    for (index, shim) in project.shims(target.vendor()).iter().enumerate() {
        // The data layout depends on the version of LLVM, so the shims omit it. Each shim gets
        // the data layout of the crate.
        let with_layout = folder.join(format!("shim{index}.ll"));
        files::write(&with_layout, format!("{layout}\n{}", files::read(shim)?))?;
        command.arg(with_layout);
    }
    process::run(&step, command.arg("-o").arg(&linked))?;
    let text = edit::prepare(&files::read(&linked)?, target.vendor(), |kernel| {
        project.max_threads_of(kernel)
    });
    files::write(&linked, text)?;
    Ok(linked)
}

/// Optimises all kernels together. Returns the families to extract from the result.
fn optimise(
    toolchain: &Toolchain,
    project: &Project,
    options: &Options,
    folder: &Path,
    linked: &Path,
    compiled: &Compilation,
) -> Result<Vec<Family>> {
    let target = compiled.target;
    let kernels = ir::kernel_names(&files::read(linked)?, target.vendor());
    if kernels.is_empty() {
        return Err(Error::Project(format!(
            "{} exports no kernel for {target}",
            project.name
        )));
    }
    let bitcode = folder.join(WHOLE);
    process::run(
        &format!("opt for {target}"),
        process::clean(&toolchain.opt)
            .arg(format!("-mcpu={target}"))
            .arg(public(&kernels))
            .args([recipe::STRIP, "-passes", recipe::PASSES, recipe::UNROLL])
            .arg(linked)
            .arg("-o")
            .arg(&bitcode),
    )?;
    process::run(
        &format!("llvm-dis for {target}"),
        process::clean(&toolchain.llvm_dis)
            .arg(&bitcode)
            .arg("-o")
            .arg(&compiled.ir),
    )?;
    let mut left = kernels;
    let mut families = Vec::new();
    for family in &options.families {
        let (entries, rest) = left
            .into_iter()
            .partition(|kernel| family.entries.contains(kernel));
        left = rest;
        families.push(Family {
            name: family.name.clone(),
            entries,
        });
    }
    families.push(Family {
        name: project.name.clone(),
        entries: left,
    });
    families.retain(|family| !family.entries.is_empty());
    Ok(families)
}

/// Optimises the linked module a second time, with its line tables. Returns the IR as text.
pub(crate) fn optimise_with_lines(
    toolchain: &Toolchain,
    project: &Project,
    compiled: &Compilation,
) -> Result<String> {
    let target = compiled.target;
    let linked = compiled.ir.with_file_name(LINKED);
    let kernels = ir::kernel_names(&files::read(&linked)?, target.vendor());
    let text = compiled.ir.with_file_name("lines.ll");
    process::run(
        &format!("opt with line tables of {} for {target}", project.name),
        process::clean(&toolchain.opt)
            .arg(format!("-mcpu={target}"))
            .arg(public(&kernels))
            .args(["-passes", recipe::PASSES, recipe::UNROLL, "-S"])
            .arg(&linked)
            .arg("-o")
            .arg(&text),
    )?;
    files::read(&text)
}

/// Generates assembly for the IR `module`, which has line tables. Returns the path of the assembly.
pub(crate) fn assemble_lines(
    toolchain: &Toolchain,
    compiled: &Compilation,
    module: &str,
) -> Result<PathBuf> {
    let input = compiled.ir.with_file_name("numbered.ll");
    let output = compiled.ir.with_file_name("numbered.s");
    files::write(&input, module)?;
    llc(toolchain, compiled.target, "line tables", &input, &output)?;
    Ok(output)
}

/// Generates assembly for the IR or bitcode `input`. For AMD, inserts the waits that LLVM omits.
/// For NVIDIA, inserts pragmas that keep ptxas from unrolling loops.
fn llc(
    toolchain: &Toolchain,
    target: Target,
    name: &str,
    input: &Path,
    output: &Path,
) -> Result<()> {
    process::run(
        &format!("llc of {name} for {target}"),
        process::clean(&toolchain.llc)
            .args(recipe::llc(target))
            .arg(input)
            .arg("-o")
            .arg(output),
    )?;
    match target.vendor() {
        Vendor::Nvidia => files::write(output, unroll::forbid(&files::read(output)?)),
        Vendor::Amd => files::write(output, waits::insert(&files::read(output)?)),
    }
}

/// File name of the linked module, which has line tables.
const LINKED: &str = "linked.ll";

/// File name of the optimised bitcode of all kernels.
const WHOLE: &str = "image.bc";

fn public(kernels: &[String]) -> String {
    format!("--internalize-public-api-list={}", kernels.join(","))
}

/// Makes the image of one family: opt extracts the family, llc generates assembly and, for AMD,
/// llvm-mc assembles it and ld.lld links the code object.
fn generate(
    toolchain: &Toolchain,
    folder: &Path,
    target: Target,
    family: &Family,
    part: &Part,
) -> Result<()> {
    let name = &family.name;
    let bitcode = folder.join(format!("{name}.part.bc"));
    process::run(
        &format!("opt of {name} for {target}"),
        process::clean(&toolchain.opt)
            .arg(public(&family.entries))
            .args(["-passes", recipe::SPLIT])
            .arg(folder.join(WHOLE))
            .arg("-o")
            .arg(&bitcode),
    )?;
    llc(toolchain, target, name, &bitcode, &part.assembly)?;
    if let (Vendor::Amd, Ok(tools), Some(image)) = (target.vendor(), &toolchain.amd, &part.image) {
        let input = folder.join(format!("{name}.mc.s"));
        let object = folder.join(format!("{name}.o"));
        let assembly = files::read(&part.assembly)?;
        files::write(&input, waits::encodable(target, &assembly))?;
        process::run(
            &format!("llvm-mc of {name} for {target}"),
            process::clean(&tools.llvm_mc)
                .args(recipe::llvm_mc(target))
                .arg(&input)
                .arg("-o")
                .arg(&object),
        )?;
        process::run(
            &format!("ld.lld of {name} for {target}"),
            process::clean(&tools.lld)
                .arg("-shared")
                .arg(&object)
                .arg("-o")
                .arg(image),
        )?;
    }
    Ok(())
}

/// Returns the hash of the sources, the manifest and lock file of the workspace, the tools and the
/// flags.
fn key(
    toolchain: &Toolchain,
    project: &Project,
    target: Target,
    options: &Options,
) -> Result<String> {
    let mut hash = Hash::default();
    for text in [
        &sources::content(project)?,
        &recipe::rustflags(target, options),
        &toolchain.version,
        &project.max_threads().to_string(),
        &format!("{:?}", options.families),
    ] {
        hash.add(text.as_bytes());
    }
    for tool in [&toolchain.opt, &toolchain.llc] {
        // Size and modification time detect that a tool was replaced.
        if let Ok(about) = tool.canonicalize().and_then(|path| path.metadata()) {
            hash.add(format!("{}{:?}", about.len(), about.modified().ok()).as_bytes());
        }
    }
    for name in ["Cargo.lock", "Cargo.toml"] {
        let path = project.workspace.join(name);
        if path.exists() {
            hash.add(&files::read_bytes(&path)?);
        }
    }
    Ok(hash.text())
}
