//! The arguments of the attribute: instances, launch contract, texts of failures.

use syn::parse::{Parse, ParseStream};
use syn::{Expr, Ident, LitInt, LitStr, Path, Token, Type, parenthesized};

/// `each(T: f32 = f32, bf16 = Bf16)`: a generic parameter and its instances.
pub(crate) struct Instances {
    pub(crate) parameter: Ident,
    pub(crate) choices: Vec<(Ident, Type)>,
}

/// The parsed attribute.
#[derive(Default)]
pub(crate) struct Options {
    pub(crate) each: Vec<Instances>,
    pub(crate) block: u32,
    pub(crate) blocks: u32,
    pub(crate) shared: u32,
    pub(crate) signals: u32,
    pub(crate) failures: Vec<(Path, LitStr)>,
    /// The parameter struct of another kernel, which this one shares.
    pub(crate) params: Option<Path>,
    /// True if launches may be dependent.
    pub(crate) dependent: bool,
    /// True if all blocks of a launch must run at the same time.
    pub(crate) grid: bool,
    /// Code that every lane of a block runs after a failure.
    pub(crate) on_failure: Option<Expr>,
}

const EXPECTED: &str = "expected each(PARAMETER: name = Type, ...), block = N, blocks = N, \
     shared = BYTES, signals = N, params = STRUCT, dependent, grid, on_failure(EXPRESSION) \
     or failures(CODE = \"text\", ...)";

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut options = Self::default();
        while !input.is_empty() {
            let keyword: Ident = input.parse()?;
            match keyword.to_string().as_str() {
                "each" => options.each.push(instances(input)?),
                "params" => {
                    input.parse::<Token![=]>()?;
                    options.params = Some(input.parse()?);
                }
                "dependent" => options.dependent = true,
                "grid" => options.grid = true,
                "on_failure" => {
                    let content;
                    parenthesized!(content in input);
                    options.on_failure = Some(content.parse()?);
                }
                "failures" => options.failures = failures(input)?,
                "block" => options.block = number(input)?,
                "blocks" => options.blocks = number(input)?,
                "shared" => options.shared = number(input)?,
                "signals" => options.signals = number(input)?,
                _ => return Err(syn::Error::new(keyword.span(), EXPECTED)),
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(options)
    }
}

fn number(input: ParseStream<'_>) -> syn::Result<u32> {
    input.parse::<Token![=]>()?;
    let literal: LitInt = input.parse()?;
    match literal.base10_parse()? {
        0 => Err(syn::Error::new(literal.span(), "expected at least 1")),
        value => Ok(value),
    }
}

fn instances(input: ParseStream<'_>) -> syn::Result<Instances> {
    let content;
    parenthesized!(content in input);
    let parameter = content.parse()?;
    content.parse::<Token![:]>()?;
    let mut choices = Vec::new();
    while !content.is_empty() {
        let name = content.parse()?;
        content.parse::<Token![=]>()?;
        choices.push((name, content.parse()?));
        if !content.is_empty() {
            content.parse::<Token![,]>()?;
        }
    }
    Ok(Instances { parameter, choices })
}

fn failures(input: ParseStream<'_>) -> syn::Result<Vec<(Path, LitStr)>> {
    let content;
    parenthesized!(content in input);
    let mut texts = Vec::new();
    while !content.is_empty() {
        let code = content.parse()?;
        content.parse::<Token![=]>()?;
        texts.push((code, content.parse()?));
        if !content.is_empty() {
            content.parse::<Token![,]>()?;
        }
    }
    Ok(texts)
}
