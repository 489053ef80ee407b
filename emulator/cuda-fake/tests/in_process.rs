//! Replaces the driver of this process, and runs the library's compiled kernels on emulated GPUs.

use fusewire::{Communicator, DType, Device, Options, ReduceOp, Result, run_threads_each};
use fusewire_cuda_fake::{Settings, install, launch_count, take_faults, trips};

const RANKS: u32 = 3;
/// Number of elements. Not a multiple of the ranks, the blocks, or the elements of an access.
const COUNT: usize = 1001;

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.devices = RANKS;
    settings.trips = true;
    settings
}

/// Returns element `index` of the input of `rank`. Whole numbers, so that every sum is exact.
fn number(rank: u32, index: usize) -> f32 {
    (rank * 1000) as f32 + index as f32
}

/// Reduces by a call and by two replays of a graph.
fn reduce(comm: &Communicator) -> Result<()> {
    let x = comm.tensor(DType::F32, COUNT)?;
    let numbers: Vec<f32> = (0..COUNT).map(|i| number(comm.rank(), i)).collect();
    let sum = |i| (0..RANKS).map(|rank| number(rank, i)).sum();
    let sums: Vec<f32> = (0..COUNT).map(sum).collect();
    x.copy_from(&numbers)?;
    comm.all_reduce(&x, ReduceOp::Sum)?;
    assert_eq!(x.to_vec::<f32>()?, sums);
    let stream = comm.stream();
    stream.begin_capture()?;
    comm.all_reduce_async(&x, ReduceOp::Sum)?;
    let graph = stream.end_capture()?.instantiate()?;
    for _ in 0..2 {
        x.copy_from(&numbers)?;
        graph.run(stream)?;
        stream.synchronize()?;
        assert_eq!(x.to_vec::<f32>()?, sums);
    }
    Ok(())
}

#[test]
fn kernels_of_the_library_run_on_emulated_gpus() -> Result<()> {
    install(&settings())?;
    let mut options = Options::default();
    options.blocks = 2;
    options.threads = 64;
    for result in run_threads_each(Device::Cuda, "fusewire", RANKS, &options, |comm| {
        reduce(&comm)
    }) {
        result?;
    }
    let faults = take_faults();
    assert!(faults.is_empty(), "{faults:?}");
    let kernel = "all_reduce_packet_f32_sum";
    // Each rank has launched the kernel by a call, and has captured it.
    assert_eq!(launch_count(kernel), u64::from(2 * RANKS));
    let trips = trips(kernel);
    assert_eq!(
        trips.keys().copied().collect::<Vec<_>>(),
        (0..RANKS).collect::<Vec<_>>()
    );
    for trips in trips.values() {
        assert!(trips.steps.strong > 0 && trips.leader_instructions > 100);
    }
    Ok(())
}

#[test]
fn tests_of_a_program_share_the_gpus() -> Result<()> {
    install(&settings())?;
    install(&settings())?;
    let mut others = settings();
    others.devices += 1;
    let error = install(&others).unwrap_err().to_string();
    assert!(
        error.contains("fusewire_cuda_fake::install: this process has already installed the fake"),
        "{error}"
    );
    Ok(())
}
