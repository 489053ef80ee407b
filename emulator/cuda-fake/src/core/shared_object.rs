//! Kernels of a shared object, which the variable `FUSEWIRE_CUDA_FAKE_KERNELS` names.
//!
//! The object exports the C function `fusewire_cuda_fake_kernels`, which returns a table of
//! [`TableEntry`]. `benches/cuda/emulation/entries.cpp` is an example.

use core::ffi::{CStr, c_char};
use core::slice;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use fusewire_device::group::cpu::LaneContext;
use fusewire_device::native::ParamField;
use libloading::Library;

use super::image;
use super::record::log_refusal;
use super::settings::variable;

/// Runs one block of a kernel. The parameters have the layout that the kernel's table declares.
type RunBlock = unsafe extern "C" fn(block: u32, blocks: u32, parameters: *const u8);

/// A parameter of a kernel.
#[repr(C)]
struct TableField {
    offset: u32,
    size: u32,
}

/// A kernel in the table of a shared object. The last entry of a table has no name.
#[repr(C)]
struct TableEntry {
    name: *const c_char,
    run: Option<RunBlock>,
    fields: *const TableField,
    count: u32,
}

/// A kernel of a shared object, which is never unloaded.
#[derive(Debug)]
pub(super) struct ObjectKernel {
    name: &'static str,
    run: RunBlock,
    pub(super) params: &'static [ParamField],
}

/// Size of the prefix that [`ObjectKernel::arguments`] adds to the parameters.
const PREFIX: usize = size_of::<usize>();

impl ObjectKernel {
    /// Returns the kernel with a name, if the environment names a shared object that has it.
    pub(super) fn find(name: &str) -> Option<&'static Self> {
        static KERNELS: OnceLock<Vec<ObjectKernel>> = OnceLock::new();
        let kernels = KERNELS.get_or_init(|| {
            let Some(path) = variable("KERNELS") else {
                return Vec::new();
            };
            open(Path::new(&path)).unwrap_or_else(|error| {
                log_refusal(&format!("FUSEWIRE_CUDA_FAKE_KERNELS is {path}: {error}"));
                Vec::new()
            })
        });
        kernels.iter().find(|kernel| kernel.name == name)
    }

    /// Returns the parameters of [`run`]: the address of this kernel, and the kernel's parameters.
    pub(super) fn arguments(&'static self, parameters: &[u8]) -> Vec<u8> {
        let address = core::ptr::from_ref(self).expose_provenance();
        [&address.to_ne_bytes(), parameters].concat()
    }
}

/// Native entry of all kernels of shared objects.
///
/// # Safety
/// The requirements of `NativeEntry`. `arguments` must be those of [`ObjectKernel::arguments`].
pub(super) unsafe fn run(context: *const LaneContext, arguments: *const u8) {
    // SAFETY: the arguments start with the address of a kernel, by the contract of this function.
    let address = unsafe { arguments.cast::<usize>().read_unaligned() };
    // SAFETY: `arguments` stored the address of a kernel that lives until the process ends.
    let kernel = unsafe { &*core::ptr::with_exposed_provenance::<ObjectKernel>(address) };
    // SAFETY: `NativeEntry` requires `context` to point to a live context.
    let LaneContext { block, blocks, .. } = unsafe { *context };
    // SAFETY: the parameters follow the prefix. `Function::launch` has compared their layout with
    // the table of the kernel.
    unsafe { (kernel.run)(block, blocks, arguments.wrapping_add(PREFIX)) };
}

/// Loads a shared object and returns its kernels. The object is never unloaded.
fn open(path: &Path) -> io::Result<Vec<ObjectKernel>> {
    // SAFETY: the initialisers of an object for tests have no preconditions.
    let library = unsafe { Library::new(path) }.map_err(io::Error::other)?;
    let table = {
        // SAFETY: the type matches the declaration that the module's documentation requires.
        let table = unsafe {
            library
                .get::<unsafe extern "C" fn() -> *const TableEntry>(b"fusewire_cuda_fake_kernels\0")
        };
        let table = table.map_err(io::Error::other)?;
        // SAFETY: the function has no requirements.
        unsafe { table() }
    };
    core::mem::forget(library);
    let mut kernels = Vec::new();
    for index in 0.. {
        // SAFETY: the table ends with an entry without a name. The loop stops at this entry, so
        // `index` is within the table.
        let entry = unsafe { &*table.add(index) };
        let (Some(run), false) = (entry.run, entry.name.is_null()) else {
            break;
        };
        // SAFETY: `name` is not null and points to a string of the loaded object.
        let name = unsafe { CStr::from_ptr(entry.name) };
        // SAFETY: `fields` points to a table of at least `count` fields in the loaded object.
        let fields = unsafe { slice::from_raw_parts(entry.fields, entry.count as usize) };
        let fields: Vec<ParamField> = fields
            .iter()
            .map(|field| ParamField {
                name: "argument",
                offset: field.offset as usize,
                size: field.size as usize,
            })
            .collect();
        kernels.push(ObjectKernel {
            name: name.to_str().map_err(io::Error::other)?,
            run,
            params: fields.leak(),
        });
    }
    Ok(kernels)
}

/// Returns a stand-in image for sm_90 that declares the kernels of a shared object. The fake
/// executes them if `FUSEWIRE_CUDA_FAKE_KERNELS` is the path of the object.
///
/// # Errors
/// Fails if the shared object cannot be opened.
pub fn stand_in_of(path: &Path) -> io::Result<String> {
    let kernels = open(path)?;
    let entries = kernels.iter();
    Ok(image::declare(
        entries.map(|kernel| (kernel.name.to_owned(), kernel.params)),
        90,
    ))
}
