//! Installs the fake in a folder under the driver library's names, with stand-in images.
//!
//! ```text
//! cargo run -p fusewire-cuda-fake --example install -- FOLDER
//! LD_LIBRARY_PATH=FOLDER some-program-that-uses-cuda
//! ```

use std::path::PathBuf;
use std::process::ExitCode;
use std::{env, fs, io};

fn install(folder: &PathBuf) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fusewire_cuda_fake_library::install(folder)?;
    for (name, kernels) in [
        ("fusewire-kernels.ptx", "fusewire_kernels"),
        ("vocab-argmax.ptx", "vocab_argmax"),
    ] {
        let kernels = fusewire_cuda_fake_library::kernels_of(kernels);
        fs::write(
            folder.join(name),
            fusewire_cuda_fake_library::stand_in(kernels, 90),
        )?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let Some(folder) = env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: install FOLDER");
        return ExitCode::from(2);
    };
    match install(&folder) {
        Ok(()) => {
            println!("LD_LIBRARY_PATH={}", folder.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}
