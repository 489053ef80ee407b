//! Call options: every operation with hints and timeouts.

use core::time::Duration;

use fusewire::{CallOptions, DType, Operation, ReduceOp, Result};

use super::{Grid, Mode, warnings};
use crate::cases::{Case, operations};

const GROUP: &str = "options of calls";

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    grid.doing = "options".to_owned();
    let long = Duration::from_secs(50);
    let all = [
        CallOptions::new().timeout(long),
        CallOptions::new().timeout(Duration::ZERO),
        CallOptions::new().hint("algorithm", "signal"),
        CallOptions::new()
            .timeout(long)
            .hint("made_up", "1")
            .hint("algorithm", "auto"),
    ];
    let plain = grid.comm.clone();
    for options in &all {
        let unknown = options.hints.contains_key("made_up");
        let (comm, warned) = warnings::of(|| plain.with_options(options));
        let is_warned = warned
            .iter()
            .any(|line| line.contains("unknown hint \"made_up\""));
        grid.check(
            GROUP,
            is_warned == unknown,
            &format!("{options:?} warned {warned:?}"),
        );
        grid.comm = comm?;
        for operation in operations() {
            if operation == Operation::AllReduceNorm {
                continue; // The fused norm has no safe async form and needs other tensor shapes.
            }
            let reduction = operation.reduces().then_some(ReduceOp::Sum);
            let case = Case {
                count: 100,
                ..Case::new(operation, DType::F32, reduction)
            };
            for mode in [Mode::Sync, Mode::Async, Mode::Graph] {
                if !grid.is_short() || mode == Mode::Sync {
                    grid.run(GROUP, &case, mode)?;
                }
            }
        }
        grid.comm = plain.clone();
    }
    let wrong = CallOptions::new().hint("algorithm", "made_up");
    grid.check(
        GROUP,
        plain.with_options(&wrong).is_err(),
        "a wrong value of a hint was accepted",
    );
    grid.comm.set_timeout(long);
    let case = Case {
        count: 10,
        ..Case::new(Operation::AllReduce, DType::F32, Some(ReduceOp::Sum))
    };
    grid.run(GROUP, &case, Mode::Sync)?;
    grid.check(
        GROUP,
        plain.timeout() == long,
        "set_timeout did not reach a clone",
    );
    grid.comm.set_timeout(Duration::ZERO);
    grid.comm = plain;
    Ok(())
}
