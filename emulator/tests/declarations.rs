//! Tests the declarations of modules.

use fusewire_emulator::{Error, Module};

const HEAD: &str = ".version 8.6\n.target sm_90a\n.address_size 64\n";

fn parse(body: &str) -> Result<Module, Error> {
    Module::parse(&format!("{HEAD}{body}"))
}

#[test]
fn entries_with_offsets_and_attributes() {
    let module = parse(
        "// a comment with .entry nothing(\n\
         .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n\
         .shared .align 128 .b8 scratch[64];\n\
         .visible .entry first(\n .param .u64 .ptr .global .align 16 a,\n .param .u32 b,\n\
         .param .align 16 .b8 c[20],\n .param .f16 d)\n.maxntid 16, 8\n\
         { .reg .b64 %rd<2>; mov.b64 %rd1, scratch; { } ret; }\n\
         .visible .entry second()\n{ /* } */ ret; }\n",
    )
    .unwrap();
    assert_eq!((module.version(), module.target()), (86, 90));
    assert!(module.is_exact());
    assert_eq!(module.external_functions().collect::<Vec<_>>(), ["vprintf"]);
    let first = module.entry("first").unwrap();
    let params: Vec<_> = first.params.iter().map(|it| (it.offset, it.size)).collect();
    assert_eq!(params, [(0, 8), (8, 4), (16, 20), (36, 2)]);
    assert_eq!(
        (first.param_bytes(), first.max_threads, first.shared_bytes),
        (38, 128, 64)
    );
    let second = module.entry("second").unwrap();
    assert!(second.params.is_empty() && second.shared_bytes == 0);
    assert!(module.entry("nothing").is_none());
    module.decode_all().unwrap();
}

#[test]
fn malformed_text_is_refused_with_its_line() {
    for (body, expected) in [
        (".visible .entry k(.param .u64 a", 4),
        (".visible .entry k(.param .u65 a) { }", 4),
        ("\n.visible .entry k(.param .u64 a)\n{", 6),
        (".visible .entry k(.param .u64 a);", 4),
        (".visible .entry k(.param .align 3 .b8 a[3]) { }", 4),
        (".visible .entry k() { }\n.visible .entry k() { }", 5),
        ("}", 4),
        ("/* no end", 4),
    ] {
        match parse(body) {
            Err(Error::Ptx { line, .. }) => assert_eq!(line, expected, "{body:?}"),
            other => panic!("{body:?}: {other:?}"),
        }
    }
    for text in [
        "",
        "hello",
        ".version 8.6\n.target gfx942\n",
        ".version x\n",
    ] {
        assert!(Module::parse(text).is_err(), "{text:?}");
    }
}

#[test]
fn sizes_that_are_too_large_are_refused() {
    for body in [
        ".entry k(.param .b8 a[4294967295]) { ret; }",
        ".entry k(.param .align 1048576 .b8 a[1048576], .param .align 1048576 .b8 b[9], .param .b8 \
         c[1]) { ret; }",
        ".entry k()\n{ .shared .b8 a[4000000000]; .shared .b8 b[4000000000]; ret; }",
        ".entry k()\n{ .local .b8 a[4000000000]; ret; }",
        ".entry k()\n{ .reg .b32 %r<4294967295>; ret; }",
        ".shared .align 3 .b8 a[4];",
        ".entry k()\n{ .reg .b32 %r<4>; mov.b32 %r1, {%r2, %r2, %r3}; ret; }",
        ".entry k()\n{ .reg .b32 %r<4>; mov.b32 {}, %r1; ret; }",
    ] {
        let result = parse(body).and_then(|module| module.decode_all());
        assert!(
            matches!(result, Err(Error::Ptx { .. })),
            "{body}: {result:?}"
        );
    }
    let threads = parse(".entry k()\n.maxntid 4294967295, 4294967295\n{ ret; }").unwrap();
    assert_eq!(threads.entry("k").unwrap().max_threads, u32::MAX);
}
