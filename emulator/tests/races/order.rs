//! Barriers, releases and acquires, and ends of launches order accesses.

use super::*;

/// Executes one code in all threads of a block. The code has the address `%x`, and the predicates
/// `%p0` and `%p1` of the threads 0 and 33.
fn run_block(config: Config, code: &str) -> Result<(), Error> {
    let body = format!(
        "{START} setp.eq.u32 %p0, %thread, 0; setp.eq.u32 %p1, %thread, 33;
        setp.lt.u32 %p2, %thread, 32;\n{code}\nret;"
    );
    let gpus = Gpus::new(config);
    let data = gpus.allocate(0, 256);
    gpus.run(&[Kernel::new(&kernel(1, &body), "k").threads(64).arg(&data)])
        .map(drop)
}

#[test]
fn barriers_order_accesses() {
    for (first, second) in [
        ("st.global.u32 [%x], 1;", "ld.global.u32 %r0, [%x];"),
        ("ld.global.u32 %r0, [%x];", "st.global.u32 [%x], 1;"),
        ("st.shared.u32 [s], 1;", "st.shared.u32 [s], 2;"),
        ("ld.shared.u32 %r0, [s];", "st.shared.v2.u32 [s], {1, 2};"),
        ("atom.shared.add.u32 %r0, [s], 1;", "st.shared.u8 [s+1], 2;"),
        (
            "st.relaxed.cta.global.u64 [%x], 1;",
            "ld.relaxed.cta.global.u16 %r0, [%x];",
        ),
    ] {
        for barrier in [
            "bar.sync 0;",
            "barrier.sync 1, 64;",
            "bar.red.or.pred %p6, 0, %p0;",
        ] {
            let code = format!("@%p0 {first} {barrier} @%p1 {second}");
            for config in configs() {
                run_block(config, &code).unwrap_or_else(|error| panic!("{error}\n{code}"));
            }
        }
        for barrier in [
            "",
            "bar.warp.sync -1;",
            "shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;",
        ] {
            let code = format!("mov.u32 %r0, 0; @%p0 {first} {barrier} @%p1 {second}");
            for config in configs() {
                assert_eq!(expect_fault(run_block(config, &code)).kind, FaultKind::Race);
            }
        }
    }
}

#[test]
fn a_ring_in_shared_memory_does_not_race() {
    // The first warp writes, the second reads, with a full and an empty barrier.
    let code = "mov.u32 %r1, 0; mov.u32 %r2, 0;
        ROUND: @%p2 bra PRODUCE;
        barrier.sync 1, 64; ld.shared.u32 %r3, [s]; add.u32 %r2, %r2, %r3; barrier.arrive 2, 64;
        bra NEXT;
        PRODUCE: @%p0 st.shared.u32 [s], %r1; barrier.arrive 1, 64; barrier.sync 2, 64;
        NEXT: add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 6; @%p3 bra ROUND;";
    // The reader signals before its read, or the writer before its write.
    let swap = |first: &str, second: &str| {
        let swapped = code.replace(&format!("{first} {second}"), &format!("{second} {first}"));
        assert_ne!(swapped, code);
        swapped
    };
    let early_reader = swap(
        "ld.shared.u32 %r3, [s]; add.u32 %r2, %r2, %r3;",
        "barrier.arrive 2, 64;",
    );
    let early_writer = swap("@%p0 st.shared.u32 [s], %r1;", "barrier.arrive 1, 64;");
    for config in configs() {
        run_block(config.clone(), code).unwrap();
        for broken in [&early_reader, &early_writer] {
            let fault = expect_fault(run_block(config.clone(), broken));
            assert_eq!(fault.kind, FaultKind::Race);
        }
    }
}

