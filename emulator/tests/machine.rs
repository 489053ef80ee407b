//! The machine: concurrent launches, schedulers, virtual time, capacity, and error messages.

mod common;

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use common::{
    HEADER, expect_fault, expect_hang, impatient, kernel, kernel_text, line_of, module, write_u32,
};
use fusewire_emulator::{
    Config, Error, FaultKind, Gpus, IdleTime, Kernel, Launch, LoadedModule, Machine, Mark, Memory,
    Module, Range, Replica, Scheduler, StreamOperation,
};

/// Returns schedulers of all kinds.
fn schedulers() -> Vec<Scheduler> {
    let mut all = vec![
        Scheduler::RoundRobin,
        Scheduler::Starve {
            device: Some(0),
            block: None,
        },
        Scheduler::Starve {
            device: Some(1),
            block: None,
        },
        Scheduler::Starve {
            device: None,
            block: Some(0),
        },
        Scheduler::Starve {
            device: Some(1),
            block: Some(2),
        },
        Scheduler::Starve {
            device: None,
            block: None,
        },
    ];
    all.extend((0..12).map(Scheduler::Random));
    all
}

fn gpus(scheduler: Scheduler) -> Gpus {
    Gpus::new(Config {
        scheduler,
        hang_after_virtual: Duration::from_millis(100),
        ..impatient()
    })
}

/// Exchanges 100 numbers between two kernels: parameters are the own flag, the flag of the other
/// and the result. The kernel adds the numbers that it receives.
const PING_PONG: &str = "mov.u32 %r0, 1; mov.u32 %r5, 0;
    ROUND: mad.lo.u32 %r1, %r0, 7, %cta; st.global.u32 [%in1+4], %r1;
    st.release.sys.global.u32 [%in1], %r0;
    WAIT: ld.acquire.sys.global.u32 %r2, [%in0]; setp.lt.u32 %p0, %r2, %r0; @%p0 bra WAIT;
    ld.global.u32 %r3, [%in0+4]; add.u32 %r5, %r5, %r3; st.global.u32 [%in2], %r5;
    st.release.sys.global.u32 [%in1+8], %r0;
    TAKEN: ld.acquire.sys.global.u32 %r2, [%in0+8]; setp.lt.u32 %p0, %r2, %r0; @%p0 bra TAKEN;
    add.u32 %r0, %r0, 1; setp.le.u32 %p1, %r0, 100; @%p1 bra ROUND; ret;";

fn ping_pong(gpus: &Gpus) -> Result<Vec<u64>, Error> {
    let module = kernel(3, PING_PONG);
    let flags = [gpus.allocate(0, 12), gpus.allocate(1, 12)];
    let results = [gpus.allocate(0, 4), gpus.allocate(1, 4)];
    let launch = |device: usize| {
        Kernel::new(&module, "k")
            .device(device as u32)
            .arg(&flags[device])
            .arg(&flags[1 - device])
            .arg(&results[device])
    };
    let counts = gpus.run(&[launch(0), launch(1)])?;
    for result in &results {
        assert_eq!(result.read_u32(), [7 * 5050]);
    }
    Ok(counts.iter().map(|it| it.instructions).collect())
}

#[test]
fn kernels_of_two_devices_exchange_flags() {
    for scheduler in schedulers() {
        if let Err(error) = ping_pong(&gpus(scheduler)) {
            panic!("{scheduler:?}: {error}");
        }
    }
}

#[test]
fn equal_seeds_give_equal_executions() {
    let run = |seed| ping_pong(&gpus(Scheduler::Random(seed))).unwrap();
    let first: Vec<_> = (0..8).map(run).collect();
    let second: Vec<_> = (0..8).map(run).collect();
    assert_eq!(first, second);
    assert!(
        first.iter().any(|it| *it != first[0]),
        "all seeds give {:?}",
        first[0]
    );
}

