//! The executing fake of the CUDA driver ([`fusewire_cuda_fake`]), which also runs the CUDA C++ baseline: with a host thread
//! for each thread of a block, from a shared object that a test makes of `cuda/emulation/entries.cpp`. For tests of the
//! harness that measures it.
//!
//! The shared object of this crate takes the place of `libcuda.so.1`. When it is loaded it opens the file that [`VARIABLE`] names;
//! [`image`] writes the image that a program then loads.

use core::ffi::{CStr, c_char};
use core::slice;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use fusewire_device::native::{KernelInfo, LaneContext, NativeEntries, NativeEntry, ParamField};
use libloading::Library;

/// Names the shared object with the kernels.
pub const VARIABLE: &str = "FUSEWIRE_BASELINE_EMULATION";

/// The kernels that there is room for.
const ROOM: usize = 96;

/// `Field` of `emulation/entries.cpp`.
#[repr(C)]
struct Field {
    offset: u32,
    size: u32,
}

/// `Entry` there; the last of a list has no name.
#[repr(C)]
struct Entry {
    name: *const c_char,
    run: Option<unsafe extern "C" fn(block: u32, blocks: u32, parameters: *const u8)>,
    fields: *const Field,
    count: u32,
}

/// A kernel, with everything that outlives the library being opened.
#[derive(Clone, Copy, Debug)]
struct Emulated {
    name: &'static str,
    run: unsafe extern "C" fn(block: u32, blocks: u32, parameters: *const u8),
    params: &'static [ParamField],
}

static EMULATED: OnceLock<Vec<Emulated>> = OnceLock::new();

/// The native entry of kernel `INDEX`.
///
/// # Safety
/// As [`NativeEntry`].
unsafe fn native<const INDEX: usize>(context: *const LaneContext, parameters: *const u8) {
    let Some(kernel) = EMULATED.get().and_then(|all| all.get(INDEX)) else {
        return;
    };
    // SAFETY: a context, by this function's requirement.
    let LaneContext { block, blocks, .. } = unsafe { *context };
    // SAFETY: the parameters lie where the image, and so the kernel, has them.
    unsafe { (kernel.run)(block, blocks, parameters) };
}

macro_rules! natives {
    ($($tens:literal)*) => {
        [$(
            native::<{ $tens * 8 }>, native::<{ $tens * 8 + 1 }>, native::<{ $tens * 8 + 2 }>, native::<{ $tens * 8 + 3 }>,
            native::<{ $tens * 8 + 4 }>, native::<{ $tens * 8 + 5 }>, native::<{ $tens * 8 + 6 }>, native::<{ $tens * 8 + 7 }>,
        )*]
    };
}

const NATIVES: [NativeEntry; ROOM] = natives!(0 1 2 3 4 5 6 7 8 9 10 11);

/// The kernels of a shared object, which stays loaded.
fn open(path: &Path) -> io::Result<Vec<Emulated>> {
    // SAFETY: it was made of `emulation/entries.cpp`, whose initialisers only fill tables.
    let library = unsafe { Library::new(path) }.map_err(io::Error::other)?;
    let list = {
        // SAFETY: the function's type there.
        let list =
            unsafe { library.get::<unsafe extern "C" fn() -> *const Entry>(b"baseline_entries\0") };
        let list = list.map_err(io::Error::other)?;
        // SAFETY: it has no requirements.
        unsafe { list() }
    };
    core::mem::forget(library);
    let mut kernels = Vec::new();
    for index in 0.. {
        // SAFETY: the list ends with an entry that has no name, where this loop ends.
        let entry = unsafe { &*list.add(index) };
        let (Some(run), false) = (entry.run, entry.name.is_null()) else {
            break;
        };
        // SAFETY: a literal of C++.
        let name = unsafe { CStr::from_ptr(entry.name) };
        // SAFETY: a table of so many fields, and one more.
        let fields = unsafe { slice::from_raw_parts(entry.fields, entry.count as usize) };
        let fields: Vec<ParamField> = fields
            .iter()
            .map(|field| ParamField {
                name: "argument",
                offset: field.offset as usize,
                size: field.size as usize,
            })
            .collect();
        kernels.push(Emulated {
            name: name.to_str().map_err(io::Error::other)?,
            run,
            params: fields.leak(),
        });
    }
    if kernels.len() > ROOM {
        return Err(io::Error::other(format!(
            "{} kernels, and room for {ROOM}",
            kernels.len()
        )));
    }
    Ok(kernels)
}

fn infos(kernels: &[Emulated]) -> Vec<KernelInfo> {
    let entries = kernels.iter().zip(NATIVES);
    let info = |(kernel, native): (&Emulated, NativeEntry)| KernelInfo {
        name: kernel.name,
        module: "fusewire_baseline_fake::baseline",
        params: kernel.params,
        native: NativeEntries {
            baseline: native,
            avx2: native,
            avx512: native,
            lanes: native,
        },
    };
    entries.map(info).collect()
}

/// An image that declares the kernels of a shared object, for the fake: text, with the zero byte at its end.
///
/// # Errors
/// When the shared object cannot be opened.
pub fn image(path: &Path) -> io::Result<Vec<u8>> {
    let kernels = infos(&open(path)?);
    let mut text = fusewire_cuda_fake::stand_in(&[&kernels], 90).into_bytes();
    text.push(0);
    Ok(text)
}

/// This crate's shared object, beside the binaries of a test that depends on it.
///
/// # Errors
/// When it is not there.
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
        .ok_or_else(|| io::Error::other(format!("{name} is not beside {}", binary.display())))
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

/// Called when the object is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
