//! Three and four threads: chains of releases and acquires, independent readers, and outcomes that
//! do not occur.

use super::common::Place::{self, Blocks, Devices, Launches, Warps};
use super::common::Spot;
use super::{Litmus, binary_except};

/// Places of threads that a wide scope contains.
const PLACES: [(&str, Place); 4] = [
    ("sys", Devices),
    ("gpu", Launches),
    ("gpu", Blocks),
    ("cta", Warps),
];

fn litmus(place: Place, scope: &str, codes: &[&str]) -> Litmus {
    let codes: Vec<_> = codes.iter().map(|it| it.replace("SCOPE", scope)).collect();
    Litmus::new(place, &codes.iter().map(String::as_str).collect::<Vec<_>>()).seeds(800)
}

/// Returns the test of independent reads of independent writes.
fn independent_reads(place: Place, scope: &str, order: &str, fence: &str) -> Litmus {
    let reader = |first: &str, second: &str| {
        format!(
            "ld.{order}.sys.global.u32 %o0, [%{first}]; {fence}
            ld.{order}.sys.global.u32 %o1, [%{second}];"
        )
    };
    let codes = [
        "st.relaxed.sys.global.u32 [%x], 1;",
        "st.relaxed.sys.global.u32 [%y], 1;",
        &reader("x", "y"),
        &reader("y", "x"),
    ];
    litmus(place, scope, &codes).seeds(1500)
}

#[test]
fn independent_readers_may_disagree() {
    for place in Place::ALL {
        for (order, fence) in [
            ("relaxed", ""),
            ("acquire", ""),
            ("relaxed", "fence.acq_rel.sys;"),
            ("acquire", "fence.acq_rel.sys;"),
        ] {
            let outcomes = independent_reads(place, "sys", order, fence)
                .seeds(800)
                .run();
            outcomes.include(&["1010", "1111", "0000", "0101", "1011", "1110"]);
        }
    }
    // A sequentially consistent fence of one reader only, and fences whose scope is too narrow.
    let code = |fence: &str| independent_reads(Devices, "", "relaxed", fence);
    code("fence.sc.gpu;").run().include(&["1010"]);
    independent_reads(Blocks, "", "relaxed", "fence.sc.cta;")
        .run()
        .include(&["1010"]);
}

#[test]
fn independent_readers_with_sequentially_consistent_fences_agree() {
    let agree = binary_except(4, &["1010"]);
    for (scope, place) in PLACES {
        for fence in ["fence.sc.SCOPE;", "fence.sc.sys;"] {
            independent_reads(place, scope, "relaxed", fence)
                .run()
                .are(&agree);
        }
    }
    // Readers on one device, which a fence of the device orders. The writers are on others.
    let spot = |launch, device| Spot {
        launch,
        device,
        block: 0,
        thread: 0,
    };
    let reader = |first: &str, second: &str| {
        format!(
            "ld.relaxed.sys.global.u32 %o0, [%{first}]; fence.sc.gpu;
            ld.relaxed.sys.global.u32 %o1, [%{second}];"
        )
    };
    let test = Litmus::at([
        (spot(0, 1), "st.relaxed.sys.global.u32 [%x], 1;"),
        (spot(1, 2), "st.relaxed.sys.global.u32 [%y], 1;"),
        (spot(2, 0), &reader("x", "y")),
        (spot(3, 0), &reader("y", "x")),
    ]);
    test.seeds(1500).run().are(&agree);
}

#[test]
fn write_to_read_causality() {
    let codes = |middle: &'static str, last: &'static str| {
        ["st.relaxed.sys.global.u32 [%x], 1;", middle, last]
    };
    let release = "ld.relaxed.sys.global.u32 %o0, [%x]; st.release.SCOPE.global.u32 [%y], 1;";
    let acquire = "ld.acquire.SCOPE.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];";
    let fence = "ld.relaxed.sys.global.u32 %o0, [%x]; fence.acq_rel.SCOPE;
        st.relaxed.SCOPE.global.u32 [%y], 1;";
    let fence_last = "ld.relaxed.SCOPE.global.u32 %o0, [%y]; fence.acq_rel.SCOPE;
        ld.relaxed.sys.global.u32 %o1, [%x];";
    let relaxed = "ld.relaxed.sys.global.u32 %o0, [%x]; st.relaxed.sys.global.u32 [%y], 1;";
    let relaxed_last = "ld.relaxed.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];";
    let ordered = binary_except(3, &["110"]);
    let all = binary_except(3, &[]);
    for (scope, place) in PLACES {
        for (middle, last) in [
            (release, acquire),
            (fence, fence_last),
            (release, fence_last),
        ] {
            litmus(place, scope, &codes(middle, last))
                .run()
                .are(&ordered);
        }
        for (middle, last) in [
            (relaxed, acquire),
            (release, relaxed_last),
            (relaxed, relaxed_last),
        ] {
            litmus(place, scope, &codes(middle, last)).run().are(&all);
        }
    }
    // The scope of the fences is too narrow.
    let middle = "ld.relaxed.sys.global.u32 %o0, [%x]; fence.acq_rel.gpu;
        st.relaxed.sys.global.u32 [%y], 1;";
    litmus(Devices, "sys", &codes(middle, acquire))
        .run()
        .are(&all);
}

