//! The metadata of PTX: its target, and the parameters of its kernels.

use super::Entry;

/// Returns the first CUDA version (12020 for 12.2) whose driver loads PTX of the version `version`
/// (82 for PTX 8.2). Source: the release notes of the PTX ISA.
pub(super) const fn cuda_version(version: u32) -> u32 {
    match version {
        90.. => 13_000 + (version - 90) * 10,
        // CUDA 12.6 has no PTX version of its own.
        86..90 => 12_070 + (version - 86) * 10,
        80..86 => 12_000 + (version - 80) * 10,
        _ => 12_000,
    }
}

/// Returns the version of a PTX text times ten.
pub(super) fn version(text: &str) -> Option<u32> {
    let (_, rest) = text.split_once(".version")?;
    let (major, minor) = rest.split_whitespace().next()?.split_once('.')?;
    Some(major.parse::<u32>().ok()? * 10 + minor.parse::<u32>().ok()?)
}

/// Parses the target and the kernels of a PTX text.
pub(super) fn parse(text: &str) -> Result<(String, Vec<Entry>), String> {
    let text = without_comments(text);
    let target = text
        .split_once(".target")
        .and_then(|(_, rest)| rest.trim_start().split([',', ' ', '\n', '\r', '\t']).next())
        .filter(|target| target.starts_with("sm_"))
        .ok_or_else(|| "it is neither PTX (it has no .target) nor a code object".to_owned())?;
    let mut entries = Vec::new();
    for rest in text.split(".entry").skip(1) {
        let head = rest.split('{').next().unwrap_or_default();
        let (name, list) = head.split_once('(').unwrap_or((head, ""));
        let list = list.split(')').next().unwrap_or_default();
        let name = name.split_whitespace().next().unwrap_or_default();
        entries.push(Entry {
            name: name.to_owned(),
            parameters: parameters(list).map_err(|part| {
                format!("the parameter `{part}` of kernel {name} cannot be understood")
            })?,
        });
    }
    Ok((target.to_owned(), entries))
}

/// Parses a parameter list. Computes the offsets like a C compiler: each parameter starts at the
/// next multiple of its alignment. Returns the text of the first invalid parameter as the error.
fn parameters(list: &str) -> Result<Vec<(usize, usize)>, &str> {
    let mut out = Vec::new();
    let mut end = 0usize;
    for parameter in list
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (mut size, mut align) = (None, None);
        // Attributes after `.ptr` describe the memory that the pointer refers to, not the parameter
        // itself.
        let mut of_target = false;
        let mut words = parameter.split_whitespace();
        while let Some(word) = words.next() {
            match word {
                ".ptr" => of_target = true,
                ".align" => {
                    let value: usize =
                        words.next().and_then(|w| w.parse().ok()).ok_or(parameter)?;
                    if !of_target {
                        align = Some(value);
                    }
                }
                ".b8" | ".u8" | ".s8" => size = Some(1),
                ".b16" | ".u16" | ".s16" | ".f16" => size = Some(2),
                ".b32" | ".u32" | ".s32" | ".f32" => size = Some(4),
                ".b64" | ".u64" | ".s64" | ".f64" => size = Some(8),
                _ => {}
            }
        }
        let element: usize = size.ok_or(parameter)?;
        let size = match parameter.split_once('[') {
            None => element,
            Some((_, count)) => count
                .trim_end_matches(']')
                .trim()
                .parse::<usize>()
                .ok()
                .and_then(|count| element.checked_mul(count))
                .ok_or(parameter)?,
        };
        let offset = end
            .checked_next_multiple_of(align.unwrap_or(element))
            .ok_or(parameter)?;
        end = offset.checked_add(size).ok_or(parameter)?;
        out.push((offset, size));
    }
    Ok(out)
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let (code, comment) = rest.split_at(at);
        out.push_str(code);
        let end = match comment.as_bytes().get(1) {
            Some(b'/') => comment.find('\n'),
            Some(b'*') => comment.find("*/").map(|end| end + 2),
            _ => {
                out.push('/');
                Some(1)
            }
        };
        rest = end.map_or("", |end| &comment[end..]);
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_and_parameters() {
        let text = "// .entry nothing(\n.version 8.0\n.target sm_90, texmode_independent\n\
            .visible .entry copy( /* two, .entry */\n\
            \t.param .u64 .ptr .align 1 copy_param_0,\n\
            \t.param .u32 copy_param_1, .param .align 16 .b8 copy_param_2[20],\n\
            \t.param .u8 copy_param_3\n)\n.maxntid 512\n{\n\tret;\n}\n\
            .visible .entry empty()\n{\n\tret;\n}\n";
        let (target, entries) = parse(text).unwrap();
        assert_eq!(target, "sm_90");
        assert_eq!(entries[0].name, "copy");
        assert_eq!(entries[0].parameters, [(0, 8), (8, 4), (16, 20), (36, 1)]);
        assert_eq!(entries[1].name, "empty");
        assert_eq!(entries[1].parameters, []);
        assert_eq!(entries.len(), 2);
    }

    #[test]
    fn versions_of_ptx_and_of_cuda() {
        assert_eq!(version("//\n.version 8.2\n.target sm_90\n"), Some(82));
        assert_eq!(version(".target sm_90"), None);
        for (version, cuda) in [
            (78, 12_000),
            (80, 12_000),
            (82, 12_020),
            (85, 12_050),
            (86, 12_070),
            (88, 12_090),
            (90, 13_000),
            (91, 13_010),
        ] {
            assert_eq!(cuda_version(version), cuda, "{version}");
        }
    }

    #[test]
    fn what_is_no_ptx_is_refused() {
        assert!(parse("fn main() {}").unwrap_err().contains("no .target"));
        let odd = ".target sm_80\n.entry k(.param .pred p) {}";
        assert!(
            parse(odd)
                .unwrap_err()
                .contains("`.param .pred p` of kernel k")
        );
    }
}
