//! The committed images are made of the sources as they are now. Needs no device tool chain; CI also makes the images anew and
//! compares the bytes (`fusewire-build images --check`).

use std::path::Path;

use fusewire_build::{Project, portable, sources};

#[test]
fn committed_images_are_of_these_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let project = Project::at(&root.join("kernels")).expect("the kernel crate");
    let now = sources::hash(&project).expect("its sources");
    let manifest = portable::read(&root.join("host/images")).expect("the images' manifest");
    assert_eq!(
        manifest.sources,
        now,
        "the sources of the GPU images have changed; make the images anew by `{}` and commit them",
        portable::COMMAND
    );
    let targets: Vec<&str> = portable::TARGETS.iter().map(|t| t.name()).collect();
    for image in &manifest.images {
        assert!(targets.contains(&image.target.as_str()), "{}", image.file);
        assert!(
            root.join("host/images").join(&image.file).is_file(),
            "{}",
            image.file
        );
    }
}