#[test]
fn release_and_acquire_order_accesses() {
    for place in Place::ALL {
        for (first, second) in [
            ("st.global.u32 [%x], 1;", "ld.global.u32 %r0, [%x];"),
            ("st.global.u32 [%x], 1;", "st.global.u64 [%x], 1;"),
            ("ld.global.u32 %r0, [%x];", "st.global.u32 [%x], 1;"),
            (
                "atom.cta.global.add.u32 %r0, [%x], 1;",
                "ld.relaxed.cta.global.u8 %r0, [%x];",
            ),
        ] {
            let scope = place.scope();
            let writer = format!("{first} st.release.{scope}.global.u32 [%y], 1;");
            let reader = format!(
                "LOOP: ld.acquire.{scope}.global.u32 %r1, [%y]; setp.eq.u32 %p0, %r1, 0;
                @%p0 bra LOOP;\n{second}"
            );
            Program::new(place, &[&writer, &reader]).expect_no_race();
            // The same without release.
            let writer = format!("st.relaxed.{scope}.global.u32 [%y], 1;\n{first}");
            Program::new(place, &[&writer, &reader]).expect_race(false);
        }
    }
}

#[test]
fn ends_of_launches_order_accesses() {
    let module = kernel(
        1,
        "ld.global.u32 %r0, [%in0]; st.global.u32 [%in0], 1; ret;",
    );
    for config in configs() {
        let gpus = Gpus::new(config);
        let data = gpus.allocate(0, 4);
        let kernel = Kernel::new(&module, "k").arg(&data);
        for device in 0..3 {
            gpus.run(&[kernel.clone().device(device)]).unwrap();
        }
        let both = [kernel.clone(), kernel.clone().device(1)];
        assert_eq!(expect_fault(gpus.run(&both)).kind, FaultKind::Race);
        // The machine is usable after a race.
        gpus.run(&[kernel]).unwrap();
    }
}

#[test]
fn launches_end_while_another_runs() {
    // The first launch runs until the host sets a flag. The others are one after the other.
    let long = kernel(
        1,
        "st.global.u32 [%in0+64], 1; st.release.sys.global.u32 [%in0+192], 1;
        START: ld.relaxed.sys.global.u32 %r0, [%in0+128]; setp.eq.u32 %p0, %r0, 0;
        @%p0 bra START; ret;",
    );
    let add = kernel(
        1,
        "ld.global.u32 %r0, [%in0]; add.u32 %r0, %r0, 1; st.global.u32 [%in0], %r0;
        st.relaxed.cta.global.u16 [%in0+4], 1; bar.sync 0; ret;",
    );
    let constant = kernel(1, "ld.global.nc.u32 %r0, [%in0]; ret;");
    let acquire = kernel(1, "ld.acquire.sys.global.u32 %r0, [%in0+192]; ret;");
    let conflict = kernel(1, "ld.global.u32 %r0, [%in0+64]; ret;");
    for config in configs() {
        let gpus = Gpus::new(Config {
            idle: IdleTime::Host,
            ..config
        });
        let data = gpus.allocate(0, 256);
        let run = |module, device| gpus.run(&[Kernel::new(module, "k").device(device).arg(&data)]);
        std::thread::scope(|scope| {
            let long = scope.spawn(|| run(&long, 0));
            while data.read_u32()[48] == 0 {
                std::thread::yield_now();
            }
            let results = [
                run(&add, 1),
                run(&add, 0),
                run(&constant, 2),
                run(&add, 0),
                run(&constant, 0),
            ];
            let race = run(&conflict, 0);
            // A launch that acquires orders the later ones after the first launch's write.
            let ordered = [run(&acquire, 2), run(&conflict, 0)];
            let mut words = data.read_u32();
            words[32] = 1;
            write_u32(&data, &words);
            long.join().expect("no panic").unwrap();
            for result in results.into_iter().chain(ordered) {
                result.unwrap();
            }
            assert_eq!(expect_fault(race).kind, FaultKind::Race);
            assert_eq!(words[0], 3);
        });
        run(&conflict, 1).unwrap();
    }
}

