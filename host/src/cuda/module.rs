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
use crate::gpu::driver::{FunctionProperties, LaunchShape, RawFunction, RawModule, RawStream};

/// Bytes of the compiler's log, each of information and errors.
const LOG_BYTES: usize = 16 << 10;

/// Dynamic shared memory that a block may have without asking for more.
const SHARED_UNASKED: u32 = 48 << 10;

/// More parameters than a kernel can have: they take 32,764 bytes at most.
const MOST_PARAMETERS: usize = 32_764;

/// Returns true if the library can find the end of an image: text ends with a zero byte, a cubin
/// and a fat binary know their size.
fn ends(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
        || image.starts_with(&0xBA55_ED50_u32.to_le_bytes())
        || image.last() == Some(&0)
}

/// A log up to its zero byte, without the white space at the end.
fn log_text(log: &[u8]) -> String {
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).trim().to_owned()
}

impl Cuda {
    /// Loads an image and, where the driver can list them, all of its kernels.
    pub(super) fn load(&self, image: &[u8]) -> Result<RawModule> {
        if !ends(image) {
            return Err(error::driver(
                "cuModuleLoadDataEx",
                "an image of text must end with a zero byte, or the driver reads beyond it",
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
        // SAFETY: `module` is writable; the image ends where the library sees it; there are as many
        // values as options, and the logs have the sizes that they say.
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
                error::with(error, &format!("the driver's compiler says: {failed}"))
            }
        })?;
        if let Err(error) = load_all(&library, module) {
            // SAFETY: loaded above; nobody has it. The error that counts is the first.
            let _ = unsafe { (library.cuModuleUnload)(module) };
            return Err(error);
        }
        Ok(RawModule(module.addr()))
    }

    /// A kernel by its symbol, loaded and with leave to use all of a block's shared memory.
    ///
    /// Drivers load kernels lazily, by default since 12.2: at the first launch, and with a wait for
    /// the device. A kernel that runs and waits for the one being loaded then waits for ever.
    /// `CUDA_MODULE_LOADING=EAGER` is no remedy for a library, since it counts only where it was
    /// set before anybody used CUDA. So every kernel is loaded here, explicitly.
    pub(super) fn function(&self, module: RawModule, name: &CStr) -> Result<Option<RawFunction>> {
        let library = self.relaxed()?;
        let mut function = core::ptr::null_mut();
        // SAFETY: `function` is writable, the module is live by its type, the name ends with a zero
        // byte.
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
            // SAFETY: a live function.
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

    /// Offset and size of each parameter.
    pub(super) fn parameters(&self, function: RawFunction) -> Result<Option<Vec<(usize, usize)>>> {
        let library = self.relaxed()?;
        let Some(ask) = library.cuFuncGetParamInfo.find() else {
            return Ok(None);
        };
        let mut parameters = Vec::new();
        for index in 0..=MOST_PARAMETERS {
            let (mut offset, mut size) = (0, 0);
            let function = function.0 as sys::CUfunction;
            // SAFETY: a live function by its type, and both are writable.
            let code = unsafe { ask(function, index, &raw mut offset, &raw mut size) };
            if code == INVALID_VALUE {
                return Ok(Some(parameters)); // no parameter of that number
            }
            library.check("cuFuncGetParamInfo", code)?;
            parameters.push((offset, size));
        }
        Err(error::driver(
            "cuFuncGetParamInfo",
            "the driver finds no end of the kernel's parameters",
        ))
    }

    /// What a kernel needs.
    pub(super) fn function_properties(&self, function: RawFunction) -> Result<FunctionProperties> {
        let library = self.relaxed()?;
        let ask = |asked| attribute(&library, function.0 as sys::CUfunction, asked);
        Ok(FunctionProperties {
            registers: ask(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: ask(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: ask(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads: ask(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }

    /// Blocks that are resident on one multiprocessor at once.
    pub(super) fn resident_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        let library = self.relaxed()?;
        let mut blocks: c_int = 0;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: `blocks` is writable, the function is live by its type.
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
    /// As [`Driver::launch`](crate::gpu::driver::Driver::launch).
    pub(super) unsafe fn launch(
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
            // SAFETY: by this function's requirement the parameters are those of the kernel.
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
        // SAFETY: as above; the attributes live through the call.
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

/// The attributes of a launch, and how many of them count. A device before Hopper (9.0) has no
/// dependent launches, and to begin early is a leave, not a wish: it is left out there. Clusters
/// are a wish: the library refuses them.
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

/// An attribute of a kernel.
fn attribute(library: &Library, function: sys::CUfunction, asked: Attribute) -> Result<u32> {
    let mut value: c_int = 0;
    // SAFETY: `value` is writable, the function is live.
    library.check("cuFuncGetAttribute", unsafe {
        (library.cuFuncGetAttribute)(&raw mut value, asked, function)
    })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// Loads a kernel, where the driver loads lazily. A driver without `cuFuncLoad` loads it when its
/// attributes are asked for.
fn load_function(library: &Library, function: sys::CUfunction) -> Result<()> {
    if let Some(load) = library.cuFuncLoad.find() {
        // SAFETY: a live function.
        library.check("cuFuncLoad", unsafe { load(function) })?;
    }
    attribute(library, function, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS).map(|_| ())
}

/// Loads all kernels of a module, where the driver can list them.
fn load_all(library: &RelaxedCapture, module: sys::CUmodule) -> Result<()> {
    let (Some(count_of), Some(list)) = (
        library.cuModuleGetFunctionCount.find(),
        library.cuModuleEnumerateFunctions.find(),
    ) else {
        return Ok(());
    };
    let mut count: c_uint = 0;
    // SAFETY: `count` is writable, the module is live.
    library.check("cuModuleGetFunctionCount", unsafe {
        count_of(&raw mut count, module)
    })?;
    let mut functions = vec![core::ptr::null_mut(); count as usize];
    if count == 0 {
        return Ok(());
    }
    // SAFETY: there is room for `count` functions.
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

    /// The attributes that count, as their numbers.
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
        // SAFETY: every value was written whole, with zeros beyond the field that is set.
        let cluster = unsafe { attributes[0].value.clusterDim };
        assert_eq!((cluster.x, cluster.y, cluster.z), (4, 1, 1));
        // SAFETY: as above.
        assert_eq!(unsafe { attributes[1].value.cooperative }, 1);
        // SAFETY: as above.
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
