//! Compares dispatch and combine with the reference, bit for bit: the conformance list on threads,
//! processes and a network, and the fp8 codes of all values.

use core::time::Duration;

use fusewire::{Bf16, Communicator, Element, F16, MissingRanks, MoePayload, MoeScales};
use fusewire_tests::moe::{
    GROUP, Inputs, LAYOUTS, MoeCase, Routing, check_dispatched, expected, list, payload, rounds,
    run, settings,
};
use fusewire_tests::process::Host;
use fusewire_tests::rng::Rng;
use fusewire_tests::runner::{Processes, Setup};
use fusewire_tests::skip::full;

use super::{Layer, all, formats, launches_separately, modes, run_cases, two_groups};

/// Returns every `step`-th case of the list, or all cases in a full run.
fn sample(ranks: u32, step: usize) -> Vec<MoeCase> {
    let step = if full() { 1 } else { step };
    list(ranks).into_iter().step_by(step).collect()
}

#[test]
fn every_number_of_ranks() {
    for ranks in 1..=8 {
        let cases = sample(ranks, if ranks <= 4 { 1 } else { 5 });
        run_cases(Setup::new(ranks), &cases, 4);
    }
}

#[test]
fn sixteen_ranks() {
    let setup = Setup::new(16);
    let mut cases = sample(16, 13);
    cases.extend(rounds(16).into_iter().step_by(5));
    run_cases(setup, &cases, 3);
}

#[test]
fn high_throughput() {
    for (ranks, blocks, step) in [(1, 1, 3), (2, 1, 1), (3, 3, 1), (4, 2, 3), (8, 1, 7)] {
        let setup = Setup {
            blocks,
            ..Setup::new(ranks)
        };
        let cases = sample(ranks, step).into_iter().enumerate();
        let cases: Vec<MoeCase> = cases
            .filter(|(_, case)| !case.is_staged())
            .map(|(i, case)| case.staged([1, 2, 5, 16, 200][i % 5]))
            .collect();
        run_cases(setup, &cases, 3);
        run_cases(setup, &rounds(ranks), 4);
    }
}

#[test]
fn blocking_operations() {
    let blocking = |case| MoeCase {
        blocking: true,
        ..case
    };
    for (ranks, blocks) in [(1, 1), (2, 1), (3, 2)] {
        let setup = Setup {
            blocks,
            ..Setup::new(ranks)
        };
        let mut cases = modes(&two_groups());
        cases.extend(formats(&MoeCase {
            halves: true,
            missing_ranks: MissingRanks::Mask,
            ..two_groups()
        }));
        let cases: Vec<MoeCase> = cases.into_iter().map(blocking).collect();
        run_cases(setup, &cases, 4);
    }
}

#[test]
fn several_blocks() {
    let setup = Setup {
        blocks: 3,
        ..Setup::new(3)
    };
    run_cases(setup, &sample(3, 1), 3);
    // The layer may have fewer blocks than the communicator.
    for (of_comm, blocks) in [(3, 1), (3, 2), (5, 5)] {
        let setup = Setup {
            blocks: of_comm,
            ..Setup::new(2)
        };
        let mut cases = formats(&two_groups());
        cases.iter_mut().for_each(|case| case.blocks = blocks);
        run_cases(setup, &cases, 3);
    }
}

#[test]
fn lanes_as_threads() {
    let shapes = [
        (1, 32, 0, 1),
        (2, 32, 8, 1),
        (3, 32, 0, 2),
        (2, 64, 16, 1),
        (2, 64, 32, 2),
        (2, 64, 64, 1),
    ];
    for (ranks, lanes, warp, blocks) in shapes {
        let setup = Setup {
            lanes,
            warp,
            blocks,
            ..Setup::new(ranks)
        };
        let mut cases = formats(&MoeCase {
            routing: Routing::Masked,
            ..two_groups()
        });
        // More tokens and experts than lanes, and fewer elements than lanes have vectors.
        cases.extend(
            settings(ranks)
                .into_iter()
                .skip(ranks as usize % 3)
                .step_by(3),
        );
        cases.extend(LAYOUTS.map(|layout| MoeCase {
            layout,
            routing: Routing::Skewed,
            ..MoeCase::new(70, 2, 8, 67)
        }));
        run_cases(setup, &cases, 2);
        if full() {
            run_cases(setup, &list(ranks), 2);
        }
    }
}

