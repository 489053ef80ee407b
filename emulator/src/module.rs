//! Modules: PTX text with its kernels and variables.

use core::fmt;
use core::sync::atomic::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use crate::decode::decode;
use crate::error::{Error, Result};
use crate::memory::Range;
use crate::program::{FUNCTION_BASE, Program};
use crate::ptx::{FunctionText, Initializer, Source, shared_bytes};

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelParam {
    /// Name in the PTX text.
    pub name: String,
    /// Offset in bytes from the start of the parameters.
    pub offset: u32,
    /// Size in bytes.
    pub size: u32,
}

/// The declaration of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of the kernel.
    pub name: String,
    /// Parameters in their order.
    pub params: Vec<KernelParam>,
    /// Maximum number of threads of a block (`.maxntid`, `.reqntid`), or 0.
    pub max_threads: u32,
    /// Size of the static variables in shared memory that the kernel uses, in bytes.
    pub shared_bytes: u32,
}

impl Entry {
    /// Returns the size of all parameters in bytes.
    pub fn param_bytes(&self) -> usize {
        self.params
            .last()
            .map_or(0, |it| (it.offset + it.size) as usize)
    }
}

/// A module: PTX text. Its kernels are decoded when they are first used.
pub struct Module {
    source: Source,
    entries: Vec<Entry>,
    programs: Mutex<HashMap<String, Arc<Program>>>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Module");
        debug
            .field("entries", &self.entries)
            .finish_non_exhaustive()
    }
}

impl Module {
    /// Reads the declarations of PTX text. The bodies of kernels are decoded when the kernels are
    /// launched for the first time; [`Module::decode_all`] decodes them at once.
    ///
    /// # Errors
    /// Fails at the first declaration that is not PTX or is not supported, with its line.
    pub fn parse(text: &str) -> Result<Self> {
        let source = Source::parse(text)?;
        let entries = source
            .declarations
            .functions
            .iter()
            .filter(|it| it.is_entry);
        Ok(Self {
            entries: entries
                .map(|function| entry(function, &source))
                .collect::<Result<_>>()?,
            source,
            programs: Mutex::default(),
        })
    }

    /// Decodes all kernels.
    ///
    /// # Errors
    /// Fails at the first instruction that the emulator does not support, with its name and line.
    pub fn decode_all(&self) -> Result<()> {
        let mut entries = self.entries.iter();
        entries.try_for_each(|entry| self.program(&entry.name).map(drop))
    }

    /// Returns the declarations of all kernels, in the order of the text.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the declaration of a kernel.
    pub fn entry(&self, kernel: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == kernel)
    }

    /// Returns the PTX version times ten.
    pub fn version(&self) -> u32 {
        self.source.declarations.version
    }

    /// Returns the target of the module: 90 for `sm_90` and `sm_90a`.
    pub fn target(&self) -> u32 {
        self.source.declarations.target
    }

    /// Returns true if the module runs only on its target, such as `sm_90a`.
    pub fn is_exact(&self) -> bool {
        self.source.declarations.exact
    }

    /// Returns the names of the external functions.
    pub fn external_functions(&self) -> impl Iterator<Item = &str> {
        let functions = self.source.declarations.functions.iter();
        functions
            .filter(|it| it.is_external)
            .map(|function| function.name.as_str())
    }

    /// Returns the lines that threads have executed since the module was parsed, of a kernel and of
    /// the functions that it calls: their numbers and texts.
    pub fn executed(&self, kernel: &str) -> Vec<(u32, String)> {
        let programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(program) = programs.get(kernel) else {
            return Vec::new();
        };
        let executed = program.code.iter().zip(&program.executed);
        let lines: BTreeSet<u32> = executed
            .filter(|(_, executed)| executed.load(Ordering::Relaxed))
            .map(|(inst, _)| inst.line)
            .collect();
        let texts: Vec<&str> = program.text.lines().collect();
        let text = |line: &u32| texts.get(line.saturating_sub(1) as usize).copied();
        lines
            .iter()
            .map(|line| (*line, text(line).unwrap_or("").trim().to_owned()))
            .collect()
    }

    pub(crate) fn program(&self, kernel: &str) -> Result<Arc<Program>> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = programs.get(kernel) {
            return Ok(Arc::clone(program));
        }
        let program = Arc::new(decode(&self.source, kernel)?);
        programs.insert(kernel.to_owned(), Arc::clone(&program));
        Ok(program)
    }
}