/// A race whose result depends on the order: the last thread stores its number.
#[test]
fn seeds_give_different_orders() {
    let module = kernel(
        1,
        "mad.lo.u32 %r0, %cta, 64, %thread; st.relaxed.gpu.global.u32 [%in0], %r0; ret;",
    );
    let run = |seed| {
        let gpus = gpus(Scheduler::Random(seed));
        let out = gpus.allocate(0, 4);
        gpus.run(&[Kernel::new(&module, "k").blocks(8).threads(64).arg(&out)])
            .unwrap();
        out.read_u32()[0]
    };
    let results: Vec<u32> = (0..20).map(run).collect();
    assert_eq!(results, (0..20).map(run).collect::<Vec<_>>());
    assert!(results.iter().any(|it| *it != results[0]), "{results:?}");
}

#[test]
fn changes_of_local_memory_are_no_progress() {
    let gpus = gpus(Scheduler::RoundRobin);
    let out = gpus.allocate(0, 4);
    // The argument of the function changes in each iteration of the wait.
    let function = ".func next(.param .b32 x) { ret; }\n";
    let body = "mov.u32 %r1, 0;\n\
                W: { .param .b32 a; st.param.b32 [a], %r1; call next, (a); }\n\
                add.u32 %r1, %r1, 1; ld.relaxed.gpu.global.u32 %r0, [%in0];\n\
                setp.eq.u32 %p0, %r0, 0; @%p0 bra W; ret;";
    let waits = module(&format!("{function}{}", kernel_text("k", 1, body)));
    expect_hang(gpus.run(&[Kernel::new(&waits, "k").arg(&out)]));
}

#[test]
fn errors_name_the_seed() {
    let gpus = gpus(Scheduler::Random(4711));
    let out = gpus.allocate(0, 4);
    let launch = |body: &str| gpus.run(&[Kernel::new(&kernel(1, body), "k").arg(&out)]);
    let fault = expect_fault(launch("trap;"));
    assert_eq!(fault.seed, Some(4711));
    assert!(fault.to_string().contains("seed 4711"), "{fault}");
    let endless = "W: ld.relaxed.gpu.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra W;";
    let hang = expect_hang(launch(endless));
    assert_eq!(hang.seed, Some(4711));
    assert!(hang.to_string().contains("seed 4711"), "{hang}");
    let hang = expect_hang(launch("bar.sync 0, 64; ret;"));
    assert_eq!(hang.seed, Some(4711));
}

#[test]
fn spin_lock_between_lanes_of_a_warp() {
    let body = "mov.u32 %r2, 0;
        LOCK: atom.acquire.gpu.global.cas.b32 %r0, [%in0], 0, 1;
        setp.ne.u32 %p0, %r0, 0; @%p0 bra LOCK;
        ld.global.u32 %r1, [%in0+4]; add.u32 %r1, %r1, 1; st.global.u32 [%in0+4], %r1;
        atom.release.gpu.global.exch.b32 %r0, [%in0], 0;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 2; @%p1 bra LOCK; ret;";
    // The unlock is before the loop in the text, or after it.
    let reversed = "mov.u32 %r2, 0; bra LOCK;
        HELD: ld.global.u32 %r1, [%in0+4]; add.u32 %r1, %r1, 1; st.global.u32 [%in0+4], %r1;
        atom.release.gpu.global.exch.b32 %r0, [%in0], 0;
        add.u32 %r2, %r2, 1; setp.ge.u32 %p1, %r2, 2; @%p1 ret;
        LOCK: atom.acquire.gpu.global.cas.b32 %r0, [%in0], 0, 1;
        setp.ne.u32 %p0, %r0, 0; @%p0 bra LOCK; bra HELD;";
    for body in [body, reversed] {
        let module = kernel(1, body);
        for scheduler in schedulers() {
            let gpus = gpus(scheduler);
            let out = gpus.allocate(0, 8);
            let kernel = Kernel::new(&module, "k").blocks(2).threads(33).arg(&out);
            if let Err(error) = gpus.run(&[kernel]) {
                panic!("{scheduler:?}: {error}");
            }
            assert_eq!(out.read_u32(), [0, 2 * 33 * 2], "{scheduler:?}");
        }
    }
}

