//! Tests of the library's images and of the search for user images.

use std::path::Path;

use fusewire_device::native::KernelInfo;

use super::library::{self, FILES, PackedImage, manifest};
use super::*;

const PTX: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry argmax(\n\
    \t.param .u64 a,\n\t.param .u32 b\n)\n{\n\tret;\n}\n";

fn detail(result: Result<Image>) -> String {
    match result {
        Err(Error::Image { image, detail }) => format!("{image}: {detail}"),
        other => panic!("{other:?}"),
    }
}

/// Checks that every image is intact and that its metadata agrees with the manifest. Also checks
/// that the images of each target contain every kernel of the program, and that each kernel has the
/// same parameter offsets and sizes in the image and in the program.
#[test]
fn carried_images_are_whole_and_fit_the_program() {
    let mut bytes = 0;
    let kernels: Vec<&KernelInfo> = fusewire_kernels::KERNELS
        .iter()
        .copied()
        .flatten()
        .collect();
    let on = |device| Images::in_folders(device, Vec::new());
    for (images, target, kind) in [
        (on("sm_80"), "sm_80", Kind::Cubin),
        (on("sm_90"), "sm_90", Kind::Cubin),
        (on("sm_100"), "sm_100", Kind::Cubin),
        (on("sm_80").without_cubins(), "sm_80", Kind::Other),
        (on("sm_90").without_cubins(), "sm_90", Kind::Other),
        (on("gfx90a"), "gfx90a", Kind::Other),
        (on("gfx942"), "gfx942", Kind::Other),
    ] {
        let mut found = 0;
        for family in images.families().unwrap() {
            let image = images.library(family).unwrap();
            assert_eq!((image.target.as_str(), image.kind()), (target, kind));
            let again = Image::new(family, image.bytes.clone()).unwrap();
            assert_eq!(again.target, target);
            for entry in &image.entries {
                assert_eq!(again.entry(&entry.name), Some(entry), "{image}");
                let kernel = kernels.iter().find(|kernel| kernel.name == entry.name);
                let kernel = kernel.unwrap_or_else(|| panic!("{} is not in KERNELS", entry.name));
                assert_eq!(kernel.family(), family);
                let fields: Vec<_> = kernel.params.iter().map(|p| (p.offset, p.size)).collect();
                assert_eq!(entry.parameters, fields, "{} of {image}", entry.name);
                found += 1;
            }
            assert_eq!(again.entries.len(), image.entries.len());
            let is_text = !image.bytes.starts_with(b"\x7fELF");
            assert!(!is_text || image.bytes.ends_with(b"\0"), "{image}");
        }
        assert_eq!(found, kernels.len(), "{target}: {}", REBUILD);
    }
    for (_, file) in FILES {
        bytes += file.len();
    }
    assert!(bytes <= 5 << 20, "{bytes} bytes of compressed images");
}

/// Checks which images of the library a GPU gets.
#[test]
fn cubins_are_preferred_where_the_gpu_runs_them() {
    for (device, target, kind) in [
        ("sm_80", "sm_80", Kind::Cubin),
        ("sm_86", "sm_80", Kind::Cubin),
        ("sm_89", "sm_80", Kind::Cubin),
        ("sm_90", "sm_90", Kind::Cubin),
        ("sm_100", "sm_100", Kind::Cubin),
        ("sm_103", "sm_100", Kind::Cubin),
        ("sm_110", "sm_90", Kind::Other),
        ("sm_120", "sm_90", Kind::Other),
    ] {
        let image = Images::in_folders(device, Vec::new())
            .library("barrier")
            .unwrap();
        assert_eq!((image.target.as_str(), image.kind()), (target, kind));
    }
}

const REBUILD: &str = "`cargo run --release -p fusewire-build -- images` rebuilds the images";

