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
    use fusewire_emulator::Module;

    use super::*;

    #[test]
    fn the_library_lists_every_kernel_that_is_registered() {
        let listed = fusewire_kernels::KERNELS.iter().copied().flatten();
        let mut listed: Vec<_> = listed.map(|kernel| kernel.name).collect();
        listed.sort_unstable();
        let registered = kernel::kernels_of("fusewire_kernels").iter().copied();
        let registered: Vec<_> = registered.flatten().map(|kernel| kernel.name).collect();
        assert_eq!(listed, registered);
    }

    #[test]
    fn stand_ins_declare_what_the_structs_have() {
        let lists = kernel::kernels_of("fusewire_kernels");
        let image = Module::parse(&stand_in(lists, 90)).unwrap();
        let kernels: Vec<_> = lists.iter().copied().flatten().collect();
        assert_eq!(image.entries().len(), kernels.len());
        for kernel in kernels {
            let entry = image.entry(kernel.name).unwrap();
            let parameters = entry.params.iter();
            let parameters = parameters.map(|it| (it.offset as usize, it.size as usize));
            let fields = kernel.params.iter().map(|it| (it.offset, it.size));
            assert!(parameters.eq(fields), "{}", kernel.name);
        }
    }
}