#[test]
fn lanes_of_a_warp_wait_for_each_other() {
    // Lane 0 waits for a flag of lane 31, which waits for a flag of lane 0.
    let body = "setp.eq.u32 %p0, %lane, 31; @%p0 bra LAST;
        st.release.gpu.global.u32 [%in0], 1;
        A: ld.acquire.gpu.global.u32 %r0, [%in0+4]; setp.eq.u32 %p1, %r0, 0; @%p1 bra A; ret;
        LAST: ld.acquire.gpu.global.u32 %r0, [%in0]; setp.eq.u32 %p1, %r0, 0; @%p1 bra LAST;
        st.release.gpu.global.u32 [%in0+4], 1; ret;";
    let module = kernel(1, body);
    for scheduler in schedulers() {
        let gpus = gpus(scheduler);
        let out = gpus.allocate(0, 8);
        if let Err(error) = gpus.run(&[Kernel::new(&module, "k").threads(32).arg(&out)]) {
            panic!("{scheduler:?}: {error}");
        }
    }
}

#[test]
fn nanosleep_advances_the_virtual_clock() {
    let body = "mov.u64 %d0, %globaltimer; nanosleep.u32 1000000000; mov.u64 %d1, %globaltimer;
        sub.u64 %d1, %d1, %d0; st.global.u64 [%in0], %d1; ret;";
    let start = Instant::now();
    let out = common::run_body(body, 1, 2);
    let slept = u64::from(out[0]) | u64::from(out[1]) << 32;
    assert!((1_000_000_000..1_500_000_000).contains(&slept), "{slept}");
    assert!(
        start.elapsed() < Duration::from_millis(900),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn sleeping_lanes_wake_in_the_order_of_their_times() {
    let body = "sub.u32 %r0, 31, %lane; mul.lo.u32 %r0, %r0, 1000000; nanosleep.u32 %r0;
        atom.global.add.u32 %r1, [%in0], 1; mul.wide.u32 %d0, %lane, 4; add.u64 %d0, %in0, %d0;
        st.global.u32 [%d0+4], %r1; ret;";
    let out = common::run_body(body, 32, 33);
    let expected: Vec<u32> = (0..32).map(|lane| 31 - lane).collect();
    assert_eq!(out[1..], expected);
}

/// Polls a flag until a time-out of 10 virtual seconds. Stores 1 if the flag was set, 2 after the
/// time-out.
const TIMEOUT: &str = "mov.u64 %d0, %globaltimer; add.u64 %d0, %d0, 10000000000;
    POLL: ld.acquire.sys.global.u32 %r0, [%in0]; setp.ne.u32 %p0, %r0, 0; @%p0 bra FOUND;
    mov.u64 %d1, %globaltimer; setp.lt.u64 %p1, %d1, %d0; @%p1 bra POLL;
    st.global.u32 [%in1], 2; ret;
    FOUND: st.global.u32 [%in1], 1; ret;";

#[test]
fn a_timeout_of_virtual_time_ends_soon() {
    for sleep in ["", "nanosleep.u32 100;"] {
        let body = TIMEOUT.replace("POLL: ", &format!("POLL: {sleep} "));
        let gpus = Gpus::new(Config {
            idle: IdleTime::Skip,
            ..Config::default()
        });
        let (flag, out) = (gpus.allocate(0, 4), gpus.allocate(0, 4));
        let start = Instant::now();
        let kernel = Kernel::new(&kernel(2, &body), "k").arg(&flag).arg(&out);
        gpus.run(&[kernel]).unwrap();
        assert_eq!(out.read_u32(), [2]);
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{sleep:?} {:?}",
            start.elapsed()
        );
    }
}

#[test]
fn a_timeout_does_not_expire_while_another_block_makes_progress() {
    // Another kernel changes memory for a while, then sets the flag.
    let busy = "mov.u32 %r0, 0;
        LOOP: st.global.u32 [%in1], %r0; add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 200000;
        @%p0 bra LOOP; st.release.sys.global.u32 [%in0], 1; ret;";
    for scheduler in [
        Scheduler::RoundRobin,
        Scheduler::Random(1),
        Scheduler::Random(2),
    ] {
        let gpus = Gpus::new(Config {
            scheduler,
            idle: IdleTime::Skip,
            ..Config::default()
        });
        let (flag, out, other) = (
            gpus.allocate(0, 4),
            gpus.allocate(0, 4),
            gpus.allocate(1, 4),
        );
        gpus.run(&[
            Kernel::new(&kernel(2, TIMEOUT), "k").arg(&flag).arg(&out),
            Kernel::new(&kernel(2, busy), "k")
                .device(1)
                .arg(&flag)
                .arg(&other),
        ])
        .unwrap();
        assert_eq!(out.read_u32(), [1], "{scheduler:?}");
    }
}

#[test]
fn a_sleeping_block_delays_the_timeout_of_another() {
    // The sleep of 5 s ends before the time-out of 10 s; then the flag is set.
    let sleeper = "nanosleep.u32 1000000000; nanosleep.u32 4000000000;
        st.release.sys.global.u32 [%in0], 1; ret;";
    let gpus = Gpus::default();
    let (flag, out) = (gpus.allocate(0, 4), gpus.allocate(0, 4));
    gpus.run(&[
        Kernel::new(&kernel(2, TIMEOUT), "k").arg(&flag).arg(&out),
        Kernel::new(&kernel(1, sleeper), "k").arg(&flag),
    ])
    .unwrap();
    assert_eq!(out.read_u32(), [1]);
}

/// A barrier of all blocks of a grid: parameters are the counter and the number of blocks.
const GRID_BARRIER: &str = "red.release.sys.global.add.u32 [%in0], 1;
    cvt.u32.u64 %r1, %in1;
    WAIT: ld.acquire.sys.global.u32 %r0, [%in0];
    setp.lt.u32 %p0, %r0, %r1;
    @%p0 bra WAIT;
    ret;";

#[test]
fn blocks_that_wait_for_blocks_that_are_not_resident_hang() {
    let text = kernel_text("k", 2, GRID_BARRIER);
    let module = module(&text);
    let run = |capacity: u32, device: u32| {
        let gpus = Gpus::new(Config {
            capacity,
            ..impatient()
        });
        let counter = gpus.allocate(0, 4);
        let kernel = Kernel::new(&module, "k").device(device).blocks(6);
        let result = gpus.run(&[kernel.arg(&counter).arg(6u64)]);
        (result, counter.address())
    };
    run(6, 0).0.unwrap();
    let (result, counter) = run(4, 1);
    let hang = expect_hang(result);
    let message = hang.to_string();
    assert_eq!(hang.waits.len(), 5, "{message}");
    let line = line_of(&text, "WAIT:");
    for (block, wait) in hang.waits[..4].iter().enumerate() {
        assert!(
            wait.contains(&format!("kernel k, device 1, block {block},")),
            "{wait}"
        );
        let lines = line..line + 3;
        assert!(
            lines
                .into_iter()
                .any(|it| wait.contains(&format!("line {it} "))),
            "{wait}"
        );
        let change = format!("a change of the 4 bytes at {counter:#x} in memory of device 0");
        assert!(wait.contains(&change), "{wait}");
        assert!(wait.contains("whose value is 0x4"), "{wait}");
    }
    assert!(
        hang.waits[4].contains("blocks 4 to 5 are not resident"),
        "{message}"
    );
}

#[test]
fn blocks_execute_in_turn_with_less_capacity_than_blocks() {
    let body = "atom.global.add.u32 %r0, [%in0], 1; bar.sync 0; red.global.add.u32 [%in0+4], %cta;
        ret;";
    let module = kernel(1, body);
    for scheduler in schedulers() {
        let gpus = Gpus::new(Config {
            scheduler,
            capacity: 2,
            ..impatient()
        });
        let out = gpus.allocate(0, 8);
        gpus.run(&[Kernel::new(&module, "k").blocks(50).threads(33).arg(&out)])
            .unwrap();
        assert_eq!(out.read_u32(), [50 * 33, 33 * 49 * 25]);
    }
}

#[test]
fn devices_have_separate_capacities() {
    // Each device has room for three blocks; the barrier has six.
    let module = kernel(2, GRID_BARRIER);
    let run = |devices: [u32; 2]| {
        let gpus = Gpus::new(Config {
            capacity: 3,
            ..impatient()
        });
        let counter = gpus.allocate(0, 4);
        let launch = |device| {
            Kernel::new(&module, "k")
                .device(device)
                .blocks(3)
                .arg(&counter)
                .arg(6u64)
        };
        gpus.run(&devices.map(launch)).map(drop)
    };
    run([0, 1]).unwrap();
    let hang = expect_hang(run([1, 1]));
    assert!(
        hang.to_string().contains("blocks 0 to 2 are not resident"),
        "{hang}"
    );
}

#[test]
fn a_hang_names_all_threads_that_wait() {
    let text = kernel_text(
        "k",
        1,
        "setp.eq.u32 %p0, %lane, 3;\n@%p0 bra POLL;\nbar.warp.sync -1;\nret;\n\
         POLL: ld.relaxed.sys.global.u32 %r0, [%in0];\nsetp.ne.u32 %p1, %r0, 5;\n\
         @%p1 bra POLL;\nret;",
    );
    let module = module(&text);
    let gpus = Gpus::new(impatient());
    let out = gpus.allocate(2, 4);
    write_u32(&out, &[77]);
    let hang = expect_hang(gpus.run(&[Kernel::new(&module, "k").threads(32).arg(&out)]));
    let message = hang.to_string();
    assert_eq!(hang.waits.len(), 2, "{message}");
    assert!(
        hang.waits[0].contains("threads 0 to 2, 4 to 31,"),
        "{message}"
    );
    assert!(hang.waits[0].contains("`bar.warp.sync -1;`"), "{message}");
    assert!(hang.waits[1].contains("thread 3,"), "{message}");
    assert!(
        hang.waits[1].contains("in memory of device 2, whose value is 0x4d"),
        "{message}"
    );
}

#[test]
fn a_hang_ends_all_launches_and_the_machine_stays_usable() {
    let gpus = Gpus::new(impatient());
    let out = gpus.allocate(0, 4);
    let endless = kernel(
        1,
        "W: ld.relaxed.gpu.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra W;",
    );
    let launch = Kernel::new(&endless, "k").arg(&out);
    let hang = expect_hang(gpus.run(&[launch.clone(), launch.clone().device(1)]));
    assert_eq!(hang.waits.len(), 2);
    assert!(hang.summary.contains("2 launches"), "{hang}");
    write_u32(&out, &[1]);
    gpus.run(&[launch.clone(), launch]).unwrap();
}

#[test]
fn a_fault_of_one_launch_does_not_end_another() {
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 4);
    let good = kernel(
        1,
        "mov.u32 %r0, 0; L: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 5000; @%p0 bra L;
        st.global.u32 [%in0], %r0; ret;",
    );
    let bad = kernel(1, "trap;");
    let launches = [
        Kernel::new(&bad, "k").arg(&out),
        Kernel::new(&good, "k").arg(&out),
    ];
    expect_fault(gpus.run(&launches));
    assert_eq!(out.read_u32(), [5000]);
}

