//! Tests NVLink switches on a machine without a GPU: multicast objects, and domains with ranks of
//! several hosts. The executing fake of the driver supports switches and domains.

mod cells;
mod domains;
mod emulated;
mod multicast;

use core::time::Duration;

use fusewire::{Communicator, DType, Op, Options, ReduceOp, ReductionCode, Result, Tensor};
use fusewire_tests::process::{report, role, start};

const TEST_TIMEOUT: Duration = Duration::from_secs(240);

/// A folder with the installed fake, for child processes.
struct Driver(tempfile::TempDir);

impl Driver {
    fn install() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fusewire_cuda_fake_library::install(folder.path()).expect("the fake, built with this test");
        Self(folder)
    }

    /// Returns the environment of a process that uses the fake, extended by `more`.
    fn environment<'a>(&self, device: &str, more: &[(&'a str, &str)]) -> Vec<(&'a str, String)> {
        let mut all = vec![
            ("LD_LIBRARY_PATH", self.0.path().display().to_string()),
            ("FUSEWIRE_TEST_DEVICE", device.to_owned()),
        ];
        all.extend(
            more.iter()
                .map(|(name, value)| (*name, (*value).to_owned())),
        );
        all
    }
}

/// Runs `body` in a child process on the fake, with a separate device per rank. `test` is the name
/// of the calling test.
fn on_fake(test: &str, more: &[(&str, &str)], body: impl FnOnce()) {
    if role().as_deref() == Some("fake") {
        body();
        report("done");
        return;
    }
    let driver = Driver::install();
    let environment: Vec<_> = driver
        .environment("cuda:each", more)
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    let mut child = start(test, "fake", &environment);
    let said = child.next_report(TEST_TIMEOUT);
    assert_eq!(said.as_deref(), Ok("done"), "{test}");
    child
        .succeed(TEST_TIMEOUT)
        .expect("success after its report");
}

/// Returns options that permit any order of reduction, so multicast is allowed.
fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    options.determinism = fusewire::Determinism::Any;
    options.blocks = 2;
    options.testing.spins = Some(200);
    options.abort_process_on_timeout_or_error = Some(false);
    options
}

/// Returns the planned algorithm of a large sum.
fn algorithm(comm: &Communicator) -> Result<fusewire::Algorithm> {
    let op = Op::AllReduce {
        count: 1 << 20,
        dtype: DType::F32,
        reduction: ReductionCode::Sum,
    };
    Ok(comm.plan(&op)?.algorithm)
}

/// Runs an all_reduce on `tensor`, whose type is f32, with integral values, and checks the result.
fn sum(comm: &Communicator, tensor: &Tensor) -> Result<()> {
    let (rank, size) = (comm.rank() as usize, comm.size() as usize);
    let own: Vec<f32> = (0..tensor.len())
        .map(|i| ((i + rank) % 97) as f32)
        .collect();
    let must: Vec<f32> = (0..tensor.len())
        .map(|i| (0..size).map(|rank| ((i + rank) % 97) as f32).sum())
        .collect();
    tensor.copy_from(&own)?;
    comm.all_reduce(tensor, ReduceOp::Sum)?;
    assert!(tensor.to_vec::<f32>()? == must, "a sum of {}", tensor.len());
    Ok(())
}
