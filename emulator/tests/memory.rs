//! State spaces, addresses, loads and stores, variables, atomic operations, and faults.

mod common;

use common::{fault, kernel, line_of, module, run, run_body};
use fusewire_emulator::{FaultKind, Gpus, Kernel};

fn long(out: &[u32], at: usize) -> u64 {
    u64::from(out[at]) | u64::from(out[at + 1]) << 32
}

#[test]
fn loads_extend_to_the_width_of_their_register() {
    let body = "mov.u32 %r0, 0xf1e2d3c4; st.global.u32 [%in0+64], %r0;
        ld.global.u8 %r1, [%in0+67]; st.global.u32 [%in0], %r1;
        ld.global.s8 %r2, [%in0+67]; st.global.u32 [%in0+4], %r2;
        ld.global.s8 %d0, [%in0+65]; st.global.u64 [%in0+8], %d0;
        ld.global.u16 %r3, [%in0+66]; st.global.u32 [%in0+16], %r3;
        ld.global.s16 %d1, [%in0+66]; st.global.u64 [%in0+24], %d1;
        ld.global.s32 %d2, [%in0+64]; st.global.u64 [%in0+32], %d2;
        ld.global.u32 %d3, [%in0+64]; st.global.u64 [%in0+40], %d3;
        ld.global.s8 %h0, [%in0+64]; cvt.u32.u16 %r4, %h0; st.global.u32 [%in0+20], %r4;
        ld.global.b8 %h1, [%in0+64]; cvt.u32.u16 %r5, %h1; st.global.u32 [%in0+48], %r5;
        ret;";
    let out = run_body(body, 1, 20);
    assert_eq!(out[0], 0xf1);
    assert_eq!(out[1], 0xffff_fff1);
    assert_eq!(long(&out, 2), 0xd3u8 as i8 as u64);
    assert_eq!(out[4], 0xf1e2);
    assert_eq!(long(&out, 6), 0xf1e2u16 as i16 as u64);
    assert_eq!(long(&out, 8), 0xf1e2_d3c4u32 as i32 as u64);
    assert_eq!(long(&out, 10), 0xf1e2_d3c4);
    assert_eq!(out[5], 0xffc4);
    assert_eq!(out[12], 0xc4);
}

#[test]
fn stores_write_the_low_bytes() {
    let body = "mov.u32 %r0, 0x11223344; mov.u64 %d0, 0xaabbccdd00112233;
        st.global.u32 [%in0], -1; st.global.u8 [%in0+1], %r0;
        st.global.u32 [%in0+4], -1; st.global.u16 [%in0+6], %r0;
        st.global.u32 [%in0+8], %d0;
        st.global.u8 [%in0+12], 0x1ff; ret;";
    let out = run_body(body, 1, 4);
    assert_eq!(out, [0xffff_44ff, 0x3344_ffff, 0x0011_2233, 0xff]);
}

#[test]
fn vector_loads_and_stores() {
    let body = "mov.u32 %r0, 1; mov.u32 %r1, 2; mov.u32 %r2, 3; mov.u32 %r3, 4;
        st.global.v4.u32 [%in0], {%r0, %r1, %r2, %r3};
        ld.global.v2.u64 {%d0, %d1}, [%in0]; st.global.v2.u64 [%in0+16], {%d1, %d0};
        ld.global.v2.u16 {%h0, %h1}, [%in0+4]; st.global.v2.u16 [%in0+32], {%h1, %h0};
        ld.global.v4.u8 {%r4, %r5, %r6, %r7}, [%in0+8];
        st.global.v4.u8 [%in0+36], {%r7, %r7, %r7, %r4};
        ld.global.v4.u32 {_, %r8, _, %r9}, [%in0]; st.global.v2.u32 [%in0+40], {%r8, %r9};
        ld.global.v2.f32 {%f0, %f1}, [%in0]; st.global.v2.f32 [%in0+48], {%f1, 0f3F800000};
        st.global.u32 [%in0+60], 0x80ff7f01;
        ld.global.v4.s8 {%r10, %r11, %r12, %r13}, [%in0+60];
        st.global.v4.s32 [%in0+64], {%r10, %r11, %r12, %r13};
        ld.global.v2.s8 {_, %r14}, [%in0+62]; st.global.u32 [%in0+80], %r14; ret;";
    let out = run_body(body, 1, 21);
    assert_eq!(out[..8], [1, 2, 3, 4, 3, 4, 1, 2]);
    assert_eq!(out[8..14], [2 << 16, 3 << 24, 2, 4, 2, 0x3f80_0000]);
    assert_eq!(out[16..20], [1, 127, -1i32 as u32, -128i32 as u32]);
    assert_eq!(out[20], -128i32 as u32);
}

