//! Two threads: message passing and store buffering.

use super::common::Place::{self, Blocks, Devices, Lanes, Launches, Warps};
use super::{Litmus, binary_except};

/// Scopes that contain the threads of a place.
const SUFFICIENT: [(&str, Place); 7] = [
    ("sys", Devices),
    ("sys", Blocks),
    ("gpu", Blocks),
    ("gpu", Launches),
    ("gpu", Warps),
    ("cta", Warps),
    ("cta", Lanes),
];

/// Scopes that do not contain the threads of a place.
const NARROW: [(&str, Place); 4] = [
    ("gpu", Devices),
    ("cta", Devices),
    ("cta", Launches),
    ("cta", Blocks),
];

/// Instructions that write 1 to `%y` and release with a scope.
const RELEASES: [&str; 13] = [
    "st.release.SCOPE.global.u32 [%y], 1;",
    "fence.acq_rel.SCOPE; st.relaxed.SCOPE.global.u32 [%y], 1;",
    "fence.release.SCOPE; st.relaxed.SCOPE.global.u32 [%y], 1;",
    "fence.sc.SCOPE; st.relaxed.SCOPE.global.u32 [%y], 1;",
    "membar.LEVEL; st.volatile.global.u32 [%y], 1;",
    "fence.acq_rel.SCOPE; st.relaxed.sys.global.u32 [%z], 1; st.relaxed.sys.global.u32 [%y], 1;",
    "fence.acq_rel.SCOPE; fence.acq_rel.cta; st.relaxed.SCOPE.global.u32 [%y], 1;",
    "red.release.SCOPE.global.add.u32 [%y], 1;",
    "atom.release.SCOPE.global.add.u32 %r0, [%y], 1;",
    "atom.acq_rel.SCOPE.global.exch.b32 %r0, [%y], 1;",
    "atom.acq_rel.SCOPE.global.cas.b32 %r0, [%y], 0, 1;",
    "fence.acq_rel.SCOPE; red.relaxed.SCOPE.global.add.u32 [%y], 1;",
    "fence.acq_rel.SCOPE; atom.relaxed.SCOPE.global.or.b32 %r0, [%y], 1;",
];

/// Instructions that read `%y` and acquire with a scope.
const ACQUIRES: [&str; 8] = [
    "ld.acquire.SCOPE.global.u32 %o0, [%y];",
    "ld.relaxed.SCOPE.global.u32 %o0, [%y]; fence.acq_rel.SCOPE;",
    "ld.relaxed.SCOPE.global.u32 %o0, [%y]; fence.acquire.SCOPE;",
    "ld.relaxed.SCOPE.global.u32 %o0, [%y]; fence.sc.SCOPE;",
    "ld.volatile.global.u32 %o0, [%y]; membar.LEVEL;",
    "ld.relaxed.SCOPE.global.u32 %o0, [%y]; fence.acq_rel.cta; fence.acq_rel.SCOPE;",
    "atom.acquire.SCOPE.global.add.u32 %o0, [%y], 0;",
    "atom.relaxed.SCOPE.global.or.b32 %o0, [%y], 0; fence.acq_rel.SCOPE;",
];

/// Returns a code with a scope.
fn scoped(code: &str, scope: &str) -> String {
    let level = if scope == "gpu" { "gl" } else { scope };
    code.replace("SCOPE", scope).replace("LEVEL", level)
}

/// Returns the test of message passing. The data is `%x`, which strong accesses read and write.
fn message(place: Place, scope: &str, release: &str, acquire: &str) -> Litmus {
    let writer = format!("st.relaxed.sys.global.u32 [%x], 1; {release}");
    let reader = format!("{acquire} ld.relaxed.sys.global.u32 %o1, [%x];");
    Litmus::new(place, &[&scoped(&writer, scope), &scoped(&reader, scope)])
}

