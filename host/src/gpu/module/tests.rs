//! Tests of module loading with a fake driver that parses images, as a driver library does.

use core::ffi::{CStr, c_void};
use std::collections::BTreeMap;
use std::sync::Mutex;

use fusewire_kernels::KERNELS;

use super::*;
use crate::gpu::driver::{DeviceDriver, LaunchShape, Properties, RawStream};
use crate::gpu::images::Entry;
use fusewire_driver::Result as DriverResult;

/// A fake driver that loads images. Panics in methods that module loading must not call.
#[derive(Debug)]
struct Fake {
    properties: Properties,
    /// True if [`Driver::parameters`] returns the parameters from the image, false if it returns
    /// `None`.
    reports: bool,
    local_bytes: u32,
    /// True if the driver refuses cubins.
    refuses_cubins: bool,
    modules: Mutex<Vec<Image>>,
    /// Parameters of the kernels that were looked up, by symbol.
    found: Mutex<BTreeMap<String, Vec<(usize, usize)>>>,
}

impl Fake {
    fn new(architecture: &str, reports: bool) -> Self {
        Self {
            properties: Properties {
                ordinal: 0,
                name: "fake".to_owned(),
                architecture: architecture.to_owned(),
                uuid: [0; 16],
                memory: 1 << 30,
                multiprocessors: 4,
                warp: 32,
                max_threads: 1024,
                shared_bytes: 48 << 10,
                version: 12_040,
                descriptors: true,
                fabric: false,
                domain: None,
                multicast: false,
                cooperative: true,
            },
            reports,
            local_bytes: 0,
            refuses_cubins: false,
            modules: Mutex::default(),
            found: Mutex::default(),
        }
    }
}

impl DeviceDriver for Fake {
    fn library(&self) -> &'static str {
        "fake"
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }
}

impl ModuleDriver for Fake {
    fn load(&self, image: &[u8]) -> DriverResult<RawModule> {
        let refused = |detail: &str| {
            Err(fusewire_driver::Error::Driver {
                library: "fake",
                call: "load",
                detail: detail.to_owned(),
            })
        };
        let is_text = !image.starts_with(b"\x7fELF");
        if is_text && image.last() != Some(&0) {
            return refused("PTX without its zero byte");
        }
        if !is_text && self.refuses_cubins {
            return refused("no binary for this GPU");
        }
        // Parses the bytes again, because a driver receives only the bytes of an image.
        let image = Image::new("loaded", image.to_vec()).unwrap();
        let mut modules = self.modules.lock().unwrap();
        modules.push(image);
        // SAFETY: the fake driver looks the handle up in its list.
        Ok(unsafe { RawModule::from_raw(modules.len()) })
    }

    fn function(&self, module: RawModule, name: &CStr) -> DriverResult<Option<RawFunction>> {
        let modules = self.modules.lock().unwrap();
        let image = &modules[module.as_raw() - 1];
        let at = image
            .entries
            .iter()
            .position(|e| e.name == name.to_str().unwrap());
        if let Some(at) = at {
            let entry = &image.entries[at];
            let mut found = self.found.lock().unwrap();
            found.insert(entry.name.clone(), entry.parameters.clone());
        }
        // SAFETY: the fake driver looks the handle up in its list.
        Ok(at.map(|at| unsafe { RawFunction::from_raw(module.as_raw() << 16 | at) }))
    }

    fn parameters(&self, function: RawFunction) -> DriverResult<Option<Vec<(usize, usize)>>> {
        let modules = self.modules.lock().unwrap();
        let entry = &modules[(function.as_raw() >> 16) - 1].entries[function.as_raw() & 0xffff];
        Ok(self.reports.then(|| entry.parameters.clone()))
    }

    fn function_properties(&self, _: RawFunction) -> DriverResult<FunctionProperties> {
        Ok(FunctionProperties {
            registers: 40,
            local_bytes: self.local_bytes,
            shared_bytes: 0,
            max_threads: 512,
            dependent_launch: false,
        })
    }