#[test]
fn blocks_that_do_not_execute_concurrently_race() {
    // The device has room for one block, so the second starts after the end of the first.
    for place in [Place::Blocks, Place::Launches] {
        let program = Program::new(
            place,
            &["st.global.u32 [%x], 1;", "ld.global.u32 %r0, [%x];"],
        );
        for config in configs() {
            let config = Config {
                capacity: 1,
                ..config
            };
            let fault = expect_fault(program.run(config));
            assert_eq!(fault.kind, FaultKind::Race, "{place:?}");
        }
    }
}

#[test]
fn many_readers_race_with_a_writer() {
    let text = kernel_text(
        "k",
        1,
        "setp.eq.u32 %p0, %cta, 3; @%p0 bra WRITE;\nld.global.u32 %r0, [%in0];\nret;
        WRITE:\nst.global.u32 [%in0], 1;\nret;",
    );
    for config in configs() {
        let gpus = Gpus::new(config);
        let data = gpus.allocate(0, 4);
        let kernel = Kernel::new(&module(&text), "k")
            .blocks(4)
            .threads(96)
            .arg(&data);
        let fault = expect_fault(gpus.run(&[kernel]));
        assert_eq!(fault.kind, FaultKind::Race);
        let other = fault.other.clone().expect("a race has two accesses");
        let blocks = [fault.site.block, other.block];
        assert!(blocks.contains(&3), "{fault}");
        assert!(other.line >= line_of(&text, "ld.global"), "{fault}");
    }
    // A reader of which the writer knows, and one of which it does not.
    let reader = "ld.global.u32 %r0, [%x];\nst.release.sys.global.u32 [%y], 1;";
    let unknown = "ld.global.u32 %r0, [%x];";
    let writer = "LOOP: ld.acquire.sys.global.u32 %r1, [%y]; setp.eq.u32 %p0, %r1, 0;
        @%p0 bra LOOP;\nst.global.u32 [%x], 1;";
    for place in Place::ALL {
        Program::new(place, &[unknown, writer, reader]).expect_race(false);
    }
}

#[test]
fn later_accesses_do_not_hide_a_race() {
    let [spot, other, third] = [0, 1, 2].map(|it| Place::Blocks.spot(it));
    let many: String = (0..8)
        .map(|it| format!("st.relaxed.sys.global.u32 [%x], {it};"))
        .collect();
    // Writes and reads of the neighbour.
    let neighbour = format!("{many} ld.relaxed.sys.global.u32 %r0, [%x];");
    for (first, second) in [
        ("st.global.u32 [%x+4], 1;", "st.global.u32 [%x+4], 1;"),
        ("st.global.u32 [%x+4], 1;", "ld.global.u32 %r0, [%x+4];"),
        ("ld.global.u32 %r0, [%x+4];", "st.global.u32 [%x+4], 1;"),
    ] {
        Program::at(&[spot, third, other], &[first, second, &neighbour]).expect_race(true);
    }
    // A strong access of the same thread does not hide its weak access.
    let first = "st.relaxed.sys.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;
        st.global.u32 [%x], 1;";
    let second = "LOOP: ld.acquire.sys.global.u32 %r1, [%y]; setp.eq.u32 %p0, %r1, 0;
        @%p0 bra LOOP;\nld.relaxed.sys.global.u32 %r0, [%x];";
    let program = Program::new(Place::Blocks, &[first, second]);
    for config in configs() {
        assert_eq!(expect_fault(program.run(config)).kind, FaultKind::Race);
    }
    for first in [
        "ld.global.u32 %r0, [%x]; ld.relaxed.sys.global.u32 %r0, [%x];",
        "ld.relaxed.sys.global.u32 %r0, [%x]; ld.global.u32 %r0, [%x];",
        "ld.global.u8 %r0, [%x]; ld.relaxed.sys.global.u32 %r0, [%x];",
    ] {
        let second = "st.relaxed.sys.global.u32 [%x], 1;";
        let program = Program::new(Place::Blocks, &[first, second]);
        // A read of the second thread's value would order the accesses, so the first thread is the
        // first to execute.
        let is_ordered = |config: &Config| config.scheduler == Scheduler::RoundRobin;
        for config in configs().into_iter().filter(is_ordered) {
            let name = format!("{:?}, {:?}: {first}", config.memory, config.scheduler);
            match program.run(config) {
                Err(Error::Fault(fault)) => assert_eq!(fault.kind, FaultKind::Race, "{name}"),
                other => panic!("expected a race: {other:?}, {name}"),
            }
        }
    }
}