fn entry(function: &FunctionText, source: &Source) -> Result<Entry> {
    let (range, _) = function.body.clone().unwrap_or_default();
    let body = &source.text[range];
    let used = source
        .declarations
        .shared
        .iter()
        .filter(|it| body.contains(&it.name));
    Ok(Entry {
        name: function.name.clone(),
        params: function
            .params
            .iter()
            .map(|it| KernelParam {
                name: it.name.clone(),
                offset: it.offset,
                size: it.size,
            })
            .collect(),
        max_threads: function.max_threads,
        shared_bytes: used.map(|it| it.bytes).sum::<u32>() + shared_bytes(body)?,
    })
}

/// A module that is loaded on a device: it has variables of its own.
#[derive(Debug)]
pub struct LoadedModule {
    module: Arc<Module>,
    device: u32,
    /// Memory of the variables, in 8-byte words. Kernels write it through raw pointers.
    storage: Vec<Box<[core::cell::UnsafeCell<u64>]>>,
}

// SAFETY: only kernels access the words, with atomic operations, after the constructor.
unsafe impl Send for LoadedModule {}
// SAFETY: see `Send`.
unsafe impl Sync for LoadedModule {}

impl LoadedModule {
    /// Loads a module on a device: allocates and initialises its variables.
    ///
    /// # Errors
    /// Fails if an initial value is the address of a function or of an unknown variable.
    pub fn new(module: &Arc<Module>, device: u32) -> Result<Self> {
        let variables = &module.source.declarations.globals;
        let mut loaded = Self {
            module: Arc::clone(module),
            device,
            storage: variables
                .iter()
                .map(|variable| {
                    // With room for an alignment of 16 bytes and more.
                    let words = variable.bytes.div_ceil(8) + variable.align.div_ceil(8);
                    (0..words).map(|_| core::cell::UnsafeCell::new(0)).collect()
                })
                .collect(),
        };
        for (at, variable) in variables.iter().enumerate() {
            let mut bytes = Vec::with_capacity(variable.bytes as usize);
            for value in &variable.initial {
                let value = match value {
                    Initializer::Integer(value) => *value,
                    Initializer::Float(bits) if variable.element == 4 => {
                        u64::from((f64::from_bits(*bits) as f32).to_bits())
                    }
                    Initializer::Float(bits) => *bits,
                    Initializer::Address(name, offset, _) => {
                        let functions = &module.source.declarations.functions;
                        let start = if let Some(found) =
                            variables.iter().position(|it| it.name == *name)
                        {
                            loaded.address(found)
                        } else if let Some(found) = functions.iter().position(|it| it.name == *name)
                        {
                            FUNCTION_BASE + found as u64
                        } else {
                            return Err(Error::syntax(
                                variable.line,
                                format!(
                                    "the initial value of {} is the address of {name}, which is \
                                     not a variable or function",
                                    variable.name
                                ),
                            ));
                        };
                        start.wrapping_add_signed(*offset)
                    }
                };
                bytes.extend_from_slice(&value.to_le_bytes()[..variable.element as usize]);
            }
            let skip = (loaded.address(at) - loaded.storage[at].as_ptr() as u64) as usize;
            for (offset, byte) in bytes.into_iter().enumerate() {
                let position = skip + offset;
                let word = loaded.storage[at][position / 8].get_mut();
                *word |= u64::from(byte) << (position % 8 * 8);
            }
        }
        Ok(loaded)
    }

    /// Returns the module.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// Returns the address of a variable by its number.
    pub(crate) fn address(&self, variable: usize) -> u64 {
        let align = u64::from(self.module.source.declarations.globals[variable].align);
        (self.storage[variable].as_ptr() as u64).next_multiple_of(align)
    }

    /// Returns the ranges of the variables.
    pub(crate) fn ranges(&self) -> Vec<Range> {
        let variables = self.module.source.declarations.globals.iter().enumerate();
        let range = |(at, variable): (usize, &crate::ptx::Variable)| Range {
            start: self.address(at),
            end: self.address(at) + u64::from(variable.bytes),
            read: true,
            write: true,
            multicast: false,
            owner: Some(self.device),
            memory: self.address(at) & !7,
            offset: self.address(at) & 7,
        };
        variables.map(range).collect()
    }
}
