//! Control flow: branches, divergence, calls, recursion, grids and special registers.

mod common;

use common::{fault, kernel, kernel_text, module, run, run_body};
use fusewire_emulator::{FaultKind, Gpus, Kernel};

/// Stores `%r0` as the result of the thread.
const STORE: &str = "mul.wide.u32 %d31, %thread, 4; add.u64 %d31, %in0, %d31;
    st.global.u32 [%d31], %r0; ret;";

fn per_thread(body: &str, threads: u32) -> Vec<u32> {
    run_body(&format!("{body}\n{STORE}"), threads, threads as usize)
}

fn table(threads: u32, f: impl FnMut(u32) -> u32) -> Vec<u32> {
    (0..threads).map(f).collect()
}

#[test]
fn loops_with_different_counts() {
    let out = per_thread(
        "mov.u32 %r0, 0; mov.u32 %r1, %thread;
        LOOP: setp.eq.u32 %p0, %r1, 0; @%p0 bra DONE;
        add.u32 %r0, %r0, %r1; sub.u32 %r1, %r1, 1; bra.uni LOOP;
        DONE:",
        100,
    );
    assert_eq!(out, table(100, |t| t * (t + 1) / 2));
}

#[test]
fn nested_loops() {
    let out = per_thread(
        "mov.u32 %r0, 0; mov.u32 %r1, 0;
        OUTER: setp.ge.u32 %p0, %r1, %thread; @%p0 bra DONE; mov.u32 %r2, 0;
        INNER: add.u32 %r0, %r0, 1; add.u32 %r2, %r2, 1;
        setp.le.u32 %p1, %r2, %r1; @%p1 bra INNER;
        add.u32 %r1, %r1, 1; bra OUTER;
        DONE:",
        40,
    );
    assert_eq!(out, table(40, |t| t * (t + 1) / 2));
}

#[test]
fn diverged_lanes_take_all_paths_and_reconverge() {
    let body = "and.b32 %r1, %thread, 3;
        setp.eq.u32 %p0, %r1, 0; @%p0 bra A;
        setp.eq.u32 %p0, %r1, 1; @%p0 bra B;
        setp.eq.u32 %p0, %r1, 2; @%p0 bra C;
        mov.u32 %r0, 400; bra E;
        A: mov.u32 %r0, 100; bra E;
        B: mov.u32 %r0, 200; bra E;
        C: mov.u32 %r0, 300;
        E: vote.sync.ballot.b32 %r2, %p0, 0xffffffff; popc.b32 %r2, %r2;
        add.u32 %r0, %r0, %r2;";
    // The predicate is true in the lanes that took a branch: 24 of 32.
    assert_eq!(
        per_thread(body, 64),
        table(64, |t| [100, 200, 300, 400][t as usize % 4] + 24)
    );
}

#[test]
fn lanes_with_different_loop_counts_meet_after_the_loop() {
    let body = "mov.u32 %r1, 0;
        LOOP: add.u32 %r1, %r1, 1; setp.le.u32 %p0, %r1, %lane; @%p0 bra LOOP;
        activemask.b32 %r0;";
    assert_eq!(per_thread(body, 32), table(32, |_| u32::MAX));
}

#[test]
fn brx_idx_branches_through_a_table() {
    let body = "rem.u32 %r1, %thread, 3; mov.u32 %r0, 0;
        T: .branchtargets X, Y, Z;
        brx.idx %r1, T;
        X: add.u32 %r0, %r0, 1;
        Y: add.u32 %r0, %r0, 10; bra Q;
        Z: add.u32 %r0, %r0, 100;
        Q: add.u32 %r0, %r0, 1000;";
    assert_eq!(
        per_thread(body, 50),
        table(50, |t| 1000 + [11, 10, 100][t as usize % 3])
    );
    // A guarded indexed branch, and the same table twice.
    let body = "rem.u32 %r1, %thread, 3; mov.u32 %r0, 0; setp.lt.u32 %p0, %thread, 10;
        T: .branchtargets X, Y, Z;
        @%p0 brx.idx %r1, T;
        mov.u32 %r1, 2; brx.idx.uni %r1, T;
        X: add.u32 %r0, %r0, 1;
        Y: add.u32 %r0, %r0, 10; bra Q;
        Z: add.u32 %r0, %r0, 100;
        Q:";
    assert_eq!(
        per_thread(body, 40),
        table(40, |t| if t < 10 {
            [11, 10, 100][t as usize % 3]
        } else {
            100
        })
    );
}