#[test]
fn the_newest_ptx_that_the_gpu_runs_and_the_very_code_object() {
    let targets = ["sm_80", "gfx90a", "sm_90", "gfx942", "sm_90a"];
    for (device, expected) in [
        ("sm_75", None),
        ("sm_80", Some("sm_80")),
        ("sm_89", Some("sm_80")),
        ("sm_90", Some("sm_90")),
        ("sm_103", Some("sm_90")),
        ("sm_120", Some("sm_90")),
        ("gfx90a", Some("gfx90a")),
        ("gfx942:sramecc+:xnack-", Some("gfx942")),
        ("gfx950", None),
        ("gfx1100", None),
    ] {
        assert_eq!(best(device, targets.into_iter()), expected, "{device}");
    }
    for device in ["sm_70", "gfx950"] {
        let said = detail(Images::in_folders(device, Vec::new()).library("all_reduce"));
        let targets = "gfx90a, gfx942, sm_100, sm_80, sm_90";
        let wanted = format!("there is none for {device}; there are {targets}");
        assert!(said.contains(&wanted), "{said}");
    }
    let said = detail(Images::in_folders("sm_90", Vec::new()).library("user"));
    assert!(
        said.contains("no such family") && said.contains("all_reduce"),
        "{said}"
    );
}

#[test]
fn code_objects_are_of_version_5() {
    // The byte EI_ABIVERSION: ELFABIVERSION_AMDGPU_HSA_V5.
    const V5: u8 = 3;
    let mut checked = 0;
    for target in ["gfx90a", "gfx942"] {
        let images = Images::in_folders(target, Vec::new());
        for family in images.families().unwrap() {
            let image = images.library(family).unwrap();
            assert_eq!(
                image.bytes[8], V5,
                "{image}: ROCm before 6.3 refuses version 6"
            );
            checked += 1;
        }
    }
    assert!(checked > 20);
    for image in &manifest().unwrap().images {
        let expected = match (image.file.contains(".cubin."), image.target.as_str()) {
            (true, _) => 129,
            (false, "sm_80") => 80,
            (false, "sm_90") => 82,
            _ => 5,
        };
        assert_eq!(image.format, expected, "{}", image.file);
    }
}

/// Checks that a driver gets only images that it can load: PTX for sm_90 needs CUDA 12.2, a cubin
/// the major version of CUDA that made it.
#[test]
fn images_are_chosen_by_the_version_of_the_driver() {
    let on = |cuda| Images {
        cuda: Some(cuda),
        ..Images::in_folders("sm_90", Vec::new())
    };
    for (cuda, target) in [
        (12_000, "sm_80"),
        (12_010, "sm_80"),
        (12_020, "sm_90"),
        (13_000, "sm_90"),
    ] {
        let ptx = on(cuda).without_cubins().library("barrier").unwrap();
        assert_eq!(ptx.target, target, "{cuda}");
        let cubin = on(cuda).library("barrier").unwrap();
        assert_eq!((cubin.target.as_str(), cubin.is_cubin()), ("sm_90", true));
    }
    let said = detail(on(11_080).library("barrier"));
    assert!(
        said.contains("none for sm_90 that a driver for CUDA 11.8 can load"),
        "{said}"
    );
    let folder = tempfile::tempdir().unwrap();
    let newer = PTX.replace(".version 8.0", ".version 8.7");
    put(folder.path(), "mine.sm_80.ptx", &newer);
    let path = folder.path().join("mine.sm_80.ptx");
    assert!(on(12_080).from_path(&path).is_ok());
    let said = detail(on(12_040).from_path(&path));
    assert!(
        said.contains("PTX 8.7, which needs a driver for CUDA 12.8"),
        "{said}"
    );
}

#[test]
fn damaged_files_are_refused() {
    let packed: &PackedImage = &manifest().unwrap().images[0];
    let (_, file) = FILES.iter().find(|(name, _)| *name == packed.file).unwrap();
    library::open(packed, file).unwrap();
    let truncated = &file[..file.len() / 2];
    assert!(detail(library::open(packed, truncated)).contains("is damaged"));
    assert!(detail(library::open(packed, &[])).contains("cannot be unpacked"));
    let mut changed = packed.clone();
    changed.sha256 = "0".repeat(64);
    let said = detail(library::open(&changed, file));
    assert!(said.contains("SHA-256"), "{said}");
    let mut changed = packed.clone();
    changed.bytes -= 1;
    let said = detail(library::open(&changed, file));
    assert!(said.contains("instead of"), "{said}");
    changed.bytes = usize::MAX;
    assert!(detail(library::open(&changed, file)).contains("is said to have"));
    let mut flipped = file.to_vec();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 4;
    assert!(detail(library::open(packed, &flipped)).contains("is damaged"));
}

