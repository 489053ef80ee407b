//! Checks the calls of libibverbs as data, with a fake of the library that records them: queue pair
//! attributes, registrations of host memory and of GPU memory, and requests. No NIC executes them.

use core::time::Duration;
use std::env;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use fusewire_net::{DmaBuf, Error, Memory, Notify, Tcp, Transport, TransportFailure, Verbs};

/// Environment variable with the path of the file to which the fake library writes.
const RECORD: &str = "FUSEWIRE_FAKE_VERBS_RECORD";
const SECONDS: Duration = Duration::from_secs(20);
/// Address of memory on a GPU that the CPU cannot access.
const GPU: u64 = 0x7000_0000_0000;
const GPU_BYTES: usize = 1 << 20;

/// Runs `calls` in a process that uses the fake library, and returns the recorded lines.
fn record() -> Option<Vec<String>> {
    let required = env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        assert!(!required.split(',').any(|name| name == "cc"), "no verbs.h");
        eprintln!("skipped: install libibverbs-dev");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let (library, lines) = (folder.path().join("fake.so"), folder.path().join("record"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_verbs.c");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(source);
    assert!(compiler.status().unwrap().success());
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "calls", "--nocapture"])
        .env("FUSEWIRE_VERBS_PATH", &library)
        .env(RECORD, &lines)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let lines = fs::read_to_string(lines).unwrap();
    Some(lines.lines().map(str::to_owned).collect())
}

fn gpu_memory(offset: u64, dma_buf: Option<DmaBuf>) -> Memory {
    // SAFETY: no test accesses the memory, because the fake transfers nothing.
    unsafe { Memory::register_device((GPU + offset) as *mut u8, GPU_BYTES, dma_buf) }.unwrap()
}

fn dma_buf() -> DmaBuf {
    DmaBuf {
        fd: File::open("/dev/null").unwrap().into(),
        offset: 4096,
    }
}

/// Makes the calls that are recorded. Does nothing in an ordinary test run.
#[test]
fn calls() {
    if env::var_os(RECORD).is_none() {
        return;
    }
    let transport = || Transport::new(Verbs::new().traffic_class(104));
    let (a, b) = (transport(), transport());
    let (url_a, url_b) = (a.bind().unwrap(), b.bind().unwrap());
    a.connect(&url_b, SECONDS).unwrap();
    b.connect(&url_a, SECONDS).unwrap();
    let host = Memory::allocate(8192).unwrap();
    let with_dma_buf = gpu_memory(0, Some(dma_buf()));
    let without = gpu_memory(1 << 30, None);
    for gpu in [&with_dma_buf, &without] {
        // Few bytes, which would be sent inline if they were in host memory.
        let view = gpu.view(100..132).unwrap();
        let write = a.write(view, host.remote_key().range(0, 32), Notify::Yes, SECONDS);
        write.unwrap().wait().unwrap();
        let view = host.view(..32).unwrap();
        let write = a.write(view, gpu.remote_key().range(200, 32), Notify::No, SECONDS);
        write.unwrap().wait().unwrap();
        let read = a.read(
            gpu.view_mut(..64).unwrap(),
            host.remote_key().range(64, 64),
            SECONDS,
        );
        read.unwrap().wait().unwrap();
    }
    let store = a.store(7, with_dma_buf.remote_key().range(4096, 8), SECONDS);
    store.unwrap().wait().unwrap();
    // The CPU does not touch memory of a GPU.
    assert!(with_dma_buf.copy_to(0, &mut [0; 8]).is_err());
    assert!(with_dma_buf.copy_from(0, &[0; 8]).is_err());
    let (c, d) = (Transport::new(Tcp::local()), Transport::new(Tcp::local()));
    let (url_c, url_d) = (c.bind().unwrap(), d.bind().unwrap());
    c.connect(&url_d, SECONDS).unwrap();
    d.connect(&url_c, SECONDS).unwrap();
    let view = with_dma_buf.view(..8).unwrap();
    let write = c.write(view, host.remote_key().range(0, 8), Notify::No, SECONDS);
    let error = write.unwrap().wait().unwrap_err().to_string();
    assert!(error.contains("the memory is on a GPU"), "{error}");
    let view = host.view(..8).unwrap();
    let write = c.write(
        view,
        with_dma_buf.remote_key().range(0, 8),
        Notify::No,
        SECONDS,
    );
    let error = write.unwrap().wait().unwrap_err();
    assert!(
        error.to_string().contains("only the provider Verbs"),
        "{error}"
    );
    let kind = match error {
        Error::Call { kind, .. } => kind,
        error => panic!("{error}"),
    };
    assert_eq!(kind, TransportFailure::Refused);
}

