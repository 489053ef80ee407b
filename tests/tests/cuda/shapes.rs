//! Tests the shapes and attributes of user launches: those that must reach the driver, and those
//! that the library must refuse.

use fusewire::{
    Communicator, DType, Device, Error, LaunchAttributes, ReduceOp, Result, Tensor, Work,
    run_threads_on,
};
use fusewire_kernels::quantize::{QUANTIZE, QuantizeParams};
use fusewire_tests::device::{run_threads, tensor};
use fusewire_tests::fake::Fake;
use fusewire_tests::seeded_bugs::{LANES, SeededBug};
use serde_json::{Value, json};

use crate::{on_fake, options};

const COUNT: usize = 1000;

/// A launch of several blocks that rounds values to bf16. bf16 represents these values exactly.
struct Rounding {
    source: Tensor,
    target: Tensor,
}

impl Rounding {
    fn new(device: Device) -> Result<Self> {
        let source = Tensor::on_device(device, DType::F32, COUNT)?;
        source.copy_from(&values())?;
        let target = Tensor::on_device(device, DType::Bf16, COUNT)?;
        Ok(Self { source, target })
    }

    fn launch(&self, comm: &Communicator, attributes: LaunchAttributes) -> Result<Work> {
        let params = QuantizeParams {
            source: self.source.as_ptr().cast(),
            target: self.target.as_ptr().cast(),
            count: COUNT as u64,
            seed: 1,
        };
        let tensors = [&self.source, &self.target];
        // SAFETY: both tensors have `COUNT` elements, and the kernel accesses no other memory.
        unsafe { comm.launch_raw(&QUANTIZE, params, &tensors, attributes) }
    }

    /// Checks the target, then poisons it.
    fn check(&self, what: &str) -> Result<()> {
        let got = self.target.to_bytes()?;
        let expected: Vec<u8> = values()
            .iter()
            .flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes())
            .collect();
        assert_eq!(got, expected, "{what}");
        self.target.copy_from_bytes(&vec![0xff; COUNT * 2])
    }
}

fn values() -> Vec<f32> {
    (0..COUNT).map(|i| (i % 200) as f32 - 99.0).collect()
}

/// Returns launch attributes, each with the attributes that the driver must receive (number in
/// `cuda.h` and value).
fn asked() -> Vec<(LaunchAttributes, Value)> {
    let none = LaunchAttributes::default();
    let shaped = LaunchAttributes {
        blocks: 8,
        threads: 64,
        shared_bytes: 1024,
        ..none
    };
    vec![
        (none, json!([])),
        (shaped, json!([])),
        (
            LaunchAttributes {
                cluster: 4,
                ..shaped
            },
            json!([[4, 4, 1, 1]]),
        ),
        (
            LaunchAttributes {
                cooperative: true,
                ..shaped
            },
            json!([[2, 1]]),
        ),
        (
            LaunchAttributes {
                dependent: true,
                ..shaped
            },
            json!([[6, 1]]),
        ),
        (
            LaunchAttributes {
                blocks: 6,
                threads: 0,
                shared_bytes: 100_000,
                cluster: 2,
                cooperative: true,
                dependent: true,
            },
            json!([[4, 2, 1, 1], [2, 1], [6, 1]]),
        ),
    ]
}

/// Returns the launches that the fake has recorded after the first `before` launches.
fn seen(fake: &Fake, before: usize) -> Vec<Value> {
    let all: Value = serde_json::from_str(&fake.launches(c"quantize")).expect("JSON");
    all.as_array().expect("a list")[before..].to_vec()
}

fn expected(attributes: &LaunchAttributes, list: &Value, captured: bool) -> Value {
    let or = |value: u32, own: u32| if value == 0 { own } else { value };
    json!({
        "grid": [or(attributes.blocks, 1), 1, 1],
        "block": [or(attributes.threads, 512), 1, 1],
        "shared_bytes": attributes.shared_bytes,
        "attributes": list,
        "captured": captured,
        "code": 0,
    })
}

