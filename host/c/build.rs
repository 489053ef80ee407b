//! Linker arguments of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Programs find the library by this name at run time, even if they were linked by its path.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfusewire_c.so");
    // Rust exports the `no_mangle` functions of all crates, such as the native entry functions of
    // kernels. The linker sees the other crates as archives, and `--exclude-libs` hides the
    // functions of archives.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
