//! Tests of the cubin parser with generated headers and with the output of `ptxas`.

use std::path::Path;
use std::process::Command;

use super::*;

/// PTX with two kernels, `copy` and `empty`, and the function `helper`, which is not a kernel.
const PTX: &str = ".version 8.0\n.target sm_80\n.address_size 64\n\
    .visible .func (.param .b32 r) helper(.param .b32 a)\n{\n.reg .b32 %x;\nld.param.b32 %x, [a];\n\
    st.param.b32 [r], %x;\nret;\n}\n\
    .visible .entry copy(.param .u64 a, .param .u32 b, .param .align 16 .b8 c[20], .param .u8 d)\n\
    {\n.reg .b64 %p;\n.reg .b32 %v;\nld.param.u64 %p, [a];\nld.param.u32 %v, [b];\n\
    cvta.to.global.u64 %p, %p;\nst.global.u32 [%p], %v;\nret;\n}\n\
    .visible .entry empty()\n{\nret;\n}\n";

/// Offsets and sizes of the parameters of `copy`.
const FIELDS: [(usize, usize); 4] = [(0, 8), (8, 4), (16, 20), (36, 1)];

/// Encodes one parameter as an attribute of a kernel. `ptxas` writes the last parameter first.
fn parameter(large: bool, ordinal: u16, (offset, size): (usize, usize)) -> Vec<u8> {
    let mut out = vec![4, if large { 0x45 } else { 0x17 }, 12, 0, 0, 0, 0, 0];
    out.extend(ordinal.to_le_bytes());
    out.extend((offset as u16).to_le_bytes());
    if large {
        out.extend((size as u16).to_le_bytes());
        out.extend([0; 2]);
    } else {
        out.extend(((size as u32) << 18 | 0x1_f000).to_le_bytes());
    }
    out
}

/// Builds a cubin with kernels `copy` and `empty` and function `helper`.
fn elf(abi: (u8, u8), flags: u32, large: bool) -> Vec<u8> {
    let texts = b"\0copy\0empty\0helper\0.nv.info.copy\0.nv.info.empty\0";
    let mut symbols = vec![0u8; 24];
    for (name, other) in [(1u32, 0x10u8), (6, 0x10), (12, 0)] {
        symbols.extend(name.to_le_bytes());
        symbols.extend([0x12, other]);
        symbols.extend([0; 18]);
    }
    // Adds attributes that the parser must skip. The two attributes before the parameters have a
    // half-word value and a four-byte value. The attribute after the parameters has no value.
    let mut copy = vec![3, 0x1b, 0xff, 0, 4, 0x37, 4, 0, 0x87, 0, 0, 0];
    for (ordinal, field) in FIELDS.into_iter().enumerate().rev() {
        copy.extend(parameter(large, ordinal as u16, field));
    }
    copy.extend([1, 0x4c, 0, 0]);
    let empty = vec![3, 0x1b, 0xff, 0];
    let contents: [(u32, u32, u32, &[u8]); 5] = [
        (0, 0, 0, &[]),
        (0, 3, 0, texts),
        (0, 2, 1, &symbols),
        (19, 0x7000_0000, 2, &copy),
        (33, 0x7000_0000, 2, &empty),
    ];
    let mut file = vec![0u8; 64];
    file[..9].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, abi.0, abi.1]);
    file[16..20].copy_from_slice(&[2, 0, 190, 0]);
    file[48..52].copy_from_slice(&flags.to_le_bytes());
    let mut headers = Vec::new();
    for (name, kind, link, bytes) in contents {
        let mut header = [0u8; 64];
        header[..4].copy_from_slice(&name.to_le_bytes());
        header[4..8].copy_from_slice(&kind.to_le_bytes());
        header[24..32].copy_from_slice(&(file.len() as u64).to_le_bytes());
        header[32..40].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        header[40..44].copy_from_slice(&link.to_le_bytes());
        headers.extend(header);
        file.extend(bytes);
    }
    let at = file.len() as u64;
    file[40..48].copy_from_slice(&at.to_le_bytes());
    file[58..64].copy_from_slice(&[64, 0, contents.len() as u8, 0, 1, 0]);
    file.extend(headers);
    file
}

