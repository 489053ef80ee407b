//! Stand-in images.

use fusewire_device::multi_rank_grid::{GridParams, SUFFIX};
use fusewire_device::native::{KernelInfo, ParamField};

use super::kernel;

/// Returns a stand-in image for the fake: PTX that declares the kernels of `lists`, with empty
/// bodies.
///
/// `capability` is the target: 90 for `sm_90`. Parameters have the same sizes, and therefore the
/// same offsets, as the fields of the kernel's parameter struct.
pub fn stand_in(lists: &[&[KernelInfo]], capability: u32) -> String {
    let all = lists.iter().copied().flatten();
    declare(
        all.map(|kernel| (kernel.name.to_owned(), kernel.params)),
        capability,
    )
}

/// Returns a stand-in image like [`stand_in`] that declares the grid forms of the kernels:
/// `NAME__grid` instead of `NAME`.
pub fn stand_in_multi_rank_grid(lists: &[&[KernelInfo]], capability: u32) -> String {
    let all = lists.iter().copied().flatten();
    declare(
        all.map(|kernel| (format!("{}{SUFFIX}", kernel.name), GridParams::FIELDS)),
        capability,
    )
}

pub(super) fn declare(
    entries: impl Iterator<Item = (String, &'static [ParamField])>,
    capability: u32,
) -> String {
    let mut text = format!(".version 8.0\n.target sm_{capability}\n.address_size 64\n");
    for (name, params) in entries {
        let parameters: Vec<String> = params
            .iter()
            .enumerate()
            .map(|(at, field)| match field.size {
                1 | 2 | 4 | 8 => format!("\t.param .u{} {name}_param_{at}", field.size * 8),
                size => {
                    let alignment = 1 << field.offset.trailing_zeros().min(3);
                    format!("\t.param .align {alignment} .b8 {name}_param_{at}[{size}]")
                }
            })
            .collect();
        text.push_str(&format!(
            "\n.visible .entry {name}(\n{}\n)\n.maxntid {}\n.minnctapersm 1\n{{\n\ttrap;\n}}\n",
            parameters.join(",\n"),
            kernel::most_threads(capability, &name)
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.6\n.target sm_90a\n.address_size 64\n";

    fn parse(body: &str) -> PtxResult<Image> {
        Image::parse(&format!("{HEAD}{body}"))
    }

    #[test]
    fn entries_with_offsets_and_attributes() {
        let image = parse(
            "// a comment with .entry nothing(\n\
             .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n\
             .shared .align 128 .b8 scratch[64];\n\
             .visible .entry first(\n .param .u64 .ptr .global .align 16 a,\n .param .u32 b,\n\
             .param .align 16 .b8 c[20],\n .param .f16 d)\n.maxntid 16, 8\n\
             { mov.b64 %rd1, scratch; { } ret; }\n\
             .visible .entry second()\n{ /* } */ ret; }\n",
        )
        .unwrap();
        assert_eq!((image.version, image.target, image.exact), (86, 90, true));
        assert_eq!(image.unresolved, [""; 0]);
        let first = image.entry("first").unwrap();
        let parameters: Vec<_> = first
            .parameters
            .iter()
            .map(|it| (it.offset, it.size))
            .collect();
        assert_eq!(parameters, [(0, 8), (8, 4), (16, 20), (36, 2)]);
        assert_eq!(
            (first.bytes, first.max_threads, first.shared_bytes),
            (38, 128, 64)
        );
        let second = image.entry("second").unwrap();
        assert!(second.parameters.is_empty() && second.shared_bytes == 0);
        assert!(image.entry("nothing").is_none());
    }

    #[test]
    fn malformed_text_is_refused_with_its_line() {
        for (body, line) in [
            (".visible .entry k(.param .u64 a", 4),
            (".visible .entry k(.param .u65 a) { }", 4),
            ("\n.visible .entry k(.param .u64 a)\n{", 6),
            (".visible .entry k(.param .u64 a);", 4),
            (".visible .entry k(.param .align 3 .b8 a[3]) { }", 4),
            (".visible .entry k() { }\n.visible .entry k() { }", 5),
            ("}", 4),
            ("/* no end", 4),
        ] {
            let error = parse(body).unwrap_err();
            assert_eq!(error.line, line, "{body:?}: {error:?}");
        }
        for text in [
            "",
            "hello",
            ".version 8.6\n.target gfx942\n",
            ".version x\n",
        ] {
            assert!(Image::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn calls_to_functions_that_are_not_there() {
        let image = parse(".extern .func panic_somewhere\n(\n.param .b64 a\n);").unwrap();
        assert_eq!(image.unresolved, ["panic_somewhere"]);
    }

    #[test]
    fn the_library_lists_every_kernel_that_is_registered() {
        let listed = fusewire_kernels::KERNELS.iter().copied().flatten();
        let mut listed: Vec<_> = listed.map(|kernel| kernel.name).collect();
        listed.sort_unstable();
        let registered = crate::kernels_of("fusewire_kernels").iter().copied();
        let registered: Vec<_> = registered.flatten().map(|kernel| kernel.name).collect();
        assert_eq!(listed, registered);
    }

    #[test]
    fn stand_ins_declare_what_the_structs_have() {
        for name in ["fusewire_kernels", "vocab_argmax"] {
            let lists = crate::kernels_of(name);
            let image = Image::parse(&stand_in(lists, 90)).unwrap();
            let kernels: Vec<_> = lists.iter().copied().flatten().collect();
            assert_eq!(image.entries.len(), kernels.len());
            for kernel in kernels {
                let entry = image.entry(kernel.name).unwrap();
                let parameters = entry.parameters.iter().map(|it| (it.offset, it.size));
                let fields = kernel.params.iter().map(|it| (it.offset, it.size));
                assert!(parameters.eq(fields), "{}", kernel.name);
            }
        }
    }
}
