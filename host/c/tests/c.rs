//! Tests of the header, of the library, and of programs in C.
//!
//! If there is no C compiler, the tests are skipped with a printed reason, unless
//! `FUSEWIRE_REQUIRE` contains `cc`. `FUSEWIRE_TEST_DEVICE` (`cpu`, `cuda`, `hip`) selects the
//! device of the ranks.

mod layout;

use core::time::Duration;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Instant;

use fusewire::store::{TcpStore, TcpStoreServer};
use fusewire::{Device, Operation, Options, new_comm};
use serde_bytes::ByteBuf;

/// Commands of the C and C++ compilers. Warnings are errors.
const C: [&str; 6] = [
    "cc",
    "-std=c99",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
];
const CXX: [&str; 6] = [
    "c++",
    "-std=c++11",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
];

/// Returns true if this machine has the compiler. Otherwise prints why the test is skipped.
fn has(compiler: &str) -> bool {
    let found = Command::new(compiler).arg("--version").output();
    if found.is_ok_and(|found| found.status.success()) {
        return true;
    }
    let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name.trim() == "cc"),
        "FUSEWIRE_REQUIRE names cc, but {compiler} is not there"
    );
    eprintln!("skipped (cc): no {compiler}");
    false
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the folder of the library that cargo has built for this test, which is the folder of the
/// test binary.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.parent().expect("its folder").to_owned();
    let name = format!(
        "{}fusewire_c{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    );
    assert!(
        folder.join(&name).exists(),
        "no {name} in {}",
        folder.display()
    );
    folder
}

/// Returns a command that runs `program` with the library of this test. Prepends the library's
/// folder to the search path that cargo sets, because this search path takes precedence over the
/// path in a program and may lead to an older library.
fn command(program: &Path) -> Command {
    let mut search = vec![library()];
    if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
        search.extend(std::env::split_paths(&more));
    }
    let mut command = Command::new(program);
    command.env(
        "LD_LIBRARY_PATH",
        std::env::join_paths(search).expect("paths without colons"),
    );
    command
}

/// Compiles `source` to a program that is linked with the shared library. Returns the compiler's
/// output as the error.
fn compile(
    compiler: &[&str],
    source: &Path,
    name: &str,
    include: &Path,
) -> Result<PathBuf, String> {
    let program =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let library = library();
    let said = Command::new(compiler[0])
        .args(&compiler[1..])
        .arg("-I")
        .arg(include)
        .arg(source)
        .arg("-L")
        .arg(&library)
        .args(["-lfusewire_c", "-lm", "-ldl", "-o"])
        .arg(&program)
        .output()
        .map_err(|error| format!("{}: {error}", compiler[0]))?;
    if said.status.success() {
        return Ok(program);
    }
    Err(String::from_utf8_lossy(&said.stderr).into_owned())
}

/// Compiles `text` with the library's header, as [`compile`] does.
fn compile_text(compiler: &[&str], text: &str, name: &str) -> Result<PathBuf, String> {
    let extension = if compiler[0] == "cc" { "c" } else { "cpp" };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join(format!("{name}-{}.{extension}", std::process::id()));
    std::fs::write(&file, text).map_err(|error| error.to_string())?;
    compile(compiler, &file, name, &here().join("include"))
}

/// Returns the device of the ranks.
fn device() -> String {
    match std::env::var("FUSEWIRE_TEST_DEVICE").as_deref() {
        Ok("cuda") => "cuda:0".to_owned(),
        Ok("hip") => "hip:0".to_owned(),
        _ => "cpu".to_owned(),
    }
}

/// Returns a port that is free at this moment.
fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("its address").port()
}

/// Runs `program` on two ranks. `arguments` returns the arguments for a rank and a port. Returns
/// the output of each rank.
fn run_two(program: &Path, arguments: impl Fn(u32, u16) -> Vec<String>) -> Vec<Output> {
    run_ranks(2, program, arguments)
}

