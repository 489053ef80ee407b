//! Decoded kernels.

use core::sync::atomic::AtomicBool;
use std::sync::Arc;

use crate::error::Site;
use crate::float::{Arith, Format, Modifiers};
use crate::row::{AluFn, Row};

/// A destination register.
pub(crate) type Reg = u32;

/// The destination of a result that is discarded.
pub(crate) const NO_REG: Reg = u32::MAX;

/// A source operand: a register or a constant of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Src(pub(crate) u32);

impl Src {
    const CONSTANT: u32 = 1 << 31;

    pub(crate) fn register(register: Reg) -> Self {
        Self(register)
    }

    pub(crate) fn constant(index: usize) -> Self {
        Self(index as u32 | Self::CONSTANT)
    }

    pub(crate) fn as_register(self) -> Option<Reg> {
        (self.0 & Self::CONSTANT == 0).then_some(self.0)
    }

    pub(crate) fn as_constant(self) -> Option<usize> {
        (self.0 & Self::CONSTANT != 0).then_some((self.0 & !Self::CONSTANT) as usize)
    }
}

/// A state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    /// Parameters of the kernel.
    Param,
    /// Parameters and return values in the frame of a function.
    Frame,
}

/// The order of a memory operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Weak,
    /// `.nc`: a weak load of memory that no thread writes during the launch.
    Constant,
    Volatile,
    Relaxed,
    Acquire,
    Release,
    AcqRel,
}

impl Order {
    /// Returns true for orders other than weak ones.
    pub(crate) fn is_strong(self) -> bool {
        !matches!(self, Self::Weak | Self::Constant)
    }
}

/// The scope of a strong operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    Cta,
    Gpu,
    Sys,
}

/// Extension of a loaded value to the width of its register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extend {
    Zero,
    /// Sign extension to this number of bits.
    Sign(u8),
}

/// Properties of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) order: Order,
    pub(crate) scope: Scope,
    /// Size of an element in bytes.
    pub(crate) size: u8,
    /// Number of elements.
    pub(crate) count: u8,
    pub(crate) extend: Extend,
}

/// A read-modify-write function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Atomic {
    Exchange,
    CompareSwap,
    Add,
    And,
    Or,
    Xor,
    Inc,
    Dec,
    Min,
    Max,
    MinSigned,
    MaxSigned,
    /// Floating-point addition, minimum or maximum; `true` for two packed elements.
    Float(Arith, Format, bool),
}

/// The element type and reduction of a `multimem` instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MultimemType {
    pub(crate) reduction: Atomic,
    /// Format of the sums: f32 with `.acc::f32`.
    pub(crate) accumulator: Option<Format>,
}

/// A fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FenceKind {
    Scoped {
        scope: Scope,
        acquire: bool,
        release: bool,
        sequential: bool,
    },
    /// `fence.proxy.alias`.
    Proxy,
}

/// A barrier instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    Sync,
    Arrive,
    RedAnd,
    RedOr,
    RedPopc,
}

impl BarrierKind {
    /// Returns true if the barrier reduces predicates.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::RedAnd | Self::RedOr | Self::RedPopc)
    }
}

/// A `vote` instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uni,
    Ballot,
}

/// A `shfl` instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// An instruction that the lanes of a mask execute together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Together {
    Shuffle {
        kind: Shuffle,
        /// Destination of the predicate.
        valid: Reg,
        lane: Src,
        clamp: Src,
    },
    Vote(Vote),
    Reduce(Atomic),
    MatchAny,
    MatchAll {
        valid: Reg,
    },
    Elect {
        leader: Reg,
    },
    Sync,
}

/// A special register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    WarpCount,
    SmId,
    SmCount,
    GridId,
    MaskEq,
    MaskLe,
    MaskLt,
    MaskGe,
    MaskGt,
    Clock,
    ClockHigh,
    Clock64,
    Timer,
    TimerHigh,
    Timer64,
    DynamicShared,
    TotalShared,
    ActiveMask,
}

/// A function call.
#[derive(Clone, Debug)]
pub(crate) struct CallSite {
    /// Index of the called function in [`Program::functions`]. `None`: the instruction has its
    /// address.
    pub(crate) callee: Option<u32>,
    /// Offsets and sizes of the arguments and results in the frame of the caller.
    pub(crate) arguments: Vec<(u32, u32)>,
    pub(crate) results: Vec<(u32, u32)>,
}