#[test]
fn releases_and_acquires_are_cumulative() {
    let first = "st.relaxed.sys.global.u32 [%z], 1; st.release.SCOPE.global.u32 [%x], 1;";
    let middle = "ld.acquire.SCOPE.global.u32 %o0, [%x]; st.release.SCOPE.global.u32 [%y], 1;";
    let last = "ld.acquire.SCOPE.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%z];";
    let ordered = binary_except(3, &["110"]);
    let all = binary_except(3, &[]);
    for (scope, place) in PLACES {
        litmus(place, scope, &[first, middle, last])
            .run()
            .are(&ordered);
        for (from, to) in [("acquire", "relaxed"), ("release", "relaxed")] {
            let weaker = middle.replace(from, to);
            litmus(place, scope, &[first, &weaker, last])
                .run()
                .are(&all);
        }
        let middle = "ld.relaxed.sys.global.u32 %o0, [%x]; fence.acq_rel.SCOPE;
            st.relaxed.SCOPE.global.u32 [%y], 1;";
        litmus(place, scope, &[first, middle, last])
            .run()
            .are(&ordered);
    }
}

#[test]
fn weak_accesses_are_ordered_through_a_third_thread() {
    let first = "st.global.u32 [%z], 1; st.release.sys.global.u32 [%x], 1;";
    let middle = "LOOP: ld.acquire.sys.global.u32 %r0, [%x]; setp.eq.u32 %p0, %r0, 0;
        @%p0 bra LOOP; st.release.sys.global.u32 [%y], 1;";
    let last = "LOOP: ld.acquire.sys.global.u32 %r0, [%y]; setp.eq.u32 %p0, %r0, 0;
        @%p0 bra LOOP; ld.global.u32 %o0, [%z];";
    for place in Place::ALL {
        let test = |middle: &str| Litmus::new(place, &[first, middle, last]).seeds(100).run();
        test(middle).are(&["1"]);
        test(&middle.replace("acquire", "relaxed")).are(&["race"]);
        test(&middle.replace("release", "relaxed")).are(&["race"]);
    }
}

#[test]
fn cumulativity_extends_over_scopes() {
    // Two warps of a block synchronise with the scope of the block, and the second with a third
    // thread on another device.
    let spot = |launch, thread| Spot {
        launch,
        device: launch,
        block: 0,
        thread,
    };
    let first = "st.relaxed.sys.global.u32 [%z], 1; st.release.cta.global.u32 [%x], 1;";
    let middle = "ld.acquire.cta.global.u32 %o0, [%x]; st.release.sys.global.u32 [%y], 1;";
    let last = "ld.acquire.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%z];";
    let test = |middle| {
        let threads = [
            (spot(0, 0), first),
            (spot(0, 32), middle),
            (spot(1, 0), last),
        ];
        Litmus::at(threads).seeds(800).run()
    };
    test(middle).are(&binary_except(3, &["110"]));
    let middle = "ld.relaxed.cta.global.u32 %o0, [%x]; st.release.sys.global.u32 [%y], 1;";
    test(middle).are(&binary_except(3, &[]));
    // The reader of another device acquires for a thread of its block.
    let first = "st.relaxed.sys.global.u32 [%z], 1; st.release.sys.global.u32 [%x], 1;";
    let middle = "ld.acquire.sys.global.u32 %o0, [%x]; st.release.cta.global.u32 [%y], 1;";
    let last = "ld.acquire.cta.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%z];";
    let test = |middle| {
        let threads = [
            (spot(0, 0), first),
            (spot(1, 0), middle),
            (spot(1, 32), last),
        ];
        Litmus::at(threads).seeds(800).run()
    };
    test(middle).are(&binary_except(3, &["110"]));
    let middle = "ld.acquire.sys.global.u32 %o0, [%x]; st.relaxed.cta.global.u32 [%y], 1;";
    test(middle).are(&binary_except(3, &[]));
}

#[test]
fn reads_before_sequentially_consistent_fences() {
    // RWC: a reader of another thread's write, and a writer, with fences.
    let codes = |order: &str, fence: &str| {
        [
            "st.relaxed.sys.global.u32 [%x], 1;".to_owned(),
            format!(
                "ld.{order}.sys.global.u32 %o0, [%x]; {fence}
                ld.{order}.sys.global.u32 %o1, [%y];"
            ),
            format!(
                "st.relaxed.sys.global.u32 [%y], 1; {fence}
                ld.{order}.sys.global.u32 %o0, [%x];"
            ),
        ]
    };
    let test = |place, order, fence: &str| {
        let codes = codes(order, fence);
        Litmus::new(place, &[&codes[0], &codes[1], &codes[2]])
            .seeds(800)
            .run()
    };
    for (scope, place) in PLACES {
        let fence = format!("fence.sc.{scope};");
        test(place, "relaxed", &fence).are(&binary_except(3, &["100"]));
        test(place, "acquire", "fence.acq_rel.sys;").are(&binary_except(3, &[]));
    }
    test(Devices, "relaxed", "fence.sc.gpu;").are(&binary_except(3, &[]));
}