#[test]
fn ranks_on_a_network() {
    for (ranks, team, blocks, lanes, step) in [
        (2, 1, 1, 1, 3),
        (3, 1, 1, 1, 5),
        (4, 2, 1, 1, 5),
        (2, 1, 3, 1, 7),
        (2, 1, 1, 32, 31),
    ] {
        let setup = Setup {
            team,
            blocks,
            lanes,
            ..Setup::new(ranks)
        };
        // Ranks on a network cannot be masked.
        let mut cases = sample(ranks, step);
        cases.retain(|case| case.missing_ranks == MissingRanks::Fail);
        run_cases(setup, &cases, 3);
    }
}

#[test]
fn ranks_as_processes() {
    let run_rank = |comm: Communicator| -> Result<String, String> {
        for case in list(comm.size()).iter().step_by(4) {
            run(&comm, case, 4)?;
        }
        Ok("done".to_owned())
    };
    if Processes::child_of_each(|comm, _| run_rank(comm)) {
        return;
    }
    if !launches_separately("ranks of a multi-rank grid are threads") {
        return;
    }
    for (host, ranks, blocks) in [(Host::Parent, 2, 1), (Host::RankZero, 3, 2)] {
        let processes = Processes {
            test: "conformance::ranks_as_processes",
            host,
        };
        let setup = Setup {
            blocks,
            ..Setup::new(ranks)
        };
        let timeout = Duration::from_secs(120);
        if let Err(wrong) = processes.each(&setup, "", timeout) {
            panic!("{setup:?}: {wrong}");
        }
    }
}

/// Every setting gives the bits of the reference, so all settings give equal bits.
#[test]
fn results_do_not_depend_on_blocks_lanes_layout_and_ranks() {
    let case = MoeCase {
        routing: Routing::Distinct,
        uneven: false,
        ..two_groups()
    };
    for ranks in [1, 2, 3] {
        for (blocks, lanes) in [(1, 1), (2, 1), (4, 1), (1, 32), (2, 32)] {
            let setup = Setup {
                blocks,
                lanes,
                ..Setup::new(ranks)
            };
            run_cases(setup, &formats(&case), 2);
        }
    }
}

#[test]
fn ranks_without_tokens() {
    let mut cases = Vec::new();
    for routing in [Routing::Empty, Routing::SomeEmpty] {
        for halves in [false, true] {
            cases.extend(formats(&MoeCase {
                routing,
                halves,
                ..two_groups()
            }));
        }
    }
    for blocks in [1, 3] {
        let setup = Setup {
            blocks,
            ..Setup::new(3)
        };
        run_cases(setup, &cases, 3);
    }
}

/// Dispatches `tokens` on one rank and compares all codes and scales with the reference.
fn quantize<T: Element>(tokens: &[T], case: &MoeCase) {
    let mut bytes = Vec::new();
    for value in tokens {
        bytes.extend_from_slice(&value.to_bits().to_le_bytes()[..T::DTYPE.size()]);
    }
    let tokens = tokens.len() / case.hidden;
    let mut rows = expected(case, 1, 0, 0);
    assert_eq!(rows.rows.len(), tokens);
    let row_bytes = case.hidden * T::DTYPE.size();
    for row in &mut rows.rows {
        row.payload = payload(case, &bytes[row.token * row_bytes..][..row_bytes]);
    }
    all(Setup::new(1), |comm| {
        let layer = Layer::new(comm, case)?;
        let inputs = Inputs {
            x: bytes.clone(),
            ..layer.inputs(0)
        };
        let it = layer.buffers.write(case, &inputs)?;
        let dispatched = layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
        comm.synchronize()?;
        check_dispatched(case, layer.moe.info(), &dispatched, &rows, false)
            .map_err(|wrong| format!("{case:?}: {wrong}"))?;
        layer.moe.free()?;
        Ok(())
    });
}

