//! Accesses through the generic proxy and through the alias proxy of `multimem` instructions.

use fusewire_emulator::{Config, Error, FaultKind, Gpus, Kernel, MemoryModel, Scheduler};

use super::Litmus;
use super::common::{Place, Spot, kernel, write_u32};

const FENCE: &str = "fence.proxy.alias;";
/// Reads the sum of the replicas if the flag is set.
const SUM: &str = "multimem.ld_reduce.relaxed.sys.global.add.u32 %o1, [%m];";
const BROADCAST: &str = "multimem.st.relaxed.sys.global.u32 [%m], 1;";

/// Returns the test of a message: `write`, instructions before the release, instructions after the
/// acquire, and `read` if the flag is set.
fn message(place: Place, write: &str, before: &str, after: &str, read: &str) -> Litmus {
    let writer = format!("{write} {before} st.release.sys.global.u32 [%y], 1;");
    let reader = format!(
        "ld.acquire.sys.global.u32 %o0, [%y]; {after}
        setp.eq.u32 %p0, %o0, 1; @%p0 {read}"
    );
    Litmus::new(place, &[&writer, &reader])
        .multicast()
        .seeds(200)
}

/// Pairs of accesses through different proxies. The read returns 1.
const PAIRS: [(&str, &str); 6] = [
    ("st.relaxed.sys.global.u32 [%m0], 1;", SUM),
    ("st.relaxed.sys.global.u32 [%m1], 1;", SUM),
    (
        "st.global.u32 [%m1], 1;",
        "multimem.ld_reduce.global.add.u32 %o1, [%m];",
    ),
    (BROADCAST, "ld.relaxed.sys.global.u32 %o1, [%m1];"),
    (
        "multimem.st.global.u32 [%m], 1;",
        "ld.global.u32 %o1, [%m0];",
    ),
    (
        "multimem.red.relaxed.sys.global.add.u32 [%m], 1;",
        "atom.relaxed.sys.global.or.b32 %o1, [%m1], 0;",
    ),
];

#[test]
fn proxy_fences_order_accesses_of_different_proxies() {
    for place in [Place::Devices, Place::Blocks, Place::Warps] {
        for (write, read) in PAIRS {
            for (before, after) in [(FENCE, ""), ("", FENCE), (FENCE, FENCE)] {
                message(place, write, before, after, read)
                    .run()
                    .are(&["00", "11"]);
            }
            message(place, write, "", "", read)
                .run()
                .are(&["00", "race"]);
            // Other fences do not order proxies.
            message(place, write, "fence.sc.sys;", "fence.sc.sys;", read)
                .run()
                .are(&["00", "race"]);
        }
    }
}

#[test]
fn a_write_after_a_read_through_another_proxy_needs_no_fence() {
    for (read, write) in [
        (
            "multimem.ld_reduce.global.add.u32 %r1, [%m];",
            "st.global.u32 [%m1], 1;",
        ),
        (
            "ld.global.u32 %r1, [%m0];",
            "multimem.st.global.u32 [%m], 1;",
        ),
    ] {
        for place in [Place::Devices, Place::Blocks, Place::Warps] {
            for (before, after) in [(FENCE, ""), ("", FENCE)] {
                message(place, read, before, after, write)
                    .run()
                    .are(&["0", "1"]);
            }
            message(place, read, "", "", write).run().are(&["0", "1"]);
        }
    }
}

#[test]
fn proxy_fences_elsewhere_do_not_order() {
    let (write, read) = PAIRS[0];
    let early = format!("{FENCE} {write}");
    message(Place::Devices, &early, "", "", read)
        .run()
        .are(&["00", "race"]);
    let (write, read) = PAIRS[3];
    let early = format!("{FENCE} {write}");
    message(Place::Devices, &early, "", "", read)
        .run()
        .are(&["00", "race"]);
    // A fence of another thread, which is not on the path.
    let writer = format!("{write} st.release.sys.global.u32 [%y], 1;");
    let reader =
        format!("ld.acquire.sys.global.u32 %o0, [%y]; setp.eq.u32 %p0, %o0, 1; @%p0 {read}");
    let test = Litmus::new(Place::Devices, &[&writer, &reader, FENCE]).multicast();
    test.run().are(&["00", "race"]);
}

