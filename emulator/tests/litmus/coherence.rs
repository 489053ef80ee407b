//! One location: coherence, read-modify-write operations, release sequences, and the host.

use core::time::Duration;

use fusewire_emulator::{Config, Gpus, IdleTime, Kernel, MemoryModel, Scheduler};

use super::common::{Place, Spot, kernel, write_u32};
use super::{Litmus, binary_except};

const ACCESSES: [(&str, &str); 4] = [
    ("st.relaxed.sys", "ld.relaxed.sys"),
    ("st.relaxed.sys", "ld.acquire.sys"),
    ("st.release.sys", "ld.acquire.sys"),
    ("st.volatile", "ld.volatile"),
];

#[test]
fn reads_do_not_go_back() {
    for place in Place::ALL {
        for (st, ld) in ACCESSES {
            let writer = format!("{st}.global.u32 [%x], 1;");
            let reader = format!("{ld}.global.u32 %o0, [%x]; {ld}.global.u32 %o1, [%x];");
            Litmus::new(place, &[&writer, &reader])
                .run()
                .are(&["00", "01", "11"]);
            let writer = format!("{st}.global.u32 [%x], 1; {st}.global.u32 [%x], 2;");
            Litmus::new(place, &[&writer, &reader])
                .finals("x")
                .seeds(600)
                .run()
                .are(&["002", "012", "022", "112", "122", "222"]);
        }
        // The second read is part of a vector.
        let writer = "st.relaxed.sys.global.v2.u32 [%x], {1, 1};";
        let reader = "ld.relaxed.sys.global.u32 %o0, [%x];
            ld.relaxed.sys.global.v2.u32 {%o1, %o2}, [%x];";
        let outcomes = Litmus::new(place, &[writer, reader]).seeds(600).run();
        outcomes.are(&["000", "001", "010", "011", "110", "111"]);
    }
}

#[test]
fn a_thread_sees_its_own_writes() {
    for place in Place::ALL {
        for (st, ld) in ACCESSES {
            let own = format!(
                "{st}.global.u32 [%x], 1; {ld}.global.u32 %o0, [%x]; {ld}.global.u32 %o1, [%x];"
            );
            let other = format!("{st}.global.u32 [%x], 2;");
            let outcomes = Litmus::new(place, &[&own, &other])
                .finals("x")
                .seeds(600)
                .run();
            outcomes.are(&["111", "112", "122", "222"]);
            // A read before the own write.
            let own = format!("{ld}.global.u32 %o0, [%x]; {st}.global.u32 [%x], 1;");
            let outcomes = Litmus::new(place, &[&own, &other]).finals("x").run();
            outcomes.are(&["01", "02", "21"]);
        }
    }
}

#[test]
fn readers_agree_on_the_order_of_writes() {
    let reader = "ld.relaxed.sys.global.u32 %o0, [%x]; ld.relaxed.sys.global.u32 %o1, [%x];";
    let codes = [
        "st.relaxed.sys.global.u32 [%x], 1;",
        "st.relaxed.sys.global.u32 [%x], 2;",
        reader,
        reader,
    ];
    for place in [Place::Devices, Place::Blocks] {
        let outcomes = Litmus::new(place, &codes).finals("x").seeds(1200).run();
        // If a reader sees 1 and then 2, then 2 is the last write.
        outcomes.never(|it| {
            let last = &it[4..];
            let backwards = if last == "1" { "12" } else { "21" };
            [&it[..2], &it[2..4]].contains(&backwards)
                || [&it[..2], &it[2..4]]
                    .iter()
                    .any(|pair| matches!(*pair, "10" | "20"))
        });
        for (first, last) in [("12", "2"), ("21", "1"), ("02", "1"), ("01", "2")] {
            outcomes.some(|it| it.starts_with(first) && it.ends_with(last));
        }
    }
}

