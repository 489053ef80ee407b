//! `fusewire-build doctor`.

use std::process::ExitCode;

use fusewire_build::toolchain::{self, MissingTool};
use fusewire_build::{Error, Toolchain};

/// Prints the tools that were found and those that are missing. Fails if kernels cannot be
/// compiled.
pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    match Toolchain::find() {
        Ok(found) => {
            let version = found.version.lines().next().unwrap_or_default();
            println!(
                "ok  device tool chain: {} ({version}, LLVM {})",
                found.origin, found.llvm
            );
            for (name, path) in [
                ("rustc", &found.rustc),
                ("cargo", &found.cargo),
                ("llvm-dis", &found.llvm_dis),
                ("llvm-link", &found.llvm_link),
                ("opt", &found.opt),
                ("llc", &found.llc),
            ] {
                println!("      {name:<10} {}", path.display());
            }
            let amd = found.amd.map(|amd| amd.llvm_mc);
            optional("llvm-mc, ld.lld", "AMD code objects", amd);
        }
        Err(Error::Toolchain(missing)) => {
            println!("--  device tool chain: none; install the missing tools of one of these");
            for lack in missing {
                println!("{lack}");
            }
            code = ExitCode::FAILURE;
        }
        Err(error) => return Err(error.into()),
    }
    optional("ptxas", "assembles PTX in `check`", toolchain::find_ptxas());
    optional(
        "objdump",
        "native code in `check`",
        toolchain::find_objdump(),
    );
    Ok(code)
}

fn optional(name: &str, what: &str, found: Result<std::path::PathBuf, MissingTool>) {
    match found {
        Ok(path) => println!("ok  {name} ({what}): {}", path.display()),
        Err(missing) => println!("--  {name} ({what})\n{missing}"),
    }
}