#[test]
fn destination_of_a_load_may_be_its_address() {
    let body = "mov.u64 %d0, %in0; st.global.u64 [%d0], %d0; ld.global.u64 %d0, [%d0];
        st.global.u32 [%d0], 5; st.global.u64 [%in0+8], %in0;
        mov.u64 %d1, %in0; ld.global.v2.u32 {%r0, %r1}, [%d1+8]; mov.b64 %d1, {%r0, %r1};
        st.global.u32 [%d1+4], 6; ret;";
    assert_eq!(run_body(body, 1, 4)[..2], [5, 6]);
}

#[test]
fn shared_memory_is_shared_by_a_block() {
    let text = ".shared .align 16 .b8 whole[32];
        .extern .shared .align 16 .b8 dynamic[];
        .visible .entry k(.param .u64 out) {
        .shared .u32 one; .shared .align 8 .u64 two[4];
        .reg .b32 %r<16>; .reg .b64 %d<16>; .reg .pred %p<4>;
        ld.param.u64 %d0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
        setp.ne.u32 %p0, %r0, 0; @%p0 bra READ;
        add.u32 %r2, %r1, 10; st.shared.u32 [one], %r2;
        add.u32 %r2, %r1, 20; st.shared.u32 [two+8], %r2; st.shared.u32 [two+12], 1;
        add.u32 %r2, %r1, 30; st.shared.u32 [whole+28], %r2;
        add.u32 %r2, %r1, 40; mov.u32 %r3, dynamic; st.shared.u32 [%r3+4], %r2;
        mov.u64 %d1, dynamic; cvta.shared.u64 %d1, %d1; st.u32 [%d1+8], %r2;
        READ: bar.sync 0;
        ld.shared.u32 %r4, [one]; ld.shared.u64 %d2, [two+8]; ld.shared.u32 %r5, [whole+28];
        ld.shared.u32 %r6, [dynamic+4]; mov.u64 %d3, dynamic+8; ld.shared.u32 %r7, [%d3];
        cvt.u32.u64 %r8, %d2; shr.u64 %d2, %d2, 32; cvt.u32.u64 %r9, %d2;
        mov.u32 %r10, %dynamic_smem_size;
        mov.u32 %r11, %ntid.x; mad.lo.u32 %r11, %r1, %r11, %r0; mul.wide.u32 %d4, %r11, 32;
        add.u64 %d0, %d0, %d4; st.global.v4.u32 [%d0], {%r4, %r5, %r6, %r7};
        st.global.v4.u32 [%d0+16], {%r8, %r9, %r10, %r10}; ret; }";
    let module = module(text);
    assert_eq!(module.entry("k").unwrap().shared_bytes, 32 + 8 + 32);
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 3 * 40 * 32);
    let kernel = Kernel::new(&module, "k")
        .blocks(3)
        .threads(40)
        .dynamic_shared(64)
        .arg(&out);
    gpus.run(&[kernel]).unwrap();
    let out = out.read_u32();
    for block in 0..3u32 {
        for thread in 0..40 {
            let expected = [10, 30, 40, 40, 20].map(|it| it + block);
            let at = (block as usize * 40 + thread) * 8;
            assert_eq!(out[at..at + 5], expected);
            assert_eq!(out[at + 5..at + 7], [1, 64]);
        }
    }
}

