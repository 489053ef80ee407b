//! Tests of the metadata parser with a code object that `fusewire-build` created from
//! `examples/vocab-argmax`.

use super::*;

const IMAGE: &[u8] = include_bytes!("fixtures/vocab-argmax-gfx942.co");

/// Arguments of the kernel in [`IMAGE`]: constants, call, rows, columns, timeout, logits, keys,
/// winners.
fn expected() -> Vec<(usize, usize)> {
    (0..8).map(|at| (8 * at, 8)).collect()
}

#[test]
fn a_real_image_reports_its_arguments() {
    let object = parse(IMAGE).unwrap();
    assert_eq!(object.target.as_deref(), Some("amdgcn-amd-amdhsa--gfx942"));
    let kernels = object.kernels.unwrap();
    assert_eq!(kernels.len(), 1);
    assert_eq!(kernels["vocab_argmax"], expected());
}

#[test]
fn hidden_arguments_are_left_out() {
    // Renames a hidden argument. The parser must then report it as an explicit argument, which
    // shows that the parser excludes hidden arguments by name.
    let mut image = IMAGE.to_vec();
    let hidden = find(&image, b"hidden_block_count_x");
    image[hidden..hidden + 6].copy_from_slice(b"shown_");
    let kernels = parse(&image).unwrap().kernels.unwrap();
    let mut with_one_more = expected();
    with_one_more.push((64, 4));
    assert_eq!(kernels["vocab_argmax"], with_one_more);
}

#[test]
fn every_truncation_is_refused() {
    for length in 0..IMAGE.len() {
        let text = parse(&IMAGE[..length]).unwrap_err();
        assert!(!text.is_empty());
    }
    parse(IMAGE).unwrap();
}

/// Changes every byte of the headers and of the note, one at a time. The parser may return a result
/// or an error, and must not panic.
#[test]
fn damage_does_no_harm() {
    let note_end = find(IMAGE, b"amdhsa.version") + 64;
    let sections = IMAGE.len() - 15 * SECTION_HEADER;
    let mut image = IMAGE.to_vec();
    let (mut refused, mut differ) = (0, 0);
    let good = parse(IMAGE).unwrap();
    for at in (0..note_end).chain(sections..IMAGE.len()) {
        for flip in [0x01, 0x80, 0xff] {
            image[at] ^= flip;
            match parse(&image) {
                Err(_) => refused += 1,
                Ok(object) if object != good => differ += 1,
                Ok(_) => {}
            }
            image[at] ^= flip;
        }
    }
    assert_eq!(image, IMAGE);
    assert!(
        refused > 1000 && differ > 100,
        "{refused} refused, {differ} differ"
    );
}

#[test]
fn other_files_are_distinguished() {
    let text = |image: &[u8]| parse(image).unwrap_err();
    assert!(text(b"").contains("not a 64-bit"));
    assert!(text(b".version 8.0\n.target sm_90\0").contains("not a 64-bit"));
    assert!(text(b"__CLANG_OFFLOAD_BUNDLE__").contains("bundle"));
    let mut host = IMAGE.to_vec();
    host[18] = 62;
    assert!(text(&host).contains("machine 62"));
}

#[test]
fn lengths_beyond_the_image_are_refused() {
    // `at` is the position of each of these fields in turn: the size of section 1, the offset of
    // the first segment, the offset of the section headers, and the offset of the program headers.
    let table = u64_at(IMAGE, 40).unwrap() as usize;
    for at in [table + SECTION_HEADER + 32, 64 + 8, 40, 32] {
        for value in [IMAGE.len() as u64, u64::MAX, u64::MAX - 7] {
            let mut image = IMAGE.to_vec();
            image[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let text = parse(&image).unwrap_err();
            assert!(text.contains("cut short"), "{at}: {text}");
        }
    }
    let mut image = IMAGE.to_vec();
    let note = find(&image, b"AMDGPU\0") - 12;
    image[note + 4..note + 8].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(parse(&image).unwrap_err().contains("a note"));
}

#[test]
fn an_image_without_metadata_reports_nothing() {
    let mut image = IMAGE.to_vec();
    let owner = find(&image, b"AMDGPU\0");
    image[owner] = b'X';
    assert_eq!(parse(&image).unwrap().kernels, None);
}

#[test]
fn arguments_of_impossible_size_are_refused() {
    #[derive(serde::Serialize)]
    struct Argument {
        #[serde(rename = ".offset")]
        offset: u64,
        #[serde(rename = ".size")]
        size: u64,
        #[serde(rename = ".value_kind")]
        kind: &'static str,
    }
    let read = |offset, size| {
        let kind = "by_value";
        let argument = Argument { offset, size, kind };
        let kernel = HashMap::from([(".args", vec![argument])]);
        let mut bytes =
            rmp_serde::to_vec_named(&HashMap::from([("amdhsa.kernels", [kernel])])).unwrap();
        // Adds the entry `.name` to the kernel's map. The header byte of a map with two entries is
        // 0x82.
        let map = find(&bytes, b"\x81\xa5.args");
        bytes[map] = 0x82;
        let name = map + 1;
        bytes.splice(name..name, *b"\xa5.name\xa1k");
        let mut out = CodeObject::default();
        metadata(&bytes, &mut out).map(|()| out.kernels.unwrap()["k"].clone())
    };
    assert_eq!(read(8, 4), Ok(vec![(8, 4)]));
    for (offset, size) in [(u64::MAX, 1), (1 << 40, 8), (0, 1 << 20)] {
        let text = read(offset, size).unwrap_err();
        assert!(text.contains("kernel k has an argument"), "{text}");
    }
}

fn find(bytes: &[u8], what: &[u8]) -> usize {
    bytes
        .windows(what.len())
        .position(|window| window == what)
        .unwrap()
}
