//! Barriers and other instructions of blocks and warps, and shared memory.

use super::Litmus;
use super::common::Place;

/// Barriers of a block of two warps. `%p5` is true for the first warp.
const BLOCK_BARRIERS: [&str; 8] = [
    "bar.sync 0;",
    "bar.sync 3, 64;",
    "barrier.sync 0;",
    "barrier.sync 15, 64;",
    "barrier.sync.aligned 1;",
    "bar.red.popc.u32 %r5, 0, %p5;",
    "bar.red.and.pred %p6, 0, %p5;",
    "barrier.red.or.pred %p6, 2, 64, %p5;",
];

/// Predicates of the halves of a block, and of its first thread.
const HALVES: &str = "setp.lt.u32 %p5, %thread, 32; setp.eq.u32 %p4, %thread, 0;";

/// Returns the code of a block in which thread `thread` writes `%x`, and thread 0 releases `%y`
/// after `barrier`.
fn writer(thread: u32, barrier: &str) -> String {
    format!(
        "{HALVES} setp.eq.u32 %p0, %thread, {thread};
        @%p0 st.global.u32 [%x], 1;
        {barrier}
        @%p4 st.release.sys.global.u32 [%y], 1;"
    )
}

/// Returns the code of a block in which thread 0 acquires `%y`, and thread `thread` reads `%x`
/// after `barrier`.
fn reader(thread: u32, barrier: &str) -> String {
    format!(
        "{HALVES} setp.eq.u32 %p0, %thread, {thread};
        @!%p4 bra JOIN;
        LOOP: ld.acquire.sys.global.u32 %r0, [%y]; setp.eq.u32 %p1, %r0, 0; @%p1 bra LOOP;
        JOIN: bar.warp.sync -1;
        {barrier}
        @%p0 ld.global.u32 %r1, [%x]; @%p0 st.global.u32 [%out], %r1;"
    )
}

/// Returns the test of a message from a thread of a block to a thread of a block on another device.
fn message(from: u32, before: &str, after: &str, to: u32) -> Litmus {
    Litmus::blocks(&[(64, &writer(from, before)), (64, &reader(to, after))], 1).seeds(40)
}

#[test]
fn block_barriers_are_cumulative() {
    for barrier in BLOCK_BARRIERS {
        message(33, barrier, barrier, 33).run().are(&["1"]);
        message(33, barrier, barrier, 63).run().are(&["1"]);
        message(1, barrier, barrier, 33).run().are(&["1"]);
    }
    // Without the barrier of one side, the accesses race.
    message(33, "", "bar.sync 0;", 33).run().are(&["race"]);
    message(33, "bar.sync 0;", "", 33).run().are(&["race"]);
    message(33, "bar.sync 0;", "", 0).run().are(&["1"]);
    message(0, "", "bar.sync 0;", 33).run().are(&["1"]);
}

#[test]
fn warp_barriers_are_cumulative() {
    // The reader's warps execute a warp barrier before the other instruction.
    message(1, "bar.warp.sync -1;", "", 31).run().are(&["1"]);
    message(1, "", "", 31).run().are(&["race"]);
    message(33, "bar.warp.sync -1;", "", 31)
        .run()
        .are(&["race"]);
    message(1, "bar.warp.sync -1;", "", 33).run().are(&["race"]);
    // A barrier of two lanes.
    let two = "setp.lt.u32 %p6, %thread, 2; @%p6 bar.warp.sync 3;";
    message(1, two, "", 31).run().are(&["1"]);
    message(2, two, "", 31).run().are(&["race"]);
}

#[test]
fn arrivals_release_and_do_not_acquire() {
    let first_waits = "@%p5 barrier.sync 2, 64; @!%p5 barrier.arrive 2, 64;";
    let second_waits = "@!%p5 bar.sync 2, 64; @%p5 bar.arrive 2, 64;";
    let all = "bar.sync 0;";
    message(33, first_waits, all, 33).run().are(&["1"]);
    message(33, all, second_waits, 33).run().are(&["1"]);
    message(33, first_waits, second_waits, 33).run().are(&["1"]);
    message(33, second_waits, all, 33).run().are(&["race"]);
    message(33, all, first_waits, 33).run().are(&["race"]);
}

#[test]
fn different_barriers_do_not_order() {
    let separate = "@%p5 barrier.sync 1, 32; @!%p5 barrier.sync 2, 32;";
    message(33, separate, "bar.sync 0;", 33)
        .run()
        .are(&["race"]);
    message(33, "bar.sync 0;", separate, 33)
        .run()
        .are(&["race"]);
    message(33, "barrier.sync 1, 64;", "barrier.sync 2, 64;", 33)
        .run()
        .are(&["1"]);
}

