//! Parsers for command-line values: operations, element types, reductions and sizes.

use fusewire::{DType, Operation, ReduceOp};

use super::operation::{Kind, Refusal};
use super::usage;

/// Maps alternative spellings of element types, reductions and operations to Fusewire's names. The
/// alternative spellings are in lower case and without punctuation.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("double", "f64"),
    ("float64", "f64"),
    ("fp64", "f64"),
    ("float", "f32"),
    ("float32", "f32"),
    ("fp32", "f32"),
    ("single", "f32"),
    ("half", "f16"),
    ("float16", "f16"),
    ("fp16", "f16"),
    ("bfloat", "bf16"),
    ("bfloat16", "bf16"),
    ("fp8", "e4m3"),
    ("f8e4m3", "e4m3"),
    ("fp8e4m3", "e4m3"),
    ("float8e4m3", "e4m3"),
    ("float8e4m3fn", "e4m3"),
    ("f8e5m2", "e5m2"),
    ("fp8e5m2", "e5m2"),
    ("float8e5m2", "e5m2"),
    ("char", "i8"),
    ("int8", "i8"),
    ("uint8", "u8"),
    ("int", "i32"),
    ("int32", "i32"),
    ("uint32", "u32"),
    ("int64", "i64"),
    ("uint64", "u64"),
    ("prod", "product"),
    ("avg", "average"),
    ("mean", "average"),
    ("and", "band"),
    ("or", "bor"),
    ("xor", "bxor"),
    ("mulsum", "premul_sum"),
    ("sendrecv", "send_recv"),
    ("allreducermsnorm", "all_reduce_norm"),
];

/// Names that the command line accepts for reductions.
const REDUCTIONS: [&str; 9] = [
    "sum",
    "product",
    "min",
    "max",
    "average",
    "premul_sum",
    "band",
    "bor",
    "bxor",
];

/// Parses a list of operations of `all`, separated by commas or blanks. The list `all` skips those
/// that do not support the type or the backend. Returns the operations, and notes about the skipped
/// ones.
pub(super) fn operations(
    list: &str,
    all: &[Kind],
    refuses: impl Fn(Kind) -> Option<Refusal>,
) -> anyhow::Result<(Vec<Kind>, Vec<String>)> {
    let is_all = list.trim() == "all";
    let named: Vec<Kind> = if is_all {
        all.to_vec()
    } else {
        list.split([',', ' '])
            .filter(|name| !name.is_empty())
            .map(|name| operation(name, all))
            .collect::<anyhow::Result<_>>()?
    };
    if named.is_empty() {
        return Err(usage(format!("\"{list}\" names no operation")));
    }
    let (mut kept, mut notes) = (Vec::new(), Vec::new());
    for kind in named {
        match refuses(kind) {
            None => kept.push(kind),
            Some(Refusal::Kind(reason)) if is_all => {
                notes.push(format!("{} is left out: {reason}", kind.name()));
            }
            Some(Refusal::Kind(reason) | Refusal::Op(reason)) => {
                return Err(usage(format!("{}: {reason}", kind.name())));
            }
        }
    }
    Ok((kept, notes))
}

fn operation(name: &str, kinds: &[Kind]) -> anyhow::Result<Kind> {
    if let Some(kind) = kinds.iter().find(|kind| kind.name() == name) {
        return Ok(*kind);
    }
    let mut others = Operation::ALL.iter().filter(|other| other.name() == name);
    if let Some(Err(reason)) = others.next().map(|other| Kind::of(*other)) {
        return Err(usage(format!("{name} is not measured: {reason}")));
    }
    let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
    Err(usage(format!(
        "operation \"{name}\" is none of {}, all{}",
        names.join(", "),
        suggestion(name, &names)
    )))
}

/// Returns the element type with this name.
pub(super) fn dtype(name: &str) -> anyhow::Result<DType> {
    let names = DType::ALL.map(DType::name);
    DType::ALL
        .into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or_else(|| {
            usage(format!(
                "type \"{name}\" is none of {}{}",
                names.join(", "),
                suggestion(name, &names)
            ))
        })
}

/// Returns the reduction with this name.
pub(super) fn reduction(name: &str) -> anyhow::Result<ReduceOp> {
    name.parse().map_err(|error: fusewire::Error| {
        usage(format!("{error}{}", suggestion(name, &REDUCTIONS)))
    })
}

/// Returns `; did you mean NAME?` for the name in `names` that is similar to `name`, or an empty
/// string.
fn suggestion(name: &str, names: &[&str]) -> String {
    let plain = |name: &str| name.to_lowercase().replace(['-', '_', '.'], "");
    let wanted = plain(name);
    let known = OTHER_NAMES
        .iter()
        .find(|(other, known)| *other == wanted && names.contains(known))
        .map(|(_, known)| *known);
    // A name is similar if at most a third of its letters differ.
    let close = || {
        names
            .iter()
            .map(|name| (distance(&wanted, &plain(name)), *name))
            .min()
            .filter(|(distance, _)| 3 * distance <= wanted.chars().count())
            .map(|(_, name)| name)
    };
    known
        .or_else(close)
        .map_or_else(String::new, |name| format!("; did you mean {name}?"))
}