#[test]
fn local_memory_is_private_to_a_thread() {
    let body = ".local .align 4 .b8 array[64]; .local .u32 single;
        mov.u64 %d0, array; cvta.local.u64 %d1, %d0; mov.u32 %r0, 0;
        FILL: mul.wide.u32 %d2, %r0, 4; add.u64 %d3, %d1, %d2; add.u32 %r1, %r0, %thread;
        st.u32 [%d3], %r1; add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 16; @%p0 bra FILL;
        st.local.u32 [single], 1000;
        and.b32 %r2, %thread, 15; mul.wide.u32 %d2, %r2, 4; add.u64 %d3, %d0, %d2;
        ld.local.u32 %r3, [%d3]; ld.local.u32 %r4, [single]; add.u32 %r3, %r3, %r4;
        ld.local.u32 %r5, [array+60]; mad.lo.u32 %r3, %r5, 10000, %r3;
        mul.wide.u32 %d4, %thread, 4; add.u64 %d4, %in0, %d4; st.global.u32 [%d4], %r3; ret;";
    let expected: Vec<u32> = (0..64)
        .map(|t| (15 + t) * 10000 + t % 16 + t + 1000)
        .collect();
    assert_eq!(run_body(body, 64, 64), expected);
}

#[test]
fn generic_addresses_name_all_spaces() {
    let body = ".shared .align 8 .b8 s[16]; .local .align 8 .b8 l[16];
        mov.u64 %d0, s; cvta.shared.u64 %d1, %d0; mov.u64 %d2, l; cvta.local.u64 %d3, %d2;
        cvta.global.u64 %d4, %in0;
        st.u32 [%d1+4], 1; st.u32 [%d3+4], 2; st.u32 [%d4+4], 3;
        ld.shared.u32 %r0, [s+4]; ld.local.u32 %r1, [l+4]; ld.global.u32 %r2, [%in0+4];
        st.global.v2.u32 [%in0+8], {%r0, %r1}; st.global.u32 [%in0+16], %r2;
        cvta.to.shared.u64 %d5, %d1; cvta.to.local.u64 %d6, %d3; cvta.to.global.u64 %d7, %d4;
        setp.eq.u64 %p0, %d5, %d0; setp.eq.and.u64 %p0, %d6, %d2, %p0;
        setp.eq.and.u64 %p0, %d7, %in0, %p0; selp.u32 %r3, 1, 0, %p0;
        st.global.u32 [%in0+20], %r3;
        isspacep.shared %p1, %d1; isspacep.local %p2, %d3; isspacep.global %p3, %d4;
        isspacep.shared %p4, %d4; isspacep.global %p5, %d1; isspacep.local %p6, %d1;
        selp.u32 %r4, 1, 0, %p1; selp.u32 %r5, 1, 0, %p2; selp.u32 %r6, 1, 0, %p3;
        selp.u32 %r7, 1, 0, %p4; selp.u32 %r8, 1, 0, %p5; selp.u32 %r9, 1, 0, %p6;
        st.global.v2.u32 [%in0+24], {%r4, %r5};
        st.global.v4.u32 [%in0+32], {%r6, %r7, %r8, %r9};
        atom.add.u32 %r10, [%d1+4], 10; ld.shared.u32 %r11, [s+4];
        st.global.v2.u32 [%in0+48], {%r10, %r11}; ret;";
    let out = run_body(body, 1, 14);
    assert_eq!(out[1..6], [3, 1, 2, 3, 1]);
    assert_eq!(out[6..14], [1, 1, 1, 0, 0, 0, 1, 11]);
}

#[test]
fn parameters_of_kernels() {
    let text = ".visible .entry k(.param .u64 out, .param .u8 a, .param .align 8 .b8 b[12],
        .param .u16 c, .param .f64 d) {
        .reg .b64 %d<8>; .reg .b32 %r<8>;
        ld.param.u64 %d0, [out]; ld.param.s8 %r0, [a]; ld.param.u32 %r1, [b+8];
        ld.param.u16 %r2, [c]; ld.param.u64 %d1, [d]; ld.param.v2.u32 {%r3, %r4}, [b];
        st.global.v4.u32 [%d0], {%r0, %r1, %r2, %r3}; st.global.u64 [%d0+16], %d1;
        mov.b64 %d2, b; cvta.param.u64 %d3, %d2; ld.u32 %r5, [%d3+4]; ld.param.u32 %r6, [%d2+8];
        st.global.v2.u32 [%d0+24], {%r5, %r6}; ret; }";
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 32);
    let bytes: Vec<u8> = [7u32, 8, 9]
        .iter()
        .flat_map(|it| it.to_le_bytes())
        .collect();
    let kernel = Kernel::new(&module(text), "k")
        .arg(&out)
        .arg(-2i8)
        .arg(bytes.as_slice())
        .arg(0xfffeu16)
        .arg(1.5f64);
    gpus.run(&[kernel]).unwrap();
    let out = out.read_u32();
    assert_eq!(out[..4], [-2i32 as u32, 9, 0xfffe, 7]);
    assert_eq!(long(&out, 4), 1.5f64.to_bits());
    assert_eq!(out[6..], [8, 9]);
}

