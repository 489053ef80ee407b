//! The conformance lists: cases as data, and named lists of cases.

use fusewire::{DType, Op, Operation, ReduceOp};

use crate::skip::full;

/// Kind of memory of a case's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Buffers are in windows on every rank.
    Registered,
    /// Buffers are outside windows on every rank.
    Ordinary,
    /// Buffers are in windows on rank 1 only.
    Mixed,
}

/// Distribution of the lengths that pairs of ranks exchange in an [`Operation::AllToAllV`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Splits {
    /// Different lengths for most pairs, many of them zero.
    Mixed,
    /// The same length for all pairs.
    Uniform,
    /// A different length for each pair, none of them zero.
    Variable,
    /// Every second pair exchanges nothing.
    Zeros,
    /// All lengths are zero.
    AllZero,
    /// The length is proportional to the number of the receiving rank, so rank 0 receives nothing.
    Asymmetric,
}

/// One case: the arguments that are equal on all ranks, and the settings that may differ by rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// The operation. [`Operation::Send`] stands for a ring of sends and receives.
    pub operation: Operation,
    /// Element type.
    pub dtype: DType,
    /// Reduction, if the operation reduces. The factor of [`ReduceOp::PreMulSum`] differs by rank.
    pub reduction: Option<ReduceOp>,
    /// Number of elements of each rank's block, or of the whole buffer if the operation does not
    /// divide its buffers into blocks. For an [`Operation::AllReduceNorm`], the number of rows.
    pub count: usize,
    /// Number of elements of a row of an [`Operation::AllReduceNorm`].
    pub hidden: usize,
    /// Root. Numbers above the last rank wrap around.
    pub root: u32,
    /// True if output and input share memory as the operation's in-place form requires.
    pub in_place: bool,
    /// Kind of memory of the buffers.
    pub memory: Memory,
    /// Number of elements by which the buffers are displaced from their alignment. Each rank
    /// derives a different displacement from this number.
    pub offset: usize,
    /// True if the inputs are chosen so that every reduction order gives bitwise identical results.
    pub exact: bool,
    /// Lengths of an [`Operation::AllToAllV`].
    pub splits: Splits,
}

impl Case {
    /// Creates a registered, aligned, out-of-place case of 1,000 elements.
    pub const fn new(operation: Operation, dtype: DType, reduction: Option<ReduceOp>) -> Self {
        Self {
            operation,
            dtype,
            reduction,
            count: 1000,
            hidden: 0,
            root: 0,
            in_place: false,
            memory: Memory::Registered,
            offset: 0,
            exact: false,
            splits: Splits::Mixed,
        }
    }

    const fn count(self, count: usize) -> Self {
        Self { count, ..self }
    }

    const fn root(self, root: u32) -> Self {
        Self { root, ..self }
    }

    const fn memory(self, memory: Memory) -> Self {
        Self { memory, ..self }
    }

    const fn in_place(self, in_place: bool) -> Self {
        Self { in_place, ..self }
    }

    const fn offset(self, offset: usize) -> Self {
        Self { offset, ..self }
    }

    /// Returns true if the operation has an in-place form.
    pub const fn has_in_place(operation: Operation) -> bool {
        !matches!(
            operation,
            Operation::AllToAllV | Operation::Send | Operation::Barrier
        )
    }
}

