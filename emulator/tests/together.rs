//! Instructions that lanes or warps execute together: shuffles, votes, matches, reductions and
//! barriers, with lanes that arrive at different times, and kernels that use them incorrectly.

mod common;

use common::{Random, expect_hang, fault, hang, impatient, kernel, run_body};
use fusewire_emulator::{Config, FaultKind, Gpus, Kernel, Scheduler};

/// Stores `%r0` as the result of the thread.
const STORE: &str = "mul.wide.u32 %d31, %thread, 4; add.u64 %d31, %in0, %d31;
    st.global.u32 [%d31], %r0; ret;";

fn per_thread(body: &str, threads: u32) -> Vec<u32> {
    run_body(&format!("{body}\n{STORE}"), threads, threads as usize)
}

fn table(threads: u32, f: impl FnMut(u32) -> u32) -> Vec<u32> {
    (0..threads).map(f).collect()
}

/// Runs a body with several schedulers. All must return the same results.
fn with_schedulers(body: &str, threads: u32) -> Vec<u32> {
    let module = kernel(1, &format!("{body}\n{STORE}"));
    let mut schedulers = vec![
        Scheduler::RoundRobin,
        Scheduler::Starve {
            device: None,
            block: Some(0),
        },
    ];
    schedulers.extend((0..20).map(Scheduler::Random));
    let mut first = None;
    for scheduler in schedulers {
        let gpus = Gpus::new(Config {
            scheduler,
            ..impatient()
        });
        let out = gpus.allocate(0, 4 * threads as usize);
        let kernel = Kernel::new(&module, "k").threads(threads).arg(&out);
        if let Err(error) = gpus.run(&[kernel]) {
            panic!("{scheduler:?}: {error}");
        }
        let out = out.read_u32();
        let first = first.get_or_insert_with(|| out.clone());
        assert_eq!(out, *first, "{scheduler:?}");
    }
    first.expect("the kernel ran")
}

#[test]
fn shuffles_follow_the_definition() {
    let mut random = Random(3);
    let mut cases = vec![(0, 31), (1, 31), (16, 31), (1, 0), (1, 0x1810), (3, 0x181f)];
    cases.extend((0..20).map(|_| {
        let number = random.next() as u32;
        (number & 63, number >> 8 & 0x1f1f)
    }));
    for mode in ["up", "down", "bfly", "idx"] {
        for (b, c) in &cases {
            let body = format!(
                "add.u32 %r1, %lane, 100; mov.u32 %r2, {b}; mov.u32 %r3, {c};
                shfl.sync.{mode}.b32 %r4|%p0, %r1, %r2, %r3, 0xffffffff;
                selp.u32 %r5, 1000, 0, %p0; add.u32 %r0, %r4, %r5;"
            );
            let expected = table(32, |lane| {
                let (b, clamp, segment) = (b & 31, c & 31, c >> 8 & 31);
                let least = lane & segment;
                let most = least | clamp & !segment;
                let (from, within) = match mode {
                    "up" => (
                        lane as i32 - b as i32,
                        lane as i32 - b as i32 >= most as i32,
                    ),
                    "down" => ((lane + b) as i32, lane + b <= most),
                    "bfly" => ((lane ^ b) as i32, lane ^ b <= most),
                    _ => {
                        let from = least | b & !segment;
                        (from as i32, from <= most)
                    }
                };
                let from = if within { from as u32 } else { lane };
                100 + from + if within { 1000 } else { 0 }
            });
            assert_eq!(per_thread(&body, 32), expected, "{mode} {b} {c:#x}");
        }
    }
}