#[test]
fn variables_have_initial_values() {
    let text = ".global .align 4 .u32 numbers[5] = {1, 0x20, 3};
        .const .align 8 .f64 constant = 0d4008000000000000;
        .global .align 1 .b8 text[6] = {104, 105, 0};
        .global .s16 negative = -2;
        .global .f32 float = 0f3FC00000;
        .global .align 8 .u64 pointers[3] = {numbers, numbers+8, generic(text)+1};
        .visible .global .u32 counter;
        .visible .entry k(.param .u64 out) {
        .reg .b64 %d<8>; .reg .b32 %r<8>;
        ld.param.u64 %d0, [out];
        ld.global.u32 %r0, [numbers+4]; ld.global.u32 %r1, [numbers+16];
        ld.const.u64 %d1, [constant];
        st.global.v2.u32 [%d0], {%r0, %r1}; st.global.u64 [%d0+8], %d1;
        ld.global.u8 %r2, [text+1]; ld.global.s16 %r3, [negative];
        ld.global.u32 %r4, [float]; ld.global.u64 %d2, [pointers+8]; ld.global.u32 %r5, [%d2];
        st.global.v4.u32 [%d0+16], {%r2, %r3, %r4, %r5};
        ld.global.u64 %d3, [pointers+16]; ld.u8 %r6, [%d3];
        atom.global.add.u32 %r7, [counter], 1;
        st.global.v2.u32 [%d0+32], {%r6, %r7}; ret; }";
    let module = module(text);
    let gpus = Gpus::default();
    for round in 0..2 {
        let out = gpus.allocate(0, 40);
        gpus.run(&[Kernel::new(&module, "k").arg(&out)]).unwrap();
        let out = out.read_u32();
        assert_eq!(out[..2], [0x20, 0]);
        assert_eq!(long(&out, 2), 3f64.to_bits());
        assert_eq!(out[4..8], [105, -2i32 as u32, 1.5f32.to_bits(), 3]);
        // Variables keep their values between launches; each device has its own.
        assert_eq!(out[8..], [105, round]);
        let other = gpus.allocate(1, 40);
        gpus.run(&[Kernel::new(&module, "k").device(1).arg(&other)])
            .unwrap();
        assert_eq!(other.read_u32()[9], round);
    }
}

#[test]
fn devices_access_the_memory_of_other_devices() {
    let gpus = Gpus::default();
    let (first, second) = (gpus.allocate(0, 4), gpus.allocate(1, 4));
    let module = kernel(1, "st.global.u32 [%in0], 3; ret;");
    gpus.run(&[
        Kernel::new(&module, "k").device(1).arg(&first),
        Kernel::new(&module, "k").arg(&second),
    ])
    .unwrap();
    assert_eq!((first.read_u32()[0], second.read_u32()[0]), (3, 3));
}

