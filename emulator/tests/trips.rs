//! Trips of kernels whose chains of loads and fences are known.

mod common;

use std::collections::BTreeMap;

use common::{kernel, kernel_text, module};
use fusewire_emulator::{
    Arg, Bytes, Config, Gpus, Kernel, MemoryModel, Route, Scheduler, Steps, Trips,
};

fn gpus(scheduler: Scheduler) -> Gpus {
    Gpus::new(Config {
        scheduler,
        memory: MemoryModel::Unchecked,
        trips: true,
        ..Config::default()
    })
}

fn steps(strong: u32, weak: u32, fences: u32) -> Steps {
    Steps {
        strong,
        weak,
        fences,
    }
}

fn trips(gpus: &Gpus, kernels: &[Kernel]) -> Vec<Trips> {
    let counts = gpus.run(kernels).expect("a valid launch");
    let trips = counts.into_iter().map(|it| *it.trips.expect("trips"));
    trips.collect()
}

/// Runs a body with the addresses of a zeroed buffer on device 0 and one on device 1.
fn run(threads: u32, body: &str) -> Trips {
    let gpus = gpus(Scheduler::RoundRobin);
    let (own, peer) = (gpus.allocate(0, 4096), gpus.allocate(1, 4096));
    let kernel = Kernel::new(&kernel(2, body), "k").threads(threads);
    trips(&gpus, &[kernel.arg(&own).arg(&peer)]).remove(0)
}

#[test]
fn counts_are_absent_by_default() {
    let gpus = Gpus::default();
    let counts = gpus.run(&[Kernel::new(&kernel(0, "ret;"), "k")]);
    assert_eq!(counts.expect("a valid launch")[0].trips, None);
}

#[test]
fn dependent_loads_add_up() {
    let chase = "add.u64 %d0, %in0, %d0; ld.relaxed.sys.global.u64 %d0, [%d0];";
    let body = format!("mov.u64 %d0, 0; {} ret;", chase.repeat(7));
    // The last value is not used.
    assert_eq!(run(1, &body).steps, steps(6, 0, 0));
    let body = format!(
        "mov.u64 %d0, 0; {} st.global.u64 [%in0], %d0; ret;",
        chase.repeat(7)
    );
    let trips = run(1, &body);
    assert_eq!(trips.steps, steps(7, 0, 0));
    assert_eq!(trips.chain.len(), 7);
    assert!(
        trips.chain[0]
            .instruction
            .contains("ld.relaxed.sys.global.u64")
    );
    assert_eq!(
        (trips.chain[0].device, trips.chain[0].source.as_deref()),
        (0, None)
    );
}

#[test]
fn independent_loads_are_one_step() {
    let loads: String = (0..8)
        .map(|at| format!("ld.global.u64 %d{at}, [%in0+{}]; ", 8 * at))
        .collect();
    let body = format!("{loads} add.u64 %d0, %d1, %d7; st.global.u64 [%in0], %d0; ret;");
    assert_eq!(run(1, &body).steps, steps(0, 1, 0));
}

#[test]
fn values_used_in_one_iteration_delay_the_next() {
    // The sum is used only after the loop, but each iteration adds before the next one loads.
    let body = "mov.u64 %d0, %in0; mov.u64 %d2, 0; mov.u32 %r0, 0;
        again: ld.volatile.global.u64 %d1, [%d0]; or.b64 %d2, %d1, %d2;
        add.u64 %d0, %d0, 8; add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 8; @%p0 bra again;
        st.global.u64 [%in0], %d2; ret;";
    assert_eq!(run(1, body).steps, steps(8, 0, 0));
    // The assembler can move the use of the first value across the branch.
    let forward = "ld.volatile.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 0;
        setp.eq.u32 %p1, %thread, 1; @%p1 bra end; ld.volatile.global.u32 %r1, [%in0+8];
        st.global.u32 [%in0+16], %r1; @%p0 bra end; end: ret;";
    assert_eq!(run(1, forward).steps, steps(1, 0, 0));
}

#[test]
fn branches_delay_loads_and_unused_values_do_not() {
    let branch = "ld.relaxed.sys.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 1; @%p0 bra end;
        ld.global.u32 %r1, [%in0+8]; st.global.u32 [%in0+16], %r1; end: ret;";
    assert_eq!(run(1, branch).steps, steps(1, 1, 0));
    let unused = "ld.relaxed.sys.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %thread, 1;
        @%p0 bra end; ld.global.u32 %r1, [%in0+8]; st.global.u32 [%in0+16], %r1; end: ret;";
    assert_eq!(run(1, unused).steps, steps(0, 1, 0));
    let guard = "ld.relaxed.sys.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 0;
        @%p0 ld.global.u32 %r1, [%in0+8]; @%p0 st.global.u32 [%in0+16], %r1; ret;";
    assert_eq!(run(1, guard).steps, steps(1, 1, 0));
}

