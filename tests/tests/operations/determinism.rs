//! Checks that results are bitwise identical for every algorithm, number of lanes and blocks,
//! replay, instruction set and batch.

use core::time::Duration;

use fusewire::{Algorithm, Communicator, DType, Norm, Options, ReduceOp, Result, Tensor, isa};
use fusewire_tests::device::run_threads;
use fusewire_tests::oracle;
use fusewire_tests::process::{report, role, start};
use fusewire_tests::runner::{ALGORITHMS, Setup};

const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Number of elements: a prime that is small enough for packets with any number of lanes.
const COUNT: usize = 331;

/// Returns the inputs of a rank: ordinary numbers and special numbers.
fn inputs(dtype: DType, rank: u32) -> Vec<u8> {
    let size = dtype.size();
    let mut bytes = oracle::fill(dtype, rank, 77, COUNT);
    let special: &[u64] = match dtype {
        DType::F64 => &[
            0x7ff8_0000_0000_0000,
            0x7ff0_0000_0000_0000,
            0xfff0_0000_0000_0000,
            0x8000_0000_0000_0000,
            0,
            1,
            0x800f_ffff_ffff_ffff,
            0x7fef_ffff_ffff_ffff,
        ],
        DType::F32 => &[
            0x7fc0_0000,
            0x7f80_0000,
            0xff80_0000,
            0x8000_0000,
            0,
            1,
            0x807f_ffff,
            0x7f7f_ffff,
        ],
        DType::F16 => &[0x7e00, 0x7c00, 0xfc00, 0x8000, 0, 1, 0x83ff, 0x7bff],
        DType::Bf16 => &[0x7fc0, 0x7f80, 0xff80, 0x8000, 0, 1, 0x807f, 0x7f7f],
        _ => return bytes,
    };
    for i in 0..64 {
        // The inputs of an even and an odd rank together contain all pairs of special numbers.
        let which = if rank.is_multiple_of(2) { i % 8 } else { i / 8 };
        let at = (100 + i) * size;
        bytes[at..at + size].copy_from_slice(&special[which].to_le_bytes()[..size]);
    }
    bytes
}

fn tensor(comm: &Communicator, dtype: DType, bytes: &[u8]) -> Result<Tensor> {
    let tensor = comm.alloc(dtype, bytes.len() / dtype.size())?;
    write(&tensor, bytes);
    Ok(tensor)
}

fn write(tensor: &Tensor, bytes: &[u8]) {
    tensor.copy_from_bytes(bytes).expect("as many bytes");
}

fn read(tensor: &Tensor) -> Vec<u8> {
    tensor.to_bytes().expect("bytes")
}

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::Bf16];
const OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Average,
    ReduceOp::PreMulSum(0.3),
];

/// Returns, per rank, the concatenated results of all reducing operations for all float types and
/// reductions.
fn everything(setup: &Setup) -> Vec<Vec<u8>> {
    let mut options: Options = setup.options();
    options.packet_slot_bytes = 8192;
    let results = run_threads(setup.ranks, &options, |comm| {
        let mut out = Vec::new();
        for dtype in FLOATS {
            let x = tensor(&comm, dtype, &inputs(dtype, comm.rank()))?;
            let y = comm.alloc(dtype, COUNT)?;
            for op in OPS {
                comm.all_reduce_into(&y, &x, op)?;
                out.extend(read(&y));
                comm.stream().begin_capture()?;
                comm.all_reduce_into_async(&y, &x, op)?;
                let graph = comm.stream().end_capture()?.instantiate()?;
                write(&y, &vec![0; COUNT * dtype.size()]);
                graph.run(comm.stream())?;
                out.extend(read(&y));
            }
        }
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let x = oracle::fill(dtype, comm.rank(), 5, 3 * 776);
            let (x, residual) = (tensor(&comm, dtype, &x)?, tensor(&comm, dtype, &x)?);
            let weight = oracle::fill(dtype, 0, 6, 776);
            let weight = tensor(&comm, dtype, &weight)?;
            let (y, kept) = (comm.alloc(dtype, 3 * 776)?, comm.alloc(dtype, 3 * 776)?);
            write(&residual, &oracle::fill(dtype, 0, 7, 3 * 776));
            let norm = Norm::rms(&y, &x, &weight, 1e-6)
                .with_residual(&residual)
                .with_residual_out(&kept);
            comm.all_reduce_norm(&norm)?;
            out.extend(read(&y));
            out.extend(read(&kept));
        }
        Ok(out)
    });
    results
        .into_iter()
        .map(|result| result.unwrap_or_else(|error| panic!("{setup:?}: {error}")))
        .collect()
}

