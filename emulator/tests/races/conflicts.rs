//! Accesses without order: strength, scopes, sizes, bytes, and state spaces.

use super::*;

#[test]
fn weak_accesses_race() {
    for place in Place::ALL {
        for (first, second) in [
            ("st.global.u32 [%x], 1;", "st.global.u32 [%x], 2;"),
            ("ld.global.u32 %r1, [%x];", "st.global.u32 [%x], 1;"),
            ("st.u32 [%x], 1;", "ld.global.u32 %r1, [%x];"),
            (
                "st.weak.global.u32 [%x+4], 1;",
                "st.global.v2.u32 [%x], {1, 2};",
            ),
            (
                "st.global.u8 [%x+15], 1;",
                "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%x];",
            ),
            ("ld.global.cg.u32 %r1, [%x];", "st.global.wt.u32 [%x], 1;"),
        ] {
            expect_race(place, first, second);
        }
        // Writes of equal values race, too, also by one instruction.
        expect_race(place, "st.global.u32 [%x], 0;", "st.global.u32 [%x], 0;");
    }
}

#[test]
fn one_instruction_of_several_threads_races() {
    let text = kernel_text("k", 1, "st.global.u32 [%in0], 7;\nret;");
    for (blocks, threads) in [(1, 2), (1, 33), (2, 1)] {
        for config in configs() {
            let gpus = Gpus::new(config);
            let data = gpus.allocate(0, 4);
            let kernel = Kernel::new(&module(&text), "k")
                .blocks(blocks)
                .threads(threads);
            let fault = expect_fault(gpus.run(&[kernel.arg(&data)]));
            assert_eq!(fault.kind, FaultKind::Race);
            let other = fault.other.clone().expect("a race has two accesses");
            let line = line_of(&text, "st.global");
            assert_eq!((fault.site.line, other.line), (line, line));
            assert_ne!(
                (fault.site.block, fault.site.thread),
                (other.block, other.thread)
            );
            check_text(&fault);
        }
    }
}

#[test]
fn weak_and_strong_accesses_race() {
    let strong = [
        "st.relaxed.sys.global.u32 [%x], 1;",
        "st.release.sys.global.u32 [%x], 1;",
        "st.volatile.global.u32 [%x], 1;",
        "atom.relaxed.sys.global.add.u32 %r1, [%x], 1;",
        "red.relaxed.sys.global.add.u32 [%x], 1;",
        "atom.acq_rel.sys.global.cas.b32 %r1, [%x], 0, 1;",
    ];
    for place in Place::ALL {
        for strong in strong {
            expect_race(place, strong, "ld.global.u32 %r2, [%x];");
            expect_race(place, strong, "st.global.u32 [%x], 2;");
        }
        for strong in [
            "ld.relaxed.sys.global.u32 %r1, [%x];",
            "ld.volatile.global.u32 %r1, [%x];",
        ] {
            expect_race(place, strong, "st.global.u32 [%x], 2;");
            expect_no_race(place, strong, "ld.global.u32 %r2, [%x];");
        }
    }
}

#[test]
fn strong_accesses_of_equal_size_do_not_race() {
    let accesses = [
        "st.relaxed.SCOPE.global.u32 [%x], 1;",
        "ld.acquire.SCOPE.global.u32 %r1, [%x];",
        "atom.SCOPE.global.add.u32 %r1, [%x], 1;",
        "red.release.SCOPE.global.max.u32 [%x], 1;",
        "st.release.SCOPE.global.f32 [%x], 0f3F800000;",
    ];
    for place in Place::ALL {
        for first in accesses {
            for second in accesses {
                for scope in [place.scope(), "sys"] {
                    let [first, second] = [first, second].map(|it| it.replace("SCOPE", scope));
                    Program::new(place, &[&first, &second]).expect_no_race();
                }
            }
        }
        expect_no_race(
            place,
            "st.volatile.global.u32 [%x], 1;",
            "ld.volatile.u32 %r1, [%x];",
        );
    }
}

