//! Reduces source text to the parts that affect an image.
//!
//! Two texts with the same tokens produce the same image. The tokens exclude comments,
//! documentation, lint levels, white space, trailing commas, and items that are compiled only for
//! tests or only for CPUs.

use core::fmt::Write as _;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::punctuated::Punctuated;
use syn::{Attribute, ImplItem, Item, Meta, Token, TraitItem};

/// Values of `target_arch` for which images are made.
const ARCHITECTURES: [&str; 2] = ["nvptx64", "amdgpu"];

/// `cfg` conditions that are always false when an image is compiled.
const NEVER: [&str; 7] = [
    "debug_assertions",
    "loom",
    "miri",
    "shuttle",
    "test",
    "tsan",
    "unix",
];

/// Attributes that generate no code.
const SILENT: [&str; 6] = ["allow", "deny", "doc", "expect", "forbid", "warn"];

/// The tokens of a Rust file.
#[derive(Debug, Default)]
pub(crate) struct RustTokens {
    /// One token per line.
    pub(crate) text: String,
    /// Modules in separate files that are in no image, written as `module` or `outer/module`.
    pub(crate) absent: Vec<String>,
}

/// Reduces a Rust file to its tokens. If the text cannot be parsed, returns it unchanged.
///
/// The tokens exclude items whose `cfg` is false for both GPU architectures. The code of a
/// procedural macro is compiled for the host but filtered in the same way, so it must not depend on
/// `target_arch`.
pub(crate) fn rust(text: &str) -> RustTokens {
    let Ok(mut file) = syn::parse_file(text) else {
        return RustTokens {
            text: text.to_owned(),
            absent: Vec::new(),
        };
    };
    let mut tokens = RustTokens::default();
    retain_items(&mut file.items, "", &mut tokens.absent);
    write_tokens(file.into_token_stream(), &mut tokens.text);
    tokens
}

/// Removes comments and indentation from LLVM IR.
pub(crate) fn llvm(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let mut quoted = false;
        let end = line.find(|c| {
            quoted ^= c == '"';
            c == ';' && !quoted
        });
        let code = line[..end.unwrap_or(line.len())].trim();
        if !code.is_empty() {
            out.push_str(code);
            out.push('\n');
        }
    }
    out
}

/// Returns `true` if a condition such as `cfg(not(target_arch = "nvptx64"))` is false for every
/// GPU.
pub(crate) fn excludes_gpus(condition: &str) -> bool {
    syn::parse_str::<Meta>(condition).is_ok_and(|meta| match &meta {
        Meta::List(list) if list.path.is_ident("cfg") => list
            .parse_args()
            .is_ok_and(|inner| is_false_for_gpus(&inner)),
        _ => false,
    })
}

fn retain_items(items: &mut Vec<Item>, outer: &str, absent: &mut Vec<String>) {
    items.retain_mut(|item| {
        let kept = !attributes(item).iter().any(is_false);
        match item {
            Item::Mod(module) => {
                let name = format!("{outer}{}", module.ident);
                match &mut module.content {
                    Some((_, inner)) if kept => {
                        retain_items(inner, &format!("{name}/"), absent);
                    }
                    None if !kept => absent.push(name),
                    _ => {}
                }
            }
            Item::Impl(block) => block.items.retain(|item| {
                let attributes = match item {
                    ImplItem::Const(it) => &it.attrs,
                    ImplItem::Fn(it) => &it.attrs,
                    ImplItem::Macro(it) => &it.attrs,
                    ImplItem::Type(it) => &it.attrs,
                    _ => return true,
                };
                !attributes.iter().any(is_false)
            }),
            Item::Trait(block) => block.items.retain(|item| {
                let attributes = match item {
                    TraitItem::Const(it) => &it.attrs,
                    TraitItem::Fn(it) => &it.attrs,
                    TraitItem::Macro(it) => &it.attrs,
                    TraitItem::Type(it) => &it.attrs,
                    _ => return true,
                };
                !attributes.iter().any(is_false)
            }),
            _ => {}
        }
        kept
    });
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(it) => &it.attrs,
        Item::Enum(it) => &it.attrs,
        Item::ExternCrate(it) => &it.attrs,
        Item::Fn(it) => &it.attrs,
        Item::ForeignMod(it) => &it.attrs,
        Item::Impl(it) => &it.attrs,
        Item::Macro(it) => &it.attrs,
        Item::Mod(it) => &it.attrs,
        Item::Static(it) => &it.attrs,
        Item::Struct(it) => &it.attrs,
        Item::Trait(it) => &it.attrs,
        Item::TraitAlias(it) => &it.attrs,
        Item::Type(it) => &it.attrs,
        Item::Union(it) => &it.attrs,
        Item::Use(it) => &it.attrs,
        _ => &[],
    }
}

fn is_false(attribute: &Attribute) -> bool {
    attribute.path().is_ident("cfg")
        && attribute
            .parse_args()
            .is_ok_and(|condition| is_false_for_gpus(&condition))
}

fn is_false_for_gpus(condition: &Meta) -> bool {
    ARCHITECTURES
        .iter()
        .all(|architecture| holds(condition, architecture) == Some(false))
}

