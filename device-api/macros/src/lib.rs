//! The `#[kernel]` attribute of `fusewire-device`.

use proc_macro::TokenStream;
use proc_macro2::{Span, TokenStream as Tokens};
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::{FnArg, GenericParam, Ident, ItemFn, Pat, Token, Type, parenthesized, parse_macro_input};

/// `each(T: f32 = f32, bf16 = Bf16)`: one generic parameter and its instances.
struct Instances {
    parameter: Ident,
    choices: Vec<(Ident, Type)>,
}

struct Options {
    each: Vec<Instances>,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut each = Vec::new();
        while !input.is_empty() {
            let keyword: Ident = input.parse()?;
            if keyword != "each" {
                return Err(syn::Error::new(
                    keyword.span(),
                    "expected each(PARAMETER: name = Type, ...)",
                ));
            }
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
            each.push(Instances { parameter, choices });
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(Self { each })
    }
}

/// Marks a function as a kernel: one body for NVIDIA, AMD and the CPU.
///
/// The first argument is `block: Block<impl Machine>`; the others are scalars and raw pointers.
/// The function is `unsafe` when called by hand; launching it is the host's business. For a
/// function `scale` with arguments `x` and `factor` this generates
///
/// - `ScaleParams { x, factor }`, `#[repr(C)]`;
/// - on a GPU the exported entry `scale(x, factor)`, with the arguments flattened;
/// - on the CPU native entries for several instruction sets and for several lanes a block, the
///   launchable value `SCALE: Kernel<ScaleParams>`, and `SCALE_INSTANCES: &[KernelInfo]`;
/// - in an image built with `fusewire-build build --multi-rank-grid`, instead of the GPU entry, its
///   grid form `scale__grid(parameters, blocks_per_rank)`, which runs the blocks of all ranks in
///   one launch: block `b` is block `b % blocks_per_rank` of rank `b / blocks_per_rank` and reads
///   `parameters[rank]`, a `ScaleParams` in device memory. With it tests run many ranks on one GPU
///   (their blocks are resident together) and under sanitizers. The body is the same, and must
///   query its index and the number of blocks through its `block` only. See
///   `fusewire_device::multi_rank_grid`.
///
/// `#[kernel(each(T: f32 = f32, bf16 = Bf16), each(O: sum = Sum))]` compiles a generic function
/// once for each combination, as `scale_f32_sum`, `scale_bf16_sum` and so on.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let options = parse_macro_input!(attribute as Options);
    let function = parse_macro_input!(item as ItemFn);
    expand(&options, &function)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}

