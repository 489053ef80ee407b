//! Finds a device tool chain, or reports what is missing.
//!
//! Two kinds of tool chain are supported: Debian's packages (`rustc-web cargo-web rust-web-src
//! llvm-22 lld-22`, which share one LLVM) with `RUSTC_BOOTSTRAP=1`, and rustup's nightly with
//! `rust-src` and `llvm-tools`. LLVM's tools must have the major version of the compiler's LLVM,
//! because they read bitcode that the compiler writes.
//!
//! `FUSEWIRE_RUSTC`, `FUSEWIRE_CARGO`, `FUSEWIRE_LLVM_BIN`, `FUSEWIRE_PTXAS` and `FUSEWIRE_OBJDUMP`
//! override the tools that are found.

use core::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use crate::error::MissingTool;
use crate::{Error, Result, process};

/// Origin of a tool chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Debian's packages.
    Debian,
    /// Named by `FUSEWIRE_RUSTC` and `FUSEWIRE_CARGO`.
    Environment,
    /// rustup's nightly.
    Nightly,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Debian => "Debian's packages",
            Self::Environment => "FUSEWIRE_RUSTC",
            Self::Nightly => "rustup's nightly",
        })
    }
}

/// A compiler with the source of `core`, and LLVM's tools of the same version.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// Origin of the tool chain.
    pub origin: Origin,
    /// The compiler.
    pub rustc: PathBuf,
    /// `cargo` of the same tool chain.
    pub cargo: PathBuf,
    /// Output of `rustc -vV`.
    pub version: String,
    /// LLVM's major version.
    pub llvm: u32,
    /// `llvm-dis`.
    pub llvm_dis: PathBuf,
    /// `llvm-link`.
    pub llvm_link: PathBuf,
    /// `opt`.
    pub opt: PathBuf,
    /// `llc`.
    pub llc: PathBuf,
    /// The tools that only AMD targets need.
    pub amd: core::result::Result<AmdTools, MissingTool>,
}

/// The tools that make code objects from assembly.
#[derive(Clone, Debug)]
pub struct AmdTools {
    /// `llvm-mc`.
    pub llvm_mc: PathBuf,
    /// `ld.lld`.
    pub lld: PathBuf,
}

const DEBIAN: &str = "apt-get install rustc-web cargo-web rust-web-src llvm-22 lld-22";
const RUSTUP: &str = "rustup toolchain install nightly --component rust-src --component llvm-tools";

impl Toolchain {
    /// Finds a complete tool chain. If `FUSEWIRE_RUSTC` is set, tries only that compiler. Otherwise
    /// tries Debian's packages, then rustup's nightly.
    ///
    /// # Errors
    /// [`Error::Toolchain`] lists the missing tools of each tool chain.
    pub fn find() -> Result<Self> {
        let mut missing = Vec::new();
        if let Some(rustc) = std::env::var_os("FUSEWIRE_RUSTC") {
            let rustc = PathBuf::from(rustc);
            let cargo = std::env::var_os("FUSEWIRE_CARGO")
                .map_or_else(|| rustc.with_file_name("cargo"), PathBuf::from);
            match Self::at(Origin::Environment, rustc, cargo) {
                Ok(found) => return Ok(found),
                // The user selected this compiler, so no other tool chain is tried.
                Err(lacks) => return Err(Error::Toolchain(lacks)),
            }
        }
        let debian = Path::new("/usr/bin");
        match Self::at(Origin::Debian, debian.join("rustc"), debian.join("cargo")) {
            Ok(found) => return Ok(found),
            Err(lacks) => missing.extend(lacks),
        }
        match nightly() {
            Ok((rustc, cargo)) => match Self::at(Origin::Nightly, rustc, cargo) {
                Ok(found) => return Ok(found),
                Err(lacks) => missing.extend(lacks),
            },
            Err(lack) => missing.push(lack),
        }
        Err(Error::Toolchain(missing))
    }

    /// Returns the versions of the compiler and of LLVM's tools in one line. Together with the
    /// sources, these versions determine an image.
    pub fn identity(&self) -> String {
        let version = |tool: &Path| {
            let said = ask(tool, &["--version"]).unwrap_or_default();
            let line = said
                .lines()
                .find(|line| line.contains("LLVM version") || line.contains("LLD"));
            line.unwrap_or("of unknown version").trim().to_owned()
        };
        let amd = self.amd.as_ref().map_or_else(
            |_| "no llvm-mc or ld.lld".to_owned(),
            |amd| {
                let (mc, lld) = (version(&amd.llvm_mc), version(&amd.lld));
                format!("llvm-mc: {mc}; ld.lld: {lld}")
            },
        );
        format!(
            "{}, LLVM {}; opt: {}; llc: {}; {amd}",
            self.version.lines().next().unwrap_or_default(),
            field(&self.version, "LLVM version: ").unwrap_or_default(),
            version(&self.opt),
            version(&self.llc),
        )
    }