/// Runs `program` on `size` ranks like [`run_two`].
fn run_ranks(
    size: u32,
    program: &Path,
    arguments: impl Fn(u32, u16) -> Vec<String>,
) -> Vec<Output> {
    let port = free_port();
    let start = |rank: u32| start_rank(size, rank, port, program, &arguments(rank, port));
    let ranks: Vec<Child> = (0..size).map(start).collect();
    let deadline = Instant::now() + Duration::from_secs(240);
    ranks
        .into_iter()
        .map(|rank| ended(rank, deadline))
        .collect()
}

/// Starts `program` as rank `rank` of `size`, with a rendezvous at `port` of this host.
fn start_rank(size: u32, rank: u32, port: u16, program: &Path, arguments: &[String]) -> Child {
    command(program)
        .args(arguments)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", size.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
        .env("FUSEWIRE_TIMEOUT_SECONDS", "100")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// Waits until a process ends, and kills it at the deadline. Returns its output.
fn ended(mut process: Child, deadline: Instant) -> Output {
    while Instant::now() < deadline && process.try_wait().is_ok_and(|status| status.is_none()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Killing a process that has ended has no effect.
    let _ = process.kill();
    process.wait_with_output().expect("its output")
}

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&text).into_owned()
}

/// Compiles the example with the flags of the README.
fn example(name: &str) -> PathBuf {
    let source = here().join("examples/all_reduce_norm.c");
    compile(&C, &source, name, &here().join("include")).expect("the example compiles")
}

#[test]
fn the_example_is_right_on_two_ranks() {
    if !has("cc") {
        return;
    }
    let program = example("example");
    let outputs = run_two(&program, |_, _| vec![device()]);
    for (rank, output) in outputs.iter().enumerate() {
        let text = said(output);
        assert_eq!(output.status.code(), Some(0), "rank {rank}: {text}");
        for form in ["blocking", "enqueued"] {
            let line = format!(
                "rank {rank} of 2 on {}: all_reduce + residual + RMSNorm of 4 rows of 512, {form}: \
                 0 of 2048 wrong",
                device()
            );
            assert!(text.contains(&line), "no \"{line}\" in: {text}");
        }
    }
}

#[test]
fn the_example_fails_where_the_result_is_not_what_it_expects() {
    if !has("cc") {
        return;
    }
    let program = example("example-wrong");
    for output in run_two(&program, |_, _| vec![device(), "--wrong".to_owned()]) {
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(": 1 of 2048 wrong"), "{text}");
    }
    for output in run_two(&program, |_, _| vec!["abacus".to_owned()]) {
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(
            text.contains("joining: error 1: device: \"abacus\" is none of"),
            "{text}"
        );
    }
}

/// Runs the program `tests/NAME.c` on `size` ranks, which the program has as `RANKS`, and checks
/// that it finds no wrong result.
fn check_program(name: &str, size: u32) {
    if !has("cc") {
        return;
    }
    let source = here().join(format!("tests/{name}.c"));
    let ranks = format!("-DRANKS={size}");
    let compiler = [&C[..], &[ranks.as_str()]].concat();
    let name = format!("{name}-{size}");
    let program = compile(&compiler, &source, &name, &here().join("include")).expect("it compiles");
    let outputs = run_ranks(size, &program, |rank, port| {
        vec![device(), rank.to_string(), format!("127.0.0.1:{port}")]
    });
    for (rank, output) in outputs.iter().enumerate() {
        let text = said(output);
        assert_eq!(output.status.code(), Some(0), "rank {rank}: {text}");
        assert!(text.contains(&format!("rank {rank}: 0 failures")), "{text}");
    }
}

#[test]
fn every_operation_and_every_refusal() {
    check_program("operations", 2);
}

#[test]
fn rooted_vector_and_batched_operations() {
    check_program("collectives", 3);
}

#[test]
fn windows() {
    check_program("windows", 3);
}

#[test]
fn mixture_of_experts() {
    check_program("moe", 2);
}

#[test]
fn mixture_of_experts_on_four_ranks() {
    check_program("moe", 4);
}

#[test]
fn byte_strings() {
    check_program("bytes", 3);
}