/// An operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Alu {
        f: AluFn,
        d: Reg,
        s: [Src; 3],
    },
    Float {
        op: Arith,
        format: Format,
        /// True for two packed elements.
        packed: bool,
        modifiers: Modifiers,
        d: Reg,
        s: [Src; 3],
    },
    Convert {
        conversion: Conversion,
        d: Reg,
        s: [Src; 2],
    },
    /// Sets a predicate if a floating-point value has a property; index in [`crate::alu::TESTP`].
    Testp {
        kind: u8,
        format: Format,
        d: Reg,
        s: Src,
    },
    Special {
        register: Special,
        d: Reg,
    },
    /// Address of a variable of the module plus an offset.
    Variable {
        variable: u32,
        offset: i64,
        d: Reg,
    },
    /// Address in local memory of an offset in the frame.
    FrameAddress {
        offset: u32,
        d: Reg,
    },
    Branch {
        target: u32,
    },
    /// Branch to an element of [`Program::tables`].
    BranchIndex {
        index: Src,
        table: u32,
    },
    /// Call of an element of [`Program::calls`].
    Call {
        site: u32,
        address: Src,
    },
    Return,
    Exit,
    Trap,
    Nop,
    Load {
        access: Access,
        d: [Reg; 4],
        base: Src,
        offset: i64,
    },
    Store {
        access: Access,
        s: [Src; 4],
        base: Src,
        offset: i64,
    },
    Atomic {
        access: Access,
        atomic: Atomic,
        d: Reg,
        base: Src,
        offset: i64,
        s: [Src; 2],
    },
    /// `multimem.ld_reduce`.
    MultimemLoad {
        access: Access,
        kind: MultimemType,
        d: [Reg; 4],
        base: Src,
        offset: i64,
    },
    /// `multimem.st`, or `multimem.red` with a reduction.
    MultimemStore {
        access: Access,
        kind: Option<MultimemType>,
        s: [Src; 4],
        base: Src,
        offset: i64,
    },
    Together {
        op: Together,
        d: Reg,
        a: Src,
        mask: Src,
        /// Inverts the predicate of a vote.
        negate: bool,
    },
    Barrier {
        kind: BarrierKind,
        /// True if all lanes of a warp must execute the instruction together.
        aligned: bool,
        id: Src,
        /// Number of threads, or `None` for all threads of the block.
        count: Option<Src>,
        d: Reg,
        a: Src,
        negate: bool,
    },
    Fence(FenceKind),
    Nanosleep {
        duration: Src,
    },
}

/// A conversion.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Conversion {
    /// Between floating-point formats. With `Some(true)`, two sources are packed; with
    /// `Some(false)`, the source holds two packed values.
    Float(Format, Format, Modifiers, Option<bool>),
    /// Rounding to an integral value of the same format.
    Integral(Format, Modifiers),
    /// From floating point to an integer: width, true if signed.
    ToInteger(Format, u8, bool, Modifiers),
    /// From an integer to floating point.
    FromInteger(u8, bool, Format, Modifiers),
}

/// The guard of an instruction: the instruction has no effect in lanes whose predicate differs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub(crate) predicate: Reg,
    pub(crate) negated: bool,
}

/// An instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inst {
    pub(crate) op: Op,
    pub(crate) guard: Option<Guard>,
    /// Line of the PTX text.
    pub(crate) line: u32,
    /// Index + 1 in [`Program::locations`], or 0.
    pub(crate) location: u32,
}

/// The use of a register by an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Use,
    Define,
}

impl Inst {
    /// Calls `f` for each register of the instruction: uses first, then definitions. `f` may
    /// replace the register.
    pub(crate) fn registers(&mut self, mut f: impl FnMut(&mut Reg, Role)) {
        let mut f = |register: &mut Reg, role| {
            if *register != NO_REG {
                f(register, role);
            }
        };
        if let Some(guard) = &mut self.guard {
            f(&mut guard.predicate, Role::Use);
        }
        let mut source = |source: &mut Src| {
            if let Some(mut register) = source.as_register() {
                f(&mut register, Role::Use);
                *source = Src::register(register);
            }
        };
        match &mut self.op {
            Op::Alu { s, .. } | Op::Float { s, .. } => s.iter_mut().for_each(&mut source),
            Op::Convert { s, .. } => s.iter_mut().for_each(&mut source),
            Op::Testp { s, .. } => source(s),
            Op::BranchIndex { index: it, .. } | Op::Call { address: it, .. } => source(it),
            Op::Load { base, .. } | Op::MultimemLoad { base, .. } => source(base),
            Op::Store { s, base, .. } | Op::MultimemStore { s, base, .. } => {
                s.iter_mut().for_each(&mut source);
                source(base);
            }
            Op::Atomic { s, base, .. } => {
                s.iter_mut().for_each(&mut source);
                source(base);
            }
            Op::Together { op, a, mask, .. } => {
                source(a);
                source(mask);
                if let Together::Shuffle { lane, clamp, .. } = op {
                    source(lane);
                    source(clamp);
                }
            }
            Op::Barrier { id, count, a, .. } => {
                source(id);
                source(a);
                if let Some(count) = count {
                    source(count);
                }
            }
            Op::Nanosleep { duration } => source(duration),
            Op::Special { .. }
            | Op::Variable { .. }
            | Op::FrameAddress { .. }
            | Op::Branch { .. }
            | Op::Return
            | Op::Exit
            | Op::Trap
            | Op::Nop
            | Op::Fence(_) => {}
        }
        match &mut self.op {
            Op::Alu { d, .. }
            | Op::Float { d, .. }
            | Op::Convert { d, .. }
            | Op::Testp { d, .. }
            | Op::Special { d, .. }
            | Op::Variable { d, .. }
            | Op::FrameAddress { d, .. }
            | Op::Atomic { d, .. }
            | Op::Barrier { d, .. } => f(d, Role::Define),
            Op::Load { d, .. } | Op::MultimemLoad { d, .. } => {
                d.iter_mut().for_each(|d| f(d, Role::Define));
            }
            Op::Together { op, d, .. } => {
                f(d, Role::Define);
                match op {
                    Together::Shuffle { valid, .. } | Together::MatchAll { valid } => {
                        f(valid, Role::Define);
                    }
                    Together::Elect { leader } => f(leader, Role::Define),
                    _ => {}
                }
            }
            _ => {}
        }
    }
}