#[test]
fn reads_of_several_threads_do_not_go_back() {
    // The threads are two lanes; a third thread writes.
    let spot = |launch, thread| Spot {
        launch,
        device: launch,
        block: 0,
        thread,
    };
    let first = |barrier: &str| format!("ld.relaxed.sys.global.u32 %o0, [%x]; {barrier}");
    let second = |barrier: &str| format!("{barrier} ld.relaxed.sys.global.u32 %o0, [%x];");
    let test = |barrier: &str| {
        let threads = [
            (spot(0, 0), "st.relaxed.sys.global.u32 [%x], 1;"),
            (spot(1, 0), &*first(barrier)),
            (spot(1, 1), &*second(barrier)),
        ];
        Litmus::at(threads).run()
    };
    test("barrier.sync 0;").are(&["00", "01", "11"]);
    test("").are(&["00", "01", "10", "11"]);
}

#[test]
fn writes_of_several_threads_are_coherent() {
    // The second thread overwrites a value that the first has released.
    let first = "st.relaxed.sys.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;";
    let second = "LOOP: ld.acquire.sys.global.u32 %r0, [%y]; setp.eq.u32 %p0, %r0, 0;
        @%p0 bra LOOP; st.relaxed.sys.global.u32 [%x], 2;";
    let third = "ld.relaxed.sys.global.u32 %o0, [%x]; ld.relaxed.sys.global.u32 %o1, [%x];";
    for place in Place::ALL {
        let outcomes = Litmus::new(place, &[first, second, third])
            .finals("x")
            .seeds(600)
            .run();
        outcomes.are(&["002", "012", "022", "112", "122", "222"]);
    }
}

#[test]
fn old_values_are_among_the_last_writes() {
    let mut writer = String::new();
    for value in 1..=8 {
        writer += &format!("st.relaxed.sys.global.u32 [%x], {value};");
    }
    writer += "st.relaxed.sys.global.u32 [%y], 1;";
    let reader = "ld.relaxed.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];";
    let outcomes = Litmus::new(Place::Devices, &[&writer, reader])
        .seeds(1000)
        .run();
    outcomes.include(&["15", "16", "17", "18", "00", "08"]);
    outcomes.never(|it| it.starts_with('1') && !"5678".contains(&it[1..]));
}

#[test]
fn elements_of_vectors_are_separate() {
    let writer = "st.relaxed.sys.global.v2.u32 [%x], {1, 1};";
    let reader = "ld.relaxed.sys.global.v2.u32 {%o0, %o1}, [%x];";
    let outcomes = Litmus::new(Place::Blocks, &[writer, reader]).run();
    outcomes.are(&binary_except(2, &[]));
    // Words of 8 bytes are single accesses.
    let writer = "st.relaxed.sys.global.u64 [%x], 0x100000001;";
    let reader = "ld.relaxed.sys.global.u64 %d0, [%x]; mov.b64 {%o0, %o1}, %d0;";
    Litmus::new(Place::Blocks, &[writer, reader])
        .run()
        .are(&["00", "11"]);
}

#[test]
fn accesses_of_other_sizes_see_the_newest_writes() {
    // Happens-before orders accesses of different sizes.
    let writer = "st.relaxed.sys.global.u64 [%x], 0x300000003; st.global.u32 [%x+4], 2;
        st.global.u8 [%x], 1; st.release.sys.global.u32 [%y], 1;";
    let reader = "LOOP: ld.acquire.sys.global.u32 %r0, [%y]; setp.eq.u32 %p0, %r0, 0;
        @%p0 bra LOOP; ld.relaxed.sys.global.u64 %d0, [%x]; mov.b64 {%o0, %o1}, %d0;
        ld.relaxed.sys.global.u8 %o2, [%x+4];";
    for place in Place::ALL {
        Litmus::new(place, &[writer, reader])
            .seeds(100)
            .run()
            .are(&["122"]);
    }
    // A part of an older write is newer than the value before it.
    let first = "st.relaxed.sys.global.u32 [%x], 1; st.relaxed.sys.global.u32 [%x+4], 1;
        st.release.sys.global.u32 [%y], 1; st.relaxed.sys.global.u32 [%x], 2;";
    let second = "ld.acquire.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];
        ld.relaxed.sys.global.u32 %o2, [%x+4];";
    let outcomes = Litmus::new(Place::Blocks, &[first, second])
        .seeds(600)
        .run();
    outcomes.never(|it| it.starts_with("10") || it.starts_with('1') && it.ends_with('0'));
    outcomes.include(&["111", "121", "000", "021", "010", "011"]);
}

