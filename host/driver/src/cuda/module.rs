//! Modules and their kernels.

use core::ffi::{CStr, c_int, c_uint, c_void};

use cudarc::driver::sys::{
    self, CUfunction_attribute as Attribute, CUjit_option as Option_,
    CUlaunchAttributeID as AttributeId,
};

use super::context::{Cuda, RelaxedCapture};
use super::error::{self, INVALID_VALUE, NOT_FOUND};
use super::library::Library;
use crate::Result;
use crate::gpu::{
    FunctionProperties, LaunchShape, ModuleDriver, RawFunction, RawModule, RawStream,
};

/// Size in bytes of each log of the compiler. One log contains information, the other errors.
const LOG_BYTES: usize = 16 << 10;

/// Maximum bytes of dynamic shared memory per block, unless
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` is raised for the kernel.
const SHARED_UNASKED: u32 = 48 << 10;

/// Upper bound on the number of parameters of a kernel: each parameter has at least one byte, and
/// all parameters together have at most 32,764 bytes.
const MOST_PARAMETERS: usize = 32_764;

/// Returns true if the library can determine the length of an image. Text must be zero-terminated.
/// A cubin and a fat binary contain their own length.
fn ends(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
        || image.starts_with(&0xBA55_ED50_u32.to_le_bytes())
        || image.last() == Some(&0)
}

/// Returns a log up to its zero byte, without trailing white space.
fn log_text(log: &[u8]) -> String {
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).trim().to_owned()
}

impl ModuleDriver for Cuda {
    /// Loads an image. If the driver can list the kernels of a module, also loads all kernels of
    /// the image.
    fn load(&self, image: &[u8]) -> Result<RawModule> {
        if !ends(image) {
            return Err(error::driver(
                "cuModuleLoadDataEx",
                "a text image must end with a zero byte, or the driver reads beyond its end",
            ));
        }
        let library = self.relaxed()?;
        let (mut said, mut failed) = (vec![0_u8; LOG_BYTES], vec![0_u8; LOG_BYTES]);
        let size = core::ptr::without_provenance_mut::<c_void>(LOG_BYTES - 1);
        let mut options = [
            Option_::CU_JIT_INFO_LOG_BUFFER,
            Option_::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            Option_::CU_JIT_ERROR_LOG_BUFFER,
            Option_::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [
            said.as_mut_ptr().cast::<c_void>(),
            size,
            failed.as_mut_ptr().cast::<c_void>(),
            size,
        ];
        let mut module = core::ptr::null_mut();
        // SAFETY: `module` is writable. `ends` has checked that the library can determine the
        // length of the image. The arrays have one value per option, and the log buffers have the
        // given sizes.
        let code = unsafe {
            (library.cuModuleLoadDataEx)(
                &raw mut module,
                image.as_ptr().cast::<c_void>(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let (said, failed) = (log_text(&said), log_text(&failed));
        if !said.is_empty() {
            tracing::debug!(said, "the driver's compiler");
        }
        library.check("cuModuleLoadDataEx", code).map_err(|error| {
            if failed.is_empty() {
                error
            } else {
                error::with(error, &format!("the driver's compiler reports: {failed}"))
            }
        })?;
        if let Err(error) = load_all(&library, module) {
            // SAFETY: the module was loaded above, and no other code has its handle. A second error
            // is ignored, because the first error is returned.
            let _ = unsafe { (library.cuModuleUnload)(module) };
            return Err(error);
        }
        Ok(RawModule(module.addr()))
    }

    /// Looks up a kernel by its symbol, loads it, and permits it to use the maximum shared memory
    /// per block.
    ///
    /// Since CUDA 12.2, drivers load kernels lazily by default: the first launch of a kernel loads
    /// it and waits for the device. If a running kernel waits for the kernel that is being loaded,
    /// the two kernels deadlock. A library cannot rely on `CUDA_MODULE_LOADING=EAGER`, because the
    /// variable must be set before the first use of CUDA. Therefore this function loads the kernel
    /// explicitly.
    fn function(&self, module: RawModule, name: &CStr) -> Result<Option<RawFunction>> {
        let library = self.relaxed()?;
        let mut function = core::ptr::null_mut();
        // SAFETY: `function` is writable, `module` is a live handle, and a `CStr` is
        // zero-terminated.
        let code = unsafe {
            (library.cuModuleGetFunction)(
                &raw mut function,
                module.0 as sys::CUmodule,
                name.as_ptr(),
            )
        };
        if code == NOT_FOUND {
            return Ok(None);
        }
        library.check("cuModuleGetFunction", code)?;
        load_function(&library, function)?;
        let fixed = attribute(
            &library,
            function,
            Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        )?;
        let dynamic = self.properties.shared_bytes.saturating_sub(fixed);
        if dynamic > SHARED_UNASKED {
            // SAFETY: the function was looked up above in a live module.
            library.check("cuFuncSetAttribute", unsafe {
                (library.cuFuncSetAttribute)(
                    function,
                    Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    dynamic as c_int,
                )
            })?;
        }
        Ok(Some(RawFunction(function.addr())))
    }

    /// Returns the offset and size of each parameter of a kernel, or `None` if the driver cannot
    /// report them.
    fn parameters(&self, function: RawFunction) -> Result<Option<Vec<(usize, usize)>>> {
        let library = self.relaxed()?;
        let Some(ask) = library.cuFuncGetParamInfo.find() else {
            return Ok(None);
        };
        let mut parameters = Vec::new();
        for index in 0..=MOST_PARAMETERS {
            let (mut offset, mut size) = (0, 0);
            let function = function.0 as sys::CUfunction;
            // SAFETY: `function` is a live handle, and `offset` and `size` are writable.
            let code = unsafe { ask(function, index, &raw mut offset, &raw mut size) };
            if code == INVALID_VALUE {
                return Ok(Some(parameters)); // `index` is the number of parameters
            }
            library.check("cuFuncGetParamInfo", code)?;
            parameters.push((offset, size));
        }
        Err(error::driver(
            "cuFuncGetParamInfo",
            "the driver reports too many parameters of the kernel",
        ))
    }

    /// Returns the resource usage of a kernel.
    fn function_properties(&self, function: RawFunction) -> Result<FunctionProperties> {
        let library = self.relaxed()?;
        let ask = |asked| attribute(&library, function.0 as sys::CUfunction, asked);
        Ok(FunctionProperties {
            registers: ask(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: ask(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: ask(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads: ask(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            dependent_launch: ask(Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION)? >= 90,
        })
    }

    /// Returns the maximum number of blocks that one SM can hold at once.
    fn resident_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        let library = self.relaxed()?;
        let mut blocks: c_int = 0;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: `blocks` is writable, and `function` is a live handle.
        library.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            (library.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &raw mut blocks,
                function.0 as sys::CUfunction,
                threads,
                shared_bytes as usize,
            )
        })?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The preconditions of [`Driver::launch`](crate::gpu::Driver::launch).
    unsafe fn launch(
        &self,
        function: RawFunction,
        shape: &LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        let library = self.enter()?;
        let (function, stream) = (function.0 as sys::CUfunction, stream.0 as sys::CUstream);
        let (mut attributes, count) = attributes(shape, self.major);
        if count == 0 {
            // SAFETY: the caller guarantees that `parameters` are the kernel's arguments.
            return library.check("cuLaunchKernel", unsafe {
                (library.cuLaunchKernel)(
                    function,
                    shape.blocks,
                    1,
                    1,
                    shape.threads,
                    1,
                    1,
                    shape.shared_bytes,
                    stream,
                    parameters.as_mut_ptr(),
                    core::ptr::null_mut(),
                )
            });
        }
        let config = sys::CUlaunchConfig {
            gridDimX: shape.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as c_uint,
        };
        // SAFETY: the caller guarantees that `parameters` are the kernel's arguments. The
        // attributes outlive the call.
        library.check("cuLaunchKernelEx", unsafe {
            (library.cuLaunchKernelEx)(
                &raw const config,
                function,
                parameters.as_mut_ptr(),
                core::ptr::null_mut(),
            )
        })
    }
}

/// Returns the attributes of a launch and the number of attributes in use.
///
/// The attribute for dependent launches is omitted on devices before Hopper (compute capability
/// 9.0), which do not support them. The omission is safe, because the attribute only permits an
/// earlier start of the kernel. The cluster attribute is never omitted, because the kernel depends
/// on its clusters. If the device does not support clusters, the library returns an error.
fn attributes(shape: &LaunchShape, major: u32) -> ([sys::CUlaunchAttribute; 3], usize) {
    let mut attributes = [sys::CUlaunchAttribute {
        id: AttributeId::CU_LAUNCH_ATTRIBUTE_IGNORE,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    }; 3];
    let mut count = 0;
    let mut add = |id, set: fn(&mut sys::CUlaunchAttributeValue, u32), value| {
        attributes[count].id = id;
        set(&mut attributes[count].value, value);
        count += 1;
    };
    if shape.cluster > 0 {
        add(
            AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            |to, blocks| {
                to.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                    x: blocks,
                    y: 1,
                    z: 1,
                };
            },
            shape.cluster,
        );
    }
    if shape.cooperative {
        add(
            AttributeId::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            |to, on| to.cooperative = on as c_int,
            1,
        );
    }
    if shape.dependent && major >= 9 {
        add(
            AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            |to, on| to.programmaticStreamSerializationAllowed = on as c_int,
            1,
        );
    }
    (attributes, count)
}

/// Returns an attribute of a kernel.
fn attribute(library: &Library, function: sys::CUfunction, asked: Attribute) -> Result<u32> {
    let mut value: c_int = 0;
    // SAFETY: `value` is writable, and `function` is a live handle.
    library.check("cuFuncGetAttribute", unsafe {
        (library.cuFuncGetAttribute)(&raw mut value, asked, function)
    })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// Loads a kernel now instead of at its first launch. A driver without `cuFuncLoad` loads a kernel
/// when its attributes are queried.
fn load_function(library: &Library, function: sys::CUfunction) -> Result<()> {
    if let Some(load) = library.cuFuncLoad.find() {
        // SAFETY: `function` is a live handle.
        library.check("cuFuncLoad", unsafe { load(function) })?;
    }
    attribute(library, function, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS).map(|_| ())
}

/// Loads all kernels of a module, if the driver can list them.
fn load_all(library: &RelaxedCapture, module: sys::CUmodule) -> Result<()> {
    let (Some(count_of), Some(list)) = (
        library.cuModuleGetFunctionCount.find(),
        library.cuModuleEnumerateFunctions.find(),
    ) else {
        return Ok(());
    };
    let mut count: c_uint = 0;
    // SAFETY: `count` is writable, and `module` is a live handle.
    library.check("cuModuleGetFunctionCount", unsafe {
        count_of(&raw mut count, module)
    })?;
    let mut functions = vec![core::ptr::null_mut(); count as usize];
    if count == 0 {
        return Ok(());
    }
    // SAFETY: `functions` has space for `count` functions.
    library.check("cuModuleEnumerateFunctions", unsafe {
        list(functions.as_mut_ptr(), count, module)
    })?;
    functions
        .into_iter()
        .try_for_each(|function| load_function(library, function))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the ids of the attributes in use.
    fn numbers(shape: LaunchShape, major: u32) -> Vec<u32> {
        let (attributes, count) = attributes(&shape, major);
        attributes[..count]
            .iter()
            .map(|one| one.id as u32)
            .collect()
    }

    #[test]
    fn a_launch_has_the_attributes_that_are_asked_for() {
        let shape = LaunchShape {
            blocks: 8,
            threads: 32,
            ..LaunchShape::default()
        };
        assert!(numbers(shape, 9).is_empty());
        let all = LaunchShape {
            cluster: 4,
            cooperative: true,
            dependent: true,
            ..shape
        };
        assert_eq!(numbers(all, 9), [4, 2, 6]);
        assert_eq!(numbers(all, 8), [4, 2], "no dependent launch before Hopper");
        let (attributes, _) = attributes(&all, 9);
        // SAFETY: every value was written completely, with zeros outside the field that is set.
        let cluster = unsafe { attributes[0].value.clusterDim };
        assert_eq!((cluster.x, cluster.y, cluster.z), (4, 1, 1));
        // SAFETY: every value was written completely, with zeros outside the field that is set.
        assert_eq!(unsafe { attributes[1].value.cooperative }, 1);
        // SAFETY: every value was written completely, with zeros outside the field that is set.
        let dependent = unsafe { attributes[2].value.programmaticStreamSerializationAllowed };
        assert_eq!(dependent, 1);
    }

    #[test]
    fn an_image_without_end_is_refused() {
        assert!(ends(b".version 8.0\0"));
        assert!(!ends(b".version 8.0"));
        assert!(!ends(b""));
        assert!(ends(b"\x7fELF\x02"));
        assert!(ends(&[0x50, 0xED, 0x55, 0xBA, 1]));
    }

    #[test]
    fn logs_end_at_their_zero() {
        assert_eq!(log_text(b"ptxas error\n\0rest"), "ptxas error");
        assert_eq!(log_text(b"full"), "full");
        assert_eq!(log_text(&[0; 8]), "");
    }
}