/// Describes the first difference of two results.
fn difference(a: &[u8], b: &[u8]) -> String {
    let at = a.iter().zip(b).position(|(a, b)| a != b);
    at.map_or("nowhere".to_owned(), |at| {
        let mut start = 0;
        for dtype in FLOATS {
            for op in OPS {
                for how in ["eager", "replayed"] {
                    let bytes = COUNT * dtype.size();
                    if at < start + bytes {
                        let i = (at - start) / dtype.size();
                        let element = start + i * dtype.size()..start + (i + 1) * dtype.size();
                        return format!(
                            "{op:?} of {dtype:?}, {how}, element {i}: {:02x?} and {:02x?}",
                            &a[element.clone()],
                            &b[element]
                        );
                    }
                    start += bytes;
                }
            }
        }
        format!("fused, byte {}", at - start)
    })
}

#[test]
fn every_setting_gives_the_same_bits_on_every_rank() {
    for ranks in [1, 2, 3] {
        let first = everything(&Setup::new(ranks));
        for (rank, other) in first.iter().enumerate() {
            assert!(
                *other == first[0],
                "rank {rank}: {}",
                difference(&first[0], other)
            );
        }
        let base = Setup::new(ranks);
        let mut ways = Vec::new();
        for algorithm in ALGORITHMS {
            ways.push(Setup { algorithm, ..base });
            ways.push(Setup {
                algorithm,
                blocks: 3,
                ..base
            });
            if ranks == 2 {
                let lanes = if algorithm == Algorithm::Signal {
                    64
                } else {
                    32
                };
                ways.push(Setup {
                    algorithm,
                    lanes,
                    ..base
                });
            }
        }
        ways.push(Setup {
            staging: 1 << 20,
            ..base
        });
        for way in ways {
            for (rank, other) in everything(&way).iter().enumerate() {
                let found = difference(&first[0], other);
                assert!(*other == first[0], "rank {rank}, {way:?}: {found}");
            }
        }
    }
}