#[test]
fn threads_of_the_host_launch_concurrently() {
    // Each kernel waits for the kernel that another thread of the host launches.
    let gpus = Gpus::new(Config {
        idle: IdleTime::Host,
        ..Config::default()
    });
    let counter = gpus.allocate(0, 4);
    let module = kernel(2, GRID_BARRIER);
    std::thread::scope(|scope| {
        for device in 0..4 {
            let launch = Kernel::new(&module, "k")
                .device(device)
                .arg(&counter)
                .arg(4u64);
            let gpus = &gpus;
            scope.spawn(move || gpus.run(&[launch]).unwrap());
        }
    });
    assert_eq!(counter.read_u32(), [4]);
}

#[test]
fn the_host_sets_a_flag_while_a_kernel_polls_it() {
    let gpus = Gpus::new(Config {
        idle: IdleTime::Host,
        ..Config::default()
    });
    let (flag, out) = (gpus.allocate(0, 4), gpus.allocate(0, 4));
    let module = kernel(2, TIMEOUT);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            gpus.run(&[Kernel::new(&module, "k").arg(&flag).arg(&out)])
                .unwrap()
        });
        std::thread::sleep(Duration::from_millis(20));
        write_u32(&flag, &[1]);
    });
    assert_eq!(out.read_u32(), [1]);
}