#[test]
fn a_proxy_fence_of_a_thread_on_the_path_orders() {
    let test = |middle: &str| {
        let (write, read) = PAIRS[0];
        let first = format!("{write} st.release.sys.global.u32 [%x], 1;");
        let middle = format!(
            "LOOP: ld.acquire.sys.global.u32 %r0, [%x]; setp.eq.u32 %p0, %r0, 0;
            @%p0 bra LOOP; {middle} st.release.sys.global.u32 [%y], 1;"
        );
        let last =
            format!("ld.acquire.sys.global.u32 %o0, [%y]; setp.eq.u32 %p0, %o0, 1; @%p0 {read}");
        Litmus::new(Place::Devices, &[&first, &middle, &last])
            .multicast()
            .run()
    };
    test(FENCE).are(&["00", "11"]);
    test("").are(&["00", "race"]);
}

/// Returns the test of a message between blocks of two devices: thread 33 writes `%m0`, and thread
/// 33 of the other block reads the sum of the replicas. The thread 0 of each block synchronises the
/// blocks. The codes are those before and after the barriers of the blocks.
fn blocks(writer: [&str; 2], reader: [&str; 2]) -> Litmus {
    let numbers = "setp.eq.u32 %p0, %thread, 0; setp.eq.u32 %p1, %thread, 33;
        setp.eq.u32 %p2, %thread, 5;";
    let writer = format!(
        "{numbers} @%p1 st.global.u32 [%m0], 1; {} bar.sync 0; {}
        @%p0 st.release.sys.global.u32 [%y], 1;",
        writer[0], writer[1]
    );
    let reader = format!(
        "{numbers} @!%p0 bra JOIN;
        LOOP: ld.acquire.sys.global.u32 %r0, [%y]; setp.eq.u32 %p3, %r0, 0; @%p3 bra LOOP;
        JOIN: bar.warp.sync -1; {} bar.sync 0; {}
        @%p1 multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%m];
        @%p1 st.global.u32 [%out], %r1;",
        reader[0], reader[1]
    );
    Litmus::blocks(&[(64, &writer), (64, &reader)], 1)
        .multicast()
        .seeds(40)
}

#[test]
fn proxy_fences_of_other_threads_of_a_block() {
    let (first, writer, other) = (
        "@%p0 fence.proxy.alias;",
        "@%p1 fence.proxy.alias;",
        "@%p2 fence.proxy.alias;",
    );
    for (before, after) in [([writer, ""], ["", ""]), (["", first], ["", ""])] {
        blocks(before, after).run().are(&["1"]);
    }
    for after in [[first, ""], ["", writer]] {
        blocks(["", ""], after).run().are(&["1"]);
    }
    // The thread of the fence is not on the path between the accesses, or the fence is before the
    // write or after the release.
    for before in [[first, ""], ["", other], ["", writer], [other, ""]] {
        blocks(before, ["", ""]).run().are(&["race"]);
    }
    for after in [[writer, ""], ["", first], ["", other]] {
        blocks(["", ""], after).run().are(&["race"]);
    }
}

#[test]
fn accesses_of_one_proxy_in_different_blocks_need_a_fence() {
    for place in [Place::Devices, Place::Blocks] {
        for (before, after) in [(FENCE, ""), ("", FENCE)] {
            message(place, BROADCAST, before, after, SUM)
                .run()
                .are(&["00", "12"]);
        }
        // Both are strong, so they do not race. The reader may see old values in each replica.
        message(place, BROADCAST, "", "", SUM)
            .run()
            .are(&["00", "10", "11", "12"]);
        // Weak accesses race.
        let (write, read) = (
            "multimem.st.global.u32 [%m], 1;",
            "multimem.ld_reduce.global.add.u32 %o1, [%m];",
        );
        message(place, write, "", "", read)
            .run()
            .are(&["00", "race"]);
        message(place, write, FENCE, "", read)
            .run()
            .are(&["00", "12"]);
    }
    for place in [Place::Warps, Place::Lanes] {
        message(place, BROADCAST, "", "", SUM)
            .run()
            .are(&["00", "12"]);
    }
}