#[test]
fn atomic_operations_lose_nothing() {
    // Each of 24 threads adds 5 times.
    let add = "mov.u32 %r1, 0;
        LOOP: OPERATION add.u32 %r1, %r1, 1; setp.lt.u32 %p0, %r1, 5; @%p0 bra LOOP;";
    let operations = [
        "atom.relaxed.sys.global.add.u32 %r0, [%x], 1;",
        "red.relaxed.sys.global.add.u32 [%x], 1;",
        "atom.acq_rel.sys.global.inc.u32 %r0, [%x], 1000;",
        "ld.relaxed.sys.global.u32 %r2, [%x]; AGAIN: add.u32 %r3, %r2, 1;
        atom.relaxed.sys.global.cas.b32 %r4, [%x], %r2, %r3; setp.ne.u32 %p1, %r4, %r2;
        mov.u32 %r2, %r4; @%p1 bra AGAIN;",
    ];
    for operation in operations {
        let code = add.replace("OPERATION", operation).replace("%x", "%in0");
        let module = kernel(1, &format!("{code}\nret;"));
        for seed in 0..20 {
            let gpus = Gpus::new(weak(seed));
            let counter = gpus.allocate(0, 4);
            let launch = |device| {
                Kernel::new(&module, "k")
                    .device(device)
                    .blocks(3)
                    .threads(4)
                    .arg(&counter)
            };
            gpus.run(&[launch(0), launch(1)]).unwrap();
            assert_eq!(counter.read_u32(), [120], "{operation}");
        }
    }
}

fn weak(seed: u64) -> Config {
    Config {
        memory: MemoryModel::Weak,
        scheduler: Scheduler::Random(seed),
        ..Config::default()
    }
}

#[test]
fn atomic_operations_and_stores_are_atomic() {
    for place in Place::ALL {
        let add = "atom.relaxed.sys.global.add.u32 %o0, [%x], 2;";
        let store = "st.relaxed.sys.global.u32 [%x], 1;";
        Litmus::new(place, &[add, store])
            .finals("x")
            .run()
            .are(&["01", "13"]);
        let outcomes = Litmus::new(place, &[add, add, add]).finals("x").run();
        outcomes.never(|it| {
            let mut old: Vec<char> = it.chars().collect();
            old.sort_unstable();
            old != ['0', '2', '4', '6'] || !it.ends_with('6')
        });
        outcomes.include(&["0246", "2046", "2406"]);
        let exchange = |value| format!("atom.relaxed.sys.global.exch.b32 %o0, [%x], {value};");
        let outcomes = Litmus::new(place, &[&exchange(1), &exchange(2)])
            .finals("x")
            .run();
        outcomes.are(&["012", "201"]);
    }
}

#[test]
fn a_lock_orders_weak_accesses() {
    let code = "LOOP: atom.acquire.SCOPE.global.cas.b32 %r0, [%y], 0, 1;
        setp.ne.u32 %p0, %r0, 0; @%p0 bra LOOP;
        ld.global.u32 %r1, [%x]; add.u32 %r1, %r1, 2; st.global.u32 [%x], %r1;
        UNLOCK";
    let test = |place: Place, lock: &str, unlock: &str| {
        let code = code.replace("UNLOCK", unlock).replace("acquire", lock);
        let code = code.replace("SCOPE", place.scope());
        Litmus::new(place, &[&code, &code, &code])
            .finals("x")
            .seeds(100)
            .run()
    };
    let exchange = "atom.release.SCOPE.global.exch.b32 %r0, [%y], 0;";
    let store = "st.release.SCOPE.global.u32 [%y], 0;";
    for place in Place::ALL {
        test(place, "acquire", exchange).are(&["6"]);
        test(place, "acquire", store).are(&["6"]);
        test(
            place,
            "acq_rel",
            "fence.acq_rel.SCOPE; st.relaxed.SCOPE.global.u32 [%y], 0;",
        )
        .are(&["6"]);
        test(place, "relaxed", exchange).are(&["race"]);
        test(place, "acquire", &store.replace("release", "relaxed")).are(&["race"]);
    }
}