#[test]
fn strong_accesses_of_narrow_scopes_race() {
    for (place, narrow) in [
        (Place::Devices, "gpu"),
        (Place::Devices, "cta"),
        (Place::Launches, "cta"),
        (Place::Blocks, "cta"),
        // Without clusters, each block is a cluster of its own.
        (Place::Blocks, "cluster"),
    ] {
        let scoped = |scope: &str| {
            [
                format!("st.relaxed.{scope}.global.u32 [%x], 1;"),
                format!("ld.relaxed.{scope}.global.u32 %r1, [%x];"),
                format!("atom.relaxed.{scope}.global.add.u32 %r2, [%x], 1;"),
            ]
        };
        for first in scoped(narrow) {
            for second in scoped(narrow).into_iter().chain(scoped("sys")) {
                if first.starts_with("ld") && second.starts_with("ld") {
                    expect_no_race(place, &first, &second);
                } else {
                    expect_race(place, &first, &second);
                }
            }
        }
    }
}

#[test]
fn atomic_operations_have_the_scope_of_the_device_by_default() {
    for (first, second) in [
        (
            "atom.global.add.u32 %r1, [%x], 1;",
            "atom.global.add.u32 %r2, [%x], 1;",
        ),
        (
            "red.global.add.u32 [%x], 1;",
            "red.sys.global.add.u32 [%x], 1;",
        ),
        (
            "red.release.global.add.u32 [%x], 1;",
            "ld.relaxed.sys.global.u32 %r1, [%x];",
        ),
        (
            "atom.acq_rel.global.exch.b32 %r1, [%x], 1;",
            "st.relaxed.sys.global.u32 [%x], 1;",
        ),
    ] {
        expect_race(Place::Devices, first, second);
        for place in [Place::Launches, Place::Blocks, Place::Warps, Place::Lanes] {
            expect_no_race(place, first, second);
        }
    }
}

#[test]
fn strong_accesses_of_different_sizes_race() {
    for place in Place::ALL {
        for (first, second) in [
            (
                "st.relaxed.sys.global.u32 [%x], 1;",
                "ld.relaxed.sys.global.u64 %d1, [%x];",
            ),
            (
                "st.relaxed.sys.global.u64 [%x], 1;",
                "ld.relaxed.sys.global.u32 %r1, [%x+4];",
            ),
            (
                "st.relaxed.sys.global.u8 [%x+1], 1;",
                "st.relaxed.sys.global.u32 [%x], 1;",
            ),
            (
                "st.relaxed.sys.global.u16 [%x+2], 1;",
                "atom.sys.global.add.u32 %r1, [%x], 1;",
            ),
            (
                "atom.sys.global.add.u32 %r1, [%x], 1;",
                "atom.sys.global.add.u64 %d1, [%x], 1;",
            ),
            (
                "st.relaxed.sys.global.v2.u32 [%x], {1, 2};",
                "ld.relaxed.sys.global.u64 %d1, [%x];",
            ),
            (
                "st.relaxed.sys.global.v4.u32 [%x], {1, 2, 3, 4};",
                "ld.relaxed.sys.global.v2.u64 {%d1, %d2}, [%x];",
            ),
        ] {
            expect_race(place, first, second);
        }
        for (first, second) in [
            // Elements of vectors are separate accesses.
            (
                "st.relaxed.sys.global.v4.u32 [%x], {1, 2, 3, 4};",
                "ld.relaxed.sys.global.u32 %r1, [%x+12];",
            ),
            (
                "st.relaxed.sys.global.v4.u32 [%x], {1, 2, 3, 4};",
                "st.relaxed.sys.global.v2.u32 [%x+8], {1, 2};",
            ),
            (
                "st.relaxed.sys.global.v2.u64 [%x], {1, 2};",
                "atom.sys.global.add.u64 %d1, [%x+8], 1;",
            ),
            (
                "ld.relaxed.sys.global.u32 %r1, [%x];",
                "ld.relaxed.sys.global.u64 %d1, [%x];",
            ),
        ] {
            expect_no_race(place, first, second);
        }
    }
}