#[test]
fn brx_idx_out_of_range_faults() {
    let body = "T: .branchtargets X, X;\nmov.u32 %r1, %lane;\nbrx.idx %r1, T;\nX: ret;";
    let fault = fault(&kernel(1, body), 4);
    assert_eq!(fault.kind, FaultKind::InvalidOperand);
    assert_eq!((fault.site.thread, fault.site.line), (2, 4 + 3));
    assert_eq!(fault.site.instruction, "brx.idx %r1, T;");
}

#[test]
fn guarded_exits_and_returns() {
    let body = "mov.u32 %r0, 7; setp.ge.u32 %p0, %thread, 20; @%p0 exit;
        setp.lt.u32 %p1, %thread, 5; @%p1 ret;
        @!%p1 mov.u32 %r0, 8;";
    assert_eq!(
        per_thread(body, 40),
        table(40, |t| if (5..20).contains(&t) { 8 } else { 0 })
    );
}

/// A function that adds its parameters of several sizes.
const MIX: &str = "
    .func (.param .b64 result) mix(.param .b32 a, .param .b64 b, .param .b8 c, .param .b16 d)
    {
        .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .b16 %h<8>;
        ld.param.u32 %r1, [a]; ld.param.u64 %d1, [b]; ld.param.s8 %h1, [c]; ld.param.s16 %h2, [d];
        cvt.u64.u32 %d2, %r1; add.u64 %d1, %d1, %d2;
        cvt.s64.s16 %d3, %h1; add.s64 %d1, %d1, %d3;
        cvt.s64.s16 %d4, %h2; mad.lo.s64 %d1, %d4, 1000, %d1;
        st.param.b64 [result+0], %d1;
        ret;
    }";

#[test]
fn calls_pass_parameters_and_results() {
    let body = "mov.u64 %d0, 5000000000; mov.u16 %h0, -3; mov.u16 %h1, 2;
        {
            .param .b32 pa; st.param.b32 [pa], %thread;
            .param .b64 pb; st.param.b64 [pb], %d0;
            .param .b8 pc; st.param.b8 [pc], %h0;
            .param .b16 pd; st.param.b16 [pd+0], %h1;
            .param .b64 result;
            call.uni (result), mix, (pa, pb, pc, pd);
            ld.param.b64 %d1, [result];
        }
        sub.u64 %d1, %d1, 5000000000; cvt.u32.u64 %r0, %d1;";
    let text = format!(
        "{MIX}\n{}",
        kernel_text("k", 1, &format!("{body}\n{STORE}"))
    );
    let out = run(&module(&text), 33, 33);
    assert_eq!(out, table(33, |t| t + 2000 - 3));
}

#[test]
fn calls_pass_aggregates() {
    // A struct of 12 bytes is passed and returned by value, as an aligned byte array.
    let text = "
    .func (.param .align 4 .b8 result[12]) rotate(.param .align 4 .b8 value[12])
    {
        .reg .b32 %r<4>;
        ld.param.b32 %r0, [value]; ld.param.b32 %r1, [value+4]; ld.param.b32 %r2, [value+8];
        st.param.b32 [result], %r1; st.param.b32 [result+4], %r2; st.param.b32 [result+8], %r0;
        ret;
    }"
    .to_owned()
        + &kernel_text(
            "k",
            1,
            "{ .param .align 4 .b8 a[12]; .param .align 4 .b8 b[12];
            st.param.b32 [a], %thread; st.param.b32 [a+4], 20; st.param.b32 [a+8], 300;
            call (b), rotate, (a);
            ld.param.b32 %r1, [b]; ld.param.b32 %r2, [b+4]; ld.param.b32 %r3, [b+8]; }
            mad.lo.u32 %r0, %r1, 1000000, %r2; mad.lo.u32 %r0, %r3, 1000, %r0;
            mul.wide.u32 %d0, %thread, 4; add.u64 %d0, %in0, %d0; st.global.u32 [%d0], %r0; ret;",
        );
    let expected = table(8, |t| 20_000_000 + t * 1000 + 300);
    assert_eq!(run(&module(&text), 8, 8), expected);
}