/// Runs rank 0 in this process, and rank 1 as a program in C.
#[test]
fn byte_strings_between_c_and_rust() {
    if !has("cc") {
        return;
    }
    let source = here().join("tests/bytes.c");
    let include = here().join("include");
    let program = compile(&C, &source, "bytes-rust", &include).expect("it compiles");
    let server = TcpStoreServer::bind(("127.0.0.1", 0)).expect("a store");
    let port = server.port();
    let arguments = ["cpu", "1", &format!("127.0.0.1:{port}"), "rust"].map(str::to_owned);
    let rank = start_rank(2, 1, port, &program, &arguments);

    let timeout = Duration::from_secs(100);
    let store = TcpStore::connect("127.0.0.1", port, timeout).expect("the store answers");
    let mut options = Options::default();
    options.timeout = timeout;
    options.abort_process_on_timeout_or_error = Some(false);
    options.store = Some(Arc::new(store));
    options.rank_size = Some((0, 2));
    let comm = new_comm("fusewire", Device::Cpu, "rust", options).expect("a communicator");
    let string = |text: &[u8]| ByteBuf::from(text.to_vec());
    let (own, theirs) = (string(b"from\0Rust"), string(b"from\0C"));
    let pair = [own.clone(), theirs.clone()];
    assert_eq!(comm.all_gather_object(&own).expect("all_gather"), pair);
    let gathered = comm.gather_object(&own, 0).expect("gather");
    assert_eq!(gathered.as_deref(), Some(&pair[..]));
    assert_eq!(comm.gather_object(&own, 1).expect("gather"), None);
    let mut list = vec![own.clone(), string(b"")];
    comm.broadcast_object_list(&mut list, 0).expect("broadcast");
    comm.broadcast_object_list(&mut list, 1).expect("broadcast");
    assert_eq!(list, core::slice::from_ref(&theirs));
    let scattered: ByteBuf = comm.scatter_object_list(&[], 1).expect("scatter");
    assert_eq!(scattered, theirs);
    comm.send_object_list(&pair, 1).expect("send");
    assert_eq!(comm.recv_object_list::<ByteBuf>(1).expect("recv"), [theirs]);
    // Rank 1 gets an error if it receives an object of another type.
    comm.send_object_list(&[1.5f64], 1).expect("send");
    comm.barrier().expect("barrier");

    let output = ended(rank, Instant::now() + timeout);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("rank 1: 0 failures"), "{text}");
}

#[test]
fn the_header_and_the_library_agree() {
    if !has("cc") {
        return;
    }
    let lines = layout::Lines::new();
    let program = compile_text(&C, &lines.program(), "layout").expect("the prototypes agree");
    let output = command(&program).output().expect("it runs");
    assert!(output.status.success(), "{}", said(&output));
    let text = said(&output);
    assert_eq!(text.lines().collect::<Vec<_>>(), lines.expected());
    assert!(lines.expected().len() > 80, "{}", lines.expected().len());
}