#[test]
fn attributes_arrive_as_they_were_given() {
    on_fake("shapes::attributes_arrive_as_they_were_given", &[], || {
        let fake = Fake::open().expect("the fake");
        for result in run_threads(1, &options(), |comm| {
            let rounding = Rounding::new(fusewire_tests::device())?;
            for (attributes, list) in asked() {
                let before = seen(&fake, 0).len();
                rounding.launch(&comm, attributes)?.wait_blocking()?;
                rounding.check("eager")?;
                let stream = comm.stream();
                stream.begin_capture()?;
                let captured = rounding.launch(&comm, attributes);
                let graph = stream.end_capture()?.instantiate()?;
                captured?;
                let wanted = [false, true].map(|it| expected(&attributes, &list, it));
                assert_eq!(seen(&fake, before), wanted, "{attributes:?}");
                for _ in 0..2 {
                    graph.run(stream)?;
                    rounding.check("replayed")?;
                }
                // A replay is not recorded as a launch.
                assert_eq!(seen(&fake, before).len(), 2);
            }
            Ok(())
        }) {
            result.expect("one rank");
        }
    });
}

/// Checks that every shape is refused with its message before any driver call, both eagerly and in
/// a capture. Correct launches must work afterwards.
fn refused(shapes: &[(LaunchAttributes, &str)]) {
    let fake = Fake::open().expect("the fake");
    let launches = || fake.calls(c"cuLaunchKernel") + fake.calls(c"cuLaunchKernelEx");
    for result in run_threads(1, &options(), |comm| {
        let rounding = Rounding::new(fusewire_tests::device())?;
        for (attributes, says) in shapes {
            let is_refused = |result: Result<Work>| {
                let error = result.expect_err(says);
                let text = error.to_string();
                assert!(matches!(error, Error::Launch { .. }), "{text}");
                assert!(text.contains(says) && text.contains("quantize"), "{text}");
            };
            let before = launches();
            is_refused(rounding.launch(&comm, *attributes));
            comm.stream().begin_capture()?;
            is_refused(rounding.launch(&comm, *attributes));
            let graph = comm.stream().end_capture()?;
            assert!(graph.is_empty());
            assert_eq!(launches(), before, "{says}");
            let x = tensor(DType::F32, 10)?;
            comm.all_reduce(&x, ReduceOp::Sum)?;
            rounding
                .launch(&comm, LaunchAttributes::default())?
                .wait_blocking()?;
            rounding.check(says)?;
        }
        Ok(())
    }) {
        result.expect("one rank");
    }
}

#[test]
fn shapes_that_exceed_the_device_are_refused() {
    let test = "shapes::shapes_that_exceed_the_device_are_refused";
    let small = [("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", "2")];
    on_fake(test, &small, || {
        let own = LaunchAttributes::default();
        refused(&[
            (
                LaunchAttributes {
                    blocks: 8,
                    cluster: 3,
                    ..own
                },
                "8 blocks cannot be put into clusters of 3",
            ),
            (
                LaunchAttributes { cluster: 2, ..own },
                "1 blocks cannot be put into clusters of 2",
            ),
            (
                LaunchAttributes {
                    blocks: 16,
                    cluster: 16,
                    ..own
                },
                "clusters of 16 blocks, 8 at most",
            ),
            (
                LaunchAttributes {
                    blocks: 9,
                    threads: 512,
                    cooperative: true,
                    ..own
                },
                "a cooperative launch of 9 blocks of 512 threads, where 8 are resident together",
            ),
            (
                LaunchAttributes {
                    shared_bytes: 300_000,
                    ..own
                },
                "300000 bytes of dynamic shared memory",
            ),
            (
                LaunchAttributes {
                    threads: 2048,
                    ..own
                },
                "1 blocks of 2048 threads",
            ),
        ]);
    });
}

