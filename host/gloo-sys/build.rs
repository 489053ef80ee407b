//! Compiles the C++ half of the bridge and links libgloo. Does nothing without the feature `gloo`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "gloo")]
    gloo::build();
}

#[cfg(feature = "gloo")]
mod gloo {
    use std::env;
    use std::path::{Path, PathBuf};

    /// A header that every installation of Gloo has in its include directory.
    const PROBE: &str = "gloo/rendezvous/context.h";

    pub(crate) fn build() {
        println!("cargo::rerun-if-env-changed=GLOO_ROOT");
        for file in [
            "cpp/bridge.h",
            "cpp/bridge.cc",
            "cpp/guard.h",
            "cpp/guard.cc",
            "src/ffi.rs",
        ] {
            println!("cargo::rerun-if-changed={file}");
        }
        let Some(root) = find_root() else {
            return;
        };
        let mut compile = cxx_build::bridge("src/ffi.rs");
        compile
            .file("cpp/bridge.cc")
            .file("cpp/guard.cc")
            .std("c++17");
        // The compiler searches /usr/include by default, and naming the directory breaks
        // `#include_next`.
        if root != Path::new("/usr") {
            compile.include(root.join("include"));
            for folder in ["lib", "lib64"] {
                let folder = root.join(folder);
                if folder.is_dir() {
                    println!("cargo::rustc-link-search=native={}", folder.display());
                }
            }
        }
        compile.compile("fusewire_gloo_bridge");
        println!("cargo::rustc-link-lib=gloo");
    }

    /// Returns the installation prefix of Gloo, or prints a build error with instructions if there
    /// is none.
    fn find_root() -> Option<PathBuf> {
        let named = env::var_os("GLOO_ROOT").map(PathBuf::from);
        let candidates = match &named {
            Some(root) => vec![root.clone()],
            None => vec![PathBuf::from("/usr"), PathBuf::from("/usr/local")],
        };
        let found = candidates
            .iter()
            .find(|root| root.join("include").join(PROBE).is_file());
        if found.is_none() {
            let tried: Vec<_> = candidates
                .iter()
                .map(|root| root.join("include").display().to_string())
                .collect();
            println!(
                "cargo::error=feature `gloo` is on, but {PROBE} is not in {}. Install Gloo \
                 (Debian: apt install libgloo-dev), or set GLOO_ROOT to the prefix that has \
                 include/ and lib/, or build without the feature",
                tried.join(", ")
            );
        }
        found.cloned()
    }
}