/// Executes an atomic operation of a type on memory with the value `old`. Returns the result, and
/// the new values after `atom` and after `red`.
fn atomic(space: &str, operation: &str, kind: &str, old: u64, operands: &[u64]) -> [u64; 3] {
    let bits: u32 = kind.trim_start_matches(|c: char| !c.is_ascii_digit())[..2]
        .trim_end_matches('x')
        .parse()
        .unwrap();
    let bits = if kind.ends_with("x2") { 32 } else { bits };
    let list: Vec<String> = (0..operands.len()).map(|at| format!("%s{at}")).collect();
    let values: Vec<String> = (0..operands.len())
        .map(|at| format!("ld.global.b{bits} %s{at}, [%in0+{}];", 8 + 8 * at))
        .collect();
    let copy = match space {
        "shared" => format!(
            ".shared .align 8 .b8 cell[16]; mov.u64 %d0, cell;
            st.shared.b{bits} [cell], %old; st.shared.b{bits} [cell+8], %old;"
        ),
        "generic" => format!(
            ".shared .align 8 .b8 cell[16]; mov.u64 %d0, cell; cvta.shared.u64 %d0, %d0;
            st.shared.b{bits} [cell], %old; st.shared.b{bits} [cell+8], %old;"
        ),
        _ => format!(
            "add.u64 %d0, %in0, 64; st.global.b{bits} [%d0], %old; st.global.b{bits} [%d0+8], %old;"
        ),
    };
    let (atom, dot) = match space {
        "generic" => (String::new(), String::new()),
        space => (format!(".{space}"), format!(".{space}")),
    };
    // There is no `red` with `exch` or `cas`.
    let red = if matches!(operation, "exch" | "cas") {
        "atom"
    } else {
        "red"
    };
    let discard = if red == "atom" { "_, " } else { "" };
    let body = format!(
        ".reg .b{bits} %s<2>, %old, %new, %result; ld.global.b{bits} %old, [%in0];
        {} {copy}
        atom{atom}.{operation}.{kind} %result, [%d0], {};
        {red}.relaxed.gpu{dot}.{operation}.{kind} {discard}[%d0+8], {};
        ld{dot}.b{bits} %new, [%d0]; st.global.b{bits} [%in0+32], %new;
        st.global.b{bits} [%in0+40], %result;
        ld{dot}.b{bits} %new, [%d0+8]; st.global.b{bits} [%in0+48], %new; ret;",
        values.join(" "),
        list.join(", "),
        list.join(", "),
    );
    let gpus = Gpus::default();
    let buffer = gpus.allocate(0, 128);
    let mut words = [0u64; 16];
    words[0] = old;
    words[1..1 + operands.len()].copy_from_slice(operands);
    let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
    buffer.write(&bytes);
    if let Err(error) = gpus.run(&[Kernel::new(&kernel(1, &body), "k").arg(&buffer)]) {
        panic!("{operation}.{kind}: {error}");
    }
    let out = buffer.read_u32();
    [long(&out, 10), long(&out, 8), long(&out, 12)]
}

#[test]
fn atomic_operations_of_integers() {
    let values32 = [0u64, 1, 5, 6, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff];
    for space in ["global", "shared", "generic"] {
        let test = |operation: &str, kind: &str, values: &[u64], f: &dyn Fn(u64, u64) -> u64| {
            let m = u64::MAX >> (64 - kind[1..].parse::<u32>().unwrap());
            for old in values {
                for a in values {
                    let want = [*old, f(*old, *a) & m, f(*old, *a) & m];
                    let got = atomic(space, operation, kind, *old, &[*a]);
                    assert_eq!(got, want, "{space} {operation}.{kind} {old:#x} {a:#x}");
                }
            }
        };
        let signed = |x: u64| x as i32;
        test("add", "u32", &values32, &|old, a| old + a);
        test("add", "s32", &values32, &|old, a| old + a);
        test("and", "b32", &values32, &|old, a| old & a);
        test("or", "b32", &values32, &|old, a| old | a);
        test("xor", "b32", &values32, &|old, a| old ^ a);
        test("exch", "b32", &values32, &|_, a| a);
        test("min", "u32", &values32, &|old, a| old.min(a));
        test("max", "u32", &values32, &|old, a| old.max(a));
        test("min", "s32", &values32, &|old, a| {
            signed(old).min(signed(a)) as u64
        });
        test("max", "s32", &values32, &|old, a| {
            signed(old).max(signed(a)) as u64
        });
        test("inc", "u32", &values32, &|old, a| {
            if old >= a { 0 } else { old + 1 }
        });
        test("dec", "u32", &values32, &|old, a| {
            if old == 0 || old > a { a } else { old - 1 }
        });
        let values64 = [0u64, 1, 1 << 40, 1 << 63, u64::MAX];
        test("add", "u64", &values64, &u64::wrapping_add);
        test("and", "b64", &values64, &|old, a| old & a);
        test("or", "b64", &values64, &|old, a| old | a);
        test("xor", "b64", &values64, &|old, a| old ^ a);
        test("exch", "b64", &values64, &|_, a| a);
        test("min", "u64", &values64, &u64::min);
        test("max", "u64", &values64, &u64::max);
        test("min", "s64", &values64, &|old, a| {
            (old as i64).min(a as i64) as u64
        });
        test("max", "s64", &values64, &|old, a| {
            (old as i64).max(a as i64) as u64
        });
        for (kind, old) in [("b16", 0x8001), ("b32", 0x8000_0001), ("b64", 1 << 60 | 1)] {
            let got = atomic(space, "cas", kind, old, &[old, 7]);
            assert_eq!(got, [old, 7, 7], "{space} {kind}");
            let got = atomic(space, "cas", kind, old, &[old + 1, 7]);
            assert_eq!(got, [old, old, old], "{space} {kind}");
        }
    }
}