    fn at(
        origin: Origin,
        rustc: PathBuf,
        cargo: PathBuf,
    ) -> core::result::Result<Self, Vec<MissingTool>> {
        let install = if origin == Origin::Nightly {
            RUSTUP
        } else {
            DEBIAN
        };
        let lack = |piece: &str, reason: String| MissingTool {
            piece: format!("{piece} of {origin}"),
            reason,
            install: install.to_owned(),
        };
        let mut missing = Vec::new();
        let Some(version) = ask(&rustc, &["-vV"]) else {
            return Err(vec![lack(
                "rustc",
                format!("{} does not run", rustc.display()),
            )]);
        };
        if ask(&cargo, &["-V"]).is_none() {
            missing.push(lack("cargo", format!("{} does not run", cargo.display())));
        }
        let Some(sysroot) = ask(&rustc, &["--print", "sysroot"]).map(|s| PathBuf::from(s.trim()))
        else {
            return Err(vec![lack(
                "rustc",
                "it does not name its sysroot".to_owned(),
            )]);
        };
        let core = sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs");
        if !core.exists() {
            missing.push(lack(
                "the source of core",
                format!("{} is absent", core.display()),
            ));
        }
        let llvm = field(&version, "LLVM version: ")
            .and_then(|text| text.split('.').next()?.parse::<u32>().ok())
            .unwrap_or(0);
        let host = field(&version, "host: ").unwrap_or_default();
        let bundled = sysroot.join("lib/rustlib").join(host).join("bin");
        let mut tool = |name: &str| match find_llvm(name, llvm, &bundled) {
            Some(path) => path,
            None => {
                missing.push(MissingTool {
                    piece: format!("{name} of LLVM {llvm} for {origin}"),
                    reason: format!(
                        "neither {name}-{llvm} nor a {name} of that version is in $PATH, in \
                         $FUSEWIRE_LLVM_BIN or in {}",
                        bundled.display()
                    ),
                    install: if origin == Origin::Nightly {
                        "rustup component add llvm-tools --toolchain nightly".to_owned()
                    } else {
                        format!("apt-get install llvm-{llvm}")
                    },
                });
                PathBuf::new()
            }
        };
        let (llvm_dis, llvm_link, opt, llc) = (
            tool("llvm-dis"),
            tool("llvm-link"),
            tool("opt"),
            tool("llc"),
        );
        let lld = find_llvm("ld.lld", llvm, &bundled)
            .or_else(|| Some(bundled.join("gcc-ld/ld.lld")).filter(|path| path.exists()));
        let amd = find_llvm("llvm-mc", llvm, &bundled)
            .and_then(|llvm_mc| Some(AmdTools { llvm_mc, lld: lld? }))
            .ok_or_else(|| MissingTool {
                piece: format!("llvm-mc or ld.lld of LLVM {llvm} (make AMD code objects)"),
                reason: "it is not in $PATH; rustup does not provide llvm-mc".to_owned(),
                install: format!("apt-get install llvm-{llvm} lld-{llvm}"),
            });
        if !missing.is_empty() {
            return Err(missing);
        }
        Ok(Self {
            origin,
            rustc,
            cargo,
            version,
            llvm,
            llvm_dis,
            llvm_link,
            opt,
            llc,
            amd,
        })
    }
}

/// Returns the paths of rustc and cargo in rustup's nightly tool chain.
fn nightly() -> core::result::Result<(PathBuf, PathBuf), MissingTool> {
    let which = |tool: &str| {
        ask(
            Path::new("rustup"),
            &["which", "--toolchain", "nightly", tool],
        )
        .map(|path| PathBuf::from(path.trim()))
    };
    match (which("rustc"), which("cargo")) {
        (Some(rustc), Some(cargo)) => Ok((rustc, cargo)),
        _ => Err(MissingTool {
            piece: "rustup's nightly".to_owned(),
            reason: "`rustup which --toolchain nightly rustc` finds nothing".to_owned(),
            install: RUSTUP.to_owned(),
        }),
    }
}

/// Finds the tool `name` of LLVM version `major`. Tries `name` in `$FUSEWIRE_LLVM_BIN`,
/// `name-major` in `$PATH`, `name` in the folder `bundled`, and `name` in `$PATH`, in this order.
fn find_llvm(name: &str, major: u32, bundled: &Path) -> Option<PathBuf> {
    let given = std::env::var_os("FUSEWIRE_LLVM_BIN").map(|folder| Path::new(&folder).join(name));
    let versioned = in_path(&format!("{name}-{major}"));
    let own = Some(bundled.join(name)).filter(|path| path.exists());
    let fits = |path: &PathBuf| {
        let said = ask(path, &["--version"]).unwrap_or_default();
        said.contains(&format!("LLVM version {major}.")) || said.contains(&format!("LLD {major}."))
    };
    [given, versioned, own, in_path(name)]
        .into_iter()
        .flatten()
        .find(fits)
}

