//! Uninitialised shared memory, and changes of memory that `ld.global.nc` reads.

use super::*;

/// Returns the kernel of a code in all threads of two blocks, with a static variable of 64 bytes
/// and dynamic memory.
fn shared_kernel(code: &str) -> (Arc<fusewire_emulator::Module>, String) {
    let text = ".extern .shared .align 16 .b8 dynamic[];\n".to_owned()
        + &kernel_text(
            "k",
            1,
            &format!(
                ".shared .align 16 .b8 s[64]; setp.eq.u32 %p0, %thread, 0;
                setp.eq.u32 %p1, %thread, 33; setp.eq.u32 %p2, %cta, 0;\n{code}\nret;"
            ),
        );
    (module(&text), text)
}

fn run_shared(config: Config, code: &str, blocks: u32) -> Result<(), Error> {
    let gpus = Gpus::new(config);
    let data = gpus.allocate(0, 256);
    let kernel = Kernel::new(&shared_kernel(code).0, "k")
        .blocks(blocks)
        .threads(64);
    gpus.run(&[kernel.dynamic_shared(64).arg(&data)]).map(drop)
}

#[test]
fn reads_of_uninitialised_shared_memory_fault() {
    for (before, read) in [
        ("", "ld.shared.u32 %r0, [s];"),
        ("", "ld.shared.u8 %r0, [s+3];"),
        ("", "ld.relaxed.cta.shared.u32 %r0, [s];"),
        ("", "atom.shared.add.u32 %r0, [s], 1;"),
        ("", "red.shared.add.u32 [s], 1;"),
        ("", "ld.shared.u32 %r0, [dynamic+8];"),
        ("st.shared.u32 [s+4], 1;", "ld.shared.u32 %r0, [s];"),
        ("st.shared.u16 [s], 1;", "ld.shared.u32 %r0, [s];"),
        (
            "st.shared.u8 [s], 1; st.shared.u8 [s+2], 1;",
            "ld.shared.u16 %r0, [s];",
        ),
        ("st.shared.u32 [s], 1;", "ld.shared.u64 %d0, [s];"),
        (
            "st.shared.v2.u32 [s], {1, 2}; st.shared.u32 [s+12], 4;",
            "ld.shared.v4.u32 V, [s];",
        ),
        (
            "mov.u64 %d0, s; cvta.shared.u64 %d1, %d0;",
            "ld.u32 %r0, [%d1];",
        ),
    ] {
        let read = &*read.replace('V', "{%r0, %r1, %r2, %r3}");
        let code = format!("@!%p1 bra DONE;\n{before}\n{read}\nDONE:");
        let (_, text) = shared_kernel(&code);
        for config in configs() {
            let fault = expect_fault(run_shared(config, &code, 1));
            assert_eq!(fault.kind, FaultKind::Uninitialized, "{fault}");
            assert_eq!(fault.site.thread, 33);
            assert_eq!(
                (fault.site.line, &*fault.site.instruction),
                (line_of(&text, read), read)
            );
            assert!(fault.other.is_none(), "{fault}");
        }
        let unchecked = Config {
            memory: MemoryModel::Unchecked,
            ..Config::default()
        };
        run_shared(unchecked, &code, 1).unwrap();
    }
}

#[test]
fn reads_of_initialised_shared_memory() {
    for code in [
        "@%p0 st.shared.u32 [s], 1; bar.sync 0; ld.shared.u32 %r0, [s];",
        "@%p0 st.shared.u32 [dynamic], 1; bar.sync 0; ld.shared.u32 %r0, [dynamic];",
        "@%p0 st.shared.u16 [s], 1; @%p1 st.shared.u16 [s+2], 1; bar.sync 0;
        ld.shared.u32 %r0, [s];",
        "@%p1 st.shared.v4.u32 [s], {1, 2, 3, 4}; bar.sync 0; ld.shared.v2.u64 {%d0, %d1}, [s];",
        "@%p0 st.relaxed.cta.shared.u32 [s], 0; bar.sync 0; atom.shared.add.u32 %r0, [s], 1;",
        "@%p0 atom.shared.exch.b32 %r0, [s+4], 1;",
    ] {
        for config in configs() {
            let result = run_shared(config, code, 2);
            // An exchange reads, too.
            if code.contains("exch") {
                assert_eq!(expect_fault(result).kind, FaultKind::Uninitialized);
            } else {
                result.unwrap_or_else(|error| panic!("{error}\n{code}"));
            }
        }
    }
}

