//! Modules, functions and launches.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::sync::atomic::Ordering;
use std::sync::Arc;

use super::device::write_text;
use super::{export, get, put, with};
use crate::core::capture;
use crate::core::context::{Context, current};
use crate::core::handles::{FUNCTIONS, MODULES};
use crate::core::kernel::{self, Function, SHARED_MOST, Shape};
use crate::core::record::{LaunchRecord, launched, log_refusal};
use crate::core::settings::settings;
use crate::core::stream::{Stream, find};
use crate::status::{Result, SUCCESS, Status};

/// `CUlaunchConfig`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: usize,
    attributes: *const LaunchAttribute,
    count: c_uint,
}

/// `CUlaunchAttribute`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LaunchAttribute {
    id: c_uint,
    pad: [u8; 4],
    value: [u32; 16],
}

const _: () = assert!(size_of::<LaunchConfig>() == 56 && size_of::<LaunchAttribute>() == 72);

/// Magic numbers of binary images: ELF and fat binary.
const BINARIES: [[u8; 4]; 2] = [*b"\x7fELF", [0x50, 0xed, 0x55, 0xba]];

/// Numbers that `cuda.h` gives to the load options for the info log and the error log.
const INFO_SIZE: c_uint = 4;
const ERROR_BUFFER: c_uint = 5;
const ERROR_SIZE: c_uint = 6;

/// Loads an image.
fn load(
    out: *mut usize,
    image: *const c_void,
    count: c_uint,
    options: *const c_uint,
    values: *mut *mut c_void,
) -> Result<()> {
    let context = current()?;
    capture::potentially_unsafe()?;
    if out.is_null() || image.is_null() {
        return Err(Status::InvalidValue);
    }
    let binary = (0..4).try_fold([0u8; 4], |mut magic, at| {
        // SAFETY: a binary image has at least four bytes. A text image has a terminating zero byte,
        // at which the reads stop.
        magic[at] = unsafe { image.cast::<u8>().add(at).read() };
        (magic[at] != 0).then_some(magic)
    });
    let loaded = if binary.is_some_and(|magic| BINARIES.contains(&magic)) {
        let log = "the fake cannot execute binary images; load PTX".to_owned();
        Err((Status::NoBinaryForGpu, log))
    } else {
        // SAFETY: an image that is not binary is text with a terminating zero byte.
        let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
        match text.to_str() {
            Ok(text) => kernel::load(&context, text),
            Err(_) => Err((Status::InvalidImage, "the image is not UTF-8".to_owned())),
        }
    };
    let log = match &loaded {
        Ok(_) => "",
        Err((_, log)) => log.as_str(),
    };
    write_logs(log, count, options, values)?;
    match loaded {
        Ok(module) => put(out, module),
        Err((status, _)) => Err(status),
    }
}

/// Writes the error log and the lengths of the info and error logs.
fn write_logs(
    log: &str,
    count: c_uint,
    options: *const c_uint,
    values: *mut *mut c_void,
) -> Result<()> {
    let (mut buffer, mut size) = (core::ptr::null_mut(), None);
    for at in 0..count as usize {
        // SAFETY: `at < count`, and `cuda.h` requires an array of `count` options.
        let option = get(unsafe { options.add(at) })?;
        // SAFETY: `at < count`, and `cuda.h` requires an array of `count` values.
        let value = unsafe { values.add(at) };
        match option {
            INFO_SIZE => put(value, core::ptr::null_mut())?,
            ERROR_BUFFER => buffer = get(value)?,
            ERROR_SIZE => size = Some(value),
            _ => {}
        }
    }
    if let Some(out) = size {
        let capacity = get(out)? as usize as u32 as usize;
        // SAFETY: `cuda.h` requires a buffer of `capacity` bytes, the value of the size option.
        unsafe { write_text(buffer.cast(), capacity, log) };
        let length = log.len().min(capacity.saturating_sub(1));
        put(out, length as *mut c_void)?;
    }
    Ok(())
}

