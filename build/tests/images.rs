//! Tests that the committed images match the sources, and that an image depends only on code.
//!
//! The first test needs no device tool chain. CI also rebuilds the images and compares their bytes
//! (`fusewire-build check --images`).

use std::path::Path;

use fusewire_build::{Options, Project, Target, Toolchain, compile, portable, sources};

#[test]
fn committed_images_are_of_these_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let project = Project::at(&root.join("kernels")).expect("the kernel crate");
    let now = sources::hash(&project).expect("its sources");
    let manifest = portable::read(&root.join("host/images")).expect("the images' manifest");
    assert_eq!(
        manifest.sources,
        now,
        "the code of the GPU images has changed (comments and formatting do not count); make the \
         images again by `{}` and commit them",
        portable::COMMAND
    );
    let mut expected = Vec::new();
    for target in portable::TARGETS {
        expected.push((target.name(), target.extension()));
        let cubins = portable::cubin_targets(target).iter();
        expected.extend(cubins.map(|target| (target.name(), "cubin")));
    }
    for image in &manifest.images {
        let kind = (image.target.as_str(), image.extension());
        assert!(expected.contains(&kind), "{}", image.file);
        assert!(
            root.join("host/images").join(&image.file).is_file(),
            "{}",
            image.file
        );
    }
}

const MANIFEST: &str = "[package]\nname = \"lines\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
                        publish = false\n\n[workspace]\n";

/// A kernel that can panic. rustc passes the file, line and column to the panic.
const KERNEL: &str = r#"#![no_std]
#![feature(abi_gpu_kernel)]
#![allow(improper_gpu_kernel_arg)]

#[inline(never)]
#[track_caller]
fn third(values: &[u32]) -> u32 {
    values[2]
}

/// # Safety
/// `to` points at `count` words.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn lines(to: *mut u32, count: u64) {
    // SAFETY: the kernel is never run; the test only compares its image.
    let values = unsafe { core::slice::from_raw_parts_mut(to, count as usize) };
    values[1] = third(values);
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    if let Some(location) = info.location() {
        keep(location.line());
    }
    loop {}
}

#[inline(never)]
fn keep(line: u32) {
    // SAFETY: the kernel is never run; the test only compares its image.
    unsafe { core::ptr::write_volatile(core::ptr::without_provenance_mut::<u32>(4096), line) };
}
"#;

#[test]
fn lines_and_comments_do_not_reach_an_image() {
    let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    let required = |word: &str| required.split(',').any(|part| part == word);
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error) => {
            assert!(!required("ptx") && !required("amdgcn"), "{error}");
            println!("skipped: ptx, amdgcn: {error}");
            return;
        }
    };
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("src")).expect("a folder");
    std::fs::write(folder.path().join("Cargo.toml"), MANIFEST).expect("a manifest");
    let own = Project::at(Path::new(env!("CARGO_MANIFEST_DIR"))).expect("this crate");
    for target in [Target::Sm90, Target::Gfx942] {
        let image = |source: &str| {
            std::fs::write(folder.path().join("src/lib.rs"), source).expect("a source");
            let mut project = Project::at(folder.path()).expect("a crate");
            // Shares the target folder, so that `core` is compiled once for all tests.
            project.target.clone_from(&own.target);
            let options = Options::default();
            let compiled = compile(&toolchain, &project, target, &options).expect("an image");
            assert!(!compiled.cached, "the second source was not compiled");
            let part = &compiled.parts[0];
            // Without llvm-mc and ld.lld, there is no code object, so the test compares the
            // assembly. Source lines that reach the image are also in the assembly.
            let path = part.image.as_ref().unwrap_or(&part.assembly);
            std::fs::read(path).expect("an image")
        };
        let commented = KERNEL.replace(
            "\n#[",
            "\n// A comment that moves what follows.\n\n\n/* And columns. */ #[",
        );
        let (first, second) = (image(KERNEL), image(&commented));
        assert!(!first.is_empty());
        assert!(first == second, "{target}: lines reach the image");
        let changed = image(&KERNEL.replace("values[2]", "values[3]"));
        assert!(
            first != changed,
            "{target}: an index does not reach the image"
        );
        for image in [&first, &second] {
            let text = String::from_utf8_lossy(image);
            assert!(
                !text.contains("lib.rs"),
                "{target}: a file's name reaches the image"
            );
            assert!(
                !text.contains("debug"),
                "{target}: debug information reaches the image"
            );
        }
    }
}