#[test]
fn shuffles_as_libraries_use_them() {
    // A sum of all lanes, and a prefix sum in segments of 8 lanes.
    let body = "mov.u32 %r0, %thread;
        shfl.sync.bfly.b32 %r1, %r0, 16, 31, -1; add.u32 %r0, %r0, %r1;
        shfl.sync.bfly.b32 %r1, %r0, 8, 31, -1; add.u32 %r0, %r0, %r1;
        shfl.sync.bfly.b32 %r1, %r0, 4, 31, -1; add.u32 %r0, %r0, %r1;
        shfl.sync.bfly.b32 %r1, %r0, 2, 31, -1; add.u32 %r0, %r0, %r1;
        shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; add.u32 %r0, %r0, %r1;";
    assert_eq!(
        per_thread(body, 64),
        table(64, |t| if t < 32 { 496 } else { 496 + 1024 })
    );
    let body = "add.u32 %r0, %lane, 1;
        shfl.sync.up.b32 %r1|%p0, %r0, 1, 0x1800, -1; @%p0 add.u32 %r0, %r0, %r1;
        shfl.sync.up.b32 %r1|%p0, %r0, 2, 0x1800, -1; @%p0 add.u32 %r0, %r0, %r1;
        shfl.sync.up.b32 %r1|%p0, %r0, 4, 0x1800, -1; @%p0 add.u32 %r0, %r0, %r1;";
    let expected = table(32, |lane| (lane / 8 * 8..=lane).map(|it| it + 1).sum());
    assert_eq!(per_thread(body, 32), expected);
    // Each lane has another source lane and width.
    let body = "sub.u32 %r1, 31, %lane; mul.lo.u32 %r2, %lane, 3;
        shfl.sync.idx.b32 %r0, %r2, %r1, 31, -1;";
    assert_eq!(per_thread(body, 32), table(32, |lane| (31 - lane) * 3));
}

#[test]
fn shuffles_of_some_lanes() {
    let body = "mov.u32 %r0, 5000; setp.lt.u32 %p0, %lane, 8; @!%p0 bra DONE;
        xor.b32 %r1, %lane, 1; shfl.sync.idx.b32 %r0, %lane, %r1, 31, 0xff;
        DONE:";
    assert_eq!(
        per_thread(body, 32),
        table(32, |t| if t < 8 { t ^ 1 } else { 5000 })
    );
    // Two groups with different masks execute one instruction.
    let body = "setp.lt.u32 %p0, %lane, 8; selp.b32 %r1, 0xff, 0xffffff00, %p0;
        redux.sync.add.u32 %r0, %lane, %r1;";
    assert_eq!(
        with_schedulers(body, 32),
        table(32, |t| if t < 8 { 28 } else { 468 })
    );
}

#[test]
fn votes() {
    for (condition, holds) in [
        ("setp.lt.u32 %p0, %lane, 32;", [1, 1, 1]),
        ("setp.lt.u32 %p0, %lane, 5;", [0, 1, 0]),
        ("setp.gt.u32 %p0, %lane, 50;", [0, 0, 1]),
    ] {
        for (mode, want) in ["all", "any", "uni"].into_iter().zip(holds) {
            let body =
                format!("{condition} vote.sync.{mode}.pred %p1, %p0, -1; selp.u32 %r0, 1, 0, %p1;");
            assert_eq!(per_thread(&body, 32), vec![want; 32], "{condition} {mode}");
        }
    }
    let body = "setp.lt.u32 %p0, %lane, 5; vote.sync.any.pred %p1, !%p0, -1;
        selp.u32 %r0, 1, 0, %p1;";
    assert_eq!(per_thread(body, 32), vec![1; 32]);
    let body = "and.b32 %r1, %lane, 1; setp.eq.u32 %p0, %r1, 1;
        vote.sync.ballot.b32 %r0, %p0, 0xffffffff;";
    assert_eq!(per_thread(body, 32), vec![0xaaaa_aaaa; 32]);
    let body = body.replace("%p0, 0xffffffff", "!%p0, 0xffffffff");
    assert_eq!(per_thread(&body, 32), vec![0x5555_5555; 32]);
    // Lanes that are not in the mask do not vote; the last warp has 8 lanes.
    let body = "setp.gt.u32 %p0, %lane, 3; vote.sync.ballot.b32 %r0, %p0, -1;";
    assert_eq!(per_thread(body, 40)[32..], [0xf0; 8]);
}

#[test]
fn matches() {
    let body = "rem.u32 %r1, %lane, 3; match.any.sync.b32 %r0, %r1, -1;";
    let equal = |lane: u32| {
        (0..32)
            .filter(|it| it % 3 == lane % 3)
            .fold(0, |all, it| all | 1 << it)
    };
    assert_eq!(per_thread(body, 32), table(32, equal));
    // The values differ only in their upper halves.
    let body = "rem.u32 %r1, %lane, 3; mov.u32 %r2, 7; mov.b64 %d0, {%r2, %r1};
        match.any.sync.b64 %r0, %d0, -1;";
    assert_eq!(per_thread(body, 32), table(32, equal));
    let body = "shr.u32 %r1, %thread, 5; match.all.sync.b32 %r2|%p0, %r1, -1;
        selp.u32 %r0, %r2, 0, %p0;";
    assert_eq!(per_thread(body, 64), vec![u32::MAX; 64]);
    let body = "shr.u32 %r1, %thread, 4; match.all.sync.b32 %r2|%p0, %r1, -1;
        selp.u32 %r0, 1, %r2, %p0;";
    assert_eq!(per_thread(body, 32), vec![0; 32]);
}