    fn resident_blocks(&self, _: RawFunction, _: u32, _: u32) -> DriverResult<u32> {
        panic!("loading a module has asked for the occupancy")
    }

    unsafe fn launch(
        &self,
        _: RawFunction,
        _: &LaunchShape,
        _: &mut [*mut c_void],
        _: RawStream,
    ) -> DriverResult<()> {
        panic!("loading a module has launched a kernel")
    }
}

fn point(architecture: &str) -> (Image, Vec<&'static KernelInfo>) {
    let image = Images::in_folders(architecture, Vec::new())
        .without_cubins()
        .library("point")
        .unwrap();
    let kernels = KERNELS.iter().copied().flatten();
    (
        image,
        kernels
            .filter(|kernel| kernel.family() == "point")
            .collect(),
    )
}

fn detail(result: Result<Module>) -> String {
    match result {
        Err(Error::Image { image, detail }) => format!("{image}: {detail}"),
        other => panic!("{other:?}"),
    }
}

/// Checks that a driver that refuses cubins gets PTX, and that any other driver gets no PTX.
#[test]
fn ptx_is_loaded_where_the_driver_refuses_cubins() {
    for refuses_cubins in [false, true] {
        let driver = Fake {
            refuses_cubins,
            ..Fake::new("sm_90", true)
        };
        let images = Images::in_folders("sm_90", Vec::new());
        let modules = load_library(&driver, &images, KERNELS).unwrap();
        let loaded = driver.modules.lock().unwrap();
        assert_eq!(loaded.len(), modules.len());
        assert!(
            loaded
                .iter()
                .all(|image| image.is_cubin() != refuses_cubins)
        );
    }
    // An error that PTX has, too, is not hidden.
    let driver = Fake {
        refuses_cubins: true,
        ..Fake::new("sm_90", true)
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("all_reduce.sm_90.ptx"), "no image").unwrap();
    let images = Images::with_library(folder.path(), "sm_90");
    let error = load_library(&driver, &images, KERNELS).unwrap_err();
    assert!(error.to_string().contains("neither PTX"), "{error}");
}

/// Loads all library images with two drivers for each architecture: one that reports kernel
/// parameters, and one that does not. With the second driver, the parameters come from the manifest
/// of the library's images.
#[test]
fn a_library_loads_whole_on_every_architecture() {
    for architecture in ["sm_80", "sm_90", "sm_120", "gfx90a", "gfx942"] {
        for reports in [false, true] {
            let driver = Fake::new(architecture, reports);
            let images = Images::in_folders(architecture, Vec::new());
            let modules = load_library(&driver, &images, KERNELS).unwrap();
            let names: Vec<&str> = modules.iter().map(Module::name).collect();
            assert!(names.is_sorted(), "{names:?}");
            assert_eq!(names, images.families().unwrap());
            for kernel in KERNELS.iter().copied().flatten() {
                let module = modules
                    .iter()
                    .find(|m| m.name() == kernel.family())
                    .unwrap();
                let function = module.function(kernel.name).unwrap();
                assert_eq!(function.name, kernel.name);
                let fields: Vec<_> = kernel.params.iter().map(|p| (p.offset, p.size)).collect();
                assert_eq!(function.params, fields);
                assert_eq!(function.properties.registers, 40);
                assert_eq!(driver.found.lock().unwrap()[kernel.name], fields);
            }
            assert!(
                modules
                    .iter()
                    .all(|module| module.function("nothing").is_none())
            );
        }
    }
}

#[test]
fn an_older_gpu_is_refused_with_a_list_of_images() {
    let driver = Fake::new("sm_70", true);
    let error = load_library(&driver, &Images::in_folders("sm_70", Vec::new()), KERNELS);
    assert!(error.unwrap_err().to_string().contains("there are gfx90a"));
}