fn put(folder: &Path, file: &str, content: &str) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join(file), content).unwrap();
}

#[test]
fn users_images_are_found_in_the_order_of_the_folders() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let images = Images::in_folders("sm_90", vec![first.clone(), second.clone()]);
    let said = detail(images.find("my-argmax"));
    assert!(
        said.starts_with("my-argmax: there is none for sm_90; looked in"),
        "{said}"
    );
    assert!(said.contains("first") && said.contains("second"), "{said}");
    assert!(
        said.contains("fusewire-build build --crate FOLDER --target sm_90"),
        "{said}"
    );
    assert!(!said.contains("for other devices"), "{said}");

    put(
        &second,
        "my-argmax.sm_100.ptx",
        &PTX.replace("sm_80", "sm_100"),
    );
    put(&second, "my-argmax.gfx942.co", "");
    let said = detail(images.find("my-argmax"));
    assert!(
        said.contains("for other devices") && said.contains("my-argmax.sm_100.ptx"),
        "{said}"
    );

    put(&second, "my-argmax.sm_80.ptx", PTX);
    let image = images.find("my_argmax").unwrap();
    assert_eq!(
        (image.name.as_str(), image.target.as_str()),
        ("my-argmax", "sm_80")
    );
    assert_eq!(image.bytes.last(), Some(&0));
    assert_eq!(image.entries.len(), 1);
    assert_eq!(image.entry("argmax").unwrap().parameters, [(0, 8), (8, 4)]);

    // An image in an earlier folder is preferred to an image in a later folder, even if its target
    // is older.
    put(
        &second,
        "my-argmax.sm_90.ptx",
        &PTX.replace("sm_80", "sm_90"),
    );
    assert_eq!(images.find("my-argmax").unwrap().target, "sm_90");
    put(&first, "my-argmax.sm_80.ptx", PTX);
    assert_eq!(images.find("my-argmax").unwrap().target, "sm_80");
}

#[test]
fn cargos_target_folder_around_the_program_is_searched() {
    let folder = tempfile::tempdir().unwrap();
    let mut images = Images::in_folders("sm_80", Vec::new());
    images.around = vec![folder.path().join("fusewire-gpu/out")];
    put(
        &folder.path().join("fusewire-gpu/out/my-argmax"),
        "my-argmax.sm_80.ptx",
        PTX,
    );
    assert_eq!(images.find("my_argmax").unwrap().target, "sm_80");
    let here = Images::new("sm_80");
    let program = std::env::current_exe().unwrap();
    let program_folder = program.parent().unwrap();
    assert!(here.folders.contains(&program_folder.to_owned()));
    assert!(here.folders.contains(&program_folder.join("images")));
    let target = program_folder.parent().unwrap().parent().unwrap();
    assert!(here.around.contains(&target.join("fusewire-gpu/out")));
}

#[test]
fn other_files_and_images_for_other_devices_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "a.sm_80.ptx", PTX);
    put(folder.path(), "b.sm_80.ptx", "nothing");
    put(folder.path(), "c.sm_80.ptx", ".target sm_80\n");
    put(folder.path(), "d.gfx942.co", "\x7fELF and no more");
    let path = |name: &str| folder.path().join(name);
    let images = Images::in_folders("sm_80", Vec::new());
    assert_eq!(images.from_path(&path("a.sm_80.ptx")).unwrap().name, "a");
    for (name, wanted) in [
        ("b.sm_80.ptx", "neither PTX"),
        ("c.sm_80.ptx", "holds no kernel"),
        ("d.gfx942.co", "no code object"),
        ("e.sm_80.ptx", "cannot be read"),
    ] {
        let said = detail(images.from_path(&path(name)));
        assert!(said.contains(wanted) && said.contains(name), "{said}");
    }
    let older = Images::in_folders("sm_75", Vec::new());
    let said = detail(older.from_path(&path("a.sm_80.ptx")));
    assert!(
        said.contains("it is for sm_80, this device is sm_75"),
        "{said}"
    );
    let other = Images::in_folders("gfx942", Vec::new());
    let said = detail(other.from_path(&path("a.sm_80.ptx")));
    assert!(
        said.contains("it is for sm_80, this device is gfx942"),
        "{said}"
    );
}