#[test]
fn writes_before_sequentially_consistent_fences() {
    // R: the order of two writes, and a read. If the write of 2 to `%y` is the last, then the fence
    // of its thread is the second.
    let test = |place, fences: [&str; 2]| {
        let first = format!(
            "st.relaxed.sys.global.u32 [%x], 1; {} st.relaxed.sys.global.u32 [%y], 1;",
            fences[0]
        );
        let second = format!(
            "st.relaxed.sys.global.u32 [%y], 2; {} ld.relaxed.sys.global.u32 %o0, [%x];",
            fences[1]
        );
        Litmus::new(place, &[&first, &second]).finals("y").run()
    };
    let all = ["01", "11", "12", "02"];
    for (scope, place) in PLACES {
        let fence = &*format!("fence.sc.{scope};");
        test(place, [fence; 2]).are(&["01", "11", "12"]);
        test(place, ["fence.acq_rel.sys;"; 2]).are(&all);
        test(place, [fence, "fence.acq_rel.sys;"]).are(&all);
        test(place, ["fence.acq_rel.sys;", fence]).are(&all);
    }
    test(Blocks, ["fence.sc.cta;"; 2]).are(&all);
    test(Devices, ["fence.sc.sys;", "fence.sc.gpu;"]).are(&all);
    test(Devices, ["fence.sc.gpu;", "fence.sc.sys;"]).are(&all);
}

#[test]
fn fences_of_a_device_do_not_order_other_devices() {
    // A third thread executes fences of the system. Its fence may be the last of the three, but
    // the first thread's fence of the device orders nothing on the other device.
    let first =
        "st.relaxed.sys.global.u32 [%x], 1; fence.sc.gpu; ld.relaxed.sys.global.u32 %o0, [%y];";
    let second =
        "st.relaxed.sys.global.u32 [%y], 1; fence.sc.sys; ld.relaxed.sys.global.u32 %o0, [%x];";
    let spot = |launch, device| Spot {
        launch,
        device,
        block: 0,
        thread: 0,
    };
    let threads = [
        (spot(0, 0), first),
        (spot(1, 1), second),
        (spot(2, 1), "fence.sc.sys;"),
    ];
    Litmus::at(threads).run().are(&binary_except(2, &[]));
    // On the device of the first thread, a fence of the system between the two orders them.
    let first =
        "st.relaxed.sys.global.u32 [%x], 1; fence.sc.gpu; st.relaxed.sys.global.u32 [%z], 1;";
    let between = "ld.relaxed.sys.global.u32 %o0, [%z]; fence.sc.sys;
        st.relaxed.sys.global.u32 [%y], 1;";
    let last = "ld.relaxed.sys.global.u32 %o0, [%y]; fence.sc.sys;
        ld.relaxed.sys.global.u32 %o1, [%x];";
    let threads = [
        (spot(0, 0), first),
        (spot(1, 0), between),
        (spot(2, 1), last),
    ];
    Litmus::at(threads)
        .seeds(800)
        .run()
        .are(&binary_except(3, &["110"]));
}

#[test]
fn loads_are_not_buffered() {
    // PTX allows 11. The emulator executes each thread in program order.
    let codes = [("x", "y"), ("y", "x")].map(|(from, to)| {
        format!("ld.relaxed.sys.global.u32 %o0, [%{from}]; st.relaxed.sys.global.u32 [%{to}], 1;")
    });
    for place in Place::ALL {
        let outcomes = Litmus::new(place, &[&codes[0], &codes[1]]).run();
        outcomes.are(&["00", "01", "10"]);
    }
}

#[test]
fn writes_are_not_reordered() {
    // 2+2W and S: PTX allows 11 and 12. In the emulator, the coherence order is that of execution.
    let codes = [("x", "y"), ("y", "x")].map(|(first, second)| {
        format!(
            "st.relaxed.sys.global.u32 [%{first}], 1;
            st.relaxed.sys.global.u32 [%{second}], 2;"
        )
    });
    for place in Place::ALL {
        let outcomes = Litmus::new(place, &[&codes[0], &codes[1]])
            .finals("xy")
            .run();
        outcomes.are(&["12", "21", "22"]);
        let first = "st.relaxed.sys.global.u32 [%x], 2; st.relaxed.sys.global.u32 [%y], 1;";
        let second = "ld.relaxed.sys.global.u32 %o0, [%y]; st.relaxed.sys.global.u32 [%x], 1;";
        let outcomes = Litmus::new(place, &[first, second]).finals("x").run();
        outcomes.are(&["01", "02", "11"]);
        // With release and acquire, PTX forbids it, too.
        let (first, second) = (
            first.replace("relaxed", "release"),
            second.replace("ld.relaxed", "ld.acquire"),
        );
        let outcomes = Litmus::new(place, &[&first, &second]).finals("x").run();
        outcomes.are(&["01", "02", "11"]);
    }
}