#[test]
fn each_block_initialises_its_own_shared_memory() {
    let code = "setp.eq.and.u32 %p3, %thread, 0, %p2; @%p3 st.shared.u32 [s], 1;
        bar.sync 0; @%p0 ld.shared.u32 %r0, [s];";
    for config in configs() {
        run_shared(config.clone(), code, 1).unwrap();
        for capacity in [1, u32::MAX] {
            let config = Config {
                capacity,
                ..config.clone()
            };
            let fault = expect_fault(run_shared(config, code, 2));
            assert_eq!(
                (fault.kind, fault.site.block),
                (FaultKind::Uninitialized, 1)
            );
        }
        // A later launch does not see the values of an earlier one.
        let gpus = Gpus::new(config);
        let data = gpus.allocate(0, 256);
        for (code, is_initialised) in [(code, true), ("ld.shared.u32 %r0, [s];", false)] {
            let kernel = Kernel::new(&shared_kernel(code).0, "k").threads(64);
            let result = gpus.run(&[kernel.dynamic_shared(64).arg(&data)]);
            assert_eq!(result.is_ok(), is_initialised);
        }
    }
    // Without a barrier, the read is an error in each order.
    let code = code.replace("bar.sync 0; @%p0 ld", "@%p1 ld");
    for config in configs() {
        let fault = expect_fault(run_shared(config, &code, 1));
        let kinds = [FaultKind::Uninitialized, FaultKind::Race];
        assert!(kinds.contains(&fault.kind), "{fault}");
    }
}

/// Checks that the last lines of the codes of two threads are a read of a constant and a write. A
/// write after the end of the reader's launch is a race.
#[track_caller]
fn expect_changed(program: &Program) {
    for config in configs() {
        let fault = match program.run(config.clone()) {
            Err(Error::Fault(fault)) => fault,
            other => panic!(
                "expected a changed constant: {other:?}, {:?}",
                program.codes
            ),
        };
        let is_late = config.scheduler != Scheduler::RoundRobin && program.launches.len() == 2;
        match fault.kind {
            FaultKind::ConstantChanged => {}
            FaultKind::Race if is_late => {
                assert!(!fault.site.instruction.contains(".nc"), "{fault}");
            }
            _ => panic!("{fault}"),
        }
        let other = fault.other.as_ref().expect("the fault has two accesses");
        let in_order = program.is_site(0, other) && program.is_site(1, &fault.site);
        let reverse = program.is_site(1, other) && program.is_site(0, &fault.site);
        assert!(in_order || reverse, "{fault}");
        check_text(&fault);
    }
    let unchecked = Config {
        memory: MemoryModel::Unchecked,
        ..Config::default()
    };
    program
        .run(unchecked)
        .expect("the model `Unchecked` reports nothing");
}