#[test]
fn an_observed_write_does_not_race_with_later_accesses() {
    // PTX: causality order includes the observation of a write by a strong read, followed by what
    // happens after the read.
    let writer = "st.relaxed.sys.global.u32 [%x], 1;";
    let wait = "LOOP: ld.relaxed.sys.global.u32 %r0, [%x]; setp.eq.u32 %p0, %r0, 0; @%p0 bra LOOP;";
    let flag = "LOOP: ld.acquire.sys.global.u32 %r0, [%y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra LOOP;";
    for place in Place::ALL {
        for access in ["ld.global.u32 %r1, [%x];", "st.global.u32 [%x], 2;"] {
            let reader = format!("{wait}\n{access}");
            Program::new(place, &[writer, &reader]).expect_no_race();
            // A third thread accesses the location.
            let reader = format!("{wait} st.release.sys.global.u32 [%y], 1;");
            let third = format!("{flag}\n{access}");
            Program::new(place, &[writer, &reader, &third]).expect_no_race();
            // Without release, it races.
            let reader = reader.replace("release", "relaxed");
            Program::new(place, &[writer, &third, &reader]).expect_race(false);
            // The order is not that of a happens-before: other writes of the first thread race.
            let writer = "st.global.u32 [%y+4], 1;\nst.relaxed.sys.global.u32 [%x], 1;";
            let reader = format!("{wait}\nst.global.u32 [%y+4], 1;");
            let program = Program::new(place, &[writer, &reader]);
            for config in configs() {
                assert_eq!(expect_fault(program.run(config)).kind, FaultKind::Race);
            }
        }
    }
}

/// A read is complete when its thread writes a flag, also a relaxed one. Writes are not ordered by
/// relaxed flags.
#[test]
fn relaxed_flags_order_reads_but_not_writes() {
    let writer = "LOOP: ld.relaxed.sys.global.u32 %r1, [%y]; setp.eq.u32 %p0, %r1, 0;
        @%p0 bra LOOP; st.global.u32 [%x], 1;";
    for place in Place::ALL {
        for config in configs() {
            let reader = "ld.global.u32 %r0, [%x]; st.relaxed.sys.global.u32 [%y], 1;";
            let program = Program::new(place, &[reader, writer]);
            program.run(config.clone()).unwrap();
            let late = "st.relaxed.sys.global.u32 [%y], 1; ld.global.u32 %r0, [%x];";
            let other = "st.global.u32 [%x], 7; st.relaxed.sys.global.u32 [%y], 1;";
            for body in [late, other] {
                let program = Program::new(place, &[body, writer]);
                let fault = expect_fault(program.run(config.clone()));
                assert_eq!(fault.kind, FaultKind::Race, "{body}");
            }
        }
    }
}

#[test]
fn variables_of_modules_race() {
    let text = ".global .u32 counter;\n".to_owned()
        + &kernel_text("k", 1, "st.global.u32 [counter], 1;\nret;");
    let module = module(&text);
    for config in configs() {
        let gpus = Gpus::new(config);
        let data = gpus.allocate(0, 4);
        let kernel = Kernel::new(&module, "k").arg(&data);
        let fault = expect_fault(gpus.run(&[kernel.clone(), kernel.clone()]));
        assert_eq!(fault.kind, FaultKind::Race);
        // Each device has its own variables.
        gpus.run(&[kernel.clone(), kernel.device(1)]).unwrap();
    }
}

