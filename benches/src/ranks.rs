//! One rank of a measurement. `versus` starts this program once per rank.

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use fusewire::{Algorithm, Communicator, DType, Device, Options, ReduceOp, Tensor};

use crate::measure::{self, Peer, Schedule};
use crate::{bare, machine};

/// Library and memory that a rank measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// Fusewire, with tensors in a window.
    Registered,
    /// Fusewire, with ordinary slices, which it copies through staging.
    Staged,
    /// The bare program.
    Bare,
}

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    kind: Kind,
    #[arg(long)]
    rank: usize,
    #[arg(long)]
    ranks: usize,
    /// Cores. Rank r runs on the core at index r modulo the number of cores.
    #[arg(long, value_delimiter = ',')]
    cores: Vec<usize>,
    /// Leaves the placement of the ranks to the system.
    #[arg(long)]
    unpinned: bool,
    /// Sizes and numbers of calls: BYTES:CALLS,...
    #[arg(long)]
    schedule: Schedule,
    #[arg(long)]
    touch: bool,
    #[arg(long, default_value = "auto")]
    algorithm: Algorithm,
    /// Descriptor of the bare program's shared memory.
    #[arg(long)]
    fd: Option<i32>,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let Arguments { rank, ranks, .. } = *arguments;
    ensure!(!arguments.cores.is_empty(), "no cores");
    if !arguments.unpinned {
        machine::pin(arguments.cores[rank % arguments.cores.len()])?;
    }
    let (schedule, touch) = (&arguments.schedule, arguments.touch);
    if arguments.kind == Kind::Bare {
        let fd = arguments.fd.context("the bare program needs --fd")?;
        let spins = if ranks > arguments.cores.len() {
            50
        } else {
            5000
        };
        let mut peer = bare::Rank::open(fd, rank, ranks, schedule.longest(), spins)?;
        return measure::run(&mut peer, schedule, touch);
    }
    let mut options = Options::default();
    options.timeout = core::time::Duration::from_secs(60);
    options.algorithm = arguments.algorithm;
    let comm = Communicator::from_env(Device::Cpu, options)?;
    let memory = match arguments.kind {
        Kind::Registered => {
            let count = schedule.longest() / 4;
            let input = comm.alloc(DType::F32, count)?;
            let output = comm.alloc(DType::F32, count)?;
            Memory::Registered {
                whole: (input.clone(), output.clone()),
                part: (input, output),
            }
        }
        Kind::Staged => Memory::Slices(Vec::new(), Vec::new()),
        Kind::Bare => bail!("not reached"),
    };
    let mut peer = Fusewire { comm, memory };
    measure::run(&mut peer, schedule, touch)?;
    peer.comm.barrier()?;
    Ok(())
}

struct Fusewire {
    comm: Communicator,
    memory: Memory,
}

enum Memory {
    Registered {
        whole: (Tensor, Tensor),
        part: (Tensor, Tensor),
    },
    Slices(Vec<f32>, Vec<f32>),
}

impl Peer for Fusewire {
    fn rank(&self) -> usize {
        self.comm.rank() as usize
    }

    fn ranks(&self) -> usize {
        self.comm.size() as usize
    }

    fn prepare(&mut self, count: usize) -> Result<()> {
        match &mut self.memory {
            Memory::Registered { whole, part } => {
                *part = (whole.0.slice(0, count)?, whole.1.slice(0, count)?);
            }
            Memory::Slices(input, output) => {
                (*input, *output) = (vec![0.0; count], vec![0.0; count]);
            }
        }
        Ok(())
    }

    fn input(&mut self) -> &mut [f32] {
        match &mut self.memory {
            Memory::Registered { part, .. } => elements(&part.0),
            Memory::Slices(input, _) => input,
        }
    }

    fn output(&mut self) -> &mut [f32] {
        match &mut self.memory {
            Memory::Registered { part, .. } => elements(&part.1),
            Memory::Slices(_, output) => output,
        }
    }

    #[inline]
    fn barrier(&mut self) -> Result<()> {
        Ok(self.comm.barrier()?)
    }

    #[inline]
    fn all_reduce(&mut self) -> Result<()> {
        match &mut self.memory {
            Memory::Registered { part, .. } => {
                self.comm.all_reduce_into(&part.1, &part.0, ReduceOp::Sum)?;
            }
            Memory::Slices(input, output) => {
                let (output, input) = (output.as_mut_slice(), input.as_slice());
                self.comm.all_reduce_into(output, input, ReduceOp::Sum)?;
            }
        }
        Ok(())
    }

    fn total(&mut self, value: u64) -> Result<u64> {
        let mut value = [value];
        self.comm.all_reduce(value.as_mut_slice(), ReduceOp::Sum)?;
        Ok(value[0])
    }
}

/// Returns the elements of a tensor. No operation may access the tensor while the slice exists.
#[allow(clippy::mut_from_ref)] // device memory: the tensor is only a handle
fn elements(tensor: &Tensor) -> &mut [f32] {
    // SAFETY: the tensor is aligned and holds `len` f32. The callers hold `&mut self`, which
    // excludes other slices of the tensor. This rank's calls complete before they return, and other
    // ranks access the memory only during a call on this rank.
    unsafe { core::slice::from_raw_parts_mut(tensor.as_ptr().cast(), tensor.len()) }
}
