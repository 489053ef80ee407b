//! Parser of AMD assembly and its metadata in the format of llc.

use std::collections::HashMap;

use super::assembly::{AsmFunction, Parameter, Resources};
use crate::{Error, Result};

/// Metadata of a kernel.
#[derive(Clone, Debug, Default)]
pub struct AmdKernel {
    /// Explicit arguments. A name is empty if the metadata does not contain it.
    pub arguments: Vec<(String, Parameter)>,
    /// Registers and memory.
    pub resources: Resources,
}

/// Splits assembly into functions, and parses the metadata of the kernels. A function is a kernel
/// if the metadata lists it.
///
/// # Errors
/// [`Error::Parse`] if the metadata is not in the format of llc.
pub fn parse(text: &str) -> Result<(Vec<AsmFunction>, HashMap<String, AmdKernel>)> {
    let kernels = metadata(text)?;
    let mut out = Vec::new();
    let mut open: Option<AsmFunction> = None;
    let mut announced = "";
    for line in text.lines() {
        let code = line.split_once(';').map_or(line, |(code, _)| code).trim();
        if let Some(rest) = code.strip_prefix(".type") {
            if let Some(name) = rest.trim().strip_suffix(",@function") {
                announced = name.trim();
            }
        } else if code.starts_with(".Lfunc_end") {
            out.extend(open.take());
        } else if let Some(function) = &mut open {
            if !code.is_empty() {
                function.lines.push(code.to_owned());
            }
        } else if !announced.is_empty() && code.strip_suffix(':') == Some(announced) {
            let kernel = kernels.get(announced);
            open = Some(AsmFunction {
                name: announced.to_owned(),
                kernel: kernel.is_some(),
                parameters: kernel
                    .map(|kernel| {
                        kernel
                            .arguments
                            .iter()
                            .map(|(_, parameter)| *parameter)
                            .collect()
                    })
                    .unwrap_or_default(),
                lines: Vec::new(),
                locations: Vec::new(),
                rows: Vec::new(),
            });
        }
    }
    Ok((out, kernels))
}

/// Parses the `.amdgpu_metadata` block, which is YAML with a fixed indentation.
fn metadata(text: &str) -> Result<HashMap<String, AmdKernel>> {
    let mut out = HashMap::new();
    let Some((_, block)) = text.split_once(".amdgpu_metadata") else {
        return Err(Error::Parse {
            what: "AMD assembly".into(),
            detail: "it has no .amdgpu_metadata".into(),
        });
    };
    let block = block
        .split_once(".end_amdgpu_metadata")
        .map_or(block, |(block, _)| block);
    let mut kernel = AmdKernel::default();
    let mut argument: HashMap<&str, &str> = HashMap::new();
    let mut name = String::new();
    for line in block.lines() {
        let indent = line.len() - line.trim_start().len();
        let item = line.trim_start().starts_with("- ");
        let content = line.trim_start().trim_start_matches("- ");
        let (key, value) = content.split_once(':').unwrap_or((content, ""));
        let value = value.trim().trim_matches('\'');
        if indent == 6 && item || indent < 6 {
            finish_argument(&mut argument, &mut kernel)?;
        }
        if indent <= 2 && (item || indent < 2) && !name.is_empty() {
            out.insert(core::mem::take(&mut name), core::mem::take(&mut kernel));
        }
        let number = || value.parse::<u32>().unwrap_or(0);
        match (indent, key) {
            (6 | 8, _) => {
                argument.insert(key, value);
            }
            (_, ".name") => name = value.to_owned(),
            (_, ".group_segment_fixed_size") => kernel.resources.shared = number(),
            (_, ".private_segment_fixed_size") => kernel.resources.local = number(),
            (_, ".sgpr_count") => kernel.resources.scalar_registers = number(),
            (_, ".vgpr_count") => kernel.resources.registers = number(),
            (_, ".vgpr_spill_count") => kernel.resources.spills = number(),
            _ => {}
        }
    }
    finish_argument(&mut argument, &mut kernel)?;
    if !name.is_empty() {
        out.insert(name, kernel);
    }
    Ok(out)
}

fn finish_argument(argument: &mut HashMap<&str, &str>, kernel: &mut AmdKernel) -> Result<()> {
    let fields = core::mem::take(argument);
    let Some(kind) = fields.get(".value_kind") else {
        return Ok(());
    };
    if kind.starts_with("hidden_") {
        return Ok(());
    }
    let number = |key: &str| {
        fields
            .get(key)
            .and_then(|value| value.parse().ok())
            .ok_or_else(|| Error::Parse {
                what: "AMD metadata".into(),
                detail: format!("an argument without {key}"),
            })
    };
    let parameter = Parameter {
        offset: number(".offset")?,
        size: number(".size")?,
    };
    let name = fields.get(".name").copied().unwrap_or_default();
    kernel.arguments.push((name.to_owned(), parameter));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
\t.type\tcopy,@function
copy:                                   ; @copy
; %bb.0:
\ts_load_dword s4, s[0:1], 0x8
\ts_endpgm
.Lfunc_end0:
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .address_space:  generic
        .name:           to
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .name:           n
        .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         16
        .size:           4
        .value_kind:     hidden_block_count_x
    .group_segment_fixed_size: 64
    .name:           copy
    .private_segment_fixed_size: 48
    .sgpr_count:     12
    .symbol:         copy.kd
    .vgpr_count:     98
    .vgpr_spill_count: 1
  - .args:           []
    .name:           empty
    .vgpr_count:     3
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
...
\t.end_amdgpu_metadata
";

    #[test]
    fn functions_and_metadata() {
        let (functions, kernels) = parse(TEXT).unwrap();
        assert_eq!(functions.len(), 1);
        assert_eq!(
            functions[0].lines,
            ["s_load_dword s4, s[0:1], 0x8", "s_endpgm"]
        );
        let copy = &kernels["copy"];
        assert_eq!(copy.arguments.len(), 2);
        assert_eq!(
            copy.arguments[1],
            ("n".to_owned(), Parameter { offset: 8, size: 4 })
        );
        let used = copy.resources;
        assert_eq!((used.registers, used.scalar_registers), (98, 12));
        assert_eq!((used.shared, used.local, used.spills), (64, 48, 1));
        assert_eq!(kernels["empty"].resources.registers, 3);
    }
}