#[test]
fn parameters_of_functions_have_addresses() {
    // The ISA, "Device Function Parameters": the address is in the state space .local.
    let text = "
    .func (.param .b32 result) second(.param .align 4 .b8 value[8])
    {
        .reg .b32 %r<4>; .reg .b64 %d<4>;
        mov.b64 %d0, value;
        ld.local.b32 %r0, [%d0+4];
        st.param.b32 [result], %r0;
        ret;
    }"
    .to_owned()
        + &kernel_text(
            "k",
            1,
            "{ .param .align 4 .b8 a[8]; .param .b32 b;
            st.param.b32 [a], 1; st.param.b32 [a+4], %thread;
            call (b), second, (a); ld.param.b32 %r0, [b]; }
            mul.wide.u32 %d0, %thread, 4; add.u64 %d0, %in0, %d0; st.global.u32 [%d0], %r0; ret;",
        );
    assert_eq!(run(&module(&text), 4, 4), [0, 1, 2, 3]);
}

#[test]
fn functions_are_called_before_their_definition() {
    let text = format!(
        ".func (.param .b32 r) twice(.param .b32 x);\n{}
        .func (.param .b32 r) twice(.param .b32 x)
        {{ .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, %a; st.param.b32 [r], %a; ret; }}",
        kernel_text(
            "k",
            1,
            "{ .param .b32 x; .param .b32 y; st.param.b32 [x], 21; call (y), twice, (x);
            ld.param.b32 %r0, [y]; st.global.u32 [%in0], %r0; } ret;"
        )
    );
    assert_eq!(run(&module(&text), 1, 1), [42]);
}

/// Functions with one parameter and one result: plus one, plus ten, times two.
const OPERATIONS: &str = "
    .func (.param .b32 r) one(.param .b32 x)
    { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, 1; st.param.b32 [r], %a; ret; }
    .func (.param .b32 r) ten(.param .b32 x)
    { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, 10; st.param.b32 [r], %a; ret; }
    .func (.param .b32 r) twice(.param .b32 x)
    { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, %a; st.param.b32 [r], %a; ret; }
    ";

const INDIRECT: &str = "{ .param .b32 x; .param .b32 y; st.param.b32 [x], %thread;
        P: .callprototype (.param .b32 _) _ (.param .b32 _);
        call (y), %d0, (x), P;
        ld.param.b32 %r0, [y]; }";

#[test]
fn indirect_calls_in_diverged_lanes() {
    let body = "rem.u32 %r1, %thread, 3; mov.u64 %d0, one;
        setp.eq.u32 %p0, %r1, 1; @%p0 mov.u64 %d0, ten;
        setp.eq.u32 %p1, %r1, 2; @%p1 mov.u64 %d0, twice;";
    let body = format!("{body}\n{INDIRECT}\n{STORE}");
    let out = run(
        &module(&format!("{OPERATIONS}{}", kernel_text("k", 1, &body))),
        64,
        64,
    );
    assert_eq!(out, table(64, |t| [t + 1, t + 10, 2 * t][t as usize % 3]));
}

#[test]
fn function_addresses_in_a_table() {
    let body = "rem.u32 %r1, %thread, 3; mul.wide.u32 %d1, %r1, 8;
        mov.u64 %d2, vtable; add.u64 %d2, %d2, %d1; ld.global.u64 %d0, [%d2];";
    let body = format!("{body}\n{INDIRECT}\n{STORE}");
    let text = format!(
        "{OPERATIONS}.global .align 8 .u64 vtable[3] = {{one, ten, twice}};\n{}",
        kernel_text("k", 1, &body)
    );
    let out = run(&module(&text), 64, 64);
    assert_eq!(out, table(64, |t| [t + 1, t + 10, 2 * t][t as usize % 3]));
}

#[test]
fn indirect_call_of_another_address_faults() {
    let body = format!("mov.u64 %d0, 12345;\n{INDIRECT}\nret;");
    let fault = fault(
        &module(&format!("{OPERATIONS}{}", kernel_text("k", 1, &body))),
        1,
    );
    assert_eq!(fault.kind, FaultKind::InvalidOperand);
    assert!(
        fault.site.instruction.starts_with("call (y), %d0"),
        "{fault}"
    );
}