#[test]
fn messages_name_the_source_line() {
    let text = ".file 1 \"src/kernel.rs\"\n.file 2 \"src/other.rs\"\n".to_owned()
        + &kernel_text(
            "k",
            1,
            "\t.loc 1 10 5\nmov.u32 %r0, 1;\n\t.loc 2 20 3\nst.global.u32 [8], %r0;\n\
             \t.loc 1 30 1\nret;",
        );
    let gpus = Gpus::new(impatient());
    let out = gpus.allocate(0, 4);
    let fault = expect_fault(gpus.run(&[Kernel::new(&module(&text), "k").arg(&out)]));
    assert_eq!(fault.site.source.as_deref(), Some("src/other.rs:20"));
    assert_eq!(fault.site.line, line_of(&text, "st.global.u32 [8]"));
    assert!(fault.to_string().contains("src/other.rs:20"), "{fault}");
    // Attributes of inlined functions end with the line.
    let text = text.replace(
        ".loc 2 20 3\n",
        ".loc 2 21 3, function_name $L__info_string0, inlined_at 1 10 5\n",
    );
    let fault = expect_fault(gpus.run(&[Kernel::new(&module(&text), "k").arg(&out)]));
    assert_eq!(fault.site.source.as_deref(), Some("src/other.rs:21"));
    let text = text.replace("st.global.u32 [8], %r0;", "bar.sync 0, 64;");
    let hang = expect_hang(gpus.run(&[Kernel::new(&module(&text), "k").arg(&out)]));
    assert!(hang.waits[0].contains("(src/other.rs:21)"), "{hang}");
}