/// Returns the test of message passing in which weak accesses write `%x`, and read it if the
/// reader has read 1 from `%y`.
fn weak_message(place: Place, scope: &str, release: &str, acquire: &str) -> Litmus {
    let writer = format!("st.global.u32 [%x], 1; {release}");
    let reader = format!("{acquire} setp.eq.u32 %p0, %o0, 1; @%p0 ld.global.u32 %o1, [%x];");
    Litmus::new(place, &[&scoped(&writer, scope), &scoped(&reader, scope)]).seeds(150)
}

const ORDERED: [&str; 3] = ["00", "01", "11"];
const ALL: [&str; 4] = ["00", "01", "10", "11"];

#[test]
fn release_and_acquire_order_a_message() {
    for (scope, place) in SUFFICIENT {
        for release in RELEASES {
            message(place, scope, release, ACQUIRES[0])
                .run()
                .are(&ORDERED);
        }
        for acquire in ACQUIRES {
            message(place, scope, RELEASES[0], acquire)
                .run()
                .are(&ORDERED);
        }
    }
    for release in RELEASES {
        for acquire in ACQUIRES {
            let outcomes = message(Blocks, "gpu", release, acquire).seeds(60).run();
            outcomes.never(|it| !ORDERED.contains(&it));
            outcomes.include(&["11"]);
        }
    }
}

#[test]
fn release_and_acquire_order_weak_accesses() {
    for (scope, place) in SUFFICIENT {
        for release in RELEASES {
            weak_message(place, scope, release, ACQUIRES[0])
                .run()
                .are(&["00", "11"]);
        }
        for acquire in ACQUIRES {
            weak_message(place, scope, RELEASES[0], acquire)
                .run()
                .are(&["00", "11"]);
        }
    }
}

/// Codes of a writer and a reader that do not order a message.
const UNORDERED: [(&str, &str); 14] = [
    // Relaxed accesses only.
    (
        "st.relaxed.sys.global.u32 [%y], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%y];",
    ),
    (
        "st.volatile.global.u32 [%y], 1;",
        "ld.volatile.global.u32 %o0, [%y];",
    ),
    (
        "red.relaxed.sys.global.add.u32 [%y], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%y];",
    ),
    (
        "atom.relaxed.sys.global.exch.b32 %r0, [%y], 1;",
        "atom.relaxed.sys.global.add.u32 %o0, [%y], 0;",
    ),
    // One side only.
    (
        "st.release.sys.global.u32 [%y], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%y];",
    ),
    (
        "st.relaxed.sys.global.u32 [%y], 1;",
        "ld.acquire.sys.global.u32 %o0, [%y];",
    ),
    (
        "fence.sc.sys; st.relaxed.sys.global.u32 [%y], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%y];",
    ),
    (
        "st.relaxed.sys.global.u32 [%y], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%y]; fence.sc.sys;",
    ),
    // The wrong sides.
    (
        "atom.acquire.sys.global.exch.b32 %r0, [%y], 1;",
        "ld.acquire.sys.global.u32 %o0, [%y];",
    ),
    (
        "fence.acquire.sys; st.relaxed.sys.global.u32 [%y], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%y]; fence.acq_rel.sys;",
    ),
    (
        "fence.acq_rel.sys; st.relaxed.sys.global.u32 [%y], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%y]; fence.release.sys;",
    ),
    // The wrong place.
    (
        "st.relaxed.sys.global.u32 [%y], 1; fence.acq_rel.sys;",
        "ld.relaxed.sys.global.u32 %o0, [%y]; fence.acq_rel.sys;",
    ),
    (
        "fence.acq_rel.sys; st.relaxed.sys.global.u32 [%y], 1;",
        "fence.acq_rel.sys; ld.relaxed.sys.global.u32 %o0, [%y];",
    ),
    // A fence of proxies.
    (
        "fence.proxy.alias; st.relaxed.sys.global.u32 [%y], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%y]; fence.proxy.alias;",
    ),
];

#[test]
fn a_message_without_release_or_acquire_is_unordered() {
    for place in Place::ALL {
        for (release, acquire) in UNORDERED {
            message(place, "sys", release, acquire).run().are(&ALL);
            // The reader sees 1 in `%y`, and races for `%x`.
            weak_message(place, "sys", release, acquire)
                .run()
                .are(&["00", "race"]);
        }
    }
}

