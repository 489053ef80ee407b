//! `fusewire info`: lists the devices, libraries, tool chains and transports of this machine. For
//! each missing item, prints its use and how to install it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use fusewire::Device;
use fusewire::gpu::driver::Properties;
use fusewire::transport::{self, Tcp};
use serde::Serialize;

/// Arguments of `fusewire info`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Print a JSON array with an object for each item.
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
    install: String,
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
        install: String::new(),
    }];
    gpus(
        &mut items,
        "cuda",
        fusewire::cuda::devices().map_err(Into::into),
        Device::Cuda,
    );
    gpus(
        &mut items,
        "hip",
        fusewire::hip::devices().map_err(Into::into),
        Device::Hip,
    );
    items.extend(LIBRARIES.iter().map(Library::item));
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
            .all(|path| Path::new(path).exists())
            .then(|| output("/usr/bin/rustc", &["--version"]).unwrap_or_default()),
            "images for GPUs from your own kernels",
            "apt install rustc-web cargo-web rust-web-src llvm-22 lld-22",
        ),
        (
            "ptxas",
            ptxas(),
            "the check that NVIDIA's assembler takes the PTX, and a table of registers",
            "pip install nvidia-cuda-nvcc-cu12",
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
            install: install.to_owned(),
        });
    }
    items.push(Item {
        kind: "transports",
        name: "shared memory",
        found: true,
        detail: "memfd, between processes and threads of one host".to_owned(),
        gives: "",
        install: String::new(),
    });
    items.push(tcp());
    items.extend(rdma());
    items
}

/// Returns the address on which TCP transports to other hosts listen.
fn tcp() -> Item {
    let chosen = Tcp::automatic();
    let gives = "`fusewire::transport` between hosts";
    Item {
        kind: "transports",
        name: "TCP",
        found: chosen.is_ok(),
        detail: match &chosen {
            Ok(chosen) => format!("{}, not encrypted", chosen.address()),
            Err(error) => error.to_string(),
        },
        gives,
        install: "set FUSEWIRE_SOCKET_IFNAME to the name of an interface".to_owned(),
    }
}

/// Returns the ports of the RDMA devices, or the reason why there are none.
fn rdma() -> Vec<Item> {
    let item = |found, detail, install: &str| Item {
        kind: "transports",
        name: "RDMA",
        found,
        detail,
        gives: "`fusewire::transport` between hosts by RDMA writes and reads",
        install: install.to_owned(),
    };
    match transport::verbs_ports() {
        Err(error) => vec![item(
            false,
            error.to_string(),
            "apt install libibverbs1 ibverbs-providers",
        )],
        Ok(ports) if ports.is_empty() => vec![item(
            false,
            "libibverbs finds no device".to_owned(),
            "needs an InfiniBand or RoCE NIC, or Soft-RoCE",
        )],
        Ok(ports) => {
            let items = ports.iter().map(|port| {
                let install = "connect the cable, or start the subnet manager";
                item(port.is_active, port.to_string(), install)
            });
            items.collect()
        }
    }
}

/// Adds the GPUs that a library sees, with the time that loading the kernels took. If there are no
/// GPUs, adds the reason.
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
            install: "see the library below".to_owned(),
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
        match fusewire::open_gpu(device(gpu.ordinal)).and_then(|gpu| gpu.load().map(|()| gpu)) {
            Ok(gpu) => {
                // Opening the device tests whether fabric handles work. If they do not work, the
                // NVLink domain is unknown.
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

/// A shared library that Fusewire opens at run time.
struct Library {
    name: &'static str,
    soname: &'static str,
    gives: &'static str,
    install: &'static str,
    /// Environment variables that give the path of the library. The first variable that is set is
    /// used.
    variables: &'static [&'static str],
    /// Paths below `site-packages` at which PyPI's packages install the library.
    wheels: &'static [&'static str],
}