/// Returns the operation of `case` with root or peer 0. If the lists have no cases of the
/// operation, returns the path of its tests in `tests/tests`.
///
/// # Panics
/// Panics if the operation reduces and the case has no reduction.
pub fn op_of(case: &Case) -> Result<Op, &'static str> {
    let (count, dtype, hidden) = (case.count, case.dtype, case.hidden);
    let reduction = || case.reduction.expect("a reduction").code();
    let (root, peer, row_bytes, digest) = (0, 0, 0, 0);
    Ok(match case.operation {
        Operation::AllReduce => Op::AllReduce {
            count,
            dtype,
            reduction: reduction(),
        },
        Operation::Reduce => Op::Reduce {
            count,
            dtype,
            reduction: reduction(),
            root,
        },
        Operation::ReduceScatter => Op::ReduceScatter {
            count,
            dtype,
            reduction: reduction(),
        },
        Operation::AllGather => Op::AllGather { count, dtype },
        Operation::AllGatherV => Op::AllGatherV {
            count,
            dtype,
            digest,
        },
        Operation::Broadcast => Op::Broadcast { count, dtype, root },
        Operation::Scatter => Op::Scatter { count, dtype, root },
        Operation::Gather => Op::Gather { count, dtype, root },
        Operation::AllToAll => Op::AllToAll { count, dtype },
        Operation::AllToAllV => Op::AllToAllV { dtype },
        Operation::Send => Op::Send { count, dtype, peer },
        Operation::Barrier => Op::Barrier,
        Operation::AllReduceNorm => Op::AllReduceNorm {
            rows: count,
            hidden,
            dtype,
            row_bytes,
            digest,
        },
        // A case of `Send` also receives.
        Operation::Recv => return Err("conformance.rs"),
        // The other operations need windows, lists of transfers, flags, or other buffers.
        Operation::Put | Operation::Get | Operation::Signal | Operation::WaitSignal => {
            return Err("operations/windows.rs");
        }
        Operation::Batch => return Err("operations/batch.rs"),
        Operation::AllGatherWithFlags | Operation::ReduceScatterOnArrival => {
            return Err("operations/overlap_gemm.rs");
        }
        Operation::ReduceScatterNorm => return Err("operations/norms"),
        Operation::VocabParallel => return Err("operations/vocab.rs"),
        Operation::User => return Err("user_kernels"),
        Operation::None => return Err("calls/hooks.rs"),
    })
}

/// Returns the operations of the lists. Each operation moves or reduces elements of one type.
pub fn operations() -> Vec<Operation> {
    let all = Operation::ALL.iter().copied();
    all.filter(|operation| op_of(&base(*operation)).is_ok())
        .collect()
}

/// Returns the operations of the lists that reduce element by element.
pub fn reducing() -> Vec<Operation> {
    let all = operations().into_iter();
    all.filter(|operation| operation.reduces()).collect()
}

/// All reductions. The factor of a [`ReduceOp::PreMulSum`] differs by rank (see
/// [`crate::oracle::factor`]).
pub const REDUCTIONS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Average,
    ReduceOp::PreMulSum(0.5),
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];

/// All kinds of memory.
pub const MEMORIES: [Memory; 3] = [Memory::Registered, Memory::Ordinary, Memory::Mixed];

/// Element counts: 0, 1, counts below and above one packet line, odd counts, and counts that need
/// many rounds of staging.
pub const COUNTS: [usize; 10] = [0, 1, 7, 63, 129, 1000, 1793, 4097, 9001, 70_001];

/// Returns a case of `operation` with a few elements.
fn base(operation: Operation) -> Case {
    let reduction = operation.reduces().then_some(ReduceOp::Sum);
    let case = Case::new(operation, DType::F32, reduction);
    if operation == Operation::AllReduceNorm {
        return Case {
            count: 3,
            hidden: 200,
            ..case
        };
    }
    case
}

/// Returns a case for each operation, count and kind of memory, in place and out of place, with
/// varying offsets.
pub fn sizes(ranks: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for operation in operations() {
        if operation == Operation::AllReduceNorm || operation == Operation::Barrier {
            cases.push(base(operation));
            continue;
        }
        for (i, count) in COUNTS.into_iter().enumerate() {
            for (j, memory) in MEMORIES.into_iter().enumerate() {
                for in_place in [false, true] {
                    if in_place && !Case::has_in_place(operation) {
                        continue;
                    }
                    // The short list has only one case of the largest count for each operation and
                    // kind of memory.
                    if !full() && count > 9001 && in_place == j.is_multiple_of(2) {
                        continue;
                    }
                    cases.push(
                        base(operation)
                            .count(count)
                            .memory(memory)
                            .in_place(in_place)
                            .offset((i + j) % 3)
                            .root((i + j) as u32 % ranks),
                    );
                }
            }
        }
    }
    cases
}

/// Returns cases of every operation with a few counts, for tests that run many settings.
pub fn core(ranks: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for operation in operations() {
        for (i, count) in [0, 1, 129, 4097].into_iter().enumerate() {
            if matches!(operation, Operation::Barrier | Operation::AllReduceNorm) && i > 0 {
                continue;
            }
            let case = base(operation);
            let case = if case.hidden == 0 {
                case.count(count)
            } else {
                case
            };
            cases.push(
                case.memory(MEMORIES[i % 3])
                    .root(i as u32 % ranks)
                    .offset(i % 2),
            );
            if Case::has_in_place(operation) && i > 0 {
                cases.push(
                    case.memory(MEMORIES[(i + 1) % 3])
                        .root((i as u32 + 1) % ranks)
                        .in_place(true),
                );
            }
        }
    }
    cases
}