fn expand(options: &Options, function: &ItemFn) -> syn::Result<Tokens> {
    let name = &function.sig.ident;
    let vis = &function.vis;
    if function.sig.unsafety.is_none() {
        return Err(syn::Error::new(
            name.span(),
            "a kernel is an unsafe fn: it works on raw pointers",
        ));
    }
    let (fields, types) = arguments(function)?;
    let params = format_ident!("{}Params", camel(&name.to_string()));
    let params_doc = format!("Parameters of the kernel [`{name}`].");
    let mut body = function.clone();
    body.attrs.push(syn::parse_quote!(#[inline(always)]));
    body.attrs
        .push(syn::parse_quote!(#[allow(clippy::too_many_arguments)]));

    for parameter in &function.sig.generics.params {
        if let GenericParam::Type(parameter) = parameter
            && !options
                .each
                .iter()
                .any(|each| each.parameter == parameter.ident)
        {
            return Err(syn::Error::new(
                parameter.ident.span(),
                "name the instances of this parameter: #[kernel(each(T: f32 = f32))]",
            ));
        }
    }

    let mut instances = vec![(name.to_string(), Vec::<Type>::new())];
    for each in &options.each {
        instances = instances
            .into_iter()
            .flat_map(|(prefix, types)| {
                each.choices.iter().map(move |(suffix, ty)| {
                    let mut types = types.clone();
                    types.push(ty.clone());
                    (format!("{prefix}_{suffix}"), types)
                })
            })
            .collect();
    }

    let module = format_ident!("{name}_native_entries");
    let list = format_ident!("{}_INSTANCES", name.to_string().to_uppercase());
    let list_doc = format!("All instances of the kernel [`{name}`].");
    let mut gpu = Tokens::new();
    let mut native = Tokens::new();
    let mut values = Tokens::new();
    let mut listed = Vec::new();
    for (instance, generics) in &instances {
        let symbol = Ident::new(instance, Span::call_site());
        let turbofish = if generics.is_empty() {
            quote!()
        } else {
            quote!(::<#(#generics),*>)
        };
        let ordinary = gpu_entry(name, &symbol, &turbofish, &fields, &types);
        let grid = grid_entry(name, &symbol, &turbofish, &params, &fields, &types);
        gpu.extend(quote! {
            #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
            ::fusewire_device::gpu_entries! { { #ordinary } { #grid } }
        });
        native.extend(native_entries(name, instance, &turbofish, &params, &fields));
        let value = format_ident!("{}", instance.to_uppercase());
        let doc = format!("The kernel [`{name}`], launchable, exported as `{instance}`.");
        let entries = ["baseline", "avx2", "avx512", "lanes"]
            .map(|variant| format_ident!("{instance}__{variant}"));
        let [baseline, avx2, avx512, lanes] = &entries;
        values.extend(quote! {
            #[doc = #doc]
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            #vis const #value: ::fusewire_device::native::Kernel<#params> =
                // SAFETY: the entries read exactly this parameter struct.
                unsafe {
                    ::fusewire_device::native::Kernel::new(::fusewire_device::native::KernelInfo {
                        name: #instance,
                        module: ::core::module_path!(),
                        params: <#params>::FIELDS,
                        native: ::fusewire_device::native::NativeEntries {
                            baseline: #module::#baseline,
                            avx2: #module::#avx2,
                            avx512: #module::#avx512,
                            lanes: #module::#lanes,
                        },
                    })
                };
        });
        listed.push(quote!(*#value.info()));
    }

    Ok(quote! {
        #body

        #[doc = #params_doc]
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        #[allow(missing_docs)] // the fields are the kernel's arguments
        #vis struct #params {
            #(pub #fields: #types,)*
        }

        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        impl #params {
            /// Name, offset and size of every argument, for the check against a GPU image.
            pub const FIELDS: &'static [::fusewire_device::native::ParamField] = &[
                #(::fusewire_device::native::ParamField {
                    name: stringify!(#fields),
                    offset: ::core::mem::offset_of!(#params, #fields),
                    size: ::core::mem::size_of::<#types>(),
                },)*
            ];
        }

        // A table of these is written by the host and read by a GPU.
        #[cfg(target_pointer_width = "64")]
        const _: () = assert!(
            ::fusewire_device::multi_rank_grid::is_natural(
                &[#((
                    ::core::mem::offset_of!(#params, #fields),
                    ::core::mem::size_of::<#types>(),
                ),)*],
                ::core::mem::size_of::<#params>(),
            ),
            "the parameter struct does not lie as scalars of natural alignment do",
        );

        #gpu

        #values

        #[doc = #list_doc]
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        #vis const #list: &[::fusewire_device::native::KernelInfo] = &[#(#listed),*];

        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        #[allow(non_snake_case, clippy::undocumented_unsafe_blocks, unreachable_pub)]
        mod #module {
            #[allow(unused_imports)]
            use super::*;
            #native
        }
    })
}

/// Names and types of the arguments behind the block.
fn arguments(function: &ItemFn) -> syn::Result<(Vec<Ident>, Vec<Type>)> {
    let mut inputs = function.sig.inputs.iter();
    if !matches!(inputs.next(), Some(FnArg::Typed(_))) {
        return Err(syn::Error::new(
            function.sig.ident.span(),
            "the first argument of a kernel is block: Block<impl Machine>",
        ));
    }
    let mut fields = Vec::new();
    let mut types = Vec::new();
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
        check_type(&typed.ty)?;
        fields.push(pattern.ident.clone());
        types.push((*typed.ty).clone());
    }
    Ok((fields, types))
}

/// Scalars and raw pointers only: these have one ABI on every GPU.
fn check_type(ty: &Type) -> syn::Result<()> {
    const SCALARS: [&str; 10] = [
        "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64",
    ];
    let fits = match ty {
        Type::Ptr(_) => true,
        Type::Path(path) => path
            .path
            .get_ident()
            .is_some_and(|ident| SCALARS.iter().any(|scalar| ident == scalar)),
        _ => false,
    };
    if fits {
        Ok(())
    } else {
        Err(syn::Error::new_spanned(
            ty,
            "an argument of a kernel is a scalar of fixed size or a raw pointer: structs, slices \
                and \
             references have no single ABI on GPUs",
        ))
    }
}

fn gpu_entry(
    name: &Ident,
    symbol: &Ident,
    turbofish: &Tokens,
    fields: &[Ident],
    types: &[Type],
) -> Tokens {
    let wrapper = format_ident!("{symbol}__entry");
    let symbol_name = symbol.to_string();
    quote! {
        #[unsafe(export_name = #symbol_name)]
        #[doc(hidden)]
        #[allow(missing_docs, non_snake_case, clippy::missing_safety_doc)]
        pub unsafe extern "gpu-kernel" fn #wrapper(#(#fields: #types),*) {
            unsafe {
                #name #turbofish(
                    ::fusewire_device::Block::new(::fusewire_device::group::Gpu),
                    #(#fields),*
                )
            }
        }
    }
}

/// Generates the entry of the grid form, for all ranks.
fn grid_entry(
    name: &Ident,
    symbol: &Ident,
    turbofish: &Tokens,
    params: &Ident,
    fields: &[Ident],
    types: &[Type],
) -> Tokens {
    let wrapper = format_ident!("{symbol}__grid_entry");
    let symbol_name = format!("{symbol}__grid");
    let arguments = fields.iter().zip(types).map(|(field, ty)| match ty {
        Type::Ptr(pointer) => {
            let read = if pointer.mutability.is_some() {
                quote!(pointer_mut)
            } else {
                quote!(pointer)
            };
            quote!(::fusewire_device::multi_rank_grid::#read(&raw const (*own).#field))
        }
        _ => quote!((*own).#field),
    });
    quote! {
        #[unsafe(export_name = #symbol_name)]
        #[doc(hidden)]
        #[allow(missing_docs, non_snake_case, private_interfaces, clippy::missing_safety_doc)]
        pub unsafe extern "gpu-kernel" fn #wrapper(
            parameters: *const #params,
            blocks_per_rank: u32,
        ) {
            unsafe {
                let (block, own) =
                    ::fusewire_device::multi_rank_grid::enter(parameters, blocks_per_rank);
                #name #turbofish(block, #(#arguments),*)
            }
        }
    }
}

fn native_entries(
    name: &Ident,
    instance: &str,
    turbofish: &Tokens,
    params: &Ident,
    fields: &[Ident],
) -> Tokens {
    let call = |machine: Tokens| {
        quote! {
            unsafe {
                let params = &*params.cast::<super::#params>();
                let machine = ::fusewire_device::group::#machine::new(context);
                super::#name #turbofish(
                    ::fusewire_device::Block::new(machine),
                    #(params.#fields),*
                )
            }
        }
    };
    let single = |isa: u32| {
        let body = call(quote!(Single::<#isa>));
        quote!({ #body })
    };
    let several = call(quote!(Lanes));
    let arguments = quote! {
        context: *const ::fusewire_device::native::LaneContext,
        params: *const u8
    };
    let variant = |suffix: &str, features: Tokens, body: &Tokens| {
        let symbol = format_ident!("{instance}__{suffix}");
        quote! {
            #features
            #[unsafe(no_mangle)]
            pub unsafe fn #symbol(#arguments) {
                ::fusewire_device::native_body! { context, params, #body }
            }
        }
    };
    let several = quote!({ #several });
    let x86 = |features: &str| {
        quote! { #[cfg_attr(target_arch = "x86_64", target_feature(enable = #features))] }
    };
    [
        variant("baseline", quote!(), &single(0)),
        variant("avx2", x86("avx2,fma,f16c,bmi1,bmi2"), &single(2)),
        variant(
            "avx512",
            x86("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2"),
            &single(3),
        ),
        variant("lanes", quote!(), &several),
    ]
    .into_iter()
    .collect()
}

fn camel(name: &str) -> String {
    name.split('_')
        .map(|part| {
            let mut chars = part.chars();
            chars.next().map_or_else(String::new, |first| {
                first.to_uppercase().collect::<String>() + chars.as_str()
            })
        })
        .collect()
}