#[test]
fn special_numbers_equal_the_reference() {
    for result in run_threads(2, &Setup::new(2).options(), |comm| {
        for dtype in FLOATS {
            let all: Vec<Vec<u8>> = (0..2).map(|rank| inputs(dtype, rank)).collect();
            let x = tensor(&comm, dtype, &all[comm.rank() as usize])?;
            let y = comm.alloc(dtype, COUNT)?;
            for op in OPS {
                comm.all_reduce_into(&y, &x, op)?;
                let expected = oracle::reduce(dtype, op, &[0.3, 0.3], &all);
                let size = dtype.size();
                let got = read(&y);
                for (i, (got, expected)) in got.chunks(size).zip(expected.chunks(size)).enumerate()
                {
                    // The bits of a NaN from an addition of f32 or f64 depend on the machine.
                    let nan = is_nan(dtype, got) && is_nan(dtype, expected);
                    assert!(
                        got == expected || nan && size > 2,
                        "{op:?} of {dtype:?}, element {i}: {got:02x?} for {expected:02x?}"
                    );
                }
            }
        }
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    match dtype {
        DType::F64 => f64::from_le_bytes(bytes.try_into().expect("8 bytes")).is_nan(),
        other => oracle::widen(other, bytes)[0].is_nan(),
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let test = "determinism::every_instruction_set_gives_the_same_bits";
    let bits = || {
        let base = Setup::new(2);
        let mut all = Vec::new();
        for algorithm in ALGORITHMS {
            all.extend(everything(&Setup { algorithm, ..base })[0].clone());
        }
        all
    };
    if role().is_some() {
        report(format!("{:?}", isa()));
        for line in bits().chunks(4096) {
            let hex: String = line.iter().map(|byte| format!("{byte:02x}")).collect();
            report(hex);
        }
        report("end");
        return;
    }
    let mut first: Option<(String, Vec<u8>)> = None;
    for name in ["baseline", "avx2", "avx512"] {
        let environment = [("FUSEWIRE_ISA".to_owned(), name.to_owned())];
        let mut child = start(test, "isa", &environment);
        let set = child
            .next_report(TEST_TIMEOUT)
            .expect("its instruction set");
        if !set.eq_ignore_ascii_case(name) {
            fusewire_tests::skip::skip(name, "this machine does not have it");
            continue;
        }
        let mut bytes = Vec::new();
        loop {
            let line = child.next_report(TEST_TIMEOUT).expect("bits");
            if line == "end" {
                break;
            }
            bytes.extend(
                (0..line.len() / 2).map(|i| {
                    u8::from_str_radix(&line[2 * i..2 * i + 2], 16).expect("two hex digits")
                }),
            );
        }
        child.succeed(TEST_TIMEOUT).expect("a clean end");
        match &first {
            None => first = Some((set, bytes)),
            Some((other, expected)) => {
                let found = difference(&expected[..bytes.len() / 3], &bytes[..bytes.len() / 3]);
                assert!(*expected == bytes, "{other} and {set}: {found}");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    const HIDDEN: usize = 1000;
    for blocks in [1, 3] {
        let setup = Setup {
            blocks,
            ..Setup::new(2)
        };
        for result in run_threads(2, &setup.options(), |comm| {
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let size = dtype.size();
                let rows = 13;
                let x = tensor(
                    &comm,
                    dtype,
                    &oracle::fill(dtype, comm.rank(), 1, rows * HIDDEN),
                )?;
                let residual = tensor(&comm, dtype, &oracle::fill(dtype, 0, 2, rows * HIDDEN))?;
                let weight = tensor(&comm, dtype, &oracle::fill(dtype, 0, 3, HIDDEN))?;
                let y = comm.alloc(dtype, rows * HIDDEN)?;
                comm.all_reduce_norm(&Norm::rms(&y, &x, &weight, 1e-6).with_residual(&residual))?;
                let together = read(&y);
                for row in 0..rows {
                    let part = |t: &Tensor| t.slice(row * HIDDEN, HIDDEN);
                    let alone = comm.alloc(dtype, HIDDEN)?;
                    let (x, residual) = (part(&x)?, part(&residual)?);
                    comm.all_reduce_norm(
                        &Norm::rms(&alone, &x, &weight, 1e-6).with_residual(&residual),
                    )?;
                    let bytes = row * HIDDEN * size..(row + 1) * HIDDEN * size;
                    assert!(read(&alone) == together[bytes], "row {row} of {dtype:?}");
                }
            }
            Ok(())
        }) {
            result.expect("both ranks");
        }
    }
}

#[test]
fn the_fused_norm_equals_its_steps() {
    const HIDDEN: usize = 640;
    for result in run_threads(3, &Setup::new(3).options(), |comm| {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let count = 4 * HIDDEN;
            let x = tensor(&comm, dtype, &oracle::fill(dtype, comm.rank(), 4, count))?;
            let residual_bytes = oracle::fill(dtype, 0, 5, count);
            let residual = tensor(&comm, dtype, &residual_bytes)?;
            let weight = tensor(&comm, dtype, &oracle::fill(dtype, 0, 6, HIDDEN))?;
            let (y, kept, summed) = (
                comm.alloc(dtype, count)?,
                comm.alloc(dtype, count)?,
                comm.alloc(dtype, count)?,
            );
            let norm = Norm::rms(&y, &x, &weight, 1e-6)
                .with_residual(&residual)
                .with_residual_out(&kept);
            comm.all_reduce_norm(&norm)?;
            // The unfused steps: all_reduce computes the sum, and the test adds the residual.
            comm.all_reduce_into(&summed, &x, ReduceOp::Sum)?;
            let added: Vec<f32> = oracle::widen(dtype, &read(&summed))
                .iter()
                .zip(oracle::widen(dtype, &residual_bytes))
                .map(|(sum, residual)| sum + residual)
                .collect();
            assert!(read(&kept) == oracle::narrow(dtype, &added), "{dtype:?}");
        }
        Ok(())
    }) {
        result.expect("all ranks");
    }
}