#[test]
fn accesses_after_an_arrival_are_not_ordered() {
    // Thread 33 writes after the barrier.
    let code = format!(
        "{HALVES} setp.eq.u32 %p0, %thread, 33; BARRIER
        @%p0 st.global.u32 [%x], 1; @%p4 ld.global.u32 %r0, [%x];"
    );
    for barrier in [
        "bar.sync 0;",
        "@%p5 bar.sync 2, 64; @!%p5 bar.arrive 2, 64;",
    ] {
        let code = code.replace("BARRIER", barrier);
        Litmus::blocks(&[(64, &code)], 0)
            .seeds(40)
            .run()
            .are(&["race"]);
    }
    // Two phases: thread 0 reads after the second.
    let code = code
        .replace("BARRIER", "bar.sync 0;")
        .replace("@%p4 ld", "bar.sync 0; @%p4 ld");
    Litmus::blocks(&[(64, &code)], 0).seeds(40).run().are(&[""]);
}

#[test]
fn a_release_does_not_cover_later_accesses_of_other_threads() {
    // All threads of the block have the same order before the barrier; thread 33 writes after it.
    let writer = writer(33, "bar.sync 0;").replace("@%p0 st.global.u32 [%x], 1;", "");
    let writer = writer.replace("@%p4 st", "@%p0 st.global.u32 [%x], 1; @%p4 st");
    let test = |writer: &str| {
        let codes = [(64, writer), (64, &*reader(33, "bar.sync 0;"))];
        Litmus::blocks(&codes, 1).seeds(40).run()
    };
    test(&writer).are(&["race"]);
    // With a second barrier, the release covers the write.
    test(&writer.replace("@%p4 st", "bar.sync 0; @%p4 st")).are(&["1"]);
}

#[test]
fn lanes_may_read_different_values() {
    let writer = "st.relaxed.sys.global.u32 [%x], 1;";
    let reader = "ld.relaxed.sys.global.u32 %r0, [%x]; shl.b32 %r1, %lane, 2;
        cvt.u64.u32 %d0, %r1; add.u64 %d0, %d0, %out; st.global.u32 [%d0], %r0;";
    let outcomes = Litmus::blocks(&[(1, writer), (2, reader)], 2)
        .seeds(300)
        .run();
    outcomes.are(&["00", "01", "10", "11"]);
}

/// Instructions that lanes execute together, and that order nothing.
const COLLECTIVES: [&str; 10] = [
    "shfl.sync.idx.b32 %r2|%p2, %r1, 0, 31, -1;",
    "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
    "vote.sync.ballot.b32 %r2, %p0, -1;",
    "vote.sync.all.pred %p2, %p0, -1;",
    "match.any.sync.b32 %r2, %r1, -1;",
    "match.all.sync.b32 %r2|%p2, %r1, -1;",
    "redux.sync.add.u32 %r2, %r1, -1;",
    "elect.sync %r2|%p2, -1;",
    "activemask.b32 %r2;",
    "",
];

/// Returns the test of a message between lanes, with an instruction between write and read.
fn between_lanes(store: &str, instruction: &str, load: &str) -> Litmus {
    let code = format!(
        "setp.eq.u32 %p0, %lane, 0; setp.eq.u32 %p1, %lane, 1; mov.u32 %r1, %lane;
        @%p0 {store}.u32 [%x], 1; {instruction}
        @%p1 {load}.u32 %r3, [%x]; @%p1 st.global.u32 [%out], %r3;"
    );
    Litmus::blocks(&[(32, &code)], 1)
}

#[test]
fn warp_instructions_do_not_order() {
    for instruction in COLLECTIVES {
        let weak = between_lanes("st.global", instruction, "ld.global").seeds(40);
        weak.run().are(&["race"]);
        let (store, load) = ("st.relaxed.cta.global", "ld.relaxed.cta.global");
        between_lanes(store, instruction, load)
            .run()
            .are(&["0", "1"]);
        let (store, load) = ("st.release.cta.global", "ld.acquire.cta.global");
        between_lanes(store, instruction, load)
            .run()
            .are(&["0", "1"]);
    }
    for barrier in [
        "bar.warp.sync -1;",
        "bar.warp.sync 0xffffffff;",
        "bar.sync 0;",
    ] {
        between_lanes("st.global", barrier, "ld.global")
            .run()
            .are(&["1"]);
        let (store, load) = ("st.relaxed.cta.global", "ld.relaxed.cta.global");
        between_lanes(store, barrier, load).run().are(&["1"]);
    }
}