/// A launch knows what the launch before it has acquired from a launch that is still running.
#[test]
fn a_launch_continues_what_the_one_before_has_acquired() {
    let wait = |name: &str| {
        format!(
            "WAIT: ld.acquire.sys.global.u32 %r0, [{name}]; setp.eq.u32 %p0, %r0, 0;
            @%p0 bra WAIT;"
        )
    };
    let writer = format!(
        "st.global.u32 [%in0], 7; st.release.sys.global.u32 [%in0+8], 1; add.u64 %d0, %in0, 16; {} \
         ret;",
        wait("%d0")
    );
    let acquirer = format!("add.u64 %d0, %in0, 8; {} ret;", wait("%d0"));
    let reader = "ld.global.u32 %r0, [%in0]; st.release.sys.global.u32 [%in0+16], %r0; ret;";
    for config in configs() {
        // The first launch waits for launches that the host has not submitted yet.
        let gpus = Gpus::new(Config {
            idle: IdleTime::Host,
            ..config
        });
        let data = gpus.allocate(0, 24);
        let run = |device: u32, body: &str| {
            let kernel = Kernel::new(&kernel(1, body), "k").device(device);
            gpus.run(&[kernel.arg(&data)])
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(|| run(0, &writer));
            run(1, &acquirer).unwrap();
            run(1, reader).unwrap();
            first.join().unwrap().unwrap();
        });
    }
}

/// Executes codes on devices, one launch after the other. Before each launch, `host` is called with
/// its number.
fn run_in_sequence(
    config: Config,
    launches: &[(u32, &str)],
    host: impl Fn(usize, &fusewire_emulator::Buffer),
) -> Result<(), Error> {
    let gpus = Gpus::new(config);
    let data = gpus.allocate(0, 256);
    for (number, (device, code)) in launches.iter().enumerate() {
        host(number, &data);
        let module = kernel(1, &format!("{START} {code}\nret;"));
        let kernel = Kernel::new(&module, "k").device(*device).threads(1);
        gpus.run(&[kernel.arg(&data)])?;
    }
    Ok(())
}

/// With `LaunchOrder::Device`, only signals order launches of different devices, also if one has
/// ended before the other starts.
#[test]
fn ends_of_launches_order_those_of_the_same_device() {
    let (store, load) = ("st.global.u32 [%x], 1;", "ld.global.u32 %r0, [%x];");
    let raise = "st.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;";
    let wait = "ld.acquire.sys.global.u32 %r0, [%y]; st.global.u32 [%x], 2;";
    let nothing = |_: usize, _: &fusewire_emulator::Buffer| {};
    for order in [LaunchOrder::Host, LaunchOrder::Device] {
        for config in configs() {
            let config = || Config {
                order,
                ..config.clone()
            };
            for (first, second) in [(store, store), (store, load), (load, store)] {
                run_in_sequence(config(), &[(1, first), (1, second)], nothing).unwrap();
                let other = run_in_sequence(config(), &[(0, first), (1, second)], nothing);
                match order {
                    LaunchOrder::Host => other.unwrap(),
                    _ => assert_eq!(expect_fault(other).kind, FaultKind::Race),
                }
                // A write by the host between the launches orders them.
                let write = |number: usize, data: &fusewire_emulator::Buffer| {
                    write_u32(data, &[number as u32 + 7; 64]);
                };
                run_in_sequence(config(), &[(0, first), (1, second)], write).unwrap();
            }
            if config().memory == MemoryModel::Checked {
                // The load returns the signal.
                run_in_sequence(config(), &[(0, raise), (1, wait)], nothing).unwrap();
            }
        }
    }
}
