//! Extends the fake CUDA driver ([`fusewire_cuda_fake`]) with the kernels of the CUDA C++ baseline.
//!
//! The baseline's kernels are in a shared object that a test builds from
//! `cuda/emulation/entries.cpp`. One host thread runs each thread of a block. This driver tests the
//! benchmark harness without a GPU.
//!
//! The shared object of this crate replaces `libcuda.so.1`. When loaded, it opens the file named by
//! the environment variable [`VARIABLE`]. [`image`] creates the image that a program loads.

use core::ffi::{CStr, c_char};
use core::slice;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use fusewire_device::group::cpu::LaneContext;
use fusewire_device::native::{Contract, KernelInfo, NativeEntries, NativeEntry, ParamField};
use libloading::Library;

/// Environment variable with the path of the shared object that contains the kernels.
pub const VARIABLE: &str = "FUSEWIRE_BASELINE_EMULATION";

/// Maximum number of kernels.
const MAX_KERNELS: usize = 96;

/// Mirrors `Field` in `emulation/entries.cpp`.
#[repr(C)]
struct Field {
    offset: u32,
    size: u32,
}

/// Mirrors `Entry` in `emulation/entries.cpp`. The last entry of a list has no name.
#[repr(C)]
struct Entry {
    name: *const c_char,
    run: Option<unsafe extern "C" fn(block: u32, blocks: u32, parameters: *const u8)>,
    fields: *const Field,
    count: u32,
}

/// A kernel of the loaded shared object, which is never unloaded.
#[derive(Clone, Copy, Debug)]
struct EmulatedKernel {
    name: &'static str,
    run: unsafe extern "C" fn(block: u32, blocks: u32, parameters: *const u8),
    params: &'static [ParamField],
}

static EMULATED: OnceLock<Vec<EmulatedKernel>> = OnceLock::new();

/// Native entry of kernel `INDEX`.
///
/// # Safety
/// The requirements of [`NativeEntry`].
unsafe fn native<const INDEX: usize>(context: *const LaneContext, parameters: *const u8) {
    let Some(kernel) = EMULATED.get().and_then(|all| all.get(INDEX)) else {
        return;
    };
    // SAFETY: `NativeEntry` requires `context` to point to a live context.
    let LaneContext { block, blocks, .. } = unsafe { *context };
    // SAFETY: the parameters have the layout that `kernel.run` expects, because the image was
    // generated from `kernel.params`, which was read from the `Field` table of this kernel.
    unsafe { (kernel.run)(block, blocks, parameters) };
}

macro_rules! natives {
    ($($row:literal)*) => {
        [$(
            native::<{ $row * 8 }>, native::<{ $row * 8 + 1 }>,
            native::<{ $row * 8 + 2 }>, native::<{ $row * 8 + 3 }>,
            native::<{ $row * 8 + 4 }>, native::<{ $row * 8 + 5 }>,
            native::<{ $row * 8 + 6 }>, native::<{ $row * 8 + 7 }>,
        )*]
    };
}

const NATIVES: [NativeEntry; MAX_KERNELS] = natives!(0 1 2 3 4 5 6 7 8 9 10 11);

/// Loads a shared object and returns its kernels. The object is never unloaded.
fn open(path: &Path) -> io::Result<Vec<EmulatedKernel>> {
    // SAFETY: the object is built from `emulation/entries.cpp`, whose initialisers only fill
    // tables, so running them has no precondition.
    let library = unsafe { Library::new(path) }.map_err(io::Error::other)?;
    let list = {
        // SAFETY: the type matches the declaration of the function in `emulation/entries.cpp`.
        let list =
            unsafe { library.get::<unsafe extern "C" fn() -> *const Entry>(b"baseline_entries\0") };
        let list = list.map_err(io::Error::other)?;
        // SAFETY: the function has no requirements.
        unsafe { list() }
    };
    core::mem::forget(library);
    let mut kernels = Vec::new();
    for index in 0.. {
        // SAFETY: the list ends with an entry without a name. The loop stops at this entry, so
        // `index` is within the list.
        let entry = unsafe { &*list.add(index) };
        let (Some(run), false) = (entry.run, entry.name.is_null()) else {
            break;
        };
        // SAFETY: `name` is not null and points to a C++ string literal of the loaded object.
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
        kernels.push(EmulatedKernel {
            name: name.to_str().map_err(io::Error::other)?,
            run,
            params: fields.leak(),
        });
    }
    if kernels.len() > MAX_KERNELS {
        return Err(io::Error::other(format!(
            "{} has {} kernels, at most {MAX_KERNELS} are supported",
            path.display(),
            kernels.len()
        )));
    }
    Ok(kernels)
}

fn infos(kernels: &[EmulatedKernel]) -> Vec<KernelInfo> {
    let entries = kernels.iter().zip(NATIVES);
    let info = |(kernel, native): (&EmulatedKernel, NativeEntry)| KernelInfo {
        name: kernel.name,
        module: "fusewire_baseline_fake::baseline",
        params: kernel.params,
        native: NativeEntries {
            baseline: native,
            avx2: native,
            avx512: native,
            lanes: native,
        },
        contract: Contract::NONE,
    };
    entries.map(info).collect()
}

/// Returns an image that declares the kernels of a shared object. The image is text with a
/// terminating zero byte.
///
/// # Errors
/// Fails if the shared object cannot be opened.
pub fn image(path: &Path) -> io::Result<Vec<u8>> {
    let kernels = infos(&open(path)?);
    let mut text = fusewire_cuda_fake::stand_in(&[&kernels], 90).into_bytes();
    text.push(0);
    Ok(text)
}

/// Returns the path of this crate's shared object. For a test that depends on this crate, cargo
/// builds the object next to the test binary.
///
/// # Errors
/// Fails if the file does not exist.
pub fn library() -> io::Result<PathBuf> {
    let name = "libfusewire_baseline_fake.so";
    let binary = std::env::current_exe()?;
    let mut folders = binary.ancestors().skip(1).take(3);
    folders
        .find_map(|folder| {
            [folder.join(name), folder.join("deps").join(name)]
                .into_iter()
                .find(|path| path.exists())
        })
        .ok_or_else(|| {
            io::Error::other(format!(
                "{name} is not next to {}; run `cargo build -p fusewire-baseline-fake` with the \
                 same profile",
                binary.display()
            ))
        })
}

extern "C" fn start() {
    let Some(path) = std::env::var_os(VARIABLE) else {
        return;
    };
    match open(Path::new(&path)) {
        Ok(kernels) => {
            let infos: &'static [KernelInfo] = infos(&kernels).leak();
            if EMULATED.set(kernels).is_ok() {
                fusewire_cuda_fake::register(vec![infos].leak());
            }
        }
        Err(error) => eprintln!("{VARIABLE}={}: {error}", path.display()),
    }
}

/// Initialiser that runs when the object is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