#[test]
fn atomic_additions_of_floats() {
    for space in ["global", "shared"] {
        let single = |x: f32| u64::from(x.to_bits());
        let got = atomic(space, "add", "f32", single(1.5), &[single(-4.0)]);
        assert_eq!(got, [single(1.5), single(-2.5), single(-2.5)]);
        let got = atomic(space, "add", "f64", 1e300f64.to_bits(), &[1f64.to_bits()]);
        assert_eq!(got, [1e300f64.to_bits(); 3]);
        let f16 = |x: f32| u64::from(half::f16::from_f32(x).to_bits());
        let bf16 = |x: f32| u64::from(half::bf16::from_f32(x).to_bits());
        let got = atomic(space, "add.noftz", "f16", f16(2048.0), &[f16(1.0)]);
        assert_eq!(got, [f16(2048.0); 3]);
        let pair = |low: u64, high: u64| low | high << 16;
        let (old, a) = (pair(f16(1.0), f16(-2.0)), pair(f16(0.5), f16(3.0)));
        let sum = pair(f16(1.5), f16(1.0));
        assert_eq!(
            atomic(space, "add.noftz", "f16x2", old, &[a]),
            [old, sum, sum]
        );
        let (old, a) = (pair(bf16(1.0), bf16(-2.0)), pair(bf16(0.5), bf16(3.0)));
        let sum = pair(bf16(1.5), bf16(1.0));
        assert_eq!(
            atomic(space, "add.noftz", "bf16x2", old, &[a]),
            [old, sum, sum]
        );
    }
}

#[test]
fn atomic_operations_of_many_threads() {
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 16);
    let body = "atom.sys.global.add.u32 %r0, [%in0], 1; red.sys.global.max.u32 [%in0+4], %r0;
        atom.sys.global.xor.b32 %r1, [%in0+8], %r0; atom.sys.global.inc.u32 %r2, [%in0+12], 6;
        ret;";
    let module = kernel(1, body);
    let launch = |device| {
        Kernel::new(&module, "k")
            .device(device)
            .blocks(5)
            .threads(100)
            .arg(&out)
    };
    gpus.run(&[launch(0), launch(1)]).unwrap();
    let xor = (0..1000).fold(0, |all, it| all ^ it);
    assert_eq!(out.read_u32(), [1000, 999, xor, 1000 % 7]);
}

#[test]
fn cas_loop() {
    let body = "ld.relaxed.gpu.global.u32 %r0, [%in0];
        AGAIN: mad.lo.u32 %r1, %r0, 3, 1; atom.global.cas.b32 %r2, [%in0], %r0, %r1;
        setp.ne.u32 %p0, %r2, %r0; mov.u32 %r0, %r2; @%p0 bra AGAIN; ret;";
    let expected = (0..64).fold(0u32, |x, _| x.wrapping_mul(3).wrapping_add(1));
    assert_eq!(run_body(body, 64, 1), [expected]);
}

