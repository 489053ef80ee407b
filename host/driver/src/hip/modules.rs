//! Code objects, their kernels, and launches.

use core::ffi::{CStr, c_uint, c_void};
use core::ptr;
use std::collections::HashMap;
use std::sync::Arc;

use super::bindings::{self as hip, Int, hipFunction_t, hipModule_t, hipStream_t};
use super::device::Hip;
use super::error::driver_error;
use super::metadata::{self, CodeObject};
use crate::gpu::{
    CaptureStatus, FunctionProperties, GraphDriver, LaunchShape, ModuleDriver, RawFunction,
    RawGraph, RawModule, RawStream,
};
use crate::{Error, Result};

/// Loaded modules. They are never unloaded.
#[derive(Debug, Default)]
pub(super) struct Modules {
    modules: HashMap<usize, Arc<Module>>,
    functions: HashMap<usize, Arguments>,
}

/// Offsets and sizes of a kernel's arguments, if they are known.
type Arguments = Option<Vec<(usize, usize)>>;

#[derive(Debug)]
struct Module {
    /// The image. Kept alive, because the runtime may read it after loading.
    _image: Vec<u64>,
    object: CodeObject,
}

impl ModuleDriver for Hip {
    fn load(&self, image: &[u8]) -> Result<RawModule> {
        let call = "hipModuleLoadData";
        let object = metadata::parse(image).map_err(|detail| driver_error(call, &detail))?;
        // HIP's version number of ROCm 6.3.
        const ROCM_6_3: u32 = 60_300_000;
        let version = self.properties.version;
        if object.version == Some(6) && version < ROCM_6_3 {
            return Err(driver_error(
                call,
                &format!(
                    "the image is a code object of version 6, which needs ROCm 6.3, and the \
                     runtime is of version {}.{}; build the image with fusewire-build, which \
                     writes version 5",
                    version / 10_000_000,
                    version / 100_000 % 100
                ),
            ));
        }
        let mut words = vec![0_u64; image.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..image.len()].copy_from_slice(image);
        let _relaxed = self.relaxed()?;
        let mut module: hipModule_t = ptr::null_mut();
        // SAFETY: `module` is writable. `metadata::parse` has checked that all segments and
        // sections lie within the image. `Module` keeps the image alive, and modules are never
        // unloaded.
        let status = unsafe {
            (self.functions.hipModuleLoadData)(&mut module, words.as_ptr().cast::<c_void>())
        };
        self.functions.check(call, status).map_err(|error| {
            let target = object.target.as_deref().unwrap_or("an unknown target");
            with_detail(
                error,
                &format!(
                    "the code object is for {target}, the GPU is {}",
                    self.properties.architecture
                ),
            )
        })?;
        let module = RawModule(module as usize);
        self.modules().modules.insert(
            module.0,
            Arc::new(Module {
                _image: words,
                object,
            }),
        );
        Ok(module)
    }

    fn function(&self, module: RawModule, name: &CStr) -> Result<Option<RawFunction>> {
        let call = "hipModuleGetFunction";
        let loaded = self.modules().modules.get(&module.0).cloned();
        let loaded = loaded.ok_or_else(|| {
            driver_error(
                call,
                "the module was not loaded by this driver, or on another GPU",
            )
        })?;
        if name.is_empty() {
            return Ok(None);
        }
        let _relaxed = self.relaxed()?;
        let mut function: hipFunction_t = ptr::null_mut();
        // SAFETY: `function` is writable, the module is loaded, and a `CStr` ends with a zero byte.
        let status = unsafe {
            (self.functions.hipModuleGetFunction)(
                &mut function,
                module.0 as hipModule_t,
                name.as_ptr(),
            )
        };
        if status == hip::ERROR_NOT_FOUND {
            self.functions.forget();
            return Ok(None);
        }
        self.functions.check(call, status)?;
        let function = RawFunction(function as usize);
        let arguments =
            arguments(&loaded.object, name).map_err(|detail| driver_error(call, &detail))?;
        self.modules().functions.insert(function.0, arguments);
        Ok(Some(function))
    }

