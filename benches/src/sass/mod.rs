//! Compares the inner loops in the machine code of two compilers. For each loop, reports the
//! instructions issued per 16 bytes moved and the number of loads in flight before the first wait.

mod disassembly;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use self::disassembly::{Code, Loop};
use crate::baseline;

const INSTALL: &str = "pip install nvidia-cuda-nvdisasm, or a CUDA toolkit";

/// Pairs of equivalent kernels: title, kernel of Fusewire, kernel of the baseline.
const PAIRS: [(&str, &str, &str); 8] = [
    (
        "one shot, bf16",
        "reduce_whole_bf16_sum",
        "one_stage_bf16_8",
    ),
    ("one shot, f32", "reduce_whole_f32_sum", "one_stage_f32_8"),
    (
        "two shots, bf16",
        "reduce_shards_bf16_sum",
        "two_stage_push_bf16_8",
    ),
    (
        "two shots, f32",
        "reduce_shards_f32_sum",
        "two_stage_push_f32_8",
    ),
    (
        "packets, bf16",
        "all_reduce_packet_bf16_sum",
        "packets_one_shot_bf16_8",
    ),
    (
        "packets, f32",
        "all_reduce_packet_f32_sum",
        "packets_one_shot_f32_8",
    ),
    (
        "one shot and norm, bf16",
        "reduce_norm_bf16",
        "norm_by_barrier_bf16_8_2",
    ),
    (
        "packets and norm, bf16",
        "reduce_norm_packet_bf16",
        "norm_by_packets_bf16_8_2",
    ),
];

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Fusewire's kernels: PTX from `fusewire-build build -p fusewire-kernels`, or a cubin.
    #[arg(long, value_name = "FILE")]
    ours: PathBuf,
    /// GPU architecture of both cubins.
    #[arg(long, default_value = "sm_90")]
    target: String,
    /// Writes the tables to this file instead of printing them.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let nvcc = baseline::find()?;
    let tools = nvcc.parent().unwrap_or(Path::new(""));
    let folder = tempfile::tempdir().context("a folder for machine code")?;
    let theirs = folder.path().join("theirs.cubin");
    let made = baseline::compile(&nvcc, &arguments.target, &["-cubin"])?;
    fs::write(&theirs, made).context("write the baseline's machine code")?;
    let ours = machine_code(arguments, tools, folder.path())?;
    let ours = Code::parse(&disassembled(tools, &ours)?);
    let theirs = Code::parse(&disassembled(tools, &theirs)?);
    let text = report(&arguments.target, &ours, &theirs)?;
    match &arguments.out {
        Some(path) => fs::write(path, text).with_context(|| format!("write {}", path.display())),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

/// Returns the path of a cubin of Fusewire's kernels. Compiles PTX with ptxas.
fn machine_code(arguments: &Arguments, tools: &Path, folder: &Path) -> Result<PathBuf> {
    let ours = &arguments.ours;
    let bytes = fs::read(ours).with_context(|| format!("read {}", ours.display()))?;
    if bytes.starts_with(b"\x7fELF") {
        return Ok(ours.clone());
    }
    let out = folder.join("ours.cubin");
    let mut ptxas = Command::new(tools.join("ptxas"));
    ptxas.arg("-O3").arg(format!("-arch={}", arguments.target));
    run(ptxas.arg(ours).arg("-o").arg(&out))?;
    Ok(out)
}

fn run(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("start {name}"))?;
    if !output.status.success() {
        bail!(
            "{name} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(output.stdout)
}

/// Disassembles a cubin with nvdisasm. Searches `$FUSEWIRE_NVDISASM`, nvcc's folder and PATH, in
/// this order.
fn disassembled(tools: &Path, cubin: &Path) -> Result<String> {
    let next_to_nvcc = tools.join("nvdisasm");
    let nvdisasm = env::var_os("FUSEWIRE_NVDISASM")
        .map(PathBuf::from)
        .or(Some(next_to_nvcc).filter(|path| path.is_file()))
        .unwrap_or_else(|| "nvdisasm".into());
    let text = run(Command::new(&nvdisasm).arg("-c").arg(cubin))
        .with_context(|| format!("disassemble; {INSTALL}"))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn report(target: &str, ours: &Code, theirs: &Code) -> Result<String> {
    let mut text = format!(
        "Machine code of {target}: the loops of every kernel that move 16 bytes per instruction. \
         Columns: instructions issued per 16 bytes loaded or stored (all; integer; float; shared \
         memory and constants; branches), loads and stores of 16 bytes per iteration, and loads in \
         flight before the first use of a result. Instructions whose guard is false count as \
         issued.\n"
    );
    for (what, our_kernel, their_kernel) in PAIRS {
        text += &format!(
            "\n### {what}\n\n| kernel | instructions of the kernel | in the loop | loads | stores \
             | in flight | per 16 B | integer | float | shared, const | branch |\n\
             |---|---|---|---|---|---|---|---|---|---|---|\n"
        );
        for (whose, code, kernel) in [("Rust", ours, our_kernel), ("C++", theirs, their_kernel)] {
            let loops = code.data_loops(kernel)?;
            ensure!(
                !loops.is_empty(),
                "{kernel} has no loop that moves 16 bytes per instruction"
            );
            let all = code.length(kernel);
            for found in loops {
                text += &row(whose, kernel, all, &found);
            }
        }
    }
    Ok(text)
}

fn row(whose: &str, kernel: &str, all: usize, found: &Loop) -> String {
    let per = |count: usize| count as f64 / found.moved() as f64;
    format!(
        "| {whose} `{kernel}` | {all} | {} | {} | {} | {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} \
            |\n",
        found.instructions,
        found.loads,
        found.stores,
        found.in_flight,
        per(found.instructions),
        per(found.integer),
        per(found.float),
        per(found.shared),
        per(found.branch),
    )
}
