//! The arguments of a kernel, and the scalars and pointers that its entries receive for them.

use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote};
use syn::{
    Attribute, Expr, FnArg, GenericArgument, Ident, ItemFn, LitInt, Pat, PathArguments, Type,
    TypeParamBound,
};

/// The first argument of a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Context {
    /// `&mut Session<impl Machine>`.
    Session,
    /// `Block<impl Machine>`.
    Block,
}

/// An argument after the first.
pub(crate) struct Argument {
    pub(crate) name: Ident,
    pub(crate) kind: Kind,
    /// True if `#[agreed]` precedes the argument.
    pub(crate) agreed: bool,
}

/// The kind of an argument.
pub(crate) enum Kind {
    /// A scalar or a raw pointer.
    Raw(Type),
    /// `In<T>`, `Out<T>` or `InOut<T>`: the type of the argument and its element.
    Buffer(Type, Type),
    /// `Window<T>`: the type of the argument and its element.
    Window(Type, Type),
    /// `Queue<T>`: the same.
    Queue(Type, Type),
    /// `Shared<T, N>`: the type of the argument and its element. No parameter of the launch.
    Shared(Type, Type),
    /// `Scratch<T>`: the type of the argument and its element.
    Scratch(Type, Type),
    /// `#[words(N)] T`.
    Words(Type, usize),
    /// `#[before(EXPRESSION)] T`: no parameter of the launch, but a value that is made before the
    /// session begins.
    Before(Type, Box<Expr>),
}

/// Returns true if the last segment of the path `ty` is `name`.
pub(crate) fn is_named(ty: &Type, name: &str) -> bool {
    let Type::Path(path) = ty else { return false };
    path.path
        .segments
        .last()
        .is_some_and(|last| last.ident == name)
}

/// A parameter of an entry.
pub(crate) struct Field {
    pub(crate) name: Ident,
    pub(crate) ty: Type,
    place: Place,
}

/// The place of a parameter in the parameter struct.
enum Place {
    /// A field, or a field of a field.
    Field(Tokens),
    /// A word of the field that holds the argument with this name, type and number of words.
    Word(Ident, Box<Type>, usize, usize),
}