    fn parameters(&self, function: RawFunction) -> Result<Option<Vec<(usize, usize)>>> {
        let known = self.modules().functions.get(&function.0).cloned();
        known.ok_or_else(|| {
            driver_error(
                "hipModuleGetFunction",
                "the function was not found by this driver, or on another GPU",
            )
        })
    }

    fn function_properties(&self, function: RawFunction) -> Result<FunctionProperties> {
        let _current = self.current()?;
        let attribute = |number: c_uint| {
            let mut value: Int = 0;
            // SAFETY: `value` is writable. `function` is live, because its module is never
            // unloaded.
            let status = unsafe {
                (self.functions.hipFuncGetAttribute)(
                    &mut value,
                    number,
                    function.0 as hipFunction_t,
                )
            };
            self.functions.check("hipFuncGetAttribute", status)?;
            Ok::<u32, Error>(u32::try_from(value).unwrap_or_default())
        };
        Ok(FunctionProperties {
            registers: attribute(hip::FUNCTION_REGISTERS)?,
            local_bytes: attribute(hip::FUNCTION_LOCAL_BYTES)?,
            shared_bytes: attribute(hip::FUNCTION_SHARED_BYTES)?,
            max_threads: attribute(hip::FUNCTION_MAX_THREADS)?,
            dependent_launch: false,
        })
    }

    fn resident_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        let _current = self.current()?;
        let call = "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor";
        let threads = Int::try_from(threads)
            .map_err(|_| driver_error(call, &format!("{threads} threads in a block")))?;
        let mut blocks: Int = 0;
        // SAFETY: `blocks` is writable. `function` is live, because its module is never unloaded.
        let status = unsafe {
            (self
                .functions
                .hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)(
                &mut blocks,
                function.0 as hipFunction_t,
                threads,
                shared_bytes as usize,
            )
        };
        self.functions.check(call, status)?;
        Ok(u32::try_from(blocks).unwrap_or_default())
    }

    /// Launches a kernel. Ignores [`LaunchShape::dependent`], because HIP has no dependent
    /// launches: the kernel starts after the previous kernel on the stream is complete.
    ///
    /// # Safety
    /// The preconditions of `Driver::launch`.
    unsafe fn launch(
        &self,
        function: RawFunction,
        shape: &LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        launchable(shape).map_err(|detail| driver_error("hipModuleLaunchKernel", &detail))?;
        let _current = self.current()?;
        let function = function.0 as hipFunction_t;
        let (raw, stream) = (stream, stream.0 as hipStream_t);
        let (blocks, threads, shared) = (shape.blocks, shape.threads, shape.shared_bytes);
        let arguments = if parameters.is_empty() {
            ptr::null_mut()
        } else {
            parameters.as_mut_ptr()
        };
        if shape.cooperative {
            let capture = self.growing_graph(raw)?;
            // SAFETY: `function` and `stream` are live handles. The caller guarantees that
            // `arguments` are the arguments that the kernel expects. The runtime copies the
            // arguments.
            let status = unsafe {
                (self.functions.hipModuleLaunchCooperativeKernel)(
                    function, blocks, 1, 1, threads, 1, 1, shared, stream, arguments,
                )
            };
            let call = "hipModuleLaunchCooperativeKernel";
            self.functions.check(call, status)?;
            // Some older runtimes launch the kernel immediately, even on a capturing stream.
            if let Some((graph, nodes)) = capture
                && self.graph_nodes(graph)? == nodes
            {
                return Err(driver_error(
                    call,
                    "this HIP runtime ran the kernel instead of capturing it; capture launches \
                     that are not cooperative, or install a newer ROCm",
                ));
            }
            return Ok(());
        }
        // SAFETY: `function` and `stream` are live handles. The caller guarantees that `arguments`
        // are the arguments that the kernel expects. The runtime copies the arguments.
        let status = unsafe {
            (self.functions.hipModuleLaunchKernel)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                stream,
                arguments,
                ptr::null_mut(),
            )
        };
        self.functions.check("hipModuleLaunchKernel", status)
    }
}