#[test]
fn shared_memory_and_barriers_carry_paths() {
    let body = ".shared .align 8 .b8 cell[8]; mov.u64 %d3, cell;
        setp.ne.u32 %p0, %thread, 0; @%p0 bra wait;
        ld.relaxed.sys.global.u64 %d0, [%in0]; st.shared.u64 [%d3], %d0;
        wait: bar.sync 0; ld.shared.u64 %d1, [%d3]; add.u64 %d1, %d1, %in0;
        ld.global.u64 %d2, [%d1+8]; st.global.u64 [%in0+64], %d2; ret;";
    assert_eq!(run(64, body).steps, steps(1, 1, 0));
    // Other threads wait for the barrier, so their next loads do too.
    let body = "setp.ne.u32 %p0, %thread, 0; @%p0 bra wait;
        ld.relaxed.sys.global.u64 %d0, [%in0]; st.global.u64 [%in0+8], %d0;
        wait: bar.sync 0; setp.ne.u32 %p0, %thread, 40; @%p0 bra end;
        ld.global.u64 %d2, [%in0+16]; st.global.u64 [%in0+64], %d2; end: ret;";
    assert_eq!(run(64, body).steps, steps(1, 1, 0));
    let body = "ld.relaxed.sys.global.u32 %r0, [%in0]; setp.ne.u32 %p0, %r0, 0;
        bar.red.or.pred %p1, 0, %p0; @%p1 bra end;
        ld.global.u64 %d2, [%in0+16]; st.global.u64 [%in0+64], %d2; end: ret;";
    assert_eq!(run(64, body).steps, steps(1, 1, 0));
}

#[test]
fn shuffles_combine_lanes() {
    let body = "mov.u32 %r0, 0; setp.ne.u32 %p0, %thread, 5; @%p0 bra next;
        ld.relaxed.sys.global.u32 %r0, [%in0];
        next: shfl.sync.idx.b32 %r1, %r0, 5, 31, 0xffffffff;
        setp.ne.u32 %p0, %thread, 9; @%p0 bra end;
        cvt.u64.u32 %d0, %r1; add.u64 %d0, %d0, %in0; ld.global.u32 %r2, [%d0+4];
        st.global.u32 [%in0+8], %r2; end: ret;";
    assert_eq!(run(32, body).steps, steps(1, 1, 0));
}

#[test]
fn fences_count_with_outstanding_remote_stores() {
    let fences = |body: &str| run(64, body).steps.fences;
    let release = "st.release.sys.global.u32 [%in1+128], 1; ret;";
    assert_eq!(fences(release), 0);
    assert_eq!(fences(&format!("st.global.u32 [%in0], 1; {release}")), 0);
    assert_eq!(fences(&format!("st.global.u32 [%in1], 1; {release}")), 1);
    assert_eq!(
        fences("st.global.u32 [%in1], 1; fence.acq_rel.sys; ret;"),
        1
    );
    assert_eq!(fences("st.global.u32 [%in1], 1; membar.cta; ret;"), 0);
    let twice = format!("st.global.u32 [%in1], 1; membar.sys; membar.sys; {release}");
    assert_eq!(fences(&twice), 1);
    // The release of one thread covers the stores of others before the barrier.
    let other = "setp.eq.u32 %p0, %thread, 40; @%p0 st.global.u32 [%in1], 1; bar.sync 0;
        setp.ne.u32 %p1, %thread, 0; @%p1 bra end;";
    assert_eq!(fences(&format!("{other} {release} end: ret;")), 1);
    // Another thread has already covered them.
    let again = "bar.sync 0; setp.eq.u32 %p0, %thread, 40; @%p0 st.global.u32 [%in1], 1;
        bar.sync 0; setp.eq.u32 %p1, %thread, 0; @%p1 fence.acq_rel.sys; bar.sync 0;
        setp.ne.u32 %p1, %thread, 33; @%p1 bra end;";
    assert_eq!(fences(&format!("{again} {release} end: ret;")), 1);
}