#[test]
fn accesses_of_different_proxies_race() {
    for (first, second) in [
        ("st.relaxed.sys.global.u32 [%m0], 1;", SUM),
        (BROADCAST, "ld.relaxed.sys.global.u32 %o1, [%m0];"),
        (BROADCAST, "st.relaxed.sys.global.u32 [%m1], 1;"),
        (
            "multimem.red.relaxed.sys.global.add.u32 [%m], 1;",
            "red.relaxed.sys.global.add.u32 [%m0], 1;",
        ),
        // The scope is too narrow.
        ("multimem.red.relaxed.gpu.global.add.u32 [%m], 1;", SUM),
        // Different sizes.
        ("multimem.st.relaxed.sys.global.u64 [%m], 1;", SUM),
    ] {
        for codes in [[first, second], [second, first]] {
            let test = Litmus::new(Place::Devices, &codes).multicast().seeds(50);
            test.run().are(&["race"]);
        }
    }
    // Reads do not conflict, nor do strong accesses through one proxy.
    let read = "ld.relaxed.sys.global.u32 %r1, [%m0];";
    for codes in [
        [SUM, read],
        [BROADCAST, SUM],
        [BROADCAST, BROADCAST],
        ["st.relaxed.sys.global.u32 [%m0], 1;", read],
    ] {
        let test = Litmus::new(Place::Devices, &codes).multicast().seeds(50);
        test.run().never(|it| it == "race");
    }
}

#[test]
fn accesses_of_one_thread_through_different_proxies_need_a_fence() {
    let spot = Spot {
        launch: 0,
        device: 0,
        block: 0,
        thread: 0,
    };
    for (write, read) in PAIRS {
        let read = read.replace("%o1", "%o0");
        let code = |between: &str| format!("{write} {between} {read}");
        let test = |code: &str| Litmus::at([(spot, code)]).multicast().seeds(20).run();
        test(&code(FENCE)).are(&["1"]);
        test(&code("")).are(&["race"]);
    }
}

#[test]
fn elements_of_vectors_through_the_alias_proxy() {
    let write = "multimem.st.relaxed.sys.global.v4.f32 [%m], {0f3F800000, 0f3F800000,
        0f40000000, 0f40000000};";
    let read = "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%f0, %f1, %f2, %f3}, [%m];
        @%p0 cvt.rni.u32.f32 %o1, %f0; @%p0 cvt.rni.u32.f32 %o2, %f3;";
    message(Place::Devices, write, FENCE, "", read)
        .run()
        .are(&["000", "124"]);
    let outcomes = message(Place::Devices, write, "", "", read)
        .seeds(600)
        .run();
    outcomes.include(&["000", "124", "112", "114", "120", "122"]);
}

#[test]
fn ends_of_launches_order_all_proxies() {
    let add = kernel(1, "multimem.red.relaxed.sys.global.add.u32 [%in0], 1; ret;");
    let read = kernel(
        2,
        "ld.global.u32 %r0, [%in0]; st.global.u32 [%in1], %r0; ret;",
    );
    let write = kernel(1, "st.global.u32 [%in0], 5; ret;");
    let sum = kernel(
        2,
        "multimem.ld_reduce.global.add.u32 %r0, [%in0]; st.global.u32 [%in1], %r0; ret;",
    );
    for seed in 0..50 {
        let gpus = Gpus::new(Config {
            memory: MemoryModel::Weak,
            scheduler: Scheduler::Random(seed),
            ..Config::default()
        });
        let (first, second) = (gpus.allocate(0, 64), gpus.allocate(1, 64));
        let out = gpus.allocate(0, 4);
        let object = gpus.multicast(&[&first, &second]);
        let adds = [0, 1].map(|device| {
            Kernel::new(&add, "k")
                .device(device)
                .blocks(2)
                .threads(3)
                .arg(&object)
        });
        gpus.run(&adds).unwrap();
        gpus.run(&[Kernel::new(&read, "k").device(1).arg(&first).arg(&out)])
            .unwrap();
        assert_eq!(out.read_u32(), [12]);
        gpus.run(&[Kernel::new(&write, "k").arg(&second)]).unwrap();
        gpus.run(&[Kernel::new(&sum, "k").arg(&object).arg(&out)])
            .unwrap();
        assert_eq!(out.read_u32(), [17]);
        // The host's writes are also before later accesses through the alias proxy.
        write_u32(&first, &[7; 16]);
        gpus.run(&[Kernel::new(&sum, "k").arg(&object).arg(&out)])
            .unwrap();
        assert_eq!(out.read_u32(), [12]);
        // In one run, the launches race.
        let launches = [
            Kernel::new(&write, "k").arg(&second),
            Kernel::new(&sum, "k").arg(&object).arg(&out),
        ];
        match gpus.run(&launches) {
            Err(Error::Fault(fault)) => assert_eq!(fault.kind, FaultKind::Race, "{fault}"),
            other => panic!("expected a race: {other:?}"),
        }
    }
}