impl Field {
    /// Returns the expression of the parameter's value in the struct `params`.
    pub(crate) fn value(&self, params: &Tokens) -> Tokens {
        match &self.place {
            Place::Field(path) => quote!(#params.#path),
            Place::Word(name, ty, count, index) => {
                quote!(::fusewire_device::args::to_words::<#ty, #count>(#params.#name)[#index])
            }
        }
    }

    /// Returns the expression of the parameter's offset in the struct `params`.
    pub(crate) fn offset(&self, params: &Tokens) -> Tokens {
        match &self.place {
            Place::Field(path) => quote!(::core::mem::offset_of!(#params, #path)),
            Place::Word(name, _, _, index) => {
                quote!(::core::mem::offset_of!(#params, #name) + 8 * #index)
            }
        }
    }
}

impl Argument {
    /// Returns the parameters of an entry that make up this argument.
    pub(crate) fn fields(&self) -> Vec<Field> {
        let name = &self.name;
        let field = |name: Ident, ty: Type, path: Tokens| Field {
            name,
            ty,
            place: Place::Field(path),
        };
        match &self.kind {
            Kind::Before(..) | Kind::Shared(..) => Vec::new(),
            Kind::Raw(ty) => vec![field(name.clone(), ty.clone(), quote!(#name))],
            Kind::Scratch(..) => {
                vec![field(name.clone(), syn::parse_quote!(u64), quote!(#name))]
            }
            Kind::Buffer(..) => vec![
                field(name.clone(), syn::parse_quote!(*mut u8), quote!(#name.at)),
                field(
                    format_ident!("{name}_len"),
                    syn::parse_quote!(u64),
                    quote!(#name.len),
                ),
            ],
            Kind::Window(..) | Kind::Queue(..) => vec![field(
                name.clone(),
                syn::parse_quote!(*const ::fusewire_device::window::DeviceWindow),
                quote!(#name),
            )],
            Kind::Words(ty, count) => (0..*count)
                .map(|word| Field {
                    name: format_ident!("{name}_{word}"),
                    ty: syn::parse_quote!(u64),
                    place: Place::Word(name.clone(), Box::new(ty.clone()), *count, word),
                })
                .collect(),
        }
    }

    /// Returns the type of the argument's field in the parameter struct, if it has one.
    pub(crate) fn stored(&self) -> Option<Type> {
        match &self.kind {
            Kind::Before(..) | Kind::Shared(..) => None,
            Kind::Raw(ty) | Kind::Words(ty, _) => Some(ty.clone()),
            Kind::Scratch(..) => Some(syn::parse_quote!(u64)),
            Kind::Buffer(..) => Some(syn::parse_quote!(::fusewire_device::args::RawBuffer)),
            Kind::Window(..) | Kind::Queue(..) => Some(syn::parse_quote!(
                *const ::fusewire_device::window::DeviceWindow
            )),
        }
    }

    /// Returns the statement that makes the argument with number `index` from its parameters.
    pub(crate) fn rebuild(&self, index: usize) -> Tokens {
        let name = &self.name;
        let index = index as u32;
        match &self.kind {
            Kind::Raw(_) | Kind::Before(..) => quote!(),
            Kind::Buffer(ty, _) => {
                let len = format_ident!("{name}_len");
                let made = quote!(<#ty>::new(&header_launch, &session, #index, #name, #len));
                quote! {
                    // SAFETY: the host has checked the buffer and keeps it alive.
                    let #name = unsafe { #made };
                }
            }
            Kind::Window(ty, _) | Kind::Queue(ty, _) => quote! {
                // SAFETY: the host passes a window of this communicator and keeps it alive.
                let #name = unsafe { <#ty>::new(&header_launch, &session, #index, #name) };
            },
            Kind::Scratch(ty, _) => quote! {
                // SAFETY: the host has checked that the elements fit.
                let (#name, header_scratch_end) = unsafe {
                    <#ty>::new(&header_launch, &session, #index, #name, header_scratch_end)
                };
            },
            Kind::Shared(ty, ..) => quote! {
                // SAFETY: `shared_bytes` has checked that the arrays fit.
                let (#name, header_shared_end) =
                    unsafe { <#ty>::new(&header_launch, &session, #index, header_shared_end) };
            },
            Kind::Words(ty, count) => {
                let words = (0..*count).map(|word| format_ident!("{name}_{word}"));
                quote! {
                    let #name: #ty = ::fusewire_device::args::from_words([#(#words),*]);
                }
            }
        }
    }
}

/// Splits the signature of `function` into its context and its arguments. Removes the attributes
/// of the arguments.
pub(crate) fn parse(function: &mut ItemFn) -> syn::Result<(Context, Vec<Argument>)> {
    let is_unsafe = function.sig.unsafety.is_some();
    let span = function.sig.ident.span();
    let mut inputs = function.sig.inputs.iter_mut();
    let context = match inputs.next() {
        Some(FnArg::Typed(typed)) => context(&typed.ty)?,
        Some(input @ FnArg::Receiver(_)) => {
            return Err(syn::Error::new_spanned(input, "a kernel has no self"));
        }
        None => return Err(syn::Error::new(span, FIRST)),
    };
    let mut arguments = Vec::new();
    for input in inputs {
        let FnArg::Typed(typed) = input else {
            return Err(syn::Error::new_spanned(input, "a kernel has no self"));
        };
        let Pat::Ident(pattern) = &*typed.pat else {
            return Err(syn::Error::new_spanned(
                &typed.pat,
                "an argument of a kernel has a name",
            ));
        };
        let name = pattern.ident.clone();
        let reserved = ["header", "kernel", "block", "session", "outcome"];
        if reserved.iter().any(|reserved| name == reserved)
            || name.to_string().starts_with("header_")
        {
            return Err(syn::Error::new(
                name.span(),
                "this name is reserved for the code that #[kernel] generates",
            ));
        }
        let Attributes {
            agreed,
            words,
            before,
        } = attributes(&mut typed.attrs)?;
        let kind = match before {
            Some(value) => Kind::Before((*typed.ty).clone(), Box::new(value)),
            None => kind(&typed.ty, words, context, is_unsafe)?,
        };
        let is_value = matches!(kind, Kind::Buffer(..) | Kind::Window(..))
            || matches!(&kind, Kind::Raw(ty) if !matches!(ty, Type::Ptr(_)));
        if agreed && !is_value {
            return Err(syn::Error::new(
                name.span(),
                "#[agreed] works on scalars, and on the length of In, Out, InOut and Window",
            ));
        }
        arguments.push(Argument { name, kind, agreed });
    }
    let mut names: Vec<Ident> = Vec::new();
    for field in arguments.iter().flat_map(Argument::fields) {
        if names.contains(&field.name) {
            return Err(syn::Error::new(
                span,
                format!(
                    "two parameters have the name {}: In, Out and InOut `x` have a parameter \
                     `x_len`, and the words of `x` are `x_0`, `x_1`, ..",
                    field.name
                ),
            ));
        }
        names.push(field.name);
    }
    Ok((context, arguments))
}

const NEEDS_SESSION: &str =
    "In, Out, InOut, Window, Queue, Scratch and Shared need a session, which reports errors";

const FIRST: &str = "the first argument of a kernel is `s: &mut Session<impl Machine>`, or \
     `block: Block<impl Machine>` for a kernel without communication";

fn context(ty: &Type) -> syn::Result<Context> {
    let (ty, is_reference) = match ty {
        Type::Reference(reference) if reference.mutability.is_some() => (&*reference.elem, true),
        other => (other, false),
    };
    let found = last_segment(ty).and_then(|(name, machine)| {
        let context = match (name.to_string().as_str(), is_reference) {
            ("Session", true) => Context::Session,
            ("Block", false) => Context::Block,
            _ => return None,
        };
        Some((context, machine?))
    });
    let Some((context, machine)) = found else {
        return Err(syn::Error::new_spanned(ty, FIRST));
    };
    let is_machine = matches!(machine, Type::ImplTrait(bounds) if bounds.bounds.iter().any(|bound|
        matches!(bound, TypeParamBound::Trait(bound)
            if bound.path.segments.last().is_some_and(|last| last.ident == "Machine"))));
    if is_machine {
        Ok(context)
    } else {
        Err(syn::Error::new_spanned(
            machine,
            "write `impl Machine`: a kernel is compiled for every machine",
        ))
    }
}

/// Returns the last segment of a path type, and its only generic argument.
fn last_segment(ty: &Type) -> Option<(&Ident, Option<&Type>)> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last()?;
    let argument = match &last.arguments {
        PathArguments::AngleBracketed(list) => match list.args.first() {
            Some(GenericArgument::Type(ty)) if list.args.len() == 1 => Some(ty),
            _ => None,
        },
        _ => None,
    };
    Some((&last.ident, argument))
}

/// Returns the element type of a `Shared<T, N>`.
fn shared_array(ty: &Type) -> Option<Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last()?;
    let PathArguments::AngleBracketed(list) = &last.arguments else {
        return None;
    };
    if last.ident != "Shared" || list.args.len() != 2 {
        return None;
    }
    match &list.args[0] {
        GenericArgument::Type(element) => Some(element.clone()),
        _ => None,
    }
}

/// The attributes of an argument.
struct Attributes {
    agreed: bool,
    words: Option<usize>,
    before: Option<Expr>,
}

/// Takes the attributes of `#[kernel]` out of `attributes`.
fn attributes(attributes: &mut Vec<Attribute>) -> syn::Result<Attributes> {
    let (mut agreed, mut words, mut before) = (false, None, None);
    for attribute in attributes.iter() {
        if attribute.path().is_ident("agreed") {
            attribute.meta.require_path_only()?;
            agreed = true;
        } else if attribute.path().is_ident("words") {
            let count: LitInt = attribute.parse_args()?;
            words = Some(count.base10_parse()?);
        } else if attribute.path().is_ident("before") {
            before = Some(attribute.parse_args()?);
        }
    }
    attributes.retain(|attribute| {
        ["agreed", "words", "before"]
            .iter()
            .all(|own| !attribute.path().is_ident(own))
    });
    Ok(Attributes {
        agreed,
        words,
        before,
    })
}

fn kind(ty: &Type, words: Option<usize>, context: Context, is_unsafe: bool) -> syn::Result<Kind> {
    const SCALARS: [&str; 10] = [
        "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64",
    ];
    let error = |text: &str| Err(syn::Error::new_spanned(ty, text));
    if words.is_some() && context == Context::Block {
        return error("#[words(N)] needs a kernel with a session");
    }
    if let Some(count) = words {
        return Ok(Kind::Words(ty.clone(), count));
    }
    if matches!(ty, Type::Ptr(_)) {
        return if is_unsafe {
            Ok(Kind::Raw(ty.clone()))
        } else {
            error(
                "a kernel with a raw pointer is an unsafe fn; In<T>, Out<T> and InOut<T> carry \
                 their lengths and are safe",
            )
        };
    }
    if let Some(element) = shared_array(ty) {
        return match context {
            Context::Session => Ok(Kind::Shared(ty.clone(), element)),
            Context::Block => error(NEEDS_SESSION),
        };
    }
    match last_segment(ty) {
        Some((name, None)) if SCALARS.iter().any(|scalar| name == scalar) => {
            return Ok(Kind::Raw(ty.clone()));
        }
        Some((name, Some(element))) => {
            let kind = match name.to_string().as_str() {
                "In" | "Out" | "InOut" => Some(Kind::Buffer(ty.clone(), element.clone())),
                "Window" => Some(Kind::Window(ty.clone(), element.clone())),
                "Queue" => Some(Kind::Queue(ty.clone(), element.clone())),
                "Scratch" => Some(Kind::Scratch(ty.clone(), element.clone())),
                _ => None,
            };
            match kind {
                Some(_) if context == Context::Block => {
                    return error(NEEDS_SESSION);
                }
                Some(kind) => return Ok(kind),
                None => {}
            }
        }
        _ => {}
    }
    error(
        "an argument of a kernel is In<T>, Out<T>, InOut<T>, Window<T>, Queue<T>, Scratch<T>, \
         Shared<T, N>, a scalar of fixed size (u32, f32, ..), `#[words(N)]` and a Pod struct, or a \
         raw pointer: slices, references and other structs have no single ABI on GPUs",
    )
}