/// A function of a program.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Number of the function in the module. Its address is [`FUNCTION_BASE`] plus the number.
    pub(crate) number: u32,
    /// Index of the first instruction.
    pub(crate) start: u32,
    /// Number of register rows.
    pub(crate) rows: u32,
    /// Size of the frame in local memory: parameters, return values and local variables.
    pub(crate) frame: u32,
    /// Offsets in the frame of the parameters and return values.
    pub(crate) parameters: Vec<u32>,
    pub(crate) returns: Vec<u32>,
}

/// A decoded kernel, with the functions that it calls.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) name: String,
    /// Size of the static shared memory in bytes.
    pub(crate) shared_bytes: u32,
    /// The kernel is the first function.
    pub(crate) functions: Vec<Function>,
    pub(crate) code: Vec<Inst>,
    /// True for each instruction that a thread has executed.
    pub(crate) executed: Vec<AtomicBool>,
    pub(crate) constants: Vec<Row>,
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) calls: Vec<CallSite>,
    /// Source file and line, from the line table.
    pub(crate) locations: Vec<(u32, u32)>,
    pub(crate) files: Arc<Vec<(u64, String)>>,
    /// Text of the module, for messages.
    pub(crate) text: Arc<str>,
}

impl Program {
    /// Returns the text of a PTX line without indentation.
    pub(crate) fn line_text(&self, line: u32) -> String {
        let text = self.text.lines().nth(line.saturating_sub(1) as usize);
        text.unwrap_or("").trim().to_owned()
    }

    /// Describes an instruction and a thread that executes it.
    pub(crate) fn site(&self, inst: &Inst, device: u32, block: u64, thread: u32) -> Site {
        Site {
            kernel: self.name.clone(),
            device,
            block: block as u32,
            thread,
            line: inst.line,
            instruction: self.line_text(inst.line),
            source: self.source(inst),
        }
    }

    /// Returns the source file and line of an instruction.
    pub(crate) fn source(&self, inst: &Inst) -> Option<String> {
        let (file, line) = self
            .locations
            .get((inst.location as usize).checked_sub(1)?)?;
        let (_, name) = self.files.iter().find(|(it, _)| *it == u64::from(*file))?;
        Some(format!("{name}:{line}"))
    }
}

/// Base of the generic addresses of shared memory. No process has memory there.
pub(crate) const SHARED_BASE: u64 = 0x00f1_0000_0000_0000;
/// Base of the generic addresses of local memory.
pub(crate) const LOCAL_BASE: u64 = 0x00f2_0000_0000_0000;
/// Base of the generic addresses of kernel parameters.
pub(crate) const PARAM_BASE: u64 = 0x00f3_0000_0000_0000;
/// Base of the addresses of functions.
pub(crate) const FUNCTION_BASE: u64 = 0x00f4_0000_0000_0000;

/// Returns the base of the generic addresses of a state space.
pub(crate) fn base(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED_BASE,
        Space::Local | Space::Frame => LOCAL_BASE,
        Space::Param => PARAM_BASE,
        Space::Generic | Space::Global => 0,
    }
}

/// Returns the state space of a generic address, and the address in this space.
pub(crate) fn resolve(address: u64) -> (Space, u64) {
    match address & 0xffff_0000_0000_0000 {
        SHARED_BASE => (Space::Shared, address - SHARED_BASE),
        LOCAL_BASE => (Space::Local, address - LOCAL_BASE),
        PARAM_BASE => (Space::Param, address - PARAM_BASE),
        _ => (Space::Global, address),
    }
}
