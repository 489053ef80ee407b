//! Many writes of one location and of its neighbours: values that are bounded by writes and reads
//! of which no record may be left.

use super::Litmus;
use super::common::Place;

/// Waits for a release through `%y`.
const WAIT: &str = "LOOP: ld.acquire.sys.global.u32 %r0, [%y]; setp.eq.u32 %p0, %r0, 0;
    @%p0 bra LOOP;";

/// Returns instructions that write the values to a variable.
fn writes(variable: &str, values: core::ops::RangeInclusive<u32>) -> String {
    values
        .map(|it| format!("st.relaxed.sys.global.u32 [{variable}], {it};\n"))
        .collect()
}

#[test]
fn many_writes_do_not_uncover_values_before_a_known_write() {
    let load = "ld.relaxed.sys.global.u32 %o0, [%x];";
    let release = "st.relaxed.sys.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;";
    let many = format!("{WAIT} {}", writes("%x", 2..=7));
    for place in [Place::Devices, Place::Blocks, Place::Lanes] {
        // The first write happens before the read.
        let reader = format!("{WAIT} {load}");
        let outcomes = Litmus::new(place, &[release, &many, &reader]).run();
        outcomes.never(|it| it == "0");
        outcomes.include(&["1", "7"]);
        // It is the thread's own write.
        let own = format!("{release} {load}");
        let outcomes = Litmus::new(place, &[&own, &many]).run();
        outcomes.never(|it| it == "0");
        outcomes.include(&["1"]);
        outcomes.some(|it| it != "1");
        // The thread has read its value.
        let reader = "LOOP: ld.relaxed.sys.global.u32 %r0, [%x]; setp.eq.u32 %p0, %r0, 0;
            @%p0 bra LOOP; st.release.sys.global.u32 [%y], 1; ld.relaxed.sys.global.u32 %o0, [%x];";
        let first = "st.relaxed.sys.global.u32 [%x], 1;";
        let outcomes = Litmus::new(place, &[first, &many, reader]).run();
        outcomes.never(|it| it == "0");
        outcomes.include(&["1", "7"]);
    }
}

#[test]
fn writes_of_a_neighbour_do_not_hide_a_release() {
    let writer = "st.relaxed.sys.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;";
    let overwrite = "st.relaxed.sys.global.u32 [%y], 2;";
    let reader = "ld.acquire.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];";
    for count in 2..6 {
        let other = format!("{} {overwrite}", writes("%y+4", 1..=count));
        let test = Litmus::new(Place::Devices, &[writer, &other, reader]).seeds(1500);
        let outcomes = test.run();
        outcomes.never(|it| it == "10");
        outcomes.include(&["00", "11", "20", "21"]);
    }
}

#[test]
fn writes_of_a_neighbour_do_not_uncover_old_values() {
    let writer = "st.relaxed.sys.global.u32 [%x], 1; st.relaxed.sys.global.u32 [%x], 2;
        st.release.sys.global.u32 [%y], 1;";
    let other = writes("%x+4", 1..=6);
    let reader =
        format!("{WAIT} ld.relaxed.sys.global.u32 %o0, [%x]; ld.relaxed.sys.global.u32 %o1, [%x];");
    let test = Litmus::new(Place::Blocks, &[writer, &other, &reader]);
    test.run().are(&["22"]);
}

#[test]
fn a_later_read_does_not_replace_an_earlier_one() {
    // Write-to-read causality; the second thread reads again after its release.
    let codes = [
        "st.relaxed.sys.global.u32 [%x], 1;",
        "ld.relaxed.sys.global.u32 %o0, [%x]; st.release.sys.global.u32 [%y], 1;
        ld.relaxed.sys.global.u32 %r1, [%x]; ld.relaxed.sys.global.u32 %r2, [%x];",
        "ld.acquire.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];",
    ];
    for place in [Place::Devices, Place::Blocks, Place::Lanes] {
        let outcomes = Litmus::new(place, &codes).seeds(1500).run();
        outcomes.never(|it| it == "110");
        outcomes.include(&["111", "011", "010", "100", "000"]);
    }
}

#[test]
fn a_store_of_another_thread_does_not_end_a_release_of_the_thread() {
    // PTX: a release followed by a strong write to the same location in program order is a release
    // pattern. A store of another thread may be between them in coherence order.
    for place in Place::ALL {
        let first = "st.relaxed.sys.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;
            st.relaxed.sys.global.u32 [%y], 3;";
        let second = "st.relaxed.sys.global.u32 [%y], 4;";
        let third = "ld.acquire.sys.global.u32 %o0, [%y]; ld.relaxed.sys.global.u32 %o1, [%x];";
        let outcomes = Litmus::new(place, &[first, second, third])
            .seeds(1500)
            .run();
        outcomes.never(|it| it == "10" || it == "30");
        outcomes.include(&["00", "01", "11", "31", "41", "40"]);
        // Releases of other threads of the block, which an atomic operation has continued.
        let first = "st.relaxed.sys.global.u32 [%x], 1;
            atom.release.sys.global.add.u32 %r0, [%y], 1; st.relaxed.sys.global.u32 [%y], 3;";
        let second = "red.release.sys.global.add.u32 [%y], 4;";
        let outcomes = Litmus::new(place, &[first, second, third]).seeds(600).run();
        outcomes.never(|it| "1357".contains(&it[..1]) && it.ends_with('0'));
        outcomes.include(&["00", "01", "11", "31", "71", "41", "40"]);
    }
}

#[test]
fn neighbours_are_separate_locations() {
    // Store buffering with two variables in one word of 8 bytes.
    let codes = [("%x", "%x+4"), ("%x+4", "%x")].map(|(own, other)| {
        format!("st.relaxed.sys.global.u32 [{own}], 1; ld.relaxed.sys.global.u32 %o0, [{other}];")
    });
    for place in Place::ALL {
        let outcomes = Litmus::new(place, &[&codes[0], &codes[1]]).run();
        outcomes.are(&["00", "01", "10", "11"]);
    }
    // Message passing in a word.
    let writer =
        |order| format!("st.relaxed.sys.global.u32 [%x], 1; st.{order}.sys.global.u32 [%x+4], 1;");
    let reader = "ld.acquire.sys.global.u32 %o0, [%x+4]; ld.relaxed.sys.global.u32 %o1, [%x];";
    for place in Place::ALL {
        let test = |order| Litmus::new(place, &[&writer(order), reader]).run();
        test("release").are(&["00", "01", "11"]);
        test("relaxed").are(&["00", "01", "10", "11"]);
    }
    // Bytes of one word.
    let writer = "st.relaxed.sys.global.u8 [%x+1], 1; st.relaxed.sys.global.u8 [%x+2], 1;";
    let reader = "ld.relaxed.sys.global.u8 %o0, [%x+2]; ld.relaxed.sys.global.u8 %o1, [%x+1];";
    Litmus::new(Place::Devices, &[writer, reader])
        .run()
        .are(&["00", "01", "10", "11"]);
}