/// OS ABI and ELF ABI version that `ptxas` 12.x writes for GPUs before Blackwell.
const V7: (u8, u8) = (0x33, 7);
/// OS ABI and ELF ABI version that `ptxas` 13 writes, and `ptxas` 12.8 for Blackwell.
const V8: (u8, u8) = (0x41, 8);

#[test]
fn a_header_states_the_architecture() {
    for (abi, flags, target) in [
        (V7, 0x0050_0550, "sm_80"),
        (V7, 0x005a_055a, "sm_90"),
        (V7, 0x005a_0d5a, "sm_90a"),
        (V8, 0x0600_5004, "sm_80"),
        (V8, 0x0600_5a04, "sm_90"),
        (V8, 0x0600_6402, "sm_100"),
        (V8, 0x0600_640a, "sm_100a"),
        (V8, 0x0600_7802, "sm_120"),
    ] {
        let image = Image::new("k", elf(abi, flags, abi == V8)).expect("a cubin");
        assert_eq!(image.target, target, "{flags:#x}");
        assert_eq!(image.kind(), Kind::Cubin);
        let names: Vec<&str> = image.entries.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["copy", "empty"]);
        assert_eq!(image.entries[0].parameters, FIELDS);
        assert!(image.entries[1].parameters.is_empty());
    }
}

#[test]
fn a_cubin_runs_within_its_major_version() {
    for (device, target, runs) in [
        ("sm_90", "sm_90", true),
        ("sm_90", "sm_90a", true),
        ("sm_86", "sm_80", true),
        ("sm_80", "sm_86", false),
        ("sm_90", "sm_80", false),
        ("sm_100", "sm_90", false),
        ("sm_103", "sm_100", true),
        ("sm_103", "sm_100a", false),
        ("sm_120", "sm_100", false),
        ("gfx942", "sm_90", false),
        ("sm_90", "gfx942", false),
    ] {
        assert_eq!(runs_cubin(device, target), runs, "{target} on {device}");
    }
}

fn detail(result: Result<Image>) -> String {
    match result {
        Err(Error::Image { image, detail }) => format!("{image}: {detail}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_cubin_goes_before_ptx_and_one_for_another_gpu_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let put = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).expect("a file");
    };
    let of = |device: &str| Images::in_folders(device, vec![folder.path().to_owned()]);
    put("k.sm_80.ptx", PTX.as_bytes());
    put("k.sm_80.cubin", &elf(V7, 0x0050_0550, false));
    put("k.sm_90a.cubin", &elf(V7, 0x005a_0d5a, false));
    for (device, target, kind) in [
        ("sm_80", "sm_80", Kind::Cubin),
        ("sm_86", "sm_80", Kind::Cubin),
        ("sm_90", "sm_90a", Kind::Cubin),
        ("sm_100", "sm_80", Kind::Other),
    ] {
        let image = of(device).find("k").expect(device);
        assert_eq!(
            (image.target.as_str(), image.kind()),
            (target, kind),
            "{device}"
        );
        assert_eq!(image.name, "k");
    }
    // Loads the cubin by its path. The target comes from the header, not from the file name.
    let path = folder.path().join("k.sm_80.cubin");
    let said = detail(of("sm_90").from_path(&path));
    assert!(
        said.contains("it is a cubin for sm_80, this device is sm_90"),
        "{said}"
    );
    put("k.sm_90.cubin", &elf(V8, 0x0600_6402, true));
    let said = detail(of("sm_90").from_path(&folder.path().join("k.sm_90.cubin")));
    assert!(
        said.contains("it is a cubin for sm_100, this device is sm_90"),
        "{said}"
    );
    // Neither the PTX nor the cubin fits the device, so the error lists both files.
    let said = detail(of("sm_75").find("k"));
    assert!(
        said.contains("for other devices") && said.contains("k.sm_90a.cubin"),
        "{said}"
    );
}

/// Checks that parsing a damaged cubin returns a result or an error, and does not hang or panic.
#[test]
fn damaged_cubins_do_no_harm() {
    let whole = elf(V8, 0x0600_5a04, true);
    for end in 20..whole.len() {
        assert!(cubin::parse(&whole[..end]).is_err(), "{end} bytes");
    }
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut changed = whole.clone();
            changed[at] ^= 1 << bit;
            let _ = Image::new("damaged", changed);
        }
    }
    let mut newer = whole.clone();
    newer[8] = 9;
    let said = detail(Image::new("newer", newer));
    assert!(
        said.contains("ELF ABI version 9") && said.contains("use PTX"),
        "{said}"
    );
    let mut narrow = whole;
    narrow[4] = 1;
    assert!(detail(Image::new("narrow", narrow)).contains("64 bits"));
}