/// Returns the value of a field such as `lkey=`.
fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let found = line
        .split(' ')
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("no {name} in {line}"))
}

#[test]
fn the_calls_have_the_arguments_that_a_nic_needs() {
    let Some(lines) = record() else {
        return;
    };
    let of = |call: &str| -> Vec<&String> {
        let is_call = |line: &&String| line.split(' ').next() == Some(call);
        lines.iter().filter(is_call).collect()
    };
    // Two reliable connected (type 2) queue pairs, with the depths that the device has.
    let created: Vec<_> = of("create_qp").iter().map(|line| &line[15..]).collect();
    assert!(
        created
            .iter()
            .all(|rest| rest.ends_with("type=2 send=64 receive=64")),
        "{created:?}"
    );
    // The masks are those that ibv_modify_qp(3) requires for RC: INIT, RTR, RTS.
    let init = of("init");
    assert!(
        init.iter()
            .all(|line| line.ends_with("mask=0x39 port=1 access=0x6")),
        "{init:?}"
    );
    let rtr = of("rtr");
    assert_eq!(rtr.len(), 2);
    for line in &rtr {
        let end = "mtu=4 global=1 index=0 hops=64 class=104 reads=4";
        assert!(
            line.contains(" mask=0x129181 ") && line.ends_with(end),
            "{line}"
        );
    }
    // Each queue pair is connected to the other one.
    let own = |line: &str| line.split(' ').nth(1).unwrap().to_owned();
    assert_eq!(own(rtr[0]), field(rtr[1], "peer"));
    assert_eq!(own(rtr[1]), field(rtr[0], "peer"));
    for line in of("rts") {
        let end = "mask=0x12e01 timeout=14 retries=7 rnr=7 reads=4";
        assert!(line.ends_with(end), "{line}");
    }

    // GPU memory: once for requests of this process (access 1: local write), once for peers (access
    // 7: remote write and read, too), without relaxed ordering.
    let dma_bufs = of("reg_dmabuf_mr");
    let start = format!("offset=4096 length={GPU_BYTES} address={GPU:#x}");
    let expected =
        ["0x1", "0x7"].map(|access| format!("reg_dmabuf_mr {start} access={access} of /dev/null"));
    assert_eq!(dma_bufs, expected.iter().collect::<Vec<_>>());
    let plain = format!("start={:#x} length={GPU_BYTES}", GPU + (1 << 30));
    let plain: Vec<_> = of("reg_mr")
        .into_iter()
        .filter(|line| line.contains(&plain))
        .collect();
    assert_eq!(plain.len(), 2);

    let sends = of("send");
    assert_eq!(sends.len(), 7);
    for (index, gpu) in [(0, GPU), (3, GPU + (1 << 30))] {
        // Opcode 1: write with immediate data. Flags 2: signaled; 8: inline.
        let write = sends[index];
        assert!(write.starts_with("send opcode=1 flags=0x2 "), "{write}");
        assert_eq!(field(write, "local"), format!("{:#x}+32", gpu + 100));
        let write = sends[index + 1];
        assert!(write.starts_with("send opcode=0 flags=0xa "), "{write}");
        assert_eq!(field(write, "remote"), format!("{:#x}", gpu + 200));
        let read = sends[index + 2];
        assert!(read.starts_with("send opcode=4 flags=0x2 "), "{read}");
        assert_eq!(field(read, "local"), format!("{gpu:#x}+64"));
    }
    let store = sends[6];
    assert!(store.starts_with("send opcode=0 flags=0xa "), "{store}");
    assert_eq!(field(store, "remote"), format!("{:#x}", GPU + 4096));

    // The key of a request is that of a registration: the n-th registration has the key 0x100 + n.
    let registered: Vec<_> = lines
        .iter()
        .filter(|line| line.starts_with("reg_"))
        .collect();
    let key = |position: usize| format!("{:#x}", 0x100 + position);
    let position = |start: &str| registered.iter().position(|line| line.starts_with(start));
    let local = position("reg_dmabuf_mr").unwrap();
    assert_eq!(field(sends[0], "lkey"), key(local));
    let remote = registered
        .iter()
        .rposition(|line| line.starts_with("reg_dmabuf_mr"))
        .unwrap();
    assert_eq!(field(store, "rkey"), key(0x1000 + remote));

    // Nothing is left.
    assert_eq!(of("dereg_mr").len(), registered.len());
    assert_eq!(of("destroy_qp").len(), of("create_qp").len());
}