/// Returns the test of a release sequence. The first thread releases `%x` by writing 1 to `%y`, the
/// second changes `%y`, and the third acquires. It reads `%x` if the value of `%y` is odd.
fn sequence(place: Place, release: &str, second: &str, weak: bool) -> Litmus {
    let (store, load) = if weak {
        ("st.global.u32", "ld.global.u32")
    } else {
        ("st.relaxed.sys.global.u32", "ld.relaxed.sys.global.u32")
    };
    let first = format!("{store} [%x], 1; {release}");
    let third = format!(
        "ld.acquire.sys.global.u32 %o0, [%y]; and.b32 %r0, %o0, 1; setp.eq.u32 %p0, %r0, 1;
        @%p0 {load} %o1, [%x];"
    );
    Litmus::new(place, &[&first, second, &third]).seeds(600)
}

#[test]
fn atomic_operations_continue_a_release_sequence() {
    let store = "st.release.sys.global.u32 [%y], 1;";
    let fence = "fence.acq_rel.sys; st.relaxed.sys.global.u32 [%y], 1;";
    for place in Place::ALL {
        for release in [store, fence] {
            for second in [
                "atom.relaxed.sys.global.add.u32 %r0, [%y], 4;",
                "red.relaxed.sys.global.add.u32 [%y], 4;",
                "atom.acquire.sys.global.xor.b32 %r0, [%y], 4;",
                "red.release.sys.global.add.u32 [%y], 2; red.relaxed.sys.global.add.u32 [%y], 2;",
            ] {
                // 4 is the value if the second thread is the first to write.
                let outcomes = sequence(place, release, second, true).run();
                let expected = ["00", "40", "11", "51"];
                // The values between the two operations of the last code.
                let between = if second.contains("2;") {
                    &["20", "31"][..]
                } else {
                    &[]
                };
                outcomes.never(|it| !expected.contains(&it) && !between.contains(&it));
                outcomes.include(&expected);
            }
        }
        // A store of another thread ends the sequence, even if it depends on the value.
        let copy = "ld.relaxed.sys.global.u32 %r0, [%y]; or.b32 %r0, %r0, 4;
            st.relaxed.sys.global.u32 [%y], %r0;";
        for second in [copy, "st.relaxed.sys.global.u32 [%y], 5;"] {
            sequence(place, store, second, false)
                .run()
                .include(&["50", "51", "11"]);
            sequence(place, store, second, true)
                .run()
                .include(&["race", "11"]);
            sequence(place, store, second, true)
                .run()
                .never(|it| it == "51" || it == "50");
        }
        // A store after an atomic operation of the same thread ends the sequence, too.
        let second = "atom.relaxed.sys.global.add.u32 %r0, [%y], 4; setp.eq.u32 %p1, %r0, 1;
            @%p1 st.relaxed.sys.global.u32 [%y], 7;";
        let outcomes = sequence(place, store, second, false).run();
        outcomes.include(&["70", "71", "11", "40"]);
        outcomes.never(|it| it == "50" || it == "10");
        // A release of the second thread orders its own accesses only.
        let second = "st.release.sys.global.u32 [%y], 5;";
        sequence(place, store, second, false)
            .run()
            .include(&["50", "51"]);
    }
}

