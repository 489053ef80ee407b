//! Linker arguments of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Programs refer to the library by this name, also if they were linked by its path.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfusewire_c.so");
    // Rust exports the `no_mangle` functions of all crates, such as the native entries of kernels;
    // this hides those that come from other crates, which are archives to the linker.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
