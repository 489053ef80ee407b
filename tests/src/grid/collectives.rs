//! Counts, types and reductions of all collectives, in all modes.

use fusewire::{DType, Operation, ReduceOp, Result};

use super::{Breadth, Grid, Mode, REGISTERED};
use crate::cases::{Case, Splits, operations, reducing};
use crate::rank;

/// A large count.
pub(super) const MILLION: usize = 1 << 20;
const TYPES: [DType; 3] = [DType::F32, DType::I32, DType::I8];
const SCALED: [DType; 4] = [DType::F16, DType::F32, DType::F64, DType::Bf16];

/// Returns the reductions for `grid`. If results must be exact, includes the average only if the
/// number of ranks is a power of two.
fn reductions(grid: &Grid) -> Vec<ReduceOp> {
    let mut all = vec![ReduceOp::Sum, ReduceOp::Max];
    if !grid.exact || grid.comm.size().is_power_of_two() {
        all.push(ReduceOp::Average);
    }
    all
}

/// Runs every collective with all counts, types and modes, and the special cases of each operation.
pub(super) fn run(grid: &mut Grid) -> Result<()> {
    for dtype in [DType::U8, DType::Bf16, DType::F16, DType::F64]
        .into_iter()
        .chain(TYPES)
    {
        let window = grid.comm.alloc(dtype, REGISTERED)?;
        grid.registered.insert(dtype, window);
    }
    for operation in operations() {
        // `all_to_all_v` and `norm` run these operations with more shapes.
        if matches!(operation, Operation::AllToAllV | Operation::AllReduceNorm) {
            continue;
        }
        every_count_and_type(grid, operation)?;
        every_mode(grid, operation)?;
        large(grid, operation)?;
    }
    scaled(grid)?;
    norm(grid)
}

fn case_of(operation: Operation, dtype: DType, op: ReduceOp, count: usize) -> Case {
    let reduction = operation.reduces().then_some(op);
    Case {
        count,
        root: count as u32 / 4 + 1,
        ..Case::new(operation, dtype, reduction)
    }
}

fn every_count_and_type(grid: &mut Grid, operation: Operation) -> Result<()> {
    if operation == Operation::Barrier {
        return Ok(());
    }
    let counts: &[usize] = if grid.is_short() {
        &[4, 1024]
    } else {
        &[0, 4, 1024]
    };
    let bool_too = (operation == Operation::AllGather).then_some(DType::U8);
    let all = reductions(grid);
    for &count in counts {
        for dtype in TYPES.into_iter().chain(bool_too) {
            for (at, &op) in all.iter().enumerate() {
                if at > 0 && (!operation.reduces() || grid.is_short()) {
                    break;
                }
                let case = case_of(operation, dtype, op, count);
                grid.run("counts, types, reductions", &case, Mode::Sync)?;
                if !grid.is_short() {
                    grid.run("counts, types, reductions", &case, Mode::Async)?;
                }
            }
        }
    }
    Ok(())
}

fn every_mode(grid: &mut Grid, operation: Operation) -> Result<()> {
    let counts: &[usize] = if grid.is_short() { &[4] } else { &[0, 4, 1024] };
    for &count in counts {
        for mode in Mode::ALL {
            let case = case_of(operation, DType::F32, ReduceOp::Sum, count);
            grid.run("modes", &case, mode)?;
            if matches!(operation, Operation::AllReduce | Operation::Reduce)
                && !matches!(mode, Mode::InputDropped | Mode::GraphInputDropped)
                && !grid.is_short()
            {
                let case = Case {
                    in_place: true,
                    ..case
                };
                grid.run("modes, in place", &case, mode)?;
            }
        }
    }
    Ok(())
}

/// Runs `operation` on a million elements. A full run covers all modes. A regular run covers only
/// f32 sums on few ranks, and a short run skips the operation.
fn large(grid: &mut Grid, operation: Operation) -> Result<()> {
    let group = "a million elements";
    if operation == Operation::Barrier || grid.is_short() {
        return Ok(());
    }
    if grid.breadth == Breadth::Full {
        for dtype in TYPES {
            for op in reductions(grid) {
                if op != ReduceOp::Sum && !operation.reduces() {
                    break;
                }
                let case = case_of(operation, dtype, op, MILLION);
                grid.run(group, &case, Mode::Sync)?;
            }
        }
        let case = case_of(operation, DType::F32, ReduceOp::Sum, MILLION);
        for mode in Mode::ALL {
            grid.run(group, &case, mode)?;
        }
        return Ok(());
    }
    let light = matches!(
        operation,
        Operation::AllReduce | Operation::Broadcast | Operation::Send | Operation::Reduce
    );
    if grid.comm.size() == 2 || light && grid.comm.size() <= 4 {
        let case = case_of(operation, DType::F32, ReduceOp::Sum, MILLION);
        grid.run(group, &case, Mode::Sync)?;
    }
    if grid.comm.size() == 2 && operation == Operation::AllReduce {
        let case = case_of(operation, DType::F32, ReduceOp::Sum, MILLION);
        for mode in [Mode::InputDropped, Mode::Graph, Mode::Graphs] {
            grid.run(group, &case, mode)?;
        }
    }
    Ok(())
}

/// Runs scaled sums with a different factor on each rank.
fn scaled(grid: &mut Grid) -> Result<()> {
    for operation in reducing() {
        for dtype in SCALED {
            for count in [4, 1024] {
                let case = case_of(operation, dtype, ReduceOp::PreMulSum(0.5), count);
                grid.run("scaled sums", &case, Mode::Sync)?;
                if !grid.is_short() {
                    grid.run("scaled sums", &case, Mode::Async)?;
                    grid.run("scaled sums", &case, Mode::Graph)?;
                }
            }
        }
    }
    Ok(())
}

/// Runs the fused norm, which external backends do not have.
fn norm(grid: &mut Grid) -> Result<()> {
    let group = "fused norm";
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for rows in [0, 1, 4] {
            cases.push(Case {
                count: rows,
                hidden: 1024,
                ..Case::new(Operation::AllReduceNorm, dtype, None)
            });
        }
    }
    for mode in [
        rank::CallMode::Blocking,
        rank::CallMode::Async,
        rank::CallMode::Graph,
    ] {
        if grid.comm.backend_impl().is_some() {
            cases.iter().for_each(|_| grid.tally.unsupported(group));
            continue;
        }
        let mut rank = rank::Rank::new(grid.comm.clone(), mode, &cases)?;
        for case in &cases {
            grid.tally.ran(group);
            rank.run(case)?;
        }
        grid.wrong.extend(rank.finish().1);
    }
    Ok(())
}

/// Runs all_to_all_v with a different length for each pair of ranks.
pub(super) fn all_to_all_v(grid: &mut Grid) -> Result<()> {
    let all = [
        Splits::Uniform,
        Splits::Variable,
        Splits::Zeros,
        Splits::AllZero,
        Splits::Asymmetric,
        Splits::Mixed,
    ];
    for splits in all {
        let case = |dtype, count| Case {
            splits,
            count,
            ..Case::new(Operation::AllToAllV, dtype, None)
        };
        for count in [4, 1024] {
            for dtype in TYPES.into_iter().chain([DType::Bf16]) {
                grid.run("all_to_all_v", &case(dtype, count), Mode::Sync)?;
            }
        }
        for mode in Mode::ALL {
            if grid.is_short() && mode != Mode::Graph {
                continue;
            }
            grid.run("all_to_all_v", &case(DType::F32, 1024), mode)?;
        }
    }
    Ok(())
}