/// Checks that parsing a damaged code object returns a result or an error, and does not hang or
/// panic.
#[test]
fn damaged_code_objects_do_no_harm() {
    let images = Images::in_folders("gfx942", Vec::new());
    let image = images.library("barrier").unwrap();
    for end in (0..image.bytes.len()).step_by(7) {
        let _ = code_object::parse(&image.bytes[..end]);
    }
    for at in 0..image.bytes.len().min(4096) {
        let mut changed = image.bytes.clone();
        changed[at] ^= 0xff;
        let _ = code_object::parse(&changed);
    }
    let mut other = image.bytes;
    other[18] = 62; // x86-64
    let said = detail(Image::new("probe", other));
    assert!(said.contains("no code object of an AMD GPU"), "{said}");
}

#[test]
fn compressed_images_are_unpacked_and_say_their_sources() {
    let folder = tempfile::tempdir().unwrap();
    let (_, packed) = FILES
        .iter()
        .find(|(name, _)| *name == "barrier.sm_80.ptx.lzma")
        .unwrap();
    let path = folder.path().join("mine.sm_80.ptx.lzma");
    std::fs::write(&path, packed).unwrap();
    let images = Images::in_folders("sm_90", vec![folder.path().to_owned()]);
    let image = images.find("mine").unwrap();
    let own = images_of_barrier();
    assert_eq!((image.name.as_str(), &image.bytes), ("mine", &own.bytes));
    assert_eq!(image.sources(), None);

    std::fs::write(&path, &packed[..packed.len() / 2]).unwrap();
    let wrong = detail(images.find("mine"));
    assert!(wrong.contains("it cannot be unpacked"), "{wrong}");
    std::fs::remove_file(path).unwrap();

    let said = format!("{PTX}\n// fusewire sources 12ab\n");
    std::fs::write(folder.path().join("mine.sm_80.ptx"), said).unwrap();
    assert_eq!(images.find("mine").unwrap().sources(), Some("12ab"));
    assert_eq!(images.sources().unwrap().len(), 64);
}

fn images_of_barrier() -> Image {
    let images = Images::in_folders("sm_80", Vec::new());
    images.without_cubins().library("barrier").unwrap()
}

#[test]
fn a_folder_may_stand_in_for_families_of_the_librarys_own() {
    let folder = tempfile::tempdir().unwrap();
    let mut images = images_in_library(folder.path());
    let own = images.library("barrier").unwrap();
    assert_eq!(own.name, "barrier", "the folder is empty");
    put(
        folder.path(),
        "barrier.sm_100.ptx",
        &PTX.replace("sm_80", "sm_100"),
    );
    assert_eq!(images.library("barrier").unwrap().bytes, own.bytes);
    put(folder.path(), "barrier.sm_80.ptx", PTX);
    let other = images.library("barrier").unwrap();
    assert_eq!(other.name, "barrier");
    assert!(other.entry("argmax").is_some() && other.entry("barrier").is_none());
    // Other families still come from the library.
    assert!(images.library("batch").unwrap().entry("batch").is_some());
    put(folder.path(), "barrier.sm_80.ptx", "no image");
    assert!(images.library("barrier").is_err());
    images.library = None;
    assert_eq!(images.library("barrier").unwrap().bytes, own.bytes);
}

fn images_in_library(folder: &Path) -> Images {
    Images::with_library(folder, "sm_80")
}

impl Images {
    /// Creates a lookup in which the images in `folder` replace the library's own.
    pub(in crate::gpu) fn with_library(folder: &Path, architecture: &str) -> Self {
        Self {
            library: Some(folder.to_owned()),
            ..Self::in_folders(architecture, Vec::new())
        }
    }
}