#[test]
fn later_stores_of_the_same_thread_continue_a_release() {
    for place in Place::ALL {
        for release in [
            "st.release.sys.global.u32 [%y], 1; st.relaxed.sys.global.u32 [%y], 3;",
            "atom.release.sys.global.exch.b32 %r0, [%y], 1; st.volatile.global.u32 [%y], 3;",
            "st.release.sys.global.u32 [%y], 1; red.relaxed.sys.global.add.u32 [%y], 2;",
        ] {
            sequence(place, release, "", true)
                .seeds(300)
                .run()
                .are(&["00", "11", "31"]);
        }
        // A store to another location does not.
        let release = "st.release.sys.global.u32 [%z], 1; st.relaxed.sys.global.u32 [%y], 3;";
        sequence(place, release, "", true)
            .seeds(100)
            .run()
            .are(&["00", "race"]);
        sequence(place, release, "", false)
            .seeds(300)
            .run()
            .are(&["00", "30", "31"]);
    }
}

#[test]
fn an_acquire_after_a_read_acquires_the_value_of_the_read() {
    // PTX: a strong read followed by an acquire operation on the same location is an acquire
    // pattern. The second thread overwrites the released value.
    let writer = "st.relaxed.sys.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;";
    let other = "st.relaxed.sys.global.u32 [%y], 2;";
    let reader = "ld.relaxed.sys.global.u32 %o0, [%y]; ld.acquire.sys.global.u32 %o1, [%y];
        ld.relaxed.sys.global.u32 %o2, [%x];";
    for place in Place::ALL {
        let outcomes = Litmus::new(place, &[writer, other, reader])
            .seeds(1000)
            .run();
        outcomes.never(|it| it.ends_with('0') && it[..2].contains('1'));
        outcomes.include(&["111", "121", "220", "020", "021"]);
    }
}

#[test]
fn the_read_of_a_reduction_does_not_acquire() {
    // The final value of `%y` is 5 if the reduction follows the store.
    let writer = "st.relaxed.sys.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;";
    let test = |place, add: &str| {
        let reader = format!("{add} fence.acq_rel.sys; ld.relaxed.sys.global.u32 %o0, [%x];");
        Litmus::new(place, &[writer, &reader]).finals("y").run()
    };
    for place in Place::ALL {
        test(place, "atom.relaxed.sys.global.add.u32 %r0, [%y], 4;").are(&["01", "11", "15"]);
        test(place, "red.relaxed.sys.global.add.u32 [%y], 4;").are(&["01", "11", "15", "05"]);
    }
}

#[test]
fn each_atomic_operation_of_a_sequence_must_be_morally_strong() {
    // The second thread is on another device than the first, whose store to `%y` may have the scope
    // of its block. `%z` orders the two, so there is no race. The third is in the first's block.
    let spot = |launch, thread| Spot {
        launch,
        device: launch,
        block: 0,
        thread,
    };
    let first = |scope: &str| {
        format!(
            "st.relaxed.sys.global.u32 [%x], 1; fence.acq_rel.sys;
            st.relaxed.{scope}.global.u32 [%y], 1; st.release.sys.global.u32 [%z], 1;"
        )
    };
    let second = "LOOP: ld.acquire.sys.global.u32 %r0, [%z]; setp.eq.u32 %p0, %r0, 0;
        @%p0 bra LOOP; atom.relaxed.sys.global.add.u32 %r1, [%y], 4;";
    let third = "ld.acquire.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];";
    let test = |scope| {
        let first = first(scope);
        Litmus::at([
            (spot(0, 0), &*first),
            (spot(1, 0), second),
            (spot(0, 32), third),
        ])
        .seeds(1000)
    };
    test("sys").run().are(&["00", "01", "11", "51"]);
    test("cta").run().are(&["00", "01", "11", "51", "50"]);
}