#[test]
fn a_value_of_a_shuffle_does_not_carry_order() {
    // Lane 0 acquires; lane 1 gets the flag by a shuffle, and reads.
    let writer = "st.relaxed.sys.global.u32 [%x], 1; st.release.sys.global.u32 [%y], 1;";
    let reader = |instruction: &str| {
        format!(
            "setp.eq.u32 %p0, %lane, 0; setp.eq.u32 %p1, %lane, 1; mov.u32 %r0, 0;
            @%p0 ld.acquire.sys.global.u32 %r0, [%y];
            {instruction} shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;
            ld.relaxed.sys.global.u32 %r2, [%x]; @%p1 st.global.v2.u32 [%out], {{%r1, %r2}};"
        )
    };
    let test = |instruction: &str| {
        Litmus::blocks(&[(1, writer), (32, &reader(instruction))], 2)
            .seeds(400)
            .run()
    };
    test("").are(&["00", "01", "10", "11"]);
    test("bar.warp.sync -1;").are(&["00", "01", "11"]);
}

/// Returns the test of message passing in shared memory between two warps.
fn shared_message(store: &str, load: &str) -> Litmus {
    let code = format!(
        ".shared .align 8 .b8 memory[16];
        setp.eq.u32 %p0, %thread, 0; setp.eq.u32 %p1, %thread, 32;
        @%p0 st.shared.v2.u32 [memory], {{0, 0}};
        bar.sync 0;
        @%p0 bra WRITE; @%p1 bra READ; ret;
        WRITE: st.relaxed.cta.shared.u32 [memory], 1; {store}.shared.u32 [memory+4], 1; ret;
        READ: {load}.shared.u32 %r0, [memory+4]; ld.relaxed.cta.shared.u32 %r1, [memory];
        st.global.v2.u32 [%out], {{%r0, %r1}};"
    );
    Litmus::blocks(&[(64, &code)], 2).seeds(300)
}

#[test]
fn messages_in_shared_memory() {
    shared_message("st.release.cta", "ld.acquire.cta")
        .run()
        .are(&["00", "01", "11"]);
    shared_message("fence.acq_rel.cta; st.relaxed.cta", "ld.acquire.gpu")
        .run()
        .are(&["00", "01", "11"]);
    shared_message("st.relaxed.cta", "ld.acquire.cta")
        .run()
        .are(&["00", "01", "10", "11"]);
    shared_message("st.release.cta", "ld.relaxed.cta")
        .run()
        .are(&["00", "01", "10", "11"]);
    shared_message("st.volatile", "ld.volatile")
        .run()
        .are(&["00", "01", "10", "11"]);
    shared_message("st", "ld.acquire.cta")
        .seeds(40)
        .run()
        .are(&["race"]);
}

#[test]
fn a_flag_in_shared_memory_orders_global_memory() {
    let code = ".shared .u32 flag;
        setp.eq.u32 %p0, %thread, 0; setp.eq.u32 %p1, %thread, 32;
        @%p0 st.shared.u32 [flag], 0; bar.sync 0;
        @%p0 bra WRITE; @%p1 bra LOOP; ret;
        WRITE: st.global.u32 [%x], 1; st.release.cta.shared.u32 [flag], 1; ret;
        LOOP: ld.acquire.cta.shared.u32 %r0, [flag]; setp.eq.u32 %p2, %r0, 0; @%p2 bra LOOP;
        ld.global.u32 %r1, [%x]; st.global.u32 [%out], %r1;";
    Litmus::blocks(&[(64, code)], 1).run().are(&["1"]);
    let relaxed = code.replace("release", "relaxed");
    Litmus::blocks(&[(64, &relaxed)], 1).run().are(&["race"]);
    let relaxed = code.replace("acquire", "relaxed");
    Litmus::blocks(&[(64, &relaxed)], 1).run().are(&["race"]);
}

#[test]
fn blocks_have_separate_barriers() {
    // Both blocks of a launch execute barriers, which order nothing between the blocks.
    let code = |access: &str| format!("bar.sync 0; {access} bar.sync 0;");
    let codes = [
        code("st.relaxed.sys.global.u32 [%x], 1; bar.sync 0; st.relaxed.sys.global.u32 [%y], 1;"),
        code(
            "ld.relaxed.sys.global.u32 %o0, [%y]; bar.sync 0;
            ld.relaxed.sys.global.u32 %o1, [%x];",
        ),
    ];
    for place in [Place::Devices, Place::Blocks] {
        let outcomes = Litmus::new(place, &[&codes[0], &codes[1]]).run();
        outcomes.are(&["00", "01", "10", "11"]);
    }
}
