//! `fusewire info`: what this machine has, and what each missing piece would give.

use std::process::{Command, ExitCode};

use fusewire::Device;
use fusewire::gpu::Gpu;
use fusewire::gpu::driver::Properties;
use serde::Serialize;

/// How to print.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Prints a JSON array, one object an item.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Item {
    kind: &'static str,
    name: &'static str,
    found: bool,
    detail: String,
    gives: &'static str,
    install: &'static str,
}

/// Prints the list.
pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let items = items();
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&items)?);
        return Ok(ExitCode::SUCCESS);
    }
    let mut kind = "";
    for item in &items {
        if item.kind != kind {
            kind = item.kind;
            println!("{kind}");
        }
        let mark = if item.found { "found  " } else { "missing" };
        println!("  {mark}  {:<24} {}", item.name, item.detail);
        if !item.found {
            println!(
                "           {:<24} would give {}; {}",
                "", item.gives, item.install
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn items() -> Vec<Item> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut items = vec![Item {
        kind: "devices",
        name: "cpu",
        found: true,
        detail: format!(
            "{}, {cores} cores, {} entries",
            cpu_model(),
            format!("{:?}", fusewire::isa()).to_lowercase()
        ),
        gives: "every kernel",
        install: "",
    }];
    gpus(&mut items, "cuda", fusewire::cuda::devices(), Device::Cuda);
    gpus(&mut items, "hip", fusewire::hip::devices(), Device::Hip);
    for (name, library, gives, install) in LIBRARIES {
        let opened = [library, *name].iter().find_map(|library| {
            // SAFETY: these libraries' initialisers are meant to be run by dlopen.
            let library = unsafe { libloading::Library::new(library) }.ok()?;
            let path = mapped(name);
            drop(library);
            Some(path.unwrap_or_default())
        });
        items.push(Item {
            kind: "libraries",
            name,
            found: opened.is_some(),
            detail: opened.unwrap_or_else(|| format!("{library} not found")),
            gives,
            install,
        });
    }
    let tools: [(&str, Option<String>, &str, &str); 4] = [
        (
            "rustup nightly",
            output("rustup", &["component", "list", "--toolchain", "nightly"])
                .filter(|list| list.contains("rust-src (installed)"))
                .and_then(|_| output("rustc", &["+nightly", "--version"])),
            "images for GPUs from your own kernels",
            "rustup toolchain install nightly -c rust-src -c llvm-tools",
        ),
        (
            "Debian rustc, LLVM 22",
            [
                "/usr/lib/llvm-22/bin/llc",
                "/usr/lib/llvm-22/bin/lld",
                "/usr/bin/cargo",
            ]
            .iter()
            .all(|path| std::path::Path::new(path).exists())
            .then(|| output("/usr/bin/rustc", &["--version"]).unwrap_or_default()),
            "images for GPUs from your own kernels",
            "apt install rustc-web cargo-web rust-web-src llvm-22 lld-22",
        ),
        (
            "ptxas",
            ptxas(),
            "the check that NVIDIA's assembler takes the PTX, and a table of registers",
            "pip install nvidia-cuda-nvcc",
        ),
        (
            "objdump",
            output("objdump", &["--version"]),
            "the check of the CPU's native entries",
            "apt install binutils",
        ),
    ];
    for (name, found, gives, install) in tools {
        items.push(Item {
            kind: "tool chains",
            name,
            found: found.is_some(),
            detail: found
                .and_then(|text| text.lines().next().map(str::to_owned))
                .unwrap_or_default(),
            gives,
            install,
        });
    }
    items.push(Item {
        kind: "transports",
        name: "shared memory",
        found: true,
        detail: "memfd, between processes and threads of one host".to_owned(),
        gives: "",
        install: "",
    });
    items.push(Item {
        kind: "transports",
        name: "RDMA",
        found: false,
        detail: "not implemented yet".to_owned(),
        gives: "ranks on several hosts",
        install: "nothing to install yet",
    });
    items
}

/// The GPUs that a library sees, with the time that loading the kernels takes; or what is missing.
fn gpus(
    items: &mut Vec<Item>,
    name: &'static str,
    found: fusewire::Result<Vec<Properties>>,
    device: fn(u32) -> Device,
) {
    let mut add = |found, detail| {
        items.push(Item {
            kind: "devices",
            name,
            found,
            detail,
            gives: "every kernel on that GPU",
            install: "see the library below",
        });
    };
    let all = match found {
        Ok(all) => all,
        Err(error) => return add(false, error.to_string()),
    };
    if all.is_empty() {
        return add(false, "the driver sees no GPU".to_owned());
    }
    for gpu in all {
        let here = format!(
            "{}: {}, {}, {} multiprocessors, {} GiB, driver {}",
            device(gpu.ordinal),
            gpu.name,
            gpu.architecture,
            gpu.multiprocessors,
            gpu.memory >> 30,
            gpu.version
        );
        match Gpu::open(device(gpu.ordinal)).and_then(|gpu| gpu.load().map(|()| gpu)) {
            Ok(gpu) => {
                // What the opened device says: only that has tried fabric handles.
                add(
                    true,
                    match &gpu.properties().domain {
                        Some(domain) => format!("{here}, NVLink domain {domain}"),
                        None => here,
                    },
                );
                for module in gpu.modules() {
                    add(
                        true,
                        format!(
                            "  module {}: {} kernels, loaded in {:.1} ms",
                            module.name,
                            module.kernels,
                            module.time.as_secs_f64() * 1e3
                        ),
                    );
                }
            }
            Err(error) => add(false, format!("{here}: {error}")),
        }
    }
}

const LIBRARIES: &[(&str, &str, &str, &str)] = &[
    (
        "libcuda.so",
        "libcuda.so.1",
        "the CUDA device",
        "install NVIDIA's driver",
    ),
    (
        "libnvidia-ml.so",
        "libnvidia-ml.so.1",
        "NVLink domains of several hosts",
        "install NVIDIA's driver",
    ),
    (
        "libnccl.so",
        "libnccl.so.2",
        "hand-off to NCCL",
        "pip install nvidia-nccl-cu13",
    ),
    (
        "libamdhip64.so",
        "libamdhip64.so.7",
        "the HIP device",
        "install ROCm",
    ),
    (
        "librccl.so",
        "librccl.so.1",
        "hand-off to RCCL",
        "install ROCm",
    ),
    (
        "libibverbs.so",
        "libibverbs.so.1",
        "RDMA (not implemented yet)",
        "apt install libibverbs1",
    ),
    (
        "libmlx5.so",
        "libmlx5.so.1",
        "IBGDA (not implemented yet)",
        "apt install ibverbs-providers",
    ),
    (
        "libgloo.so",
        "libgloo.so.0",
        "hand-off to Gloo (a build with --features gloo)",
        "apt install libgloo-dev",
    ),
];

/// Where the open library `name` comes from.
fn mapped(name: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps
        .lines()
        .filter_map(|line| line.split_once('/'))
        .map(|(_, path)| path)
        .find(|path| {
            path.rsplit('/')
                .next()
                .is_some_and(|file| file.starts_with(name))
        })?;
    Some(format!("/{path}"))
}

/// Returns the path of NVIDIA's assembler: from the environment, from `PATH`, or from the wheel.
fn ptxas() -> Option<String> {
    const WHEEL: &str = "import glob, nvidia; \
        print(next(p for f in nvidia.__path__ for p in glob.glob(f + '/*/bin/ptxas')))";
    if let Ok(path) = std::env::var("FUSEWIRE_PTXAS")
        && std::path::Path::new(&path).exists()
    {
        return Some(path);
    }
    output("ptxas", &["--version"])
        .map(|_| "in the path".to_owned())
        .or_else(|| output("python3", &["-c", WHEEL]))
}

fn cpu_model() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        })
        .unwrap_or_else(|| "unknown model".to_owned())
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