/// Checks the fault of an instruction that thread 3 executes.
fn check_fault(declarations: &str, setup: &str, instruction: &str, kind: FaultKind) -> String {
    let body =
        format!("{declarations}\n{setup}\nsetp.eq.u32 %p0, %thread, 3;\n@%p0 {instruction}\nret;");
    let text = common::kernel_text("k", 1, &body);
    let fault = fault(&module(&text), 8);
    assert_eq!(fault.kind, kind, "{instruction}: {fault}");
    assert_eq!(fault.site.thread, 3, "{instruction}: {fault}");
    let line = line_of(&text, &format!("@%p0 {instruction}"));
    assert_eq!(fault.site.line, line, "{instruction}: {fault}");
    assert_eq!(fault.site.instruction, format!("@%p0 {instruction}"));
    let message = fault.to_string();
    assert!(message.contains(&format!("line {line}")), "{message}");
    assert!(message.contains("thread 3"), "{message}");
    message
}

#[test]
fn accesses_out_of_bounds_fault() {
    let illegal = FaultKind::IllegalAddress;
    // The buffer has 256 bytes.
    check_fault("", "", "ld.global.u32 %r0, [%in0+256];", illegal);
    check_fault("", "", "st.global.u32 [%in0-4], %r0;", illegal);
    check_fault("", "", "ld.global.u32 %r0, [0];", illegal);
    check_fault("", "mov.u64 %d0, 8;", "st.u32 [%d0], 1;", illegal);
    check_fault("", "", "atom.global.add.u32 %r0, [%in0+256], 1;", illegal);
    check_fault("", "", "red.global.add.u64 [%in0+256], %d0;", illegal);
    check_fault(
        "",
        "",
        "ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%in0+256];",
        illegal,
    );
    let shared = ".shared .align 16 .b8 s[64];";
    check_fault(shared, "", "ld.shared.u32 %r0, [s+64];", illegal);
    check_fault(shared, "", "st.shared.u64 [s+64], %d0;", illegal);
    check_fault(
        shared,
        "mov.u64 %d0, s;",
        "ld.shared.u32 %r0, [%d0-4];",
        illegal,
    );
    check_fault(shared, "", "atom.shared.add.u32 %r0, [s+64], 1;", illegal);
    check_fault(
        shared,
        "",
        "ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [s+64];",
        illegal,
    );
    check_fault("", "", "ld.shared.u32 %r0, [0];", illegal);
    let local = ".local .align 16 .b8 l[64];";
    check_fault(local, "", "ld.local.u32 %r0, [l+4096];", illegal);
    check_fault(
        local,
        "mov.u64 %d0, l;",
        "st.local.u32 [%d0-4], 1;",
        illegal,
    );
    check_fault("", "", "ld.local.u32 %r0, [0];", illegal);
    check_fault("", "", "ld.param.u64 %d0, [p0+8];", illegal);
}

#[test]
fn accesses_to_unaligned_addresses_fault() {
    let misaligned = FaultKind::MisalignedAddress;
    check_fault("", "", "ld.global.u32 %r0, [%in0+2];", misaligned);
    check_fault("", "", "st.global.u16 [%in0+1], %h0;", misaligned);
    check_fault("", "", "ld.global.u64 %d0, [%in0+4];", misaligned);
    check_fault("", "", "ld.global.v2.u32 {%r0, %r1}, [%in0+4];", misaligned);
    check_fault(
        "",
        "",
        "st.global.v4.u32 [%in0+8], {%r0, %r1, %r2, %r3};",
        misaligned,
    );
    check_fault("", "", "atom.global.add.u64 %d0, [%in0+4], 1;", misaligned);
    let shared = ".shared .align 16 .b8 s[64];";
    check_fault(shared, "", "ld.shared.u32 %r0, [s+2];", misaligned);
    check_fault(
        shared,
        "",
        "ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [s+8];",
        misaligned,
    );
    check_fault(
        shared,
        "",
        "st.shared.v2.u32 [s+4], {%r0, %r1};",
        misaligned,
    );
    check_fault(shared, "", "atom.shared.add.u32 %r0, [s+2], 1;", misaligned);
    let local = ".local .align 16 .b8 l[64];";
    check_fault(local, "", "ld.local.u32 %r0, [l+2];", misaligned);
    check_fault(local, "", "st.local.v2.u64 [l+8], {%d0, %d1};", misaligned);
}