/// Changes the offset or size of a parameter in an image, or the number of parameters. Checks that
/// the error contains the values of the program and of the image.
#[test]
fn a_shifted_or_resized_parameter_is_refused() {
    let driver = Fake::new("sm_90", false);
    let (image, kernels) = point("sm_90");
    Module::load(&driver, &image, kernels.iter().copied()).unwrap();
    let (kernel, last) = (kernels[0], kernels[0].params.len() - 1);
    let changed = |change: &dyn Fn(&mut Entry)| {
        let mut image = image.clone();
        let entry = image
            .entries
            .iter_mut()
            .find(|entry| entry.name == kernel.name);
        change(entry.unwrap());
        detail(Module::load(&driver, &image, kernels.iter().copied()))
    };
    let field = kernel.params[last];
    let said = changed(&|entry| entry.parameters[last].0 += 8);
    let wanted = format!(
        "kernel {}: parameter {last} ({}): the program writes {} bytes at offset {}, the image \
         reads {} at offset {}",
        kernel.name,
        field.name,
        field.size,
        field.offset,
        field.size,
        field.offset + 8
    );
    assert!(said.contains(&wanted), "{said}");
    assert!(
        said.contains("point for sm_90") && said.contains("fusewire-build images"),
        "{said}"
    );
    let said = changed(&|entry| entry.parameters[0].1 = 4);
    let wanted = format!(
        "parameter 0 ({}): the program writes 8 bytes at offset 0, the image reads 4 at offset 0",
        kernel.params[0].name
    );
    assert!(said.contains(&wanted), "{said}");
    let said = changed(&|entry| entry.parameters.truncate(last));
    assert!(
        said.contains(&format!("reads only {last} parameters")),
        "{said}"
    );
    let said = changed(&|entry| entry.parameters.push((4096, 8)));
    assert!(
        said.contains(&format!("the image reads {}", last + 2)),
        "{said}"
    );
}

/// Checks that the parameters that the driver reports take precedence over the parameters in the
/// manifest.
#[test]
fn the_images_own_metadata_counts_first() {
    let driver = Fake::new("gfx942", true);
    let (mut image, kernels) = point("gfx942");
    for entry in &mut image.entries {
        entry.parameters.clear();
    }
    Module::load(&driver, &image, kernels.iter().copied()).unwrap();
    let silent = Fake::new("gfx942", false);
    assert!(
        detail(Module::load(&silent, &image, kernels.iter().copied())).contains("reads only 0")
    );
    image.entries.clear();
    let said = detail(Module::load(&silent, &image, kernels.iter().copied()));
    assert!(said.contains("says nothing about the parameters"), "{said}");
}

#[test]
fn a_missing_entry_is_refused() {
    let driver = Fake::new("sm_90", true);
    let (mut image, kernels) = point("sm_90");
    let text = String::from_utf8(image.bytes).unwrap();
    image.bytes = text.replace(".entry send(", ".entry sent(").into_bytes();
    let said = detail(Module::load(&driver, &image, kernels.iter().copied()));
    assert!(said.contains("lacks kernel send"), "{said}");
}

#[test]
fn ptx_without_its_zero_byte_is_the_drivers_error() {
    let driver = Fake::new("sm_90", true);
    let (mut image, kernels) = point("sm_90");
    image.bytes.pop();
    let error = Module::load(&driver, &image, kernels).unwrap_err();
    assert!(matches!(error, Error::Driver { .. }), "{error}");
}

/// Checks that a kernel with local memory loads without an error.
#[test]
fn local_memory_is_no_error() {
    let mut driver = Fake::new("sm_90", true);
    driver.local_bytes = 64;
    let (image, kernels) = point("sm_90");
    let module = Module::load(&driver, &image, kernels).unwrap();
    assert!(
        module
            .functions()
            .iter()
            .all(|f| f.properties.local_bytes == 64)
    );
    assert_eq!(module.target(), "sm_90");
}