/// Returns the text of a kernel that waits for a flag of the previous device, and sets one on the
/// next device: `%in0` is the own flag, `%in1` the next one, `%in2` is 1 on the first device.
fn relay(wait: &str) -> String {
    let body = format!(
        "setp.ne.u32 %p2, %thread, 0; @%p2 bra end; cvt.u32.u64 %r9, %in2;
         setp.eq.u32 %p3, %r9, 1; @%p3 bra send; {wait}
         send: ld.global.u32 %r1, [%in0+64]; st.global.u32 [%in1+64], %r1;
         st.release.sys.global.u32 [%in1], 1; end: ret;"
    );
    kernel_text("k", 3, &body)
}

const WAITS: [&str; 3] = [
    "again: ld.acquire.sys.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra again;",
    // One load before the loop, and an abort word and a sleep after each third poll.
    "ld.acquire.sys.global.u32 %r0, [%in0]; setp.ne.u32 %p0, %r0, 0; @%p0 bra send;
     mov.u32 %r2, 0;
     again: add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 3; @%p1 bra load;
     nanosleep.u32 100; ld.acquire.sys.global.u32 %r3, [%in0+128]; setp.ne.u32 %p0, %r3, 0;
     @%p0 bra send; mov.u64 %d0, %globaltimer; mov.u32 %r2, 0;
     load: ld.acquire.sys.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra again;",
    "again: ld.volatile.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra again;
     fence.acq_rel.sys;",
];

#[test]
fn flags_of_other_devices_add_up_in_all_schedules() {
    for wait in WAITS {
        let module = module(&relay(wait));
        let mut all = Vec::new();
        let seeds = (0..40).map(Scheduler::Random);
        for scheduler in [Scheduler::RoundRobin].into_iter().chain(seeds) {
            let gpus = gpus(scheduler);
            let buffers: Vec<_> = (0..3).map(|device| gpus.allocate(device, 4096)).collect();
            let launch = |device: usize| {
                let next = &buffers[(device + 1) % 3];
                let first = u64::from(device == 0);
                let kernel = Kernel::new(&module, "k").threads(64).device(device as u32);
                kernel.arg(&buffers[device]).arg(next).arg(first)
            };
            let trips = trips(&gpus, &[launch(0), launch(1), launch(2)]);
            let counts: Vec<_> = trips
                .iter()
                .map(|it| (it.steps, it.leader_instructions, it.bytes.clone()))
                .collect();
            all.push((counts, trips));
        }
        let (counts, trips) = &all[0];
        // Load, fence; poll, load, fence; poll, load, fence.
        let expected = [steps(0, 1, 1), steps(1, 2, 2), steps(2, 3, 3)];
        assert_eq!(counts.iter().map(|it| it.0).collect::<Vec<_>>(), expected);
        assert!(all.iter().all(|(it, _)| it == counts), "{wait}");
        let devices: Vec<u32> = trips[2].chain.iter().map(|it| it.device).collect();
        assert_eq!(devices, [0, 0, 1, 1, 1, 2, 2, 2]);
    }
}

#[test]
fn launches_of_earlier_operations_do_not_count() {
    let gpus = gpus(Scheduler::RoundRobin);
    let (a, b) = (gpus.allocate(0, 4096), gpus.allocate(1, 4096));
    let body = "ld.global.u32 %r0, [%in0]; st.global.u32 [%in1], %r0; ret;";
    let kernel = Kernel::new(&kernel(2, body), "k");
    for _ in 0..3 {
        let one = kernel.clone().arg(&a).arg(&b);
        assert_eq!(trips(&gpus, &[one])[0].steps, steps(0, 1, 0));
        let back = kernel.clone().device(1).arg(&b).arg(&a);
        // The first launch on device 1 belongs to the same operation as that on device 0.
        assert_eq!(trips(&gpus, &[back])[0].steps, steps(0, 2, 0));
    }
}

#[test]
fn bytes_by_route() {
    let gpus = gpus(Scheduler::RoundRobin);
    let (own, peer) = (gpus.allocate(0, 4096), gpus.allocate(1, 4096));
    let object = gpus.multicast(&[&own, &peer]);
    let body = "ld.global.v2.u64 {%d0, %d1}, [%in0]; st.global.v2.u64 [%in1+64], {%d0, %d1};
        ld.relaxed.sys.global.u32 %r0, [%in1];
        multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%in2+128];
        multimem.st.relaxed.sys.global.u32 [%in2+256], %r1;
        atom.add.relaxed.sys.global.u32 %r2, [%in0+512], 1;
        red.relaxed.sys.global.add.u32 [%in1+512], 1; ret;";
    let kernel = Kernel::new(&kernel(3, body), "k").threads(1);
    let kernel = kernel.arg(&own).arg(&peer).arg(Arg::from(&object));
    let expected = [
        (
            Route::Own,
            Bytes {
                read: 20,
                written: 4,
            },
        ),
        (
            Route::Peer(1),
            Bytes {
                read: 4,
                written: 20,
            },
        ),
        (
            Route::Multicast,
            Bytes {
                read: 4,
                written: 4,
            },
        ),
    ];
    let trips = trips(&gpus, &[kernel]).remove(0);
    assert_eq!(trips.bytes, BTreeMap::from(expected));
}