#[test]
fn reductions_of_a_warp() {
    let value = |lane: u32| lane.wrapping_mul(0x9e37_79b9) ^ 0x5555;
    let all = || (0..32).map(value);
    let reduce = |operation: &str| {
        let body = format!(
            "mul.lo.u32 %r1, %lane, 0x9e3779b9; xor.b32 %r1, %r1, 0x5555;
            redux.sync.{operation} %r0, %r1, -1;"
        );
        let out = per_thread(&body, 32);
        assert!(out.iter().all(|it| *it == out[0]));
        out[0]
    };
    assert_eq!(reduce("add.u32"), all().fold(0, u32::wrapping_add));
    assert_eq!(reduce("add.s32"), all().fold(0, u32::wrapping_add));
    assert_eq!(reduce("min.u32"), all().min().unwrap());
    assert_eq!(reduce("max.u32"), all().max().unwrap());
    assert_eq!(
        reduce("min.s32"),
        all().map(|it| it as i32).min().unwrap() as u32
    );
    assert_eq!(
        reduce("max.s32"),
        all().map(|it| it as i32).max().unwrap() as u32
    );
    assert_eq!(reduce("and.b32"), all().fold(u32::MAX, |a, b| a & b));
    assert_eq!(reduce("or.b32"), all().fold(0, |a, b| a | b));
    assert_eq!(reduce("xor.b32"), all().fold(0, |a, b| a ^ b));
}

#[test]
fn elect_chooses_one_lane() {
    let body = "mov.u32 %r0, 9999; setp.lt.u32 %p0, %lane, 4; @%p0 bra DONE;
        elect.sync %r1|%p1, 0xfffffff0; selp.u32 %r2, 100, 0, %p1; add.u32 %r0, %r1, %r2;
        DONE:";
    let out = per_thread(body, 32);
    let leader = out[4..].iter().position(|it| *it >= 100).unwrap() as u32 + 4;
    let expected = table(32, |lane| match lane {
        0..4 => 9999,
        lane if lane == leader => 100 + leader,
        _ => leader,
    });
    assert_eq!(out, expected);
    let body = "elect.sync _|%p1, -1; vote.sync.ballot.b32 %r1, %p1, -1; popc.b32 %r0, %r1;";
    assert_eq!(per_thread(body, 32), vec![1; 32]);
}

#[test]
fn activemask_names_the_lanes_of_a_branch() {
    let body = "mov.u32 %r0, 0; setp.lt.u32 %p0, %lane, 5; @!%p0 bra DONE; activemask.b32 %r0;
        DONE:";
    assert_eq!(
        per_thread(body, 32),
        table(32, |t| if t < 5 { 31 } else { 0 })
    );
}

#[test]
fn lanes_that_arrive_at_different_times() {
    // Each lane loops another number of times before it arrives.
    let body = "mov.u32 %r1, 0;
        LOOP: setp.ge.u32 %p0, %r1, %lane; @%p0 bra ARRIVE;
        add.u32 %r1, %r1, 1; nanosleep.u32 20; bra LOOP;
        ARRIVE: redux.sync.add.u32 %r2, %r1, -1;
        shfl.sync.down.b32 %r3|%p1, %r1, 1, 31, -1;
        vote.sync.ballot.b32 %r4, %p1, -1;
        bar.warp.sync -1;
        xor.b32 %r0, %r4, %r2; add.u32 %r0, %r0, %r3;";
    let expected = table(32, |lane| (0x7fff_ffff ^ 496) + (lane + 1).min(31));
    assert_eq!(with_schedulers(body, 32), expected);
}