/// Returns the output of a tool of binutils, which are installed with the C compiler.
fn binutils(tool: &str, arguments: &[&str]) -> String {
    let library = library().join("libfusewire_c.so");
    let output = Command::new(tool)
        .args(arguments)
        .arg(library)
        .output()
        .expect("binutils are installed");
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_library_exports_what_the_header_declares() {
    if !has("cc") {
        return;
    }
    let text = binutils("nm", &["-D", "--defined-only"]);
    let mut exported: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        // Ends of the list of kernels, which only the tests of this workspace enable (the feature
        // `kernel-list`).
        .filter(|name| !name.starts_with("__start_linkm") && !name.starts_with("__stop_linkm"))
        .collect();
    let lines = layout::Lines::new();
    let mut declared = lines.functions().to_vec();
    exported.sort_unstable();
    declared.sort_unstable();
    assert_eq!(exported, declared);
    let dynamic = binutils("readelf", &["-d"]);
    assert!(
        dynamic.contains("Library soname: [libfusewire_c.so]"),
        "{dynamic}"
    );
}

#[test]
fn every_operation_has_a_function() {
    let header = std::fs::read_to_string(here().join("include/fusewire.h")).expect("the header");
    let (_, text) = header.split_once("NOT INCLUDED.").expect("a list");
    let (list, _) = text.split_once('.').expect("the end of the list");
    let list = list.replace("\n *", "");
    let absent: Vec<&str> = list.split([':', ';']).map(str::trim).collect();
    let functions = layout::Lines::new().functions().to_vec();
    for operation in Operation::ALL {
        let name = operation.name();
        let function = match operation.is_one_sided() {
            true => format!("fusewire_window_{name}"),
            false => format!("fusewire_{name}"),
        };
        let is_absent = absent.contains(&&*format!("{name}s"));
        assert_ne!(functions.contains(&&*function), is_absent, "{function}");
    }
}

#[test]
fn a_program_links_with_the_static_library() {
    if !has("cc") {
        return;
    }
    let header = std::fs::read_to_string(here().join("include/fusewire.h")).expect("the header");
    // The header documents these flags.
    let flags = ["-lm", "-lpthread", "-ldl"];
    assert!(header.contains(&flags.join(" ")));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = folder.join(format!("static-{}.c", std::process::id()));
    let text = "#include <fusewire.h>\n\
                int main(void) { return fusewire_version() == FUSEWIRE_VERSION ? 0 : 1; }\n";
    std::fs::write(&source, text).expect("a file");
    let program = source.with_extension("");
    let output = Command::new(C[0])
        .args(&C[1..])
        .arg("-I")
        .arg(here().join("include"))
        .arg(&source)
        .arg(library().join("libfusewire_c.a"))
        .args(flags)
        .arg("-o")
        .arg(&program)
        .output()
        .expect("the compiler starts");
    assert!(output.status.success(), "{}", said(&output));
    assert!(Command::new(&program).status().expect("it runs").success());
    // The program contains the whole library, so it is too large to keep.
    let _ = std::fs::remove_file(&program);
}

#[test]
fn nothing_of_the_header_is_left_out() {
    let header = std::fs::read_to_string(here().join("include/fusewire.h")).expect("the header");
    let lines = layout::Lines::new();
    let declared: Vec<&str> = header
        .lines()
        .filter(|line| !line.starts_with([' ', '/', '#', 't', '}']))
        .filter_map(|line| {
            let name = line.split('(').next()?.rsplit([' ', '*']).next()?;
            name.starts_with("fusewire_").then_some(name)
        })
        .collect();
    assert_eq!(declared, lines.functions());
    let numbers: Vec<&str> = header
        .lines()
        .filter_map(|line| line.strip_prefix("#define ")?.split_once(' '))
        .filter(|(name, value)| !name.starts_with("FUSEWIRE_VERSION") && !value.is_empty())
        .map(|(name, _)| name)
        .collect();
    assert_eq!(numbers, lines.numbers());
}

#[test]
fn a_header_that_differs_is_found() {
    if !has("cc") {
        return;
    }
    // The program does not compile if a prototype differs.
    let lines = layout::Lines::new();
    let program = lines.program();
    let other = program.replacen(
        "uint32_t *) = fusewire_comm_rank",
        "uint64_t *) = fusewire_comm_rank",
        1,
    );
    assert_ne!(program, other);
    let error = compile_text(&C, &other, "prototype").expect_err("another prototype");
    assert!(error.contains("incompatible"), "{error}");

    // A different layout must print different lines.
    let header = std::fs::read_to_string(here().join("include/fusewire.h")).expect("the header");
    let field = "  float epsilon;\n";
    assert!(header.contains(field));
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("other-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(
        folder.join("fusewire.h"),
        header.replacen(field, "  double epsilon;\n", 1),
    )
    .expect("a file");
    let source = folder.join("layout.c");
    std::fs::write(&source, program).expect("a file");
    let program = compile(&C, &source, "other-layout", &folder).expect("it compiles");
    let output = command(&program).output().expect("it runs");
    assert_ne!(said(&output).lines().collect::<Vec<_>>(), lines.expected());
}

#[test]
fn the_header_is_cplusplus_too() {
    if !has("c++") {
        return;
    }
    let text = "#include <fusewire.h>\n\
                int main() { return fusewire_version() == FUSEWIRE_VERSION ? 0 : 1; }\n";
    let program = compile_text(&CXX, text, "cplusplus").expect("it compiles");
    assert!(Command::new(program).status().expect("it runs").success());
}