#[test]
fn accesses_of_different_bytes_do_not_race() {
    for place in Place::ALL {
        for (first, second) in [
            ("st.global.u8 [%x], 1;", "st.global.u8 [%x+1], 1;"),
            ("st.global.u16 [%x], 1;", "st.global.u16 [%x+2], 1;"),
            ("st.global.u32 [%x], 1;", "ld.global.u32 %r1, [%x+4];"),
            (
                "st.global.u8 [%x+3], 1;",
                "atom.global.add.u32 %r1, [%x+4], 1;",
            ),
            (
                "st.global.v4.u32 [%x], {1, 2, 3, 4};",
                "st.global.v4.u32 [%x+16], {1, 2, 3, 4};",
            ),
            (
                "st.global.v2.u8 [%x], {1, 2};",
                "st.global.v2.u8 [%x+2], {3, 4};",
            ),
        ] {
            expect_no_race(place, first, second);
        }
        expect_no_race(
            place,
            "ld.global.u32 %r1, [%x];",
            "ld.global.u64 %d1, [%x];",
        );
    }
    // The bytes of all threads are in memory.
    let text = "add.u64 %d0, %in0, 0; cvt.u64.u32 %d1, %thread; add.u64 %d0, %d0, %d1;
        add.u32 %r0, %thread, 1; st.global.u8 [%d0], %r0; ret;";
    for config in configs() {
        let gpus = Gpus::new(config);
        let data = gpus.allocate(0, 64);
        gpus.run(&[Kernel::new(&kernel(1, text), "k").threads(64).arg(&data)])
            .unwrap();
        assert_eq!(data.read(), (1..=64).collect::<Vec<u8>>());
    }
}

#[test]
fn accesses_of_one_thread_do_not_race() {
    let code = "st.global.u64 [%x], 1; st.relaxed.cta.global.u32 [%x], 2;
        ld.global.u8 %r1, [%x+1]; atom.global.add.u32 %r1, [%x+4], 1; ld.global.u64 %d1, [%x];
        st.shared.u32 [s], 1; ld.shared.u16 %r1, [s]; atom.shared.add.u32 %r1, [s], 1;";
    Program::new(Place::Blocks, &[code]).expect_no_race();
}

#[test]
fn accesses_of_shared_memory_race() {
    for place in [Place::Warps, Place::Lanes] {
        for (first, second) in [
            ("st.shared.u32 [s], 1;", "st.shared.u32 [s], 2;"),
            ("st.shared.u32 [s], 0;", "st.shared.u32 [s], 0;"),
            ("ld.shared.u32 %r1, [s];", "st.shared.u32 [s], 1;"),
            (
                "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [s];",
                "st.shared.u8 [s+15], 1;",
            ),
            (
                "atom.shared.add.u32 %r1, [s], 1;",
                "ld.shared.u32 %r1, [s];",
            ),
            ("atom.shared.add.u32 %r1, [s], 1;", "st.shared.u32 [s], 1;"),
            (
                "st.relaxed.cta.shared.u32 [s], 1;",
                "ld.shared.u32 %r1, [s];",
            ),
            (
                "st.relaxed.cta.shared.u32 [s], 1;",
                "ld.relaxed.cta.shared.u64 %d1, [s];",
            ),
        ] {
            expect_race(place, first, second);
        }
        for (first, second) in [
            ("st.shared.u32 [s], 1;", "st.shared.u32 [s+4], 2;"),
            ("st.shared.u8 [s+1], 1;", "st.shared.u8 [s+2], 2;"),
            ("ld.shared.u32 %r1, [s];", "ld.shared.u64 %d1, [s];"),
            (
                "atom.shared.add.u32 %r1, [s], 1;",
                "atom.shared.add.u32 %r1, [s], 1;",
            ),
            (
                "st.relaxed.cta.shared.u32 [s], 1;",
                "ld.acquire.cta.shared.u32 %r1, [s];",
            ),
            (
                "st.volatile.shared.u32 [s], 1;",
                "ld.volatile.shared.u32 %r1, [s];",
            ),
        ] {
            expect_no_race(place, first, second);
        }
        // A generic address of shared memory.
        let generic = "mov.u64 %d0, s; cvta.shared.u64 %d1, %d0;\nst.u32 [%d1], 1;";
        expect_race(place, generic, "ld.shared.u32 %r1, [s];");
    }
    // Each block has its own shared memory.
    for place in [Place::Blocks, Place::Launches, Place::Devices] {
        expect_no_race(place, "st.shared.u32 [s], 1;", "st.shared.u32 [s], 2;");
    }
}

#[test]
fn local_memory_does_not_race() {
    let module = kernel(
        1,
        ".local .align 8 .b8 l[16]; st.local.u32 [l], %thread; ld.local.u32 %r0, [l];
        mul.wide.u32 %d0, %thread, 4; add.u64 %d0, %d0, %in0; st.global.u32 [%d0], %r0; ret;",
    );
    for config in configs() {
        let gpus = Gpus::new(config);
        let out = gpus.allocate(0, 256);
        gpus.run(&[Kernel::new(&module, "k").threads(64).arg(&out)])
            .unwrap();
        assert_eq!(out.read_u32(), (0..64).collect::<Vec<u32>>());
    }
}