/// Executes the loops between the `ready` signal and the data of `all_reduce_nvls_bf16` in an image
/// of commit 9098d2e. The file is that of this command:
/// `git show 9098d2e:host/images/nvls.sm_90.ptx.lzma | xz --format=lzma -dc`.
#[test]
#[ignore = "needs the text of an old image in FUSEWIRE_OLD_PTX"]
fn loops_of_an_old_image() {
    const RANKS: u64 = 8;
    let path = std::env::var("FUSEWIRE_OLD_PTX").expect("FUSEWIRE_OLD_PTX");
    let text = std::fs::read_to_string(path).expect("the file");
    let lines: Vec<&str> = text.lines().collect();
    let start = lines
        .iter()
        .position(|it| it.contains(".entry all_reduce_nvls_bf16("));
    let lines = &lines[start.expect("the kernel")..];
    let at = |part: &str| {
        let found = lines.iter().position(|it| it.contains(part));
        found.unwrap_or_else(|| panic!("{part}"))
    };
    let between = |from: &str, to: &str| lines[at(from)..at(to)].join("\n");
    let registers = lines
        .iter()
        .filter(|it| it.trim_start().starts_with(".reg ") && it.contains('<'));
    let registers: Vec<&str> = registers.take(4).copied().collect();
    // One rank's pad has a line of 128 bytes for each rank: word, scalar, flags, determinism.
    let setup = format!(
        ".visible .entry k(.param .u64 pad, .param .u64 table) {{ {}
        .shared .align 128 .b8 fusewire_shared_memory[39424];
        ld.param.u64 %rd1, [pad]; ld.param.u64 %rd2, [table];
        mov.b64 %rd2304, fusewire_shared_memory;
        st.shared.u32 [fusewire_shared_memory+38136], 0;
        st.shared.u32 [fusewire_shared_memory+38140], {RANKS};
        st.shared.u64 [fusewire_shared_memory+38184], %rd2;
        st.shared.u64 [fusewire_shared_memory+38232], 0;
        st.shared.u64 [fusewire_shared_memory+38352], %rd1;
        mov.pred %p549, -1; mov.b64 %rd2388, 0; mov.b64 %rd2387, 0; mov.b64 %rd5, 0;
        mov.b64 %rd27, 0; mov.u32 %r1437, {RANKS}; mov.u32 %r1372, {RANKS};\n",
        registers.join("\n")
    );
    let flags = between("$L__BB1_177:", "$L__BB1_179:");
    let rest = between("@%p183 bra", "$L__BB1_211:");
    let rest = rest.split_once('\n').expect("lines").1;
    let vote = "setp.ne.b64 %p2, %rd2388, 0; @%p2 bra $L__BB1_211;";
    let end = "st.global.u64 [%rd1], %rd2346;\n$L__BB1_211: ret; }";
    let count = |body: &str| {
        let module = module(&format!("{setup}{flags}\n{vote}\n{body}\n{end}"));
        let gpus = gpus(Scheduler::RoundRobin);
        let (pad, table) = (
            gpus.allocate(0, 128 * RANKS as usize),
            gpus.allocate(0, 528),
        );
        let line: Vec<u8> = [0, 0, 0, 3]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        let line = [line, vec![0; 96]].concat();
        pad.write(&line.repeat(RANKS as usize));
        let window: Vec<u8> = [1 << 40, 4096]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        table.write(&[window, vec![0; 512]].concat());
        trips(&gpus, &[Kernel::new(&module, "k").arg(&pad).arg(&table)])[0].steps
    };
    assert_eq!(count(""), steps(8, 0, 0));
    // The review counts 58: it adds the own word, which is not used before the word of rank 0 is
    // loaded. The loops read the window table too, with weak loads.
    assert_eq!(count(rest), steps(56, 2, 0));
}
