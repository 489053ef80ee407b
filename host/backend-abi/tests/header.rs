//! The C header matches the Rust types: sizes, offsets, function types, numbers.

use core::fmt::Write as _;
use core::mem::offset_of;
use std::path::Path;
use std::process::Command;

use fusewire_backend_abi as abi;

/// Expected lines of the C program's output, and the C statements that print them.
#[derive(Default)]
struct Lines {
    expected: Vec<String>,
    program: String,
}

impl Lines {
    fn push(&mut self, what: &str, c: &str, value: u64) {
        self.expected.push(format!("{what} {value}"));
        writeln!(
            self.program,
            "  printf(\"{what} %llu\\n\", (unsigned long long)({c}));"
        )
        .expect("memory");
    }
}

macro_rules! fields {
    ($lines:ident, $name:ident: $($field:ident)*) => {{
        let name = stringify!($name);
        $lines.push(name, &format!("sizeof({name})"), size_of::<abi::$name>() as u64);
        $(
            let what = concat!(stringify!($name), ".", stringify!($field));
            let c = concat!("offsetof(", stringify!($name), ", ", stringify!($field), ")");
            $lines.push(what, c, offset_of!(abi::$name, $field) as u64);
        )*
        // Does not compile if the list above lacks a field of the struct.
        #[allow(dead_code)]
        fn all(value: &abi::$name) {
            let abi::$name { $($field: _),* } = value;
        }
    }};
}

macro_rules! numbers {
    ($lines:ident: $($name:ident)*) => {
        $($lines.push(
            stringify!($name),
            concat!("FUSEWIRE_", stringify!($name)),
            abi::$name as u64,
        );)*
    };
}

fn lines() -> Lines {
    let mut lines = Lines::default();
    fields!(lines, FusewireError: struct_bytes code message message_capacity);
    fields!(lines, FusewireStore: struct_bytes reserved context set get wait add);
    fields!(lines, FusewireBackendSetup: struct_bytes abi_minor rank size device device_index
        timeout_ns name hint_count hint_keys hint_values store);
    fields!(lines, FusewireCall: struct_bytes dtype reduction reserved factor timeout_ns stream);
    fields!(lines, FusewireBackendTable: magic abi_major abi_minor struct_bytes reserved name
        version create destroy supports is_bitwise group_start group_end all_reduce reduce broadcast
        all_gather reduce_scatter send recv all_to_all all_to_all_v all_gather_v scatter gather
        barrier register_memory deregister_memory split abort async_error);
    numbers!(lines: MAGIC ABI_MAJOR ABI_MINOR TABLE_BYTES_1_0 MAX_KEY_BYTES MAX_VALUE_BYTES
        CODE_OK CODE_OTHER CODE_TIMEOUT CODE_PEER CODE_ABORTED CODE_UNSUPPORTED CODE_INVALID
        CODE_STORE CODE_INTERNAL DEVICE_CPU DEVICE_CUDA DEVICE_HIP
        DTYPE_F64 DTYPE_F32 DTYPE_F16 DTYPE_BF16 DTYPE_E4M3 DTYPE_E5M2 DTYPE_I8 DTYPE_U8 DTYPE_I32
        DTYPE_U32 DTYPE_I64 DTYPE_U64 DTYPE_F32_INDEX
        REDUCE_NONE REDUCE_SUM REDUCE_PRODUCT REDUCE_MIN REDUCE_MAX REDUCE_AVERAGE
        REDUCE_PREMUL_SUM REDUCE_BIT_AND REDUCE_BIT_OR REDUCE_BIT_XOR
        OPERATION_ALL_REDUCE OPERATION_REDUCE_SCATTER OPERATION_ALL_GATHER OPERATION_ALL_GATHER_V
        OPERATION_BROADCAST OPERATION_REDUCE OPERATION_SCATTER OPERATION_GATHER
        OPERATION_ALL_TO_ALL OPERATION_ALL_TO_ALL_V OPERATION_BARRIER OPERATION_SEND
        OPERATION_RECV);
    lines
}

/// Compiles `source` against the header, as `language`, and runs it.
fn run(language: &str, source: &str) -> Result<String, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let name = format!("header-{language}-{}", std::process::id());
    let (file, binary) = (folder.join(format!("{name}.c")), folder.join(&name));
    std::fs::write(&file, source).map_err(|error| error.to_string())?;
    let compiled = Command::new("cc")
        .args(["-x", language, "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"))
        .arg(&file)
        .arg("-o")
        .arg(&binary)
        .output()
        .map_err(|error| format!("cc: {error}"))?;
    let _ = std::fs::remove_file(&file);
    if !compiled.status.success() {
        return Err(String::from_utf8_lossy(&compiled.stderr).into_owned());
    }
    let ran = Command::new(&binary).output();
    let _ = std::fs::remove_file(&binary);
    let ran = ran.map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

#[test]
fn the_header_and_the_types_agree() {
    let lines = lines();
    assert!(lines.expected.len() > 100, "{}", lines.expected.len());
    let source = format!(
        "#include <fusewire_backend.h>\n#include <stdio.h>\nint main(void) {{\n{}  return 0;\n}}\n",
        lines.program
    );
    let said = run("c", &source).expect("the header compiles as C");
    let said: Vec<&str> = said.lines().collect();
    assert_eq!(said, lines.expected);
}

#[test]
fn the_header_is_cplusplus_too() {
    let source = "#include <fusewire_backend.h>\nint main() { return 0; }\n";
    match run("c++", source) {
        Ok(_) => {}
        Err(error) if error.contains("cc1plus") => {
            eprintln!("skipped (c++): {error}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_first_version_keeps_its_size() {
    assert!(size_of::<abi::FusewireBackendTable>() >= abi::TABLE_BYTES_1_0 as usize);
    if abi::ABI_MINOR == 0 {
        assert_eq!(
            size_of::<abi::FusewireBackendTable>(),
            abi::TABLE_BYTES_1_0 as usize
        );
    }
}

#[test]
fn messages_are_cut_between_characters() {
    let mut buffer = [7u8; 6];
    let mut error = abi::FusewireError::new(&mut buffer);
    // SAFETY: the error and its buffer are live.
    unsafe { abi::FusewireError::set(&mut error, abi::CODE_PEER, "abcdé") };
    assert_eq!(error.code, abi::CODE_PEER);
    assert_eq!(&buffer, b"abcd\0\x07");
    // SAFETY: `set` accepts null.
    unsafe { abi::FusewireError::set(core::ptr::null_mut(), abi::CODE_PEER, "nobody") };
    let mut none = abi::FusewireError::new(&mut []);
    // SAFETY: the error has no memory for a message, and its capacity is 0.
    unsafe { abi::FusewireError::set(&mut none, abi::CODE_OTHER, "lost") };
    assert_eq!(none.code, abi::CODE_OTHER);
}