#[test]
fn accesses_to_another_state_space_fault() {
    let illegal = FaultKind::IllegalAddress;
    let shared = ".shared .align 16 .b8 s[64];";
    let generic = "mov.u64 %d0, s; cvta.shared.u64 %d0, %d0;";
    check_fault(shared, generic, "ld.global.u32 %r0, [%d0];", illegal);
    check_fault(shared, generic, "st.global.u32 [%d0], %r0;", illegal);
    check_fault(shared, generic, "ld.shared.u32 %r0, [%d0];", illegal);
    check_fault(shared, generic, "ld.local.u32 %r0, [%d0];", illegal);
    check_fault(
        shared,
        generic,
        "atom.global.add.u32 %r0, [%d0], 1;",
        illegal,
    );
    check_fault("", "", "ld.shared.u32 %r0, [%in0];", illegal);
    check_fault("", "", "ld.local.u32 %r0, [%in0];", illegal);
    let local = ".local .align 16 .b8 l[64];";
    let generic = "mov.u64 %d0, l; cvta.local.u64 %d0, %d0;";
    check_fault(local, generic, "ld.global.u32 %r0, [%d0];", illegal);
    check_fault(local, generic, "atom.add.u32 %r0, [%d0], 1;", illegal);
    let param = "mov.b64 %d0, p0; cvta.param.u64 %d0, %d0;";
    check_fault("", param, "st.u32 [%d0], 1;", illegal);
}

#[test]
fn faults_name_block_and_device() {
    let body = "setp.eq.u32 %p0, %cta, 2; setp.eq.and.u32 %p0, %thread, 45, %p0;
        @%p0 st.global.u32 [1024], %r0; ret;";
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 4);
    let kernel = Kernel::new(&kernel(1, body), "k")
        .device(3)
        .blocks(4)
        .threads(64)
        .arg(&out);
    let fault = common::expect_fault(gpus.run(&[kernel]));
    let site = &fault.site;
    assert_eq!((site.device, site.block, site.thread), (3, 2, 45));
    assert_eq!(site.kernel, "k");
    assert!(fault.to_string().contains("0x400"), "{fault}");
    assert_eq!(fault.seed, None);
}

#[test]
fn freed_memory_faults() {
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 64);
    let address = out.address();
    let module = kernel(1, "st.global.u32 [%in0], 1; ret;");
    gpus.run(&[Kernel::new(&module, "k").arg(address)]).unwrap();
    drop(out);
    let result = gpus.run(&[Kernel::new(&module, "k").arg(address)]);
    assert_eq!(common::expect_fault(result).kind, FaultKind::IllegalAddress);
}

#[test]
fn ordered_loads_and_stores() {
    let body = "st.release.sys.global.u32 [%in0], 1; ld.acquire.gpu.global.u32 %r0, [%in0];
        st.relaxed.cta.global.u64 [%in0+8], 2; ld.volatile.global.u64 %d0, [%in0+8];
        st.volatile.global.u32 [%in0+4], %r0; fence.sc.sys; fence.acq_rel.gpu; membar.gl;
        ld.global.nc.v2.u32 {%r3, %r4}, [%in0+24]; ld.global.v2.u32 {%r1, %r2}, [%in0];
        ld.global.cg.u32 %r3, [%in0];
        ld.global.L1::no_allocate.u32 %r4, [%in0]; st.global.wt.u32 [%in0+16], %r2;
        atom.acq_rel.sys.global.add.u32 %r5, [%in0], 5;
        atom.release.cluster.global.exch.b32 %r6, [%in0+20], 4;
        red.release.gpu.global.add.u32 [%in0+20], 5; ret;";
    assert_eq!(run_body(body, 1, 8), [6, 1, 2, 0, 1, 9, 0, 0]);
}

#[test]
fn variables_with_pointers_to_later_variables() {
    let text = ".global .u64 first = second; .global .u32 second = 44;
        .visible .entry k(.param .u64 out) { .reg .b64 %d<4>; .reg .b32 %r<4>;
        ld.param.u64 %d0, [out]; ld.global.u64 %d1, [first]; ld.global.u32 %r0, [%d1];
        st.global.u32 [%d0], %r0; ret; }";
    assert_eq!(run(&module(text), 1, 1), [44]);
}