/// Finds `objdump` of binutils or LLVM, which the check of native code needs.
///
/// # Errors
/// Returns the missing tool.
pub fn find_objdump() -> core::result::Result<PathBuf, MissingTool> {
    std::env::var_os("FUSEWIRE_OBJDUMP")
        .map(PathBuf::from)
        .or_else(|| in_path("objdump"))
        .or_else(|| in_path("llvm-objdump-22"))
        .or_else(|| in_path("llvm-objdump"))
        .ok_or_else(|| MissingTool {
            piece: "objdump".to_owned(),
            reason: "neither objdump nor llvm-objdump is in $PATH".to_owned(),
            install: "apt-get install binutils".to_owned(),
        })
}

/// Finds `llvm-objdump` of LLVM 18 or newer, which disassembles code objects for all AMD targets,
/// in `$FUSEWIRE_LLVM_BIN` or `$PATH`.
///
/// # Errors
/// Returns the missing tool.
pub fn find_llvm_objdump() -> core::result::Result<PathBuf, MissingTool> {
    let given = std::env::var_os("FUSEWIRE_LLVM_BIN");
    let given = given.map(|folder| Path::new(&folder).join("llvm-objdump"));
    let is_new = |path: &PathBuf| {
        let said = ask(path, &["--version"]).unwrap_or_default();
        let version = said.split_once("LLVM version ").map(|(_, rest)| rest);
        let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        major.is_some_and(|major| major >= 18)
    };
    [given, in_path("llvm-objdump-22"), in_path("llvm-objdump")]
        .into_iter()
        .flatten()
        .find(is_new)
        .ok_or_else(|| MissingTool {
            piece: "llvm-objdump of LLVM 18 or newer (disassembles AMD code objects)".to_owned(),
            reason: "it is neither in $FUSEWIRE_LLVM_BIN nor in $PATH".to_owned(),
            install: "apt-get install llvm-22".to_owned(),
        })
}

/// Finds NVIDIA's assembler in `$FUSEWIRE_PTXAS`, `$PATH`, `$CUDA_HOME/bin` or the Python wheel.
///
/// # Errors
/// Returns the missing tool.
pub fn find_ptxas() -> core::result::Result<PathBuf, MissingTool> {
    const WHEEL: &str = "import glob, importlib.util\n\
        spec = importlib.util.find_spec('nvidia')\n\
        for folder in spec.submodule_search_locations if spec else []:\n\
        \x20   for path in glob.glob(folder + '/*/bin/ptxas'):\n\
        \x20       print(path)\n";
    let from_wheel = || {
        let said = ask(Path::new("python3"), &["-c", WHEEL])?;
        said.lines().next().map(PathBuf::from)
    };
    std::env::var_os("FUSEWIRE_PTXAS")
        .map(PathBuf::from)
        .or_else(|| in_path("ptxas"))
        .or_else(|| {
            let path = Path::new(&std::env::var_os("CUDA_HOME")?).join("bin/ptxas");
            path.exists().then_some(path)
        })
        .or_else(from_wheel)
        .filter(|path| ask(path, &["--version"]).is_some())
        .ok_or_else(|| MissingTool {
            piece: "ptxas".to_owned(),
            reason: "not in $FUSEWIRE_PTXAS, $PATH, $CUDA_HOME/bin or the Python package nvidia"
                .to_owned(),
            install: INSTALL_PTXAS.to_owned(),
        })
}

/// The command that installs a ptxas whose cubins drivers for CUDA 12 load.
pub(crate) const INSTALL_PTXAS: &str = "pip install nvidia-cuda-nvcc-cu12==12.9.86";

/// Returns the version of ptxas, such as `release 13.0, V13.0.88`.
///
/// # Errors
/// [`Error::Parse`] if ptxas does not print its version.
pub fn ptxas_version(ptxas: &Path) -> Result<String> {
    let said = ask(ptxas, &["--version"]).unwrap_or_default();
    let version = said.lines().find_map(|line| {
        let (_, version) = line.split_once("release ")?;
        Some(format!("release {}", version.trim()))
    });
    version.ok_or_else(|| Error::Parse {
        what: format!("the version of {}", ptxas.display()),
        detail: said,
    })
}

fn in_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))
}

/// Returns the standard output of a program, or `None` if the program fails or cannot be started.
pub(crate) fn ask(program: &Path, arguments: &[&str]) -> Option<String> {
    let mut command: Command = process::clean(program);
    process::run("a query", command.args(arguments))
        .ok()
        .map(|output| output.stdout)
}