#[test]
fn narrow_scopes_of_fences_do_not_order_a_message() {
    let fences = |writer: &str, reader: &str| {
        let release = format!("fence.{writer}; st.relaxed.sys.global.u32 [%y], 1;");
        let acquire = format!("ld.relaxed.sys.global.u32 %o0, [%y]; fence.{reader};");
        (release, acquire)
    };
    for (narrow, place) in NARROW {
        for kind in ["acq_rel", "sc"] {
            let narrow = &format!("{kind}.{narrow}");
            let wide = &format!("{kind}.sys");
            for (writer, reader) in [(narrow, wide), (wide, narrow), (narrow, narrow)] {
                let (release, acquire) = fences(writer, reader);
                message(place, "sys", &release, &acquire).run().are(&ALL);
                weak_message(place, "sys", &release, &acquire)
                    .run()
                    .are(&["00", "race"]);
            }
        }
    }
    // A later fence of a wide scope releases and acquires with this scope.
    let (release, acquire) = fences("acq_rel.cta; fence.acq_rel.sys", "acq_rel.sys");
    message(Devices, "sys", &release, &acquire)
        .run()
        .are(&ORDERED);
    // The narrow fence does not replace the wide one, which orders only `%z`.
    let writer = "st.relaxed.sys.global.u32 [%z], 1; fence.acq_rel.sys;
        st.relaxed.sys.global.u32 [%x], 1; fence.acq_rel.cta; st.relaxed.sys.global.u32 [%y], 1;";
    let reader = "ld.acquire.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];
        ld.relaxed.sys.global.u32 %o2, [%z];";
    let outcomes = Litmus::new(Devices, &[writer, reader]).seeds(1000).run();
    outcomes.never(|it| it.starts_with('1') && it.ends_with('0'));
    outcomes.include(&["000", "101", "111"]);
}

#[test]
fn narrow_scopes_of_accesses_are_races() {
    for (narrow, place) in NARROW {
        for (release, acquire) in [
            (
                "st.release.SCOPE.global.u32 [%y], 1;",
                "ld.acquire.SCOPE.global.u32 %o0, [%y];",
            ),
            (
                "st.release.SCOPE.global.u32 [%y], 1;",
                "ld.acquire.sys.global.u32 %o0, [%y];",
            ),
            (
                "st.release.sys.global.u32 [%y], 1;",
                "ld.acquire.SCOPE.global.u32 %o0, [%y];",
            ),
            (
                "red.release.SCOPE.global.add.u32 [%y], 1;",
                "ld.acquire.sys.global.u32 %o0, [%y];",
            ),
        ] {
            message(place, narrow, release, acquire)
                .seeds(50)
                .run()
                .are(&["race"]);
        }
    }
    // The default scope of atomic operations is the device.
    let atomic = (
        "red.release.global.add.u32 [%y], 1;",
        "atom.acquire.global.or.b32 %o0, [%y], 0;",
    );
    message(Devices, "sys", atomic.0, atomic.1)
        .seeds(50)
        .run()
        .are(&["race"]);
    message(Blocks, "sys", atomic.0, atomic.1)
        .run()
        .are(&ORDERED);
}

#[test]
fn polling_reader_sees_the_message() {
    let writer = "st.global.v4.u32 [%x], {1, 2, 3, 4}; st.release.SCOPE.global.u32 [%y], 1;";
    let reader = "LOOP: ld.acquire.SCOPE.global.u32 %r0, [%y]; setp.eq.u32 %p0, %r0, 0;
        @%p0 bra LOOP; ld.global.v4.u32 {%o0, %o1, %o2, %o3}, [%x];";
    for (scope, place) in SUFFICIENT {
        let codes = [&*scoped(writer, scope), &*scoped(reader, scope)];
        Litmus::new(place, &codes).run().are(&["1234"]);
    }
    for (scope, place) in NARROW {
        let codes = [&*scoped(writer, scope), &*scoped(reader, scope)];
        Litmus::new(place, &codes).seeds(50).run().are(&["race"]);
    }
}