const LIBRARIES: &[Library] = &[
    Library {
        name: "libcuda.so",
        soname: "libcuda.so.1",
        gives: "the CUDA device",
        install: "install NVIDIA's driver",
        variables: &[],
        wheels: &[],
    },
    Library {
        name: "libnvidia-ml.so",
        soname: "libnvidia-ml.so.1",
        gives: "NVLink domains of several hosts",
        install: "install NVIDIA's driver",
        variables: &[],
        wheels: &[],
    },
    Library {
        name: "libnccl.so",
        soname: "libnccl.so.2",
        gives: "hand-off to NCCL",
        install: "pip install nvidia-nccl-cu13, then set FUSEWIRE_NCCL_PATH to its libnccl.so.2",
        variables: &["FUSEWIRE_NCCL_PATH", "TORCHCOMMS_BACKEND_LIB_PATH_NCCL"],
        wheels: &["nvidia/nccl/lib/libnccl.so.2"],
    },
    Library {
        name: "libamdhip64.so",
        soname: "libamdhip64.so.7",
        gives: "the HIP device",
        install: "install ROCm",
        variables: &[],
        wheels: &[],
    },
    Library {
        name: "librccl.so",
        soname: "librccl.so.1",
        gives: "hand-off to RCCL",
        install: "install ROCm, or set FUSEWIRE_RCCL_PATH to a librccl.so.1",
        variables: &["FUSEWIRE_RCCL_PATH", "TORCHCOMMS_BACKEND_LIB_PATH_RCCL"],
        wheels: &["torch/lib/librccl.so"],
    },
    Library {
        name: "libibverbs.so",
        soname: "libibverbs.so.1",
        gives: "RDMA (not implemented yet)",
        install: "apt install libibverbs1",
        variables: &[],
        wheels: &[],
    },
    Library {
        name: "libmlx5.so",
        soname: "libmlx5.so.1",
        gives: "IBGDA (not implemented yet)",
        install: "apt install ibverbs-providers",
        variables: &[],
        wheels: &[],
    },
    Library {
        name: "libgloo.so",
        soname: "libgloo.so.0",
        gives: "hand-off to Gloo (a build with --features gloo)",
        install: "apt install libgloo-dev",
        variables: &[],
        wheels: &[],
    },
];

impl Library {
    fn item(&self) -> Item {
        let mut item = Item {
            kind: "libraries",
            name: self.name,
            found: false,
            detail: format!("{} not found", self.soname),
            gives: self.gives,
            install: self.install.to_owned(),
        };
        let named = self.variables.iter().find_map(|variable| {
            let path = std::env::var_os(variable).filter(|path| !path.is_empty())?;
            Some((*variable, PathBuf::from(path)))
        });
        if let Some((variable, path)) = named {
            // Does not search further, because the backend uses only this path.
            match open(&path) {
                Ok(()) => {
                    item.found = true;
                    item.detail = format!("{} ({variable})", path.display());
                }
                Err(error) => {
                    item.detail = format!("{variable} is {}: {error}", path.display());
                    item.install = format!("set {variable} to a {} that opens", self.soname);
                }
            }
            return item;
        }
        // Tries the name with the version, then the name without it, which is a link that
        // development packages install.
        let opened = [self.soname, self.name].into_iter().find_map(|name| {
            // SAFETY: the initialisers of these libraries have no preconditions, so dlopen may run
            // them. This command calls no function of the libraries.
            let library = unsafe { libloading::Library::new(name) }.ok()?;
            let path = mapped(self.name);
            drop(library);
            Some(path.unwrap_or_default())
        });
        if let Some(path) = opened {
            item.found = true;
            item.detail = path;
        } else if let (Some(path), Some(variable)) = (self.in_wheel(), self.variables.first()) {
            let path = path.display();
            item.detail = format!("{path} is not where the dynamic linker looks");
            item.install = format!("export {variable}={path}");
        }
        item
    }

    /// Returns the path of this library in the active Python environment, if a package installed
    /// it.
    fn in_wheel(&self) -> Option<PathBuf> {
        const FOLDERS: &str = "import sysconfig; print(sysconfig.get_path('purelib'))";
        if self.wheels.is_empty() {
            return None;
        }
        // Uses the interpreter of the virtual environment, because `python3` in `PATH` may be
        // another interpreter.
        let python = std::env::var_os("VIRTUAL_ENV")
            .map(|folder| Path::new(&folder).join("bin/python3"))
            .filter(|python| python.exists())
            .unwrap_or_else(|| PathBuf::from("python3"));
        let packages = PathBuf::from(output(python, &["-c", FOLDERS])?.trim());
        self.wheels
            .iter()
            .map(|wheel| packages.join(wheel))
            .find(|path| path.exists())
    }
}

/// Opens a library and closes it again.
fn open(path: &Path) -> Result<(), libloading::Error> {
    // SAFETY: the user has named this path as a library, so dlopen may run the initialisers of that
    // library.
    unsafe { libloading::Library::new(path) }.map(drop)
}

/// Returns the path from which the library `name` was loaded into this process.
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

/// Describes where NVIDIA's assembler is: the path in `FUSEWIRE_PTXAS`, the text `in the path`, or
/// the path in the Python wheel. Returns `None` if ptxas is missing.
fn ptxas() -> Option<String> {
    const WHEEL: &str = "import glob, nvidia; \
        print(next(p for f in nvidia.__path__ for p in glob.glob(f + '/*/bin/ptxas')))";
    if let Ok(path) = std::env::var("FUSEWIRE_PTXAS")
        && Path::new(&path).exists()
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

fn output(program: impl AsRef<OsStr>, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