impl Hip {
    /// Returns the graph into which a stream is being captured, and the current number of nodes of
    /// the graph. Returns `None` if the stream is not capturing.
    fn growing_graph(&self, stream: RawStream) -> Result<Option<(RawGraph, usize)>> {
        match self.capture_status(stream)? {
            CaptureStatus::Active(_, graph) => Ok(Some((graph, self.graph_nodes(graph)?))),
            CaptureStatus::None | CaptureStatus::Invalidated | CaptureStatus::Blocked => Ok(None),
        }
    }
}

/// Checks a launch against HIP's limits: no clusters of several blocks, and from 1 to 2^32 - 1
/// threads.
fn launchable(shape: &LaunchShape) -> Result<(), String> {
    if shape.cluster > 1 {
        return Err(format!(
            "clusters of {} blocks were requested; AMD GPUs have no clusters",
            shape.cluster
        ));
    }
    let threads = u64::from(shape.blocks) * u64::from(shape.threads);
    if threads == 0 || threads > u64::from(u32::MAX) {
        return Err(format!(
            "{} blocks of {} threads were requested; HIP launches at least 1 and less than 2^32 \
             threads",
            shape.blocks, shape.threads
        ));
    }
    Ok(())
}

/// Returns the arguments of a kernel from the metadata, or `None` if the image has no metadata.
/// Fails if the metadata does not contain the kernel, because the arguments of a launch could then
/// not be checked.
fn arguments(object: &CodeObject, name: &CStr) -> Result<Arguments, String> {
    let Some(kernels) = &object.kernels else {
        return Ok(None);
    };
    name.to_str()
        .ok()
        .and_then(|name| kernels.get(name))
        .map(|arguments| Some(arguments.clone()))
        .ok_or_else(|| format!("the image's metadata does not name kernel {name:?}"))
}

/// Appends `more` to the message of an error.
fn with_detail(error: Error, more: &str) -> Error {
    match error {
        Error::Driver {
            library,
            call,
            detail,
        } => Error::Driver {
            library,
            call,
            detail: format!("{detail}; {more}"),
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_hip_lacks_are_refused() {
        let shape = LaunchShape {
            blocks: 304,
            threads: 512,
            ..LaunchShape::default()
        };
        launchable(&shape).unwrap();
        launchable(&LaunchShape {
            cluster: 1,
            ..shape
        })
        .unwrap();
        let dependent = LaunchShape {
            dependent: true,
            cooperative: true,
            ..shape
        };
        launchable(&dependent).unwrap();
        let text = launchable(&LaunchShape {
            cluster: 2,
            ..shape
        })
        .unwrap_err();
        assert!(text.contains("no clusters"), "{text}");
        for (blocks, threads) in [(0, 512), (304, 0), (1 << 23, 512), (u32::MAX, u32::MAX)] {
            let text = launchable(&LaunchShape {
                blocks,
                threads,
                ..shape
            })
            .unwrap_err();
            assert!(text.contains("2^32"), "{text}");
        }
        let most = LaunchShape {
            blocks: (1 << 23) - 1,
            ..shape
        };
        launchable(&most).unwrap();
    }

    #[test]
    fn kernels_without_metadata_are_distinguished_from_unknown_ones() {
        let mut object = CodeObject::default();
        assert_eq!(arguments(&object, c"scale"), Ok(None));
        let kernels = HashMap::from([("scale".to_owned(), vec![(0, 8), (8, 4)])]);
        object.kernels = Some(kernels);
        assert_eq!(arguments(&object, c"scale"), Ok(Some(vec![(0, 8), (8, 4)])));
        let text = arguments(&object, c"other").unwrap_err();
        assert!(text.contains("other"), "{text}");
    }

    #[test]
    fn a_refused_image_names_both_targets() {
        let error = with_detail(driver_error("hipModuleLoadData", "no"), "for gfx90a");
        assert_eq!(error.to_string(), "HIP: hipModuleLoadData: no; for gfx90a");
    }
}