#[test]
fn bar_warp_sync_orders_accesses_to_shared_memory() {
    let body = ".shared .align 4 .b8 s[128]; mov.u32 %r1, s; mad.lo.u32 %r1, %lane, 4, %r1;
        mov.u32 %r0, 0; mov.u32 %r2, 0;
        LOOP: add.u32 %r3, %lane, %r2; st.shared.u32 [%r1], %r3; bar.warp.sync 0xffffffff;
        xor.b32 %r4, %lane, 21; mov.u32 %r5, s; mad.lo.u32 %r5, %r4, 4, %r5;
        ld.shared.u32 %r6, [%r5]; add.u32 %r0, %r0, %r6; bar.warp.sync 0xffffffff;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, 10; @%p0 bra LOOP;";
    assert_eq!(
        with_schedulers(body, 32),
        table(32, |lane| 10 * (lane ^ 21) + 45)
    );
}

#[test]
fn lanes_exit_while_others_wait_for_them() {
    // The ISA: a lane waits for all non-exited lanes of its mask.
    let early = "setp.ge.u32 %p0, %lane, 16; mov.u32 %r0, 0; @%p0 exit;
        bar.warp.sync -1; redux.sync.add.u32 %r0, %lane, -1;";
    assert_eq!(
        with_schedulers(early, 32),
        table(32, |t| if t < 16 { 120 } else { 0 })
    );
    let late = "setp.ge.u32 %p0, %lane, 16; mov.u32 %r0, 0; @%p0 bra SLOW;
        bar.warp.sync -1; redux.sync.add.u32 %r0, %lane, -1; bra DONE;
        SLOW: mov.u32 %r1, 0;
        LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 1000; @%p1 bra LOOP;
        exit;
        DONE:";
    assert_eq!(
        with_schedulers(late, 32),
        table(32, |t| if t < 16 { 120 } else { 0 })
    );
}

#[test]
fn bar_sync_orders_accesses_to_shared_memory() {
    let body = ".shared .align 4 .b8 s[1024]; mov.u32 %r1, s; mov.u32 %r0, 0; mov.u32 %r2, 0;
        mad.lo.u32 %r3, %thread, 4, %r1; xor.b32 %r4, %thread, 85;
        mad.lo.u32 %r4, %r4, 4, %r1;
        LOOP: mad.lo.u32 %r5, %thread, 3, %r2; st.shared.u32 [%r3], %r5; bar.sync 0;
        ld.shared.u32 %r6, [%r4]; add.u32 %r0, %r0, %r6; barrier.sync.aligned 0;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, 10; @%p0 bra LOOP;";
    assert_eq!(
        with_schedulers(body, 256),
        table(256, |t| 30 * (t ^ 85) + 45)
    );
}

#[test]
fn barriers_with_counts() {
    // Warps 0 and 1 use barrier 1, warps 2 and 3 use barrier 2, in registers.
    let body = ".shared .align 4 .b8 s[512]; mov.u32 %r1, s; mad.lo.u32 %r2, %thread, 4, %r1;
        add.u32 %r3, %thread, 7; st.shared.u32 [%r2], %r3;
        shr.u32 %r4, %thread, 6; add.u32 %r4, %r4, 1; mov.u32 %r5, 64;
        bar.sync %r4, %r5;
        xor.b32 %r6, %thread, 63; mad.lo.u32 %r6, %r6, 4, %r1; ld.shared.u32 %r0, [%r6];";
    assert_eq!(with_schedulers(body, 128), table(128, |t| (t ^ 63) + 7));
}

#[test]
fn a_warp_counts_as_32_threads_in_a_barrier_with_a_count() {
    // The ISA: "in multiple of warp size"; the barrier marks the arrival of warps. The second warp
    // has 16 threads.
    let body = ".shared .align 4 .b8 s[256]; mov.u32 %r1, s; mad.lo.u32 %r2, %thread, 4, %r1;
        st.shared.u32 [%r2], %thread; bar.sync 1, 64;
        sub.u32 %r3, 47, %thread; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r0, [%r3];";
    assert_eq!(with_schedulers(body, 48), table(48, |t| 47 - t));
    // Half of the lanes of the first warp have exited.
    let body = "mov.u32 %r0, 0; setp.lt.u32 %p0, %thread, 16; @%p0 exit;
        bar.sync 1, 64; mov.u32 %r0, 1;";
    assert_eq!(with_schedulers(body, 64), table(64, |t| u32::from(t >= 16)));
}