#[test]
fn a_gpu_before_hopper_has_no_clusters_and_launches_nothing_early() {
    let test = "shapes::a_gpu_before_hopper_has_no_clusters_and_launches_nothing_early";
    on_fake(test, &[("FUSEWIRE_CUDA_FAKE_SM", "80")], || {
        let own = LaunchAttributes {
            blocks: 4,
            ..LaunchAttributes::default()
        };
        let cluster = LaunchAttributes { cluster: 2, ..own };
        refused(&[(cluster, "which there are on NVIDIA GPUs from sm_90 on")]);
        a_dependent_launch_is_an_ordinary_one(own);
    });
}

/// Checks a driver that loads only PTX for sm_80. Its kernels do not wait for the previous kernel.
#[test]
fn kernels_without_a_wait_for_the_previous_kernel_do_not_start_early() {
    let test = "shapes::kernels_without_a_wait_for_the_previous_kernel_do_not_start_early";
    on_fake(test, &[("FUSEWIRE_CUDA_FAKE_DRIVER", "12010")], || {
        a_dependent_launch_is_an_ordinary_one(LaunchAttributes {
            blocks: 4,
            ..LaunchAttributes::default()
        });
    });
}

fn a_dependent_launch_is_an_ordinary_one(own: LaunchAttributes) {
    let fake = Fake::open().expect("the fake");
    for result in run_threads(1, &options(), |comm| {
        let rounding = Rounding::new(fusewire_tests::device())?;
        let before = seen(&fake, 0).len();
        let dependent = LaunchAttributes {
            dependent: true,
            ..own
        };
        rounding.launch(&comm, dependent)?.wait_blocking()?;
        rounding.check("an ordinary launch")?;
        assert_eq!(
            seen(&fake, before),
            [expected(&dependent, &json!([]), false)]
        );
        Ok(())
    }) {
        result.expect("one rank");
    }
}

#[test]
fn the_cpu_takes_blocks_checks_clusters_and_ignores_the_rest() {
    for result in run_threads_on(Device::Cpu, "fusewire", 1, &options(), |comm| {
        let rounding = Rounding::new(Device::Cpu)?;
        for (attributes, _) in asked() {
            rounding.launch(&comm, attributes)?.wait_blocking()?;
            rounding.check("eager")?;
            comm.stream().begin_capture()?;
            let captured = rounding.launch(&comm, attributes);
            let graph = comm.stream().end_capture()?.instantiate()?;
            captured?;
            graph.run(comm.stream())?;
            rounding.check("replayed")?;
        }
        for (blocks, cluster) in [(8, 3), (16, 16)] {
            let attributes = LaunchAttributes {
                blocks,
                cluster,
                ..LaunchAttributes::default()
            };
            let refused = rounding.launch(&comm, attributes).expect_err("a cluster");
            assert!(matches!(refused, Error::Launch { .. }), "{refused}");
        }
        Ok(())
    }) {
        result.expect("one rank");
    }
}

#[test]
fn seeded_bugs_are_launched_as_a_block_of_two_warps() {
    let test = "shapes::seeded_bugs_are_launched_as_a_block_of_two_warps";
    on_fake(test, &[], || {
        let fake = Fake::open().expect("the fake");
        for bug in [
            SeededBug::Race { ordered: false },
            SeededBug::Divergence { limit: LANES / 2 },
        ] {
            assert!(bug.is_wrong());
            bug.run();
        }
        for kernel in [c"seeded_race", c"seeded_divergence"] {
            let launches: Value = serde_json::from_str(&fake.launches(kernel)).expect("JSON");
            assert_eq!(launches.as_array().expect("a list").len(), 1, "{kernel:?}");
            assert_eq!(launches[0]["grid"], json!([1, 1, 1]));
            assert_eq!(launches[0]["block"], json!([LANES, 1, 1]));
            assert_eq!(launches[0]["code"], 0);
        }
    });
}
