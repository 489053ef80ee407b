//! Tests that the program finds the images that `fusewire-build build` wrote, and that the images
//! match the program.
//!
//! The test is skipped if the images were not built. With `FUSEWIRE_REQUIRE=images`, it fails
//! instead.

use fusewire::gpu::images::Images;

#[test]
fn images_are_found_and_read_what_the_program_passes() {
    let kernels = [
        moe_toy::DISPATCH.info(),
        moe_toy::RUN_EXPERTS.info(),
        moe_toy::COMBINE.info(),
    ];
    // Another test compiles this image. Compiles it again if the kernels have changed. Without a
    // device tool chain, there is no such image.
    let _ =
        fusewire_build::install_images(env!("CARGO_MANIFEST_DIR"), fusewire_build::Target::Sm90);
    for architecture in ["sm_90", "sm_100", "gfx942"] {
        let image = match Images::new(architecture).find("moe_toy") {
            Ok(image) => image,
            Err(error) => {
                let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
                assert!(!required.split(',').any(|word| word == "images"), "{error}");
                println!("skipped: images: {error}");
                continue;
            }
        };
        assert_eq!(image.name, "moe-toy");
        assert_eq!(image.entries.len(), kernels.len());
        for kernel in &kernels {
            assert_eq!(kernel.family(), "moe_toy");
            let entry = image
                .entry(kernel.name)
                .expect("every kernel has its entry");
            let fields: Vec<_> = kernel.params.iter().map(|p| (p.offset, p.size)).collect();
            assert_eq!(entry.parameters, fields, "{} of {image}", kernel.name);
        }
    }
}