/// Quantizes `values` in all formats. The number of values is a multiple of [`GROUP`].
fn quantize_all<T: Element>(values: &[T]) {
    for layout in LAYOUTS {
        for scales in [MoeScales::F32, MoeScales::Ue8m0] {
            let case = MoeCase {
                input: T::DTYPE,
                payload: MoePayload::Fp8(scales),
                layout,
                ..MoeCase::new(1, 1, GROUP, values.len() / GROUP)
            };
            quantize(values, &case);
        }
    }
}

/// Returns all words of 16 bits twice: adjacent words in a group, and one word of every 512.
fn all_words() -> impl Iterator<Item = u16> {
    let strided = (0..512u16).flat_map(|group| (0..GROUP as u16).map(move |i| i * 512 + group));
    (0..=u16::MAX).chain(strided)
}

/// Returns groups whose greatest value is `greatest`, so that all groups have the same scale. The
/// other elements are the values of `words` that are not greater.
fn with_greatest<T: Element<Acc = f32>>(greatest: f32, words: impl Iterator<Item = T>) -> Vec<T> {
    let fits: Vec<T> = words
        .filter(|word| word.widen().abs() <= greatest)
        .collect();
    let mut values = Vec::new();
    for chunk in fits.chunks(GROUP - 1) {
        values.extend_from_slice(chunk);
        values.resize(values.len().next_multiple_of(GROUP), T::narrow(greatest));
    }
    values
}

#[test]
fn all_bf16_values_have_the_fp8_codes_of_the_reference() {
    let words: Vec<Bf16> = all_words().map(Bf16).collect();
    quantize_all(&words);
    // With a scale of 1, and with a scale that is not a power of two.
    for greatest in [448.0, 3.0, 1e-5] {
        quantize_all(&with_greatest(greatest, (0..=u16::MAX).map(Bf16)));
    }
}

#[test]
fn all_f16_values_have_the_fp8_codes_of_the_reference() {
    let words: Vec<F16> = all_words().map(F16).collect();
    quantize_all(&words);
    for greatest in [448.0, 3.0, 65504.0] {
        quantize_all(&with_greatest(greatest, (0..=u16::MAX).map(F16)));
    }
}

#[test]
fn f32_values_have_the_fp8_codes_of_the_reference() {
    let mut rng = Rng::new(0xf8);
    let count = 256 * GROUP;
    // All bit patterns, most of them with other exponents than the greatest value of the group.
    let patterns: Vec<f32> = (0..count)
        .map(|_| f32::from_bits(rng.bits() as u32))
        .collect();
    quantize_all(&patterns);
    // Values of similar exponents, and values halfway between two codes or next to such values.
    let mut values: Vec<f32> = (0..count)
        .map(|_| f32::from_bits((rng.bits() as u32 & 0x83ff_ffff) | 0x3c00_0000))
        .collect();
    for code in 1..=0x7e_u32 {
        let step = |bits: u32| f32::from_bits(bits);
        // Normal codes of E4M3 are the upper bits of an f32 with another exponent bias.
        let halfway = ((code << 20) | 1 << 19) + (120 << 23);
        values.extend([step(halfway - 1), step(halfway), -step(halfway + 1)]);
    }
    values.resize(values.len().next_multiple_of(GROUP - 1), -0.0);
    let halves: Vec<f32> = values[count..].to_vec();
    values.truncate(count);
    quantize_all(&values);
    quantize_all(&with_greatest(448.0, halves.into_iter()));
}