#[test]
fn changes_of_constants_fault() {
    for place in Place::ALL {
        for (read, write) in [
            ("ld.global.nc.u32 %r0, [%x];", "st.global.u32 [%x], 1;"),
            ("ld.global.nc.u32 %r0, [%x];", "st.global.u32 [%x], 0;"),
            (
                "ld.global.nc.v4.u32 {%r0, %r1, %r2, %r3}, [%x];",
                "st.global.u8 [%x+15], 1;",
            ),
            (
                "ld.global.nc.u64 %d0, [%x];",
                "atom.sys.global.add.u32 %r0, [%x+4], 1;",
            ),
            (
                "ld.global.nc.L1::no_allocate.u32 %r0, [%x];",
                "st.relaxed.sys.global.u32 [%x], 1;",
            ),
        ] {
            expect_changed(&Program::new(place, &[read, write]));
            expect_changed(&Program::new(place, &[write, read]));
            // The order of the accesses does not matter.
            let scope = place.scope();
            for (first, second) in [(read, write), (write, read)] {
                // The first thread waits for the second, so that its launch does not end.
                let wait = |flag| {
                    format!(
                        "LOOP: ld.acquire.{scope}.global.u32 %r8, [{flag}];
                        setp.eq.u32 %p0, %r8, 0; @%p0 bra LOOP;"
                    )
                };
                let signal = |flag| format!("st.release.{scope}.global.u32 [{flag}], 1;");
                let first = format!("{first} {} {}", signal("%y"), wait("%y+4"));
                let second = format!("{} {second} {}", wait("%y"), signal("%y+4"));
                let program = Program::new(place, &[&first, &second]);
                for config in configs() {
                    let kind = expect_fault(program.run(config)).kind;
                    assert_eq!(kind, FaultKind::ConstantChanged);
                }
            }
        }
    }
    // By one thread.
    for code in [
        "ld.global.nc.u32 %r0, [%x]; st.global.u32 [%x], 1;",
        "st.global.u32 [%x], 1; ld.global.nc.u32 %r0, [%x];",
        "st.global.u32 [%x], 1; fence.sc.sys; ld.global.nc.u32 %r0, [%x];",
    ] {
        let program = Program::new(Place::Blocks, &[code]);
        for config in configs() {
            assert_eq!(
                expect_fault(program.run(config)).kind,
                FaultKind::ConstantChanged
            );
        }
    }
}

#[test]
fn constants_that_do_not_change() {
    let read = "ld.global.nc.v2.u32 {%r0, %r1}, [%x];";
    for place in Place::ALL {
        for other in [
            read,
            "ld.global.u32 %r0, [%x];",
            "ld.relaxed.sys.global.u32 %r0, [%x];",
            "st.global.u32 [%x+8], 1;",
        ] {
            expect_no_race(place, read, other);
        }
        expect_no_race(
            place,
            "ld.global.nc.u32 %r0, [%x];",
            "st.global.u32 [%x+4], 1;",
        );
    }
    // Earlier and later launches, and the host, write.
    let write = kernel(1, "st.global.u32 [%in0], 5; ret;");
    let read = kernel(
        2,
        "ld.global.nc.u32 %r0, [%in0]; st.global.u32 [%in1], %r0; ret;",
    );
    for config in configs() {
        let gpus = Gpus::new(config);
        let (data, out) = (gpus.allocate(0, 4), gpus.allocate(0, 4));
        let read = Kernel::new(&read, "k").device(1).arg(&data).arg(&out);
        for _ in 0..2 {
            gpus.run(&[Kernel::new(&write, "k").arg(&data)]).unwrap();
            gpus.run(core::slice::from_ref(&read)).unwrap();
            assert_eq!(out.read_u32(), [5]);
            write_u32(&data, &[6]);
            gpus.run(core::slice::from_ref(&read)).unwrap();
            assert_eq!(out.read_u32(), [6]);
        }
    }
}

#[test]
fn memory_of_a_new_buffer_has_no_history() {
    let module = kernel(
        1,
        "st.global.u32 [%in0], 1; ld.global.u32 %r0, [%in0]; ret;",
    );
    for config in configs() {
        let gpus = Gpus::new(config);
        for device in 0..20 {
            let data = gpus.allocate(device % 2, 64);
            gpus.run(&[Kernel::new(&module, "k").device(device % 3).arg(&data)])
                .unwrap();
            assert_eq!(data.read_u32()[0], 1);
        }
    }
}