#[test]
fn recursion_keeps_registers_and_local_memory() {
    // fibonacci(n) with a variable in local memory that must survive both calls.
    let text = "
    .func (.param .b32 r) fibonacci(.param .b32 n)
    {
        .local .align 8 .b8 frame[8]; .reg .b64 %d<4>; .reg .b32 %a<8>; .reg .pred %p;
        ld.param.b32 %a0, [n];
        setp.lt.u32 %p, %a0, 2; @%p bra LEAF;
        mov.u64 %d0, frame; cvta.local.u64 %d1, %d0;
        st.u32 [%d1+4], %a0;
        sub.u32 %a1, %a0, 1;
        { .param .b32 x; .param .b32 y; st.param.b32 [x], %a1; call.uni (y), fibonacci, (x);
        ld.param.b32 %a2, [y]; }
        ld.local.u32 %a3, [frame+4];
        st.local.u32 [%d0], %a2;
        sub.u32 %a3, %a3, 2;
        { .param .b32 x; .param .b32 y; st.param.b32 [x], %a3; call.uni (y), fibonacci, (x);
        ld.param.b32 %a4, [y]; }
        ld.local.u32 %a5, [frame];
        add.u32 %a0, %a4, %a5;
        LEAF: st.param.b32 [r], %a0;
        ret;
    }"
    .to_owned()
        + &kernel_text(
            "k",
            1,
            "rem.u32 %r1, %thread, 12;
            { .param .b32 x; .param .b32 y; st.param.b32 [x], %r1; call (y), fibonacci, (x);
            ld.param.b32 %r0, [y]; }
            mul.wide.u32 %d0, %thread, 4; add.u64 %d0, %in0, %d0; st.global.u32 [%d0], %r0; ret;",
        );
    let fibonacci = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89];
    let out = run(&module(&text), 40, 40);
    assert_eq!(out, table(40, |t| fibonacci[t as usize % 12]));
}

#[test]
fn endless_recursion_faults() {
    let text = ".func f() { call f; ret; }".to_owned() + &kernel_text("k", 1, "call f;\nret;");
    let fault = fault(&module(&text), 1);
    assert_eq!(fault.kind, FaultKind::InvalidOperand);
    assert_eq!(fault.site.line, 4);
}

#[test]
fn lanes_return_at_different_places() {
    let text = "
    .func (.param .b32 r) f(.param .b32 x)
    {
        .reg .b32 %a<4>; .reg .pred %p;
        ld.param.b32 %a0, [x];
        st.param.b32 [r], 1;
        setp.lt.u32 %p, %a0, 8; @%p ret;
        st.param.b32 [r], 2;
        LOOP: sub.u32 %a0, %a0, 1; setp.gt.u32 %p, %a0, 8; @%p bra LOOP;
        ld.param.b32 %a0, [x]; setp.lt.u32 %p, %a0, 16; @!%p bra MORE; ret;
        MORE: st.param.b32 [r], %a0; ret;
    }"
    .to_owned()
        + &kernel_text(
            "k",
            1,
            "setp.eq.u32 %p0, %thread, 3; mov.u32 %r0, 77; @%p0 bra SKIP;
            { .param .b32 x; .param .b32 y; st.param.b32 [x], %thread; call (y), f, (x);
            ld.param.b32 %r0, [y]; }
            SKIP: bar.sync 0;
            mul.wide.u32 %d0, %thread, 4; add.u64 %d0, %in0, %d0; st.global.u32 [%d0], %r0; ret;",
        );
    let expected = table(64, |t| match t {
        3 => 77,
        0..8 => 1,
        8..16 => 2,
        t => t,
    });
    assert_eq!(run(&module(&text), 64, 64), expected);
}

#[test]
fn guarded_calls_and_exit_in_a_function() {
    let text = "
    .func f(.param .b64 out, .param .b32 x)
    {
        .reg .b32 %a<4>; .reg .b64 %d<4>; .reg .pred %p;
        ld.param.b64 %d0, [out]; ld.param.b32 %a0, [x];
        st.global.u32 [%d0], 5;
        setp.gt.u32 %p, %a0, 10; @%p exit;
        ret;
    }"
    .to_owned()
        + &kernel_text(
            "k",
            1,
            "mul.wide.u32 %d0, %thread, 4; add.u64 %d0, %in0, %d0;
            and.b32 %r0, %thread, 1; setp.eq.u32 %p0, %r0, 0;
            { .param .b64 a; .param .b32 b; st.param.b64 [a], %d0; st.param.b32 [b], %thread;
            @%p0 call f, (a, b); }
            ld.global.u32 %r1, [%d0]; add.u32 %r1, %r1, 1; st.global.u32 [%d0], %r1; ret;",
        );
    let expected = table(32, |t| match t {
        t if t % 2 == 1 => 1,
        0..=10 => 6,
        _ => 5,
    });
    assert_eq!(run(&module(&text), 32, 32), expected);
}

