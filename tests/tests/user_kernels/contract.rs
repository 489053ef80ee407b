//! A launch that the kernel does not take is refused before anything runs.

use fusewire::{DType, Error, LaunchAttributes, Result, WindowOptions};
use fusewire_device::{Aborted, Element, Group, In, Machine, Out, Session, Window, kernel};

use super::{all, options, tensor, zeros};

#[kernel(blocks = 2, signals = 3, block = 128)]
fn demanding(
    s: &mut Session<impl Machine>,
    window: Window<f32>,
    x: In<f32>,
) -> Result<(), Aborted> {
    let _ = (window, x);
    s.barrier()
}

#[kernel(shared = 40_000)]
fn hungry(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
    s.barrier()
}

/// An instance for each pair of types; `each` names them in another order than the function.
#[kernel(each(B: wide = u64), each(A: narrow = u8))]
fn pairs<A: Element, B: Element>(
    s: &mut Session<impl Machine>,
    x: In<A>,
    y: Out<B>,
) -> Result<(), Aborted> {
    for i in s.block().elements(x.len()) {
        y.set(i, B::from_bits(x.get(i).to_bits()));
    }
    Ok(())
}

/// Takes the parameters of `pairs`, but is not safe.
#[kernel(params = PairsParams)]
unsafe fn raw_pairs(s: &mut Session<impl Machine>, x: In<u8>, y: Out<u64>) -> Result<(), Aborted> {
    let _ = (x, y);
    s.barrier()
}

#[test]
fn an_instance_takes_the_types_that_its_contract_names() {
    all((1, 1, 1), |comm| {
        let (x, y) = (tensor(&[1u8, 2, 250])?, zeros(DType::U64, 3)?);
        let good = Pairs {
            kernel: PAIRS_NARROW_WIDE,
            x: (&x).into(),
            y: (&y).into(),
        };
        comm.kernel(good).launch()?;
        assert_eq!(y.to_vec::<u64>()?, [1, 2, 250]);
        let swapped = Pairs {
            x: (&y).into(),
            y: (&x).into(),
            ..good
        };
        refused(
            comm.kernel(swapped).launch(),
            "argument x: elements of u64; the kernel takes u8",
        );
        let raw = Pairs {
            kernel: RAW_PAIRS,
            ..good
        };
        refused(comm.kernel(raw).launch(), "raw_pairs: an unsafe function");
        // SAFETY: the kernel touches no memory of the arguments.
        unsafe { comm.kernel(raw).launch_unchecked() }
    });
}

/// Writes the number of blocks of the launch, once for each block.
#[kernel]
fn count_blocks(s: &mut Session<impl Machine>, blocks: Out<u32>) -> Result<(), Aborted> {
    if s.block().is_leader() {
        blocks.set(s.block().index() as usize, s.block().count());
    }
    Ok(())
}

fn refused(result: Result<()>, text: &str) {
    match result {
        Err(error @ Error::InvalidArgument { .. }) => {
            let message = error.to_string();
            assert!(message.contains(text), "{message} lacks {text}");
        }
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn what_the_contract_forbids_is_refused() {
    all((1, 2, 1), |comm| {
        let mut window_options = WindowOptions::default();
        window_options.signals = Some(3);
        let window = comm.alloc_window(DType::F32, 10, window_options)?;
        let x = tensor(&[1.0f32])?;
        let good = Demanding {
            window: (&window).into(),
            x: (&x).into(),
        };
        comm.kernel(good).launch()?;
        comm.kernel(good).blocks(2).launch()?;

        let launch = |blocks| comm.kernel(good).blocks(blocks).launch();
        refused(launch(1), "demanding: 1 blocks; the kernel needs exactly 2");
        refused(
            launch(3),
            "this communicator allows at most 2 (Options::blocks is 2",
        );
        refused(launch(200), "200 blocks, but this communicator allows");
        let attributes = LaunchAttributes {
            threads: 64,
            ..LaunchAttributes::default()
        };
        let threads = comm.kernel(good).attributes(attributes).launch();
        refused(threads, "64 threads a block; the kernel needs exactly 128");
        let attributes = LaunchAttributes {
            threads: 48,
            ..LaunchAttributes::default()
        };
        let threads = comm.kernel(good).attributes(attributes).launch();
        refused(
            threads,
            "48 threads a block; blocks have a multiple of 64 threads",
        );
        let attributes = LaunchAttributes {
            dependent: true,
            ..LaunchAttributes::default()
        };
        let dependent = comm.kernel(good).attributes(attributes).launch();
        refused(dependent, "declare it with #[kernel(dependent)]");
        refused(
            comm.kernel(Hungry {}).launch(),
            "hungry: needs 40000 bytes of shared memory; a block has ",
        );

        let words = tensor(&[1u64])?;
        refused(
            comm.kernel(Demanding {
                x: (&words).into(),
                ..good
            })
            .launch(),
            "demanding: argument x: elements of u64; the kernel takes f32",
        );
        let of_words = comm.alloc_window(DType::U64, 4, window_options)?;
        let with = |window| Demanding {
            window,
            x: (&x).into(),
        };
        refused(
            comm.kernel(with((&of_words).into())).launch(),
            "argument window: elements of u64; the kernel takes f32",
        );
        window_options.signals = Some(2);
        let few = comm.alloc_window(DType::F32, 10, window_options)?;
        refused(
            comm.kernel(with((&few).into())).launch(),
            "a window with 2 signals; the kernel needs 3: set WindowOptions::signals to 3",
        );
        let other = comm.dup()?;
        refused(
            other.kernel(good).launch(),
            "demanding: a window of another communicator",
        );
        let clone = few.clone();
        few.free()?;
        let freed = Demanding {
            window: (&clone).into(),
            x: (&x).into(),
        };
        let freed = comm.kernel(freed).launch();
        assert!(freed.is_err(), "{freed:?}");

        // Nothing of this was a failure of the communicator.
        comm.kernel(good).launch()?;
        comm.barrier()
    });
}

#[test]
fn a_launch_may_have_fewer_blocks_than_the_communicator() {
    all((2, 4, 1), |comm| {
        for blocks in [1u32, 3, 4] {
            let counts = zeros(DType::U32, 4)?;
            let launch = comm.kernel(CountBlocks {
                blocks: (&counts).into(),
            });
            launch.blocks(blocks).launch()?;
            let mut expected = [0; 4];
            expected[..blocks as usize].fill(blocks);
            assert_eq!(counts.to_vec::<u32>()?, expected);
            comm.barrier()?;
        }
        Ok(())
    });
    assert_eq!(options(4, 1).blocks, 4);
}