#[test]
fn poll_loops_end() {
    for load in [
        "ld.relaxed.SCOPE.global.u32 %o0, [%y];",
        "ld.acquire.SCOPE.global.u32 %o0, [%y];",
        "ld.volatile.global.u32 %o0, [%y];",
        "atom.relaxed.SCOPE.global.add.u32 %o0, [%y], 0;",
        "ld.relaxed.SCOPE.global.u32 %o0, [%y]; nanosleep.u32 100;",
    ] {
        for place in Place::ALL {
            // Without a fence, the data may be old also after the loop.
            let writer = "st.relaxed.sys.global.u32 [%x], 1; st.relaxed.sys.global.u32 [%y], 1;";
            let reader = format!(
                "LOOP: {load} setp.eq.u32 %p0, %o0, 0; @%p0 bra LOOP;
                ld.relaxed.sys.global.u32 %o1, [%x];"
            );
            let test = Litmus::new(place, &[writer, &scoped(&reader, place.scope())]);
            let outcomes = test.run();
            outcomes.never(|it| !it.starts_with('1'));
            outcomes.include(&["11"]);
            if load.starts_with("ld.relaxed") {
                outcomes.include(&["10"]);
            }
        }
    }
}

/// Returns the test of store buffering. `between` are the instructions between write and read.
fn store_buffering(place: Place, between: [&str; 2]) -> Litmus {
    let codes = [("x", "y", between[0]), ("y", "x", between[1])].map(|(own, other, between)| {
        format!(
            "st.relaxed.sys.global.u32 [%{own}], 1; {between}
            ld.relaxed.sys.global.u32 %o0, [%{other}];"
        )
    });
    Litmus::new(place, &[&codes[0], &codes[1]])
}

#[test]
fn stores_are_buffered() {
    for place in Place::ALL {
        for between in [
            "",
            "fence.acq_rel.sys;",
            "fence.acquire.sys; fence.release.sys;",
        ] {
            store_buffering(place, [between; 2]).run().are(&ALL);
        }
        // Sequentially consistent fences of one thread only.
        store_buffering(place, ["fence.sc.sys;", ""])
            .run()
            .are(&ALL);
        store_buffering(place, ["fence.acq_rel.sys;", "membar.sys;"])
            .run()
            .are(&ALL);
        let release = "st.release.sys.global.u32 [%x], 1; ld.acquire.sys.global.u32 %o0, [%y];";
        let other = "st.release.sys.global.u32 [%y], 1; ld.acquire.sys.global.u32 %o0, [%x];";
        Litmus::new(place, &[release, other]).run().are(&ALL);
        let atomic = "atom.acq_rel.sys.global.exch.b32 %r0, [%x], 1;
            ld.acquire.sys.global.u32 %o0, [%y];";
        let other = "atom.acq_rel.sys.global.exch.b32 %r0, [%y], 1;
            ld.acquire.sys.global.u32 %o0, [%x];";
        Litmus::new(place, &[atomic, other]).run().are(&ALL);
    }
}

#[test]
fn sequentially_consistent_fences_order_store_buffering() {
    let ordered = binary_except(2, &["00"]);
    for (scope, place) in SUFFICIENT {
        for fence in ["fence.sc.SCOPE;", "membar.LEVEL;"] {
            let fence = &*scoped(fence, scope);
            store_buffering(place, [fence; 2]).run().are(&ordered);
            store_buffering(place, [fence, "fence.sc.sys;"])
                .run()
                .are(&ordered);
            store_buffering(place, ["membar.sys;", fence])
                .run()
                .are(&ordered);
        }
    }
    for (scope, place) in NARROW {
        for fence in ["fence.sc.SCOPE;", "membar.LEVEL;"] {
            let fence = &*scoped(fence, scope);
            store_buffering(place, [fence; 2]).run().are(&ALL);
            store_buffering(place, [fence, "fence.sc.sys;"])
                .run()
                .are(&ALL);
            store_buffering(place, ["fence.sc.sys;", fence])
                .run()
                .are(&ALL);
        }
    }
}
