//! Tests of grids, lanes, launch owners and the floating-point environment.

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;

use fusewire_device::group::cpu::LaneContext;

use super::super::{BlockOrder, CpuStream, Grid, Launch, LaunchInfo, LaunchOwner};
use super::{Params, add, launch, launch_grid, value};
use crate::{Error, Result};

/// Writes each lane's index plus 1 to shared memory. After a barrier, adds the next lane's value,
/// shifted left by 8 bits for each preceding block, to `target`.
unsafe fn rotate(context: *const LaneContext, params: *const u8) {
    // SAFETY: the launch passes this lane's context, and every test passes a `Params`.
    let (context, params) = unsafe { (&*context, *params.cast::<Params>()) };
    // SAFETY: the `BlockShared` lives as long as the block runs.
    let shared = unsafe { &*context.shared };
    let slots = shared.shared().cast::<u64>();
    // SAFETY: each lane writes a different slot, and the slots of 64 lanes take 512 bytes of the 38
    // KiB of shared memory.
    unsafe {
        slots
            .add(context.lane as usize)
            .write(u64::from(context.lane) + 1)
    };
    shared.sync(context.lane);
    let next = (context.lane + 1) % context.lanes;
    // SAFETY: all slots were written before the barrier, and nothing writes them after it.
    let value = unsafe { slots.add(next as usize).read() };
    // SAFETY: the launch keeps `target` alive.
    unsafe { (*params.target).fetch_add(value << (8 * context.block), Ordering::Relaxed) };
}

/// Returns from lane 3 without entering the block barrier.
unsafe fn deserts(context: *const LaneContext, _: *const u8) {
    // SAFETY: the launch passes this lane's context.
    let context = unsafe { &*context };
    if context.lane != 3 {
        // SAFETY: the `BlockShared` lives as long as the block runs.
        unsafe { (*context.shared).sync(context.lane) };
    }
}

/// Waits until all blocks have started, which requires that the blocks run concurrently.
unsafe fn barrier(context: *const LaneContext, params: *const u8) {
    // SAFETY: the launch passes this lane's context, and every test passes a `Params`.
    let (context, params) = unsafe { (&*context, *params.cast::<Params>()) };
    // SAFETY: the launch keeps `target` alive.
    let target = unsafe { &*params.target };
    target.fetch_add(1, Ordering::AcqRel);
    while target.load(Ordering::Acquire) < u64::from(context.blocks) {
        thread::yield_now();
    }
}

#[test]
fn owners_can_refuse_and_report() {
    #[derive(Debug, Default)]
    struct Owner(AtomicBool, AtomicBool);
    impl LaunchOwner for Owner {
        fn before(&self, _info: &LaunchInfo) -> Result<u64> {
            let refuse = self.0.load(Ordering::Relaxed);
            if refuse {
                Err(Error::launch("refused"))
            } else {
                Ok(0)
            }
        }
        fn after(&self, _word: u64, _info: &LaunchInfo, _ran: bool) -> Result<()> {
            let fail = self.1.load(Ordering::Relaxed);
            if fail {
                Err(Error::launch("reported"))
            } else {
                Ok(())
            }
        }
    }
    let (stream, target, owner) = (CpuStream::new(), Arc::default(), Arc::new(Owner::default()));
    let launch = launch(add, &target, 1).owned_by(Arc::clone(&owner) as _, [0; 4]);
    stream.run(&launch).unwrap();
    owner.1.store(true, Ordering::Relaxed);
    assert!(
        stream
            .run(&launch)
            .unwrap_err()
            .to_string()
            .contains("reported")
    );
    owner.0.store(true, Ordering::Relaxed);
    assert!(
        stream
            .run(&launch)
            .unwrap_err()
            .to_string()
            .contains("refused")
    );
    assert_eq!(value(&target), 2);
    stream.synchronize().unwrap();
}

#[test]
fn lanes_are_threads_with_shared_memory() {
    for (lanes, warp) in [
        (1, 0),
        (2, 0),
        (32, 0),
        (64, 0),
        (32, 16),
        (64, 32),
        (64, 8),
    ] {
        let (stream, target) = (CpuStream::new(), Arc::default());
        let grid = Grid {
            blocks: 2,
            lanes,
            warp,
            shared_bytes: 512,
            ..Grid::default()
        };
        let launch = launch_grid(rotate, &target, 0, grid);
        for _ in 0..3 {
            target.store(0, Ordering::Relaxed);
            stream.run(&launch).unwrap();
            let sum = u64::from(lanes) * (u64::from(lanes) + 1) / 2;
            assert_eq!(value(&target), sum + (sum << 8), "{lanes} lanes");
        }
    }
}

#[test]
fn a_lane_that_deserts_is_reported() {
    let (stream, target) = (CpuStream::new(), Arc::default());
    let grid = Grid {
        lanes: 32,
        ..Grid::default()
    };
    let error = stream
        .run(&launch_grid(deserts, &target, 0, grid))
        .unwrap_err();
    assert!(error.to_string().contains("barrier"), "{error}");
}

#[test]
fn concurrent_blocks_meet() {
    let (stream, target) = (CpuStream::new(), Arc::default());
    let grid = Grid {
        blocks: 8,
        order: BlockOrder::Concurrent,
        ..Grid::default()
    };
    stream.run(&launch_grid(barrier, &target, 0, grid)).unwrap();
    assert_eq!(value(&target), 8);
}

#[test]
fn launches_beyond_the_limits_are_refused() {
    let grids = [
        Grid {
            blocks: 0,
            ..Grid::default()
        },
        Grid {
            lanes: 0,
            ..Grid::default()
        },
        Grid {
            lanes: 129,
            ..Grid::default()
        },
        Grid {
            lanes: 64,
            warp: 24,
            ..Grid::default()
        },
        Grid {
            lanes: 32,
            warp: 64,
            ..Grid::default()
        },
        Grid {
            lanes: 64,
            warp: 4,
            ..Grid::default()
        },
        Grid {
            blocks: 100,
            lanes: 64,
            ..Grid::default()
        },
        Grid {
            shared_bytes: 1 << 20,
            ..Grid::default()
        },
    ];
    for grid in grids {
        // SAFETY: `Launch::new` refuses the launch, so it never runs.
        let refused = unsafe { Launch::new(add, &[0; 16], grid) };
        assert!(
            matches!(refused, Err(Error::InvalidArgument { .. })),
            "{grid:?}"
        );
    }
    // SAFETY: `Launch::new` refuses the launch, so it never runs.
    assert!(unsafe { Launch::new(add, &[0; 257], Grid::default()) }.is_err());
}

#[cfg(target_arch = "x86_64")]
#[test]
fn threads_that_flush_subnormals_are_refused() {
    fn set_mxcsr(value: u32) {
        // SAFETY: `value` changes only the rounding and flush flags. All floating-point exceptions
        // stay masked.
        unsafe { core::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
    }
    let (stream, target) = (CpuStream::new(), Arc::default());
    let launch = launch(add, &target, 1);
    let mut errors = Vec::new();
    for flags in [1u32 << 15, 1 << 6, 1 << 13] {
        set_mxcsr(0x1f80 | flags);
        let result = stream.run(&launch);
        set_mxcsr(0x1f80);
        errors.push(result.unwrap_err().to_string());
    }
    assert!(
        errors.iter().all(|error| error.contains("MXCSR")),
        "{errors:?}"
    );
    stream.run(&launch).unwrap();
    assert_eq!(value(&target), 1);
}