#[test]
fn lanes_exit_before_a_barrier() {
    // 70 threads; some lanes of each warp and all lanes of warp 1 exit.
    let body = ".shared .u32 count; mov.u32 %r1, 0; setp.eq.u32 %p0, %thread, 0;
        @%p0 st.shared.u32 [count], %r1; bar.sync 0;
        and.b32 %r2, %lane, 1; setp.eq.u32 %p1, %r2, 1; @%p1 exit;
        setp.ge.u32 %p2, %thread, 32; setp.lt.and.u32 %p2, %thread, 64, %p2; @%p2 exit;
        red.shared.add.u32 [count], 1; bar.sync 0; ld.shared.u32 %r0, [count];";
    let expected = table(70, |t| match t {
        t if t % 2 == 1 || (32..64).contains(&t) => 0,
        _ => 16 + 3,
    });
    assert_eq!(per_thread(body, 70), expected);
}

#[test]
fn lanes_exit_while_others_wait_at_a_barrier() {
    // The exits complete the barrier.
    let body = "setp.ge.u32 %p0, %thread, 20; mov.u32 %r0, 9; @%p0 bra SLOW;
        bar.sync 0; bra DONE;
        SLOW: mov.u32 %r1, 0;
        LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 2000; @%p1 bra LOOP; exit;
        DONE:";
    assert_eq!(
        per_thread(body, 96),
        table(96, |t| if t < 20 { 9 } else { 0 })
    );
}

#[test]
fn grids_and_blocks_of_three_dimensions() {
    let body = "mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z;
        mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %ctaid.z;
        mov.u32 %r6, %ntid.x; mov.u32 %r7, %ntid.y; mov.u32 %r8, %ntid.z;
        mov.u32 %r9, %nctaid.x; mov.u32 %r10, %nctaid.y; mov.u32 %r11, %nctaid.z;
        mad.lo.u32 %r12, %r2, %r7, %r1; mad.lo.u32 %r12, %r12, %r6, %r0;
        mad.lo.u32 %r13, %r5, %r10, %r4; mad.lo.u32 %r13, %r13, %r9, %r3;
        mul.lo.u32 %r14, %r6, %r7; mul.lo.u32 %r14, %r14, %r8;
        mad.lo.u32 %r15, %r13, %r14, %r12;
        mul.wide.u32 %d0, %r15, 32; add.u64 %d0, %in0, %d0;
        st.global.v4.u32 [%d0], {%r0, %r1, %r2, %r3};
        mov.u32 %r16, %warpid; mov.u32 %r17, %nwarpid; mad.lo.u32 %r16, %r16, 100, %r17;
        mad.lo.u32 %r16, %r16, 100, %lane;
        st.global.v4.u32 [%d0+16], {%r4, %r5, %r16, %r11}; ret;";
    let gpus = Gpus::default();
    let (blocks, threads) = ([3u32, 2, 4], [5u32, 7, 3]);
    let count = (24 * 105) as usize;
    let out = gpus.allocate(0, count * 32);
    let kernel = Kernel::new(&kernel(1, body), "k")
        .grid(blocks)
        .block(threads)
        .arg(&out);
    gpus.run(&[kernel]).unwrap();
    let out = out.read_u32();
    for block in 0..24 {
        for thread in 0..105 {
            let at = (block * 105 + thread) as usize * 8;
            let expected = [
                thread % 5,
                thread / 5 % 7,
                thread / 35,
                block % 3,
                block / 3 % 2,
                block / 6,
                (thread / 32 * 100 + 4) * 100 + thread % 32,
                4,
            ];
            assert_eq!(out[at..at + 8], expected, "block {block} thread {thread}");
        }
    }
}