/// Returns the line and detail of an error of the PTX text.
fn ptx_error(result: Result<(), Error>) -> (u32, String) {
    match result {
        Err(Error::Ptx { line, detail }) => (line, detail),
        other => panic!("expected an error of the text: {other:?}"),
    }
}

#[test]
fn unknown_instructions_are_refused_by_name_and_line() {
    for instruction in [
        "frobnicate.u32 %r0, %r1;",
        "add.u33 %r0, %r1, %r2;",
        "madc.lo.u32 %r0, %r1, %r2, %r3;",
        "wgmma.fence.sync.aligned;",
        "ld.global.quick.u32 %r0, [%in0];",
        "cvt.upward.f32.f64 %f0, %g0;",
        "atom.global.mul.u32 %r0, [%in0], 1;",
        "fence.proxy.sideways;",
    ] {
        let text = kernel_text("k", 1, &format!("mov.u32 %r1, 1;\n{instruction}\nret;"));
        let module = module(&text);
        let (line, detail) = ptx_error(module.decode_all());
        assert_eq!(line, line_of(&text, instruction), "{instruction}: {detail}");
        let opcode = instruction.split([' ', ';']).next().unwrap();
        assert!(detail.contains(opcode), "{instruction}: {detail}");
        // The launch fails with the same message.
        let gpus = Gpus::default();
        let out = gpus.allocate(0, 4);
        let error = gpus
            .run(&[Kernel::new(&module, "k").arg(&out)])
            .unwrap_err();
        assert!(error.to_string().contains(opcode), "{error}");
    }
}