/// Launches a function with the arguments at the given addresses, and records the launch.
fn launch(
    context: &Arc<Context>,
    function: usize,
    shape: &Shape,
    attributes: Vec<Vec<u32>>,
    stream: usize,
    arguments: [*mut *mut c_void; 2],
) -> Result<()> {
    let function = FUNCTIONS.get(function).ok_or(Status::InvalidHandle)?;
    let stream = find(context, stream)?;
    let captured = !matches!(capture::info(&stream), Ok(capture::Info::None));
    let done = start(context, &function, shape, &stream, arguments);
    launched(LaunchRecord {
        kernel: function.entry.name.clone(),
        grid: shape.grid,
        block: shape.block,
        shared_bytes: shape.shared_bytes,
        attributes,
        captured,
        code: done.err().map_or(SUCCESS, |status| status as u32),
    });
    done
}

fn start(
    context: &Arc<Context>,
    function: &Function,
    shape: &Shape,
    stream: &Stream,
    [arguments, extra]: [*mut *mut c_void; 2],
) -> Result<()> {
    if !extra.is_null() {
        log_refusal("the fake does not support launches with an argument buffer (`extra`)");
        return Err(Status::NotSupported);
    }
    let mut bytes = vec![0u8; function.entry.param_bytes()];
    for (at, parameter) in function.entry.params.iter().enumerate() {
        if arguments.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: `cuda.h` requires an address for each parameter of the function.
        let argument = get(unsafe { arguments.add(at) })?;
        if argument.is_null() {
            return Err(Status::InvalidValue);
        }
        let size = parameter.size as usize;
        let target = &mut bytes[parameter.offset as usize..][..size];
        // SAFETY: `cuda.h` requires the argument to have the parameter's size.
        let argument = unsafe { core::slice::from_raw_parts(argument.cast(), size) };
        target.copy_from_slice(argument);
    }
    function.launch(context, stream, shape, &bytes)
}

/// Returns the shape of a launch and the list of its attributes, in order. Attributes that affect
/// the shape are also part of the shape.
fn shape(config: &LaunchConfig) -> Result<(Shape, Vec<Vec<u32>>)> {
    let mut shape = Shape {
        grid: config.grid,
        block: config.block,
        shared_bytes: config.shared_bytes,
        cluster: [0; 3],
        cooperative: false,
    };
    let mut attributes = Vec::new();
    for at in 0..config.count as usize {
        // SAFETY: `at < count`, and `cuda.h` requires an array of `count` attributes.
        let attribute = get(unsafe { config.attributes.add(at) })?;
        // Cluster dimensions (attribute 4) have three words. For every other attribute, only the
        // first word is recorded.
        let words = if attribute.id == 4 { 3 } else { 1 };
        attributes.push([&[attribute.id], &attribute.value[..words]].concat());
        match attribute.id {
            2 => shape.cooperative = attribute.value[0] != 0,
            4 => shape.cluster = [attribute.value[0], attribute.value[1], attribute.value[2]],
            // The fake ignores these attributes: cache windows, policies, programmatic launches,
            // priorities, domains.
            0 | 1 | 3 | 5..=14 => {}
            _ => return Err(Status::InvalidValue),
        }
    }
    Ok((shape, attributes))
}

/// Returns an attribute of a function by its number in `cuda.h`.
fn attribute(function: &Function, number: c_uint) -> Result<u32> {
    Ok(match number {
        0 => function.max_threads(),
        1 => function.entry.shared_bytes,
        2 | 3 | 7 | 10..=14 => 0,
        4 => function.registers,
        5 => function.target,
        6 => settings().capability,
        8 => function.max_dynamic.load(Ordering::Relaxed),
        9 => u32::MAX,
        _ => return Err(Status::InvalidValue),
    })
}

fn occupancy(out: *mut c_int, function: usize, threads: c_int, dynamic: usize) -> Result<()> {
    let (_, function) = with(&FUNCTIONS, function)?;
    let threads = u32::try_from(threads).or(Err(Status::InvalidValue))?;
    let dynamic = u32::try_from(dynamic).or(Err(Status::InvalidValue))?;
    put(out, function.occupancy(threads, dynamic)? as c_int)
}

/// Returns the function that a handle identifies, for calls that need no current context.
fn alive(function: usize) -> Result<Arc<Function>> {
    crate::core::context::ready()?;
    FUNCTIONS.get(function).ok_or(Status::InvalidHandle)
}