#[test]
fn producers_arrive_and_consumers_wait() {
    // Warp 0 produces ten values; warp 1 consumes them. Barrier 1: full, barrier 2: empty.
    let body = ".shared .align 4 .b8 s[128]; mov.u32 %r1, s; mad.lo.u32 %r1, %lane, 4, %r1;
        mov.u32 %r0, 0; mov.u32 %r2, 0; setp.ge.u32 %p0, %thread, 32; @%p0 bra CONSUME;
        PRODUCE: mul.lo.u32 %r3, %r2, %lane; bar.sync 2, 64; st.shared.u32 [%r1], %r3;
        bar.arrive 1, 64; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 10; @%p1 bra PRODUCE;
        bra DONE;
        CONSUME: bar.arrive 2, 64; bar.sync 1, 64; ld.shared.u32 %r3, [%r1];
        add.u32 %r0, %r0, %r3; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 10;
        @%p1 bra CONSUME;
        DONE:";
    let expected = table(64, |t| if t < 32 { 0 } else { 45 * (t - 32) });
    assert_eq!(with_schedulers(body, 64), expected);
}

#[test]
fn barriers_reduce_predicates() {
    let body = "setp.lt.u32 %p0, %thread, 37; bar.red.popc.u32 %r1, 0, %p0;
        bar.red.popc.u32 %r2, 3, !%p0; bar.red.and.pred %p1, 0, %p0; bar.red.or.pred %p2, 0, %p0;
        setp.lt.u32 %p3, %thread, 1000; bar.red.and.pred %p4, 0, %p3;
        bar.red.or.pred %p5, 1, !%p3; barrier.red.popc.u32 %r9, 0, 96, %p0;
        selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2; selp.u32 %r5, 4, 0, %p4;
        selp.u32 %r6, 8, 0, %p5; add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r5;
        add.u32 %r3, %r3, %r6; mad.lo.u32 %r0, %r1, 100, %r3; mad.lo.u32 %r0, %r2, 10000, %r0;
        sub.u32 %r9, %r9, 37; add.u32 %r0, %r0, %r9;";
    assert_eq!(
        with_schedulers(body, 96),
        vec![59 * 10000 + 37 * 100 + 6; 96]
    );
}

#[test]
fn a_barrier_that_is_used_again_keeps_the_results_of_all_warps() {
    // Warps 0 and 1, then warps 2 and 3 use barrier 1. Warp 0 may read its result after the second
    // use.
    let body = "shr.u32 %r1, %thread, 6; setp.eq.u32 %p0, %r1, 0; @%p0 bra USE;
        mov.u32 %r2, 0;
        LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 20; @%p2 bra LOOP;
        USE: bar.red.popc.u32 %r0, 1, 64, %p0;";
    let out = run_body(&format!("{body}\n{STORE}"), 128, 128);
    assert_eq!(out, table(128, |t| if t < 64 { 64 } else { 0 }));
}

#[test]
fn unaligned_barriers_in_diverged_lanes() {
    let body = "mov.u32 %r0, 3; setp.lt.u32 %p0, %lane, 7; @%p0 bra OTHER;
        barrier.sync 0; bra DONE;
        OTHER: barrier.sync 0; mov.u32 %r0, 4;
        DONE:";
    assert_eq!(
        with_schedulers(body, 64),
        table(64, |t| if t % 32 < 7 { 4 } else { 3 })
    );
}

#[test]
fn aligned_barrier_after_diverged_code() {
    let body = "mov.u32 %r0, 0; mov.u32 %r1, %lane;
        LOOP: setp.eq.u32 %p0, %r1, 0; @%p0 bra MEET; sub.u32 %r1, %r1, 1; nanosleep.u32 9;
        bra LOOP;
        MEET: bar.sync 0; mov.u32 %r0, 1;";
    assert_eq!(with_schedulers(body, 64), vec![1; 64]);
}

// Incorrect use.

#[test]
fn a_lane_that_is_not_in_its_mask_faults() {
    for instruction in [
        "shfl.sync.idx.b32 %r0, %lane, 0, 31, 0x7fffffff;",
        "vote.sync.any.pred %p0, %p1, 0x7fffffff;",
        "redux.sync.add.u32 %r0, %lane, 0x7fffffff;",
        "match.any.sync.b32 %r0, %lane, 0x7fffffff;",
        "elect.sync _|%p0, 0x7fffffff;",
        "bar.warp.sync 0x7fffffff;",
    ] {
        let fault = fault(
            &kernel(1, &format!("setp.eq.u32 %p1, 1, 1;\n{instruction}\nret;")),
            32,
        );
        assert_eq!(fault.kind, FaultKind::Divergence, "{instruction}");
        assert_eq!(fault.site.thread, 31, "{instruction}");
        assert_eq!(fault.site.instruction, instruction);
        assert!(fault.detail.contains("0x7fffffff"), "{fault}");
    }
}