/// Parses the output of the assembler that `FUSEWIRE_PTXAS` names. If the variable is not set, the
/// test is skipped, or fails if `FUSEWIRE_REQUIRE` contains `ptx`.
#[test]
fn output_of_ptxas_is_parsed() {
    let Some(ptxas) = std::env::var_os("FUSEWIRE_PTXAS") else {
        let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
        let required = required.split(',').any(|what| what == "ptx");
        assert!(
            !required,
            "FUSEWIRE_REQUIRE names ptx, FUSEWIRE_PTXAS is not set"
        );
        eprintln!("skipped (ptx): FUSEWIRE_PTXAS is not set");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    for target in ["sm_80", "sm_90", "sm_100"] {
        let images = Images::in_folders(target, vec![folder.path().to_owned()]);
        let (from, to) = (
            folder.path().join("k.ptx"),
            folder.path().join(format!("k.{target}.cubin")),
        );
        assemble(Path::new(&ptxas), PTX, target, &from, &to);
        let image = images.find("k").expect("its own cubin");
        assert_eq!((image.target.as_str(), image.kind()), (target, Kind::Cubin));
        assert_eq!(image.entries.len(), 2, "{:?}", image.entries);
        assert_eq!(image.entry("copy").expect("a kernel").parameters, FIELDS);
        assert!(
            image
                .entry("empty")
                .expect("a kernel")
                .parameters
                .is_empty()
        );
    }
    // Compares the kernel parameters in cubins of the library's kernels with those in the PTX.
    // Skips large families to save time.
    let mut compared = 0;
    for target in ["sm_80", "sm_90"] {
        let images = Images::in_folders(target, Vec::new()).without_cubins();
        for family in images.families().expect("families") {
            let ptx = images.library(family).expect("an image");
            if ptx.bytes.len() > 50_000 {
                continue;
            }
            let text = core::str::from_utf8(&ptx.bytes).expect("text");
            let (from, to) = (folder.path().join("l.ptx"), folder.path().join("l.cubin"));
            assemble(
                Path::new(&ptxas),
                text.trim_end_matches('\0'),
                target,
                &from,
                &to,
            );
            let cubin = images.from_path(&to).expect("a cubin");
            assert_eq!(cubin.target, ptx.target);
            compared += cubin.entries.len();
            assert_eq!(cubin.entries.len(), ptx.entries.len());
            for entry in &ptx.entries {
                assert_eq!(cubin.entry(&entry.name), Some(entry), "{target} {family}");
            }
        }
    }
    assert!(compared > 0, "no family is small");
    // Parses a kernel whose first parameter is larger than attribute 0x17 can describe.
    let large = ".version 8.1\n.target sm_90\n.address_size 64\n\
        .visible .entry large(.param .align 8 .b8 a[20000], .param .u32 b)\n{\nret;\n}\n";
    let (from, to) = (folder.path().join("m.ptx"), folder.path().join("m.cubin"));
    assemble(Path::new(&ptxas), large, "sm_90", &from, &to);
    let images = Images::in_folders("sm_90", Vec::new());
    let image = images.from_path(&to).expect("a cubin");
    assert_eq!(image.entries[0].parameters, [(0, 20_000), (20_000, 4)]);
}

fn assemble(ptxas: &Path, text: &str, target: &str, from: &Path, to: &Path) {
    std::fs::write(from, text).expect("a file");
    let mut command = Command::new(ptxas);
    // Turns optimisation off to save time, because the test reads only the metadata.
    command
        .args(["-O0", "-arch", target, "-o"])
        .arg(to)
        .arg(from);
    let output = command.output().expect("ptxas runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", from.display());
}
