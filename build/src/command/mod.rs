//! What the command can do.

pub(crate) mod build;
pub(crate) mod check;
pub(crate) mod doctor;

use std::path::PathBuf;

use fusewire_build::{Project, Result};

/// A thing to do.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Compiles a kernel crate for GPUs.
    Build(build::Arguments),
    /// Compiles, and checks every rule that an image must keep.
    Check(check::Arguments),
    /// Says which tools are there, and how to install what is missing.
    Doctor,
}

/// Which crate.
#[derive(Debug, clap::Args)]
pub(crate) struct Which {
    /// Folder of the kernel crate.
    #[arg(long = "crate", value_name = "PATH", conflicts_with = "package")]
    krate: Option<PathBuf>,
    /// A package of this workspace.
    #[arg(short, long, value_name = "NAME")]
    package: Option<String>,
}

impl Which {
    /// The crate that was named; else this workspace's `fusewire-kernels`, else the package in the current
    /// folder.
    pub(crate) fn project(&self) -> Result<Project> {
        match (&self.krate, &self.package) {
            (Some(folder), _) => Project::at(folder),
            (None, Some(name)) => Project::named(name),
            (None, None) => Project::named("fusewire-kernels")
                .or_else(|_| Project::at(std::path::Path::new("."))),
        }
    }
}