/// Returns the Levenshtein distance of two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// Returns the number of bytes of a size such as `64`, `1.5K`, `2kb` or `1MiB`. Units are powers of
/// 1024.
pub(super) fn bytes(text: &str) -> anyhow::Result<u64> {
    let invalid = || {
        usage(format!(
            "size \"{text}\"; a number of bytes is needed, or one with K, M, G or T for powers of \
             1024"
        ))
    };
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[number.len()..].to_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(invalid()),
    };
    let (whole, fraction) = number
        .trim_end()
        .split_once('.')
        .unwrap_or((number.trim_end(), ""));
    let is_number = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
    // A fraction of at most 18 digits cannot overflow in the computation below.
    if !is_number(whole) || !is_number(fraction) || whole.is_empty() || fraction.len() > 18 {
        return Err(invalid());
    }
    let overflow = || usage(format!("size \"{text}\" overflows"));
    let whole: u64 = whole.parse().map_err(|_| overflow())?;
    let parts = 10u128.pow(fraction.len() as u32);
    let numerator = if fraction.is_empty() {
        0
    } else {
        fraction.parse::<u128>().map_err(|_| invalid())? << shift
    };
    if numerator % parts != 0 {
        return Err(usage(format!(
            "size \"{text}\" is no whole number of bytes"
        )));
    }
    let bytes = (u128::from(whole) << shift) + numerator / parts;
    u64::try_from(bytes).map_err(|_| overflow())
}

#[cfg(test)]
mod tests {
    use super::super::moe::ExpertLayer;
    use super::*;

    fn all() -> Vec<Kind> {
        Kind::all(ExpertLayer::DEFAULT)
    }

    #[test]
    fn sizes() {
        for (text, expected) in [
            ("0", 0),
            ("8", 8),
            ("12b", 12),
            ("1K", 1024),
            ("1KiB", 1024),
            ("2kb", 2048),
            ("1.5K", 1536),
            ("1.5 MiB", 3 << 19),
            ("64M", 64 << 20),
            ("2G", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(bytes(text).expect(text), expected, "{text}");
        }
        for text in [
            "",
            "K",
            ".5K",
            "-1",
            "1i",
            "1KK",
            "1e3",
            "lots",
            "1.5",
            "0.1K",
            "99999999999G",
        ] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn close_names_are_suggested() {
        let operations: Vec<_> = all().into_iter().map(Kind::name).collect();
        let dtypes = DType::ALL.map(DType::name);
        for (name, names, expected) in [
            ("allreduce", &operations[..], "all_reduce"),
            ("all-reduce", &operations[..], "all_reduce"),
            ("AllToAll", &operations[..], "all_to_all"),
            ("brodcast", &operations[..], "broadcast"),
            ("sendrecv", &operations[..], "send_recv"),
            ("moe-dispatch", &operations[..], "moe_dispatch"),
            ("float", &dtypes[..], "f32"),
            ("float32", &dtypes[..], "f32"),
            ("bfloat16", &dtypes[..], "bf16"),
            ("float8_e4m3fn", &dtypes[..], "e4m3"),
            ("F32", &dtypes[..], "f32"),
            ("avg", &REDUCTIONS[..], "average"),
        ] {
            assert_eq!(
                suggestion(name, names),
                format!("; did you mean {expected}?"),
                "{name}"
            );
        }
        assert_eq!(suggestion("lots", &dtypes), "");
        assert_eq!(suggestion("ring", &operations), "");
    }

    #[test]
    fn lists_may_have_blanks() {
        let parsed = |list| operations(list, &all(), |_| None);
        let (kinds, _) = parsed("all_reduce, broadcast  gather,").expect("a list");
        assert_eq!(kinds, [Kind::AllReduce, Kind::Broadcast, Kind::Gather]);
        assert!(parsed(" , ").is_err());
    }

    #[test]
    fn all_skips_operations_that_the_backend_cannot_run() {
        let refuses = |kind: Kind| kind.refuses(DType::F32, ReduceOp::Sum, (2, 1), "gloo");
        let (kinds, notes) = operations("all", &all(), refuses).expect("the others");
        assert_eq!((kinds.len(), notes.len()), (12, 4));
        let note = "moe_combine is left out: backend gloo has no fused operations";
        assert!(notes.iter().any(|other| other == note), "{notes:?}");
        let named = operations("moe_combine", &all(), refuses);
        let error = named.expect_err("a refusal").to_string();
        assert_eq!(error, "moe_combine: backend gloo has no fused operations");
    }
}