#[test]
fn unknown_names_are_refused_with_their_line() {
    for (statement, name) in [
        ("mov.u32 %r0, %unknown;", "%unknown"),
        ("mov.u32 %r99, 1;", "%r99"),
        ("bra NOWHERE;", "NOWHERE"),
        ("@%q bra END;", "%q"),
        ("call missing;", "missing"),
        ("brx.idx %r0, missing;", "missing"),
        ("ld.global.u32 %r0, [missing];", "missing"),
    ] {
        let text = kernel_text("k", 1, &format!("END:\n{statement}\nret;"));
        let (line, detail) = ptx_error(module(&text).decode_all());
        assert_eq!(line, line_of(&text, statement), "{statement}: {detail}");
        assert!(detail.contains(name), "{statement}: {detail}");
    }
}

#[test]
fn texts_that_are_not_ptx_are_refused() {
    for text in [
        "",
        "hello",
        ".version 8.3\n.target sm_90\n.address_size 32\n",
        ".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry k( { ret; }",
        ".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry k() { ret;",
        ".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry k();",
    ] {
        assert!(
            matches!(Module::parse(text), Err(Error::Ptx { .. })),
            "{text:?}"
        );
    }
    let text = kernel_text("k", 0, "mov.u32 %r0 1;");
    let (line, _) = ptx_error(module(&text).decode_all());
    assert_eq!(line, line_of(&text, "mov.u32 %r0 1;"));
}

#[test]
fn decode_all_decodes_all_kernels() {
    let good = kernel_text("good", 1, "ret;");
    let bad = kernel_text("bad", 1, "frobnicate;");
    module(&good).decode_all().unwrap();
    let both = module(&format!("{good}{bad}"));
    let (line, detail) = ptx_error(both.decode_all());
    assert_eq!(line, line_of(&format!("{good}{bad}"), "frobnicate"));
    assert!(detail.contains("frobnicate"), "{detail}");
    // The other kernel can be launched.
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 4);
    gpus.run(&[Kernel::new(&both, "good").arg(&out)]).unwrap();
    assert_eq!(both.entries().len(), 2);
}

#[test]
fn a_module_has_version_target_and_external_functions() {
    let module = module(
        ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);
        .visible .entry k() { ret; }",
    );
    assert_eq!(
        (module.version(), module.target(), module.is_exact()),
        (83, 90, false)
    );
    assert_eq!(module.external_functions().collect::<Vec<_>>(), ["vprintf"]);
    let exact = Module::parse(&HEADER.replace("sm_90", "sm_90a")).unwrap();
    assert!(exact.is_exact());
    // A call of a function without a body is refused.
    let text = ".extern .func abort();\n".to_owned() + &kernel_text("k", 0, "call abort;\nret;");
    let (line, detail) = ptx_error(common::module(&text).decode_all());
    assert_eq!(line, line_of(&text, "call abort;"));
    assert!(detail.contains("abort"), "{detail}");
}

#[test]
fn modules_and_gpus_are_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Gpus>();
    check::<Arc<Module>>();
    check::<Error>();
}

#[test]
fn counts_are_those_of_executed_instructions() {
    let gpus = Gpus::default();
    let module = module(".visible .entry k() { ret; }");
    let counts = gpus
        .run(&[
            Kernel::new(&module, "k").threads(32),
            Kernel::new(&module, "k").threads(33).blocks(10),
        ])
        .unwrap();
    assert_eq!((counts[0].instructions, counts[1].instructions), (1, 20));
}

/// Returns a launch of kernel `k` with one thread and one parameter.
fn single_thread(device: u32, param: u64) -> Launch {
    Launch {
        kernel: "k".into(),
        device,
        blocks: [1; 3],
        threads: [1; 3],
        dynamic_shared: 0,
        params: param.to_le_bytes().to_vec(),
        cost: 1,
    }
}