#[test]
fn an_aligned_barrier_in_a_branch_faults() {
    // The two halves of a warp are at different barrier instructions.
    let body = "setp.lt.u32 %p0, %lane, 16;\n@%p0 bra A;\nbar.sync 0;\nbra B;\nA: bar.sync 0;\n\
        B: ret;";
    let fault = fault(&kernel(1, body), 64);
    assert_eq!(fault.kind, FaultKind::Divergence);
    assert!(fault.site.instruction.ends_with("bar.sync 0;"), "{fault}");
    // Some lanes of a warp skip the barrier and wait for the others.
    let body = "setp.lt.u32 %p0, %lane, 16;\n@%p0 bra.uni A;\nbar.sync 0;\n\
        A: bar.warp.sync -1;\nret;";
    let hang = hang(&kernel(1, body), 64);
    assert!(
        hang.waits.iter().any(|it| it.contains("bar.sync 0;")),
        "{hang}"
    );
    assert!(
        hang.waits.iter().any(|it| it.contains("bar.warp.sync -1;")),
        "{hang}"
    );
}

#[test]
fn lanes_with_different_masks_hang() {
    let body = "setp.lt.u32 %p0, %lane, 16;\nselp.b32 %r1, 0xffffffff, 0xfffffffe, %p0;\n\
        setp.eq.u32 %p1, %lane, 0;\n@%p1 mov.u32 %r1, -1;\nbar.warp.sync %r1;\nret;";
    let hang = hang(&kernel(1, body), 32);
    let text = hang.to_string();
    assert!(
        text.contains("0xffffffff") && text.contains("0xfffffffe"),
        "{text}"
    );
    assert!(text.contains("bar.warp.sync %r1;"), "{text}");
}

#[test]
fn a_missing_warp_hangs() {
    let body = "setp.lt.u32 %p0, %thread, 32;\n@%p0 bra OTHER;\nbar.sync 5;\nret;\n\
        OTHER: ld.relaxed.gpu.global.u32 %r0, [%in0];\nsetp.eq.u32 %p1, %r0, 0;\n\
        @%p1 bra OTHER;\nret;";
    let hang = hang(&kernel(1, body), 96);
    let text = hang.to_string();
    assert_eq!(hang.waits.len(), 3, "{text}");
    assert!(
        text.contains("barrier 5, 64 of 96 threads have arrived"),
        "{text}"
    );
    assert!(hang.waits[0].contains("threads 0 to 31,"), "{text}");
    assert!(hang.waits[0].contains("a change of the 4 bytes"), "{text}");
    assert!(hang.waits[1].contains("threads 32 to 63,"), "{text}");
    assert!(hang.waits[1].contains("line 7 `bar.sync 5;`"), "{text}");
    assert!(hang.waits[2].contains("threads 64 to 95,"), "{text}");
}

#[test]
fn a_barrier_with_too_few_threads_hangs_at_once() {
    // All threads wait, so the launch ends without a time-out.
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 4);
    let module = kernel(1, "bar.sync 2, 96;\nret;");
    let hang = expect_hang(gpus.run(&[Kernel::new(&module, "k").threads(64).arg(&out)]));
    let text = hang.to_string();
    assert!(
        text.contains("barrier 2, 64 of 96 threads have arrived"),
        "{text}"
    );
    assert!(
        text.contains("block 0") && text.contains("kernel k"),
        "{text}"
    );
}

#[test]
fn invalid_operands_of_barriers_fault() {
    for instruction in ["bar.sync 16;", "bar.sync 0, 33;", "bar.sync %r1, 0;"] {
        let body = format!("mov.u32 %r1, 1;\n{instruction}\nret;");
        let fault = fault(&kernel(1, &body), 64);
        assert_eq!(
            fault.kind,
            FaultKind::InvalidOperand,
            "{instruction}: {fault}"
        );
    }
    let body = "shr.u32 %r1, %thread, 5;\nadd.u32 %r1, %r1, 2;\nshl.b32 %r1, %r1, 5;\n\
        bar.sync 0, %r1;\nret;";
    let fault = fault(&kernel(1, body), 64);
    assert_eq!(fault.kind, FaultKind::Divergence, "{fault}");
    assert!(fault.detail.contains("64 threads and with 96"), "{fault}");
}