/// Returns cases of every type with every reduction that it supports, and of every type with every
/// operation that moves data.
pub fn types(ranks: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for (t, dtype) in DType::ALL.into_iter().enumerate() {
        for (o, operation) in operations().into_iter().enumerate() {
            if matches!(operation, Operation::Barrier | Operation::AllReduceNorm) {
                continue;
            }
            if !operation.reduces() {
                let case = Case::new(operation, dtype, None).count(321);
                let memory = MEMORIES[(t + o) % 3];
                cases.push(case.memory(memory).root(t as u32 % ranks).offset(t % 4));
                continue;
            }
            for (r, op) in REDUCTIONS.into_iter().enumerate() {
                if !op.code().supports(dtype) {
                    continue;
                }
                let case = Case::new(operation, dtype, Some(op));
                let memory = MEMORIES[(t + r) % 3];
                let case = case.memory(memory).root(r as u32 % ranks).offset(r % 4);
                cases.push(case.count(333));
                if operation == Operation::AllReduce || full() {
                    // An in-place case that exceeds the one-shot limit of every type.
                    cases.push(case.count(9001).in_place(true));
                }
            }
        }
    }
    cases
}

/// Returns the cases for tests of multicast: the types and reductions that multicast supports, with
/// many counts and kinds of memory. The list includes counts that do not fill 16 bytes, and memory
/// that is registered on only one rank. Except for f32, the inputs of averages are chosen so that
/// the results are exact, because multicast rounds averages of f16 and bf16 twice.
pub fn nvls(_ranks: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    let operations = [
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
    ];
    let ops = [
        ReduceOp::Sum,
        ReduceOp::Average,
        ReduceOp::Min,
        ReduceOp::Max,
    ];
    let mut next = 0;
    for operation in operations {
        for dtype in [DType::F32, DType::F16, DType::Bf16, DType::U8, DType::F64] {
            let gathers = operation == Operation::AllGather;
            for op in ops {
                if gathers && op != ReduceOp::Sum {
                    continue;
                }
                for count in [0, 1, 63, 64, 1000, 1793, 4104] {
                    for in_place in [false, true] {
                        next += 1;
                        let case = Case::new(operation, dtype, (!gathers).then_some(op));
                        cases.push(Case {
                            count,
                            in_place,
                            // Most cases use registered memory, because multicast only works on
                            // registered memory.
                            memory: MEMORIES[[0, 0, 0, 0, 0, 0, 1, 2][next % 8]],
                            offset: [0, 0, 0, 0, 1, 0, 0, 0, 8][next % 9],
                            exact: op == ReduceOp::Average && dtype != DType::F32,
                            ..case
                        });
                    }
                }
            }
        }
    }
    cases
}

/// Returns cases of the fused norm: types, shapes, kinds of memory, with and without a residual
/// output, in place and out of place.
pub fn norms(_ranks: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for (t, dtype) in [DType::F32, DType::F16, DType::Bf16]
        .into_iter()
        .enumerate()
    {
        let shapes = [
            (0, 64),
            (1, 8),
            (1, 128),
            (2, 24),
            (5, 136),
            (3, 1000),
            (17, 256),
            (4, 4096),
        ];
        for (i, (rows, hidden)) in shapes.into_iter().enumerate() {
            for root in [0, 1] {
                // `root` selects whether the residual is written.
                cases.push(Case {
                    hidden,
                    ..Case::new(Operation::AllReduceNorm, dtype, None)
                        .count(rows)
                        .root(root)
                        .memory(MEMORIES[(i + t) % 3])
                        .in_place((i + t) % 2 == 1)
                        .offset(i % 2)
                });
            }
        }
    }
    cases
}

/// Returns the cases of the list `name` for `ranks` ranks.
///
/// # Panics
/// Panics if no list has this name.
pub fn list(name: &str, ranks: u32) -> Vec<Case> {
    match name {
        "sizes" => sizes(ranks),
        "core" => core(ranks),
        "types" => types(ranks),
        "norms" => norms(ranks),
        "nvls" => nvls(ranks),
        "all" => [sizes(ranks), types(ranks), norms(ranks)].concat(),
        _ => panic!("no list of cases is named {name}"),
    }
}