#[test]
fn ends_of_launches_order_all_accesses() {
    let write = kernel(
        1,
        "st.relaxed.sys.global.u32 [%in0], 2; st.global.u32 [%in0+4], 3; ret;",
    );
    let read = kernel(
        2,
        "ld.relaxed.sys.global.u32 %r0, [%in0]; ld.global.u32 %r1, [%in0+4];
        st.global.v2.u32 [%in1], {%r0, %r1}; st.global.u32 [%in0+4], 0; ret;",
    );
    for seed in 0..50 {
        let gpus = Gpus::new(weak(seed));
        let (data, out) = (gpus.allocate(0, 8), gpus.allocate(0, 8));
        for round in 1..5u32 {
            gpus.run(&[Kernel::new(&write, "k").device(round % 2).arg(&data)])
                .unwrap();
            gpus.run(&[Kernel::new(&read, "k").arg(&data).arg(&out)])
                .unwrap();
            assert_eq!(out.read_u32(), [2, 3]);
            write_u32(&data, &[round, 7]);
            gpus.run(&[Kernel::new(&read, "k").device(1).arg(&data).arg(&out)])
                .unwrap();
            assert_eq!(out.read_u32(), [round, 7]);
        }
    }
}

#[test]
fn writes_of_the_host_happen_before_later_accesses() {
    let module = kernel(
        3,
        "START: ld.relaxed.sys.global.u32 %r0, [%in0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra START;
        ld.global.u32 %r1, [%in1]; st.global.u32 [%in2], %r1; st.global.u32 [%in1], 9; ret;",
    );
    for seed in 0..5 {
        let gpus = Gpus::new(Config {
            idle: IdleTime::Host,
            ..weak(seed)
        });
        let [flag, data, out] = [0; 3].map(|device| gpus.allocate(device, 4));
        write_u32(&data, &[1]);
        std::thread::scope(|scope| {
            let kernel = Kernel::new(&module, "k").arg(&flag).arg(&data).arg(&out);
            let gpus = &gpus;
            scope.spawn(move || gpus.run(&[kernel]).unwrap());
            std::thread::sleep(Duration::from_millis(5));
            write_u32(&data, &[2]);
            write_u32(&flag, &[1]);
        });
        assert_eq!((out.read_u32(), data.read_u32()), (vec![2], vec![9]));
    }
}

#[test]
fn other_models_return_the_newest_values() {
    let reader = "ld.relaxed.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];";
    let codes = [
        "st.relaxed.sys.global.u32 [%x], 1; st.relaxed.sys.global.u32 [%y], 1;",
        reader,
    ];
    for model in [MemoryModel::Unchecked, MemoryModel::Checked] {
        for place in Place::ALL {
            let outcomes = Litmus::new(place, &codes).memory(model).run();
            outcomes.are(&["00", "01", "11"]);
        }
    }
}

#[test]
fn a_seed_determines_the_outcomes() {
    let codes = [
        "st.relaxed.sys.global.u32 [%x], 1; ld.relaxed.sys.global.u32 %o0, [%y];",
        "st.relaxed.sys.global.u32 [%y], 1; ld.relaxed.sys.global.u32 %o0, [%x];",
    ];
    let test = Litmus::new(Place::Blocks, &codes);
    for seed in 0..100 {
        assert_eq!(test.run_once(seed), test.run_once(seed), "seed {seed}");
    }
}

#[test]
fn round_robin_also_returns_old_values() {
    // The scheduler does not interleave these blocks within their 256 instructions.
    let codes = [
        "st.relaxed.sys.global.u32 [%in0], 1; ld.relaxed.sys.global.u32 %r0, [%in0+64];",
        "st.relaxed.sys.global.u32 [%in0+64], 1; ld.relaxed.sys.global.u32 %r0, [%in0];",
    ];
    let modules = codes.map(|it| kernel(2, &format!("{it} st.global.u32 [%in1], %r0; ret;")));
    let gpus = Gpus::new(Config {
        memory: MemoryModel::Weak,
        ..Config::default()
    });
    let mut outcomes = std::collections::BTreeSet::new();
    for _ in 0..100 {
        let [data, first, second] = [68, 4, 4].map(|bytes| gpus.allocate(0, bytes));
        let launch = |at: usize, out| Kernel::new(&modules[at], "k").arg(&data).arg(out);
        gpus.run(&[launch(0, &first), launch(1, &second)]).unwrap();
        outcomes.insert((first.read_u32()[0], second.read_u32()[0]));
    }
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [(0, 0), (0, 1)]);
}