#[test]
fn lane_masks_and_sizes() {
    let body = "mov.u32 %r1, %lanemask_eq; mov.u32 %r2, %lanemask_lt; mov.u32 %r3, %lanemask_le;
        mov.u32 %r4, %lanemask_gt; mov.u32 %r5, %lanemask_ge; mov.u32 %r6, WARP_SZ;
        add.u32 %r7, %laneid, 100;
        mul.wide.u32 %d0, %thread, 32; add.u64 %d0, %in0, %d0;
        st.global.v4.u32 [%d0], {%r1, %r2, %r3, %r4};
        st.global.v4.u32 [%d0+16], {%r5, %r6, %r7, %lane}; ret;";
    let out = run_body(body, 33, 33 * 8);
    for thread in 0..33 {
        let lane = thread % 32;
        let eq = 1u32 << lane;
        let expected = [
            eq,
            eq - 1,
            eq | (eq - 1),
            !(eq | (eq - 1)),
            !(eq - 1),
            32,
            100 + lane,
            lane,
        ];
        assert_eq!(out[thread as usize * 8..][..8], expected, "thread {thread}");
    }
}

#[test]
fn clocks_advance() {
    let body = "mov.u64 %d0, %clock64; mov.u64 %d1, %globaltimer; mov.u32 %r0, 0;
        LOOP: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 5000; @%p0 bra LOOP;
        mov.u64 %d2, %clock64; mov.u64 %d3, %globaltimer;
        sub.u64 %d2, %d2, %d0; sub.u64 %d3, %d3, %d1;
        st.global.u64 [%in0], %d2; st.global.u64 [%in0+8], %d3; ret;";
    let out = run_body(body, 1, 4);
    assert!(out[0] >= 5000 && out[1] == 0, "{out:?}");
    assert!(out[2] > 0 && out[3] == 0, "{out:?}");
}

#[test]
fn trap_ends_the_launch() {
    let body = "setp.eq.u32 %p0, %thread, 37;\n@%p0 trap;\nret;";
    let fault = fault(&kernel(1, body), 64);
    assert_eq!(fault.kind, FaultKind::Trap);
    assert_eq!((fault.site.thread, fault.site.block), (37, 0));
    assert_eq!(fault.site.line, 6);
    assert_eq!(fault.site.instruction, "@%p0 trap;");
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let module = module(
        ".visible .entry k(.param .u64 a) .maxntid 64, 1, 1 { ret; }
        .visible .entry r(.param .u32 a, .param .u64 b) { ret; }",
    );
    let gpus = Gpus::default();
    let launch = |kernel: Kernel| gpus.run(&[kernel]);
    assert!(launch(Kernel::new(&module, "k").threads(64).arg(1u64)).is_ok());
    assert!(launch(Kernel::new(&module, "k").threads(65).arg(1u64)).is_err());
    assert!(launch(Kernel::new(&module, "k").threads(0).arg(1u64)).is_err());
    assert!(launch(Kernel::new(&module, "k").blocks(0).arg(1u64)).is_err());
    assert!(launch(Kernel::new(&module, "k")).is_err());
    assert!(launch(Kernel::new(&module, "k").arg(1u32)).is_err());
    assert!(launch(Kernel::new(&module, "r").arg(1u32).arg(2u64)).is_ok());
    assert!(launch(Kernel::new(&module, "r").arg(1u32).arg(2u64).threads(1025)).is_err());
    let error = launch(Kernel::new(&module, "missing")).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    let entry = module.entry("r").unwrap();
    assert_eq!((entry.params[1].offset, entry.param_bytes()), (8, 16));
    assert_eq!(module.entry("k").unwrap().max_threads, 64);
}

#[test]
fn a_function_returns_at_its_end() {
    // The last instruction has a guard.
    let text = ".func f(.param .b64 out) { .reg .b64 %d; .reg .pred %p; ld.param.b64 %d, [out];
        setp.eq.u64 %p, %d, 0; @%p st.global.u32 [%d], 1; }"
        .to_owned()
        + &kernel_text(
            "k",
            1,
            "{ .param .b64 a; st.param.b64 [a], %in0; call f, (a); }
            setp.eq.u32 %p0, %thread, 3; @%p0 st.global.u32 [%in0], 7;",
        );
    assert_eq!(run(&module(&text), 8, 1), [7]);
}