export! {
    fn cuModuleLoadDataEx(
        out: *mut usize,
        image: *const c_void,
        count: c_uint,
        options: *mut c_uint,
        values: *mut *mut c_void,
    ) {
        load(out, image, count, options, values)
    }

    fn cuModuleLoadData(out: *mut usize, image: *const c_void) {
        load(out, image, 0, core::ptr::null(), core::ptr::null_mut())
    }

    fn cuModuleUnload(module: usize) {
        current()?;
        capture::potentially_unsafe()?;
        kernel::unload(module)
    }

    fn cuModuleGetFunction(out: *mut usize, module: usize, name: *const c_char) {
        let (_, module) = with(&MODULES, module)?;
        if out.is_null() || name.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: `name` is not null (checked above), and `cuda.h` requires a C string.
        let name = unsafe { CStr::from_ptr(name) };
        put(out, module.function(name.to_str().or(Err(Status::NotFound))?)?)
    }

    fn cuModuleGetFunctionCount(count: *mut c_uint, module: usize) {
        let (_, module) = with(&MODULES, module)?;
        put(count, module.names().count() as c_uint)
    }

    fn cuModuleEnumerateFunctions(outs: *mut usize, count: c_uint, module: usize) {
        let (_, module) = with(&MODULES, module)?;
        for (at, name) in module.names().take(count as usize).enumerate() {
            let function = module.function(name)?;
            // SAFETY: `take` keeps `at` below `count`, and `cuda.h` requires an array of `count`
            // elements.
            put(unsafe { outs.add(at) }, function)?;
        }
        Ok(())
    }

    fn cuFuncLoad(function: usize) {
        current()?;
        alive(function).map(drop)
    }

    fn cuFuncGetModule(out: *mut usize, function: usize) {
        put(out, alive(function)?.module)
    }

    fn cuFuncGetAttribute(out: *mut c_int, number: c_uint, function: usize) {
        put(out, attribute(&*alive(function)?, number)? as c_int)
    }

    fn cuFuncSetAttribute(function: usize, number: c_uint, value: c_int) {
        let function = alive(function)?;
        match number {
            8 => {
                let most = SHARED_MOST.saturating_sub(function.entry.shared_bytes);
                let value = u32::try_from(value).ok().filter(|value| *value <= most);
                function.max_dynamic.store(value.ok_or(Status::InvalidValue)?, Ordering::Relaxed);
                Ok(())
            }
            9 | 14 => Ok(()),
            _ => Err(Status::InvalidValue),
        }
    }

    fn cuFuncGetParamInfo(function: usize, index: usize, offset: *mut usize, size: *mut usize) {
        let function = alive(function)?;
        let parameter = function.entry.params.get(index).ok_or(Status::InvalidValue)?;
        put(offset, parameter.offset as usize)?;
        super::put_if(size, parameter.size as usize);
        Ok(())
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        out: *mut c_int,
        function: usize,
        threads: c_int,
        dynamic: usize,
    ) {
        occupancy(out, function, threads, dynamic)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        out: *mut c_int,
        function: usize,
        threads: c_int,
        dynamic: usize,
        _flags: c_uint,
    ) {
        occupancy(out, function, threads, dynamic)
    }

    fn cuLaunchKernel(
        function: usize,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: usize,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let context = current()?;
        let shape = Shape {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            cluster: [0; 3],
            cooperative: false,
        };
        launch(&context, function, &shape, Vec::new(), stream, [arguments, extra])
    }

    fn cuLaunchCooperativeKernel(
        function: usize,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: usize,
        arguments: *mut *mut c_void,
    ) {
        let context = current()?;
        let shape = Shape {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            cluster: [0; 3],
            cooperative: true,
        };
        let attributes = vec![vec![2, 1]];
        launch(&context, function, &shape, attributes, stream, [arguments, core::ptr::null_mut()])
    }

    fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: usize,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let context = current()?;
        let config = get(config)?;
        let (shape, attributes) = shape(&config)?;
        launch(&context, function, &shape, attributes, config.stream, [arguments, extra])
    }
}