/// A word of device 0, which device 1 may read and device 2 may not access.
#[derive(Debug)]
struct Word(AtomicU64);

// SAFETY: the range is the word, which lives as long as the machine that has this object.
unsafe impl Memory for Word {
    fn range(&self, device: u32, _: u64) -> Option<Range> {
        let start = self.0.as_ptr() as u64;
        Some(Range {
            start,
            end: start + 8,
            read: device < 2,
            write: device == 0,
            multicast: false,
            owner: Some(0),
            memory: 1,
            offset: 0,
        })
    }

    fn generation(&self) -> u64 {
        0
    }

    fn hold(&self, slice: &mut dyn FnMut()) {
        slice();
    }

    fn replicas(&self, _: u32, _: u64, _: u64) -> Result<Vec<Replica>, String> {
        Err("no multicast object".into())
    }
}

#[test]
fn accesses_need_the_rights_of_the_device() {
    let word = Arc::new(Word(AtomicU64::new(0)));
    let address = word.0.as_ptr() as u64;
    let machine = Machine::new(Config::default(), Arc::clone(&word) as Arc<dyn Memory>);
    for (body, devices) in [
        ("ld.global.u32 %r0, [%in0]; ret;", 0..2),
        ("st.global.u32 [%in0], 1; ret;", 0..1),
        ("red.sys.global.add.u32 [%in0], 1; ret;", 0..1),
    ] {
        for device in 0..3 {
            let module = kernel(1, body);
            let module = LoadedModule::new(&module, device).expect("no variables");
            let launch = single_thread(device, address);
            // SAFETY: `word` lives until the launch has completed, and the host accesses it with
            // atomic operations only.
            let result = unsafe { machine.execute(&Arc::new(module), &launch) };
            if devices.contains(&device) {
                result.expect("the device has access");
                continue;
            }
            let fault = expect_fault(result);
            assert_eq!(fault.kind, FaultKind::IllegalAddress);
            let expected =
                format!("memory of device 0, to which device {device} has no such access");
            assert!(fault.detail.contains(&expected), "{fault}");
        }
    }
    assert_eq!(word.0.load(Ordering::Relaxed), 2);
}

/// Memory whose description panics.
#[derive(Debug)]
struct Panics;

// SAFETY: no function returns a range.
unsafe impl Memory for Panics {
    fn range(&self, _: u32, _: u64) -> Option<Range> {
        panic!("a fault of the caller")
    }

    fn generation(&self) -> u64 {
        0
    }

    fn hold(&self, slice: &mut dyn FnMut()) {
        slice();
    }

    fn replicas(&self, _: u32, _: u64, _: u64) -> Result<Vec<Replica>, String> {
        Err("no multicast object".into())
    }
}

#[test]
fn launches_after_a_panic_fail() {
    let module = kernel(1, "ld.global.u32 %r0, [%in0]; ret;");
    let module = Arc::new(LoadedModule::new(&module, 0).expect("a module without variables"));
    let machine = Machine::new(Config::default(), Arc::new(Panics));
    let launch = single_thread(0, 0);
    std::thread::scope(|scope| {
        let run = || {
            // SAFETY: the kernel accesses no memory, because no address is mapped.
            unsafe { machine.execute(&module, &launch) }
        };
        assert!(
            scope.spawn(run).join().is_err(),
            "the panic reaches the caller"
        );
        let again = scope.spawn(run).join().expect("no second panic");
        let text = again.expect_err("the machine is unusable").to_string();
        assert!(text.contains("panicked during another launch"), "{text}");
        let operation = StreamOperation::WaitFor(Mark::default());
        // SAFETY: the operation accesses no memory.
        let result = unsafe { machine.execute_on_stream(0, operation) };
        let text = result.expect_err("the machine is unusable").to_string();
        assert_eq!(
            text,
            "wait of a stream for an event: the machine has panicked during another launch"
        );
    });
}