/// Evaluates a condition for an architecture. Returns `None` if the value of the condition depends
/// on anything other than the architecture and [`NEVER`].
fn holds(condition: &Meta, architecture: &str) -> Option<bool> {
    match condition {
        Meta::Path(path) => NEVER
            .iter()
            .any(|name| path.is_ident(name))
            .then_some(false),
        Meta::NameValue(pair) if pair.path.is_ident("target_arch") => {
            let value = pair.value.to_token_stream().to_string();
            Some(value.trim_matches('"') == architecture)
        }
        Meta::NameValue(_) => None,
        Meta::List(list) => {
            let inner = list
                .parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)
                .ok()?;
            let mut values = inner.iter().map(|inner| holds(inner, architecture));
            if list.path.is_ident("not") {
                return values.next()?.map(|value| !value);
            }
            // One false operand makes `all` false, and one true operand makes `any` true.
            let decisive = list.path.is_ident("any");
            let values: Vec<Option<bool>> = values.collect();
            if values.contains(&Some(decisive)) {
                Some(decisive)
            } else if values.contains(&None) {
                None
            } else {
                Some(!decisive)
            }
        }
    }
}

fn write_tokens(tokens: TokenStream, out: &mut String) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                let _ = writeln!(out, "{open}");
                write_tokens(group.stream(), out);
                let _ = writeln!(out, "{close}");
            }
            TokenTree::Punct(mark) if mark.as_char() == ',' && tokens.peek().is_none() => {}
            TokenTree::Punct(mark) if mark.as_char() == '#' => {
                let mut ahead = tokens.clone();
                let inner =
                    matches!(ahead.peek(), Some(TokenTree::Punct(mark)) if mark.as_char() == '!');
                if inner {
                    ahead.next();
                }
                if ahead.next().is_some_and(|token| is_silent(&token)) {
                    tokens.nth(usize::from(inner));
                } else {
                    out.push_str("#\n");
                }
            }
            other => {
                let _ = writeln!(out, "{other}");
            }
        }
    }
}

fn is_silent(token: &TokenTree) -> bool {
    let TokenTree::Group(group) = token else {
        return false;
    };
    let first = group.stream().into_iter().next();
    group.delimiter() == Delimiter::Bracket
        && first.is_some_and(|first| SILENT.contains(&first.to_string().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "\
//! Kernels.
#![no_std]

/// Adds.
#[inline(always)]
pub fn add(a: u32, b: u32) -> u32 {
    // The sum.
    a.wrapping_add(b)
}
";

    fn text(source: &str) -> String {
        rust(source).text
    }

    #[test]
    fn comments_and_layout_do_not_count() {
        let reformatted = "\
//! Other words.
#![no_std]
#![allow(missing_docs)]
/* a comment */
#[inline( always )]
/// More
/// words.
pub fn add(
    a: u32,
    b: u32,
) -> u32 { a . wrapping_add(b) /* the sum */ }
";
        assert_eq!(text(KERNEL), text(reformatted));
    }

    #[test]
    fn every_token_counts() {
        for (from, to) in [
            ("wrapping_add", "wrapping_sub"),
            ("a: u32", "a: u64"),
            ("always", "never"),
            ("#![no_std]", ""),
            ("(b)", "(b + 1)"),
        ] {
            let changed = KERNEL.replacen(from, to, 1);
            assert_ne!(changed, KERNEL);
            assert_ne!(text(KERNEL), text(&changed), "{from}");
        }
        assert_ne!(
            text("fn f() { g(\"a b\") }"),
            text("fn f() { g(\"a  b\") }")
        );
    }

    #[test]
    fn items_for_tests_and_cpus_do_not_count() {
        let more = format!(
            "{KERNEL}\
             #[cfg(test)]\nmod tests;\n\
             #[cfg(all(test, feature = \"x\"))]\nfn helper() {{}}\n\
             #[cfg(not(any(target_arch = \"nvptx64\", target_arch = \"amdgpu\")))]\n\
             pub static KERNELS: &[u32] = &[];\n"
        );
        let tokens = rust(&more);
        assert_eq!(text(KERNEL), tokens.text);
        assert_eq!(tokens.absent, ["tests"]);
        for condition in [
            "target_arch = \"amdgpu\"",
            "not(target_arch = \"nvptx64\")",
            "not(test)",
            "feature = \"x\"",
            "any(test, feature = \"x\")",
            "target_feature = \"sm_90\"",
        ] {
            let more = format!("{KERNEL}#[cfg({condition})]\nfn helper() {{}}\n");
            assert_ne!(text(KERNEL), text(&more), "{condition}");
        }
    }

    #[test]
    fn modules_in_separate_files_are_named_by_their_path() {
        let tokens = rust("mod a { #[cfg(test)] mod b; mod c; } #[cfg(loom)] mod d;");
        assert_eq!(tokens.absent, ["a/b", "d"]);
    }

    #[test]
    fn conditions_of_dependencies() {
        assert!(excludes_gpus(
            "cfg(not(any(target_arch = \"nvptx64\", target_arch = \"amdgpu\")))"
        ));
        assert!(excludes_gpus("cfg(loom)"));
        assert!(!excludes_gpus("cfg(target_arch = \"nvptx64\")"));
        assert!(!excludes_gpus("x86_64-unknown-linux-gnu"));
    }

    #[test]
    fn comments_of_llvm_do_not_count() {
        let plain = "define void @f() {\ncall void asm \"a; b\", \"\"()\n}\n";
        let other = "; a shim\n\ndefine void @f() { ; f\n  call void asm \"a; b\", \"\"()\n}\n";
        assert_eq!(llvm(plain), llvm(other));
        assert_ne!(llvm(plain), llvm(&plain.replace("a; b", "a; c")));
    }
}
