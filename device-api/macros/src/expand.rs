//! From a kernel to its entries, its parameter structs and its descriptions.

use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote};
use syn::{
    GenericArgument, GenericParam, Generics, Ident, ItemFn, PathArguments, ReturnType, Type,
    TypeParamBound, Visibility,
};

use crate::arguments::{self, Argument, Context, Field, Kind};
use crate::options::Options;

/// A kernel, as the generators below need it.
struct Kernel<'a> {
    options: &'a Options,
    name: Ident,
    vis: Visibility,
    generics: Generics,
    is_unsafe: bool,
    context: Context,
    arguments: Vec<Argument>,
    /// The function that entries call.
    launch: Ident,
    /// The parameter struct.
    params: Tokens,
}

/// A compiled instance of a kernel: its name and the types of the generic parameters.
struct Instance {
    name: String,
    types: Vec<Type>,
}

pub(crate) fn expand(options: &Options, mut function: ItemFn) -> syn::Result<Tokens> {
    let (context, arguments) = arguments::parse(&mut function)?;
    check(options, &function, context)?;
    let name = function.sig.ident.clone();
    let kernel = Kernel {
        options,
        vis: function.vis.clone(),
        generics: function.sig.generics.clone(),
        is_unsafe: function.sig.unsafety.is_some(),
        context,
        arguments,
        launch: match context {
            Context::Session => format_ident!("{name}__launch"),
            Context::Block => name.clone(),
        },
        params: match &options.params {
            Some(path) => quote!(#path),
            None => {
                let params = format_ident!("{}Params", camel(&name.to_string()));
                quote!(#params)
            }
        },
        name,
    };
    function.attrs.push(syn::parse_quote!(#[inline(always)]));
    function
        .attrs
        .push(syn::parse_quote!(#[allow(clippy::too_many_arguments)]));

    let instances = kernel.instances();
    let module = format_ident!("{}_native_entries", kernel.name);
    let mut gpu = Tokens::new();
    let mut native = Tokens::new();
    let mut values = Tokens::new();
    for instance in &instances {
        let ordinary = kernel.gpu_entry(instance);
        let grid = kernel.grid_entry(instance);
        gpu.extend(quote! {
            #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
            ::fusewire_device::gpu_entries! { { #ordinary } { #grid } }
        });
        native.extend(kernel.native_entries(instance));
        values.extend(kernel.value(instance, &module));
    }
    let launch = kernel.launch_function();
    let params = match &options.params {
        None => kernel.params_struct(),
        Some(_) => kernel.same_params(),
    };
    let select = kernel.select(&instances);
    let typed = kernel.typed_struct();
    let list = kernel.list(&instances);
    Ok(quote! {
        #function
        #launch
        #params
        #select
        #gpu
        #values
        #list
        #typed

        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        #[allow(non_snake_case, clippy::undocumented_unsafe_blocks, unreachable_pub)]
        mod #module {
            #[allow(unused_imports)]
            use super::*;
            #native
        }
    })
}

const RETURNS: &str = "a kernel with a session returns `Result<(), Aborted>`";

/// Returns true for `Result<(), Aborted>`, by any path.
fn is_result(ty: &Type) -> bool {
    let Type::Path(path) = ty else { return false };
    let Some(last) = path.path.segments.last() else {
        return false;
    };
    let PathArguments::AngleBracketed(list) = &last.arguments else {
        return false;
    };
    let mut arguments = list.args.iter();
    let (Some(GenericArgument::Type(value)), Some(GenericArgument::Type(error)), None) =
        (arguments.next(), arguments.next(), arguments.next())
    else {
        return false;
    };
    let is_unit = matches!(value, Type::Tuple(tuple) if tuple.elems.is_empty());
    let is_aborted = matches!(error, Type::Path(path)
        if path.path.segments.last().is_some_and(|last| last.ident == "Aborted"));
    last.ident == "Result" && is_unit && is_aborted
}

/// Checks the signature except for the arguments.
fn check(options: &Options, function: &ItemFn, context: Context) -> syn::Result<()> {
    let signature = &function.sig;
    let span = signature.ident.span();
    for parameter in &signature.generics.params {
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
    for (index, each) in options.each.iter().enumerate() {
        let is_parameter = signature
            .generics
            .type_params()
            .any(|parameter| parameter.ident == each.parameter);
        let before = &options.each[..index];
        if !is_parameter || before.iter().any(|other| other.parameter == each.parameter) {
            return Err(syn::Error::new(
                each.parameter.span(),
                "each(..) names each type parameter of the function once",
            ));
        }
    }
    if !options.block.is_multiple_of(64) || options.block > 512 {
        return Err(syn::Error::new(
            span,
            "`block` is a multiple of 64, up to 512: blocks consist of whole warps and waves",
        ));
    }
    match (context, &signature.output) {
        (Context::Session, ReturnType::Default) => Err(syn::Error::new(span, RETURNS)),
        (Context::Session, ReturnType::Type(_, ty)) if !is_result(ty) => {
            Err(syn::Error::new_spanned(ty, RETURNS))
        }
        (Context::Block, ReturnType::Type(..)) => Err(syn::Error::new_spanned(
            &signature.output,
            "a kernel without a session returns nothing",
        )),
        (Context::Block, _) if signature.unsafety.is_none() => Err(syn::Error::new(
            span,
            "a kernel without a session is an unsafe fn: it works on raw pointers",
        )),
        (Context::Block, _) if !options.failures.is_empty() || options.signals != 0 => Err(
            syn::Error::new(span, "`failures` and `signals` need a session"),
        ),
        _ => Ok(()),
    }
}

impl Kernel<'_> {
    fn instances(&self) -> Vec<Instance> {
        let mut instances = vec![Instance {
            name: self.name.to_string(),
            types: Vec::new(),
        }];
        // In the order of the generic parameters, which a turbofish follows.
        let each = self.generics.type_params().filter_map(|parameter| {
            let mut each = self.options.each.iter();
            each.find(|each| each.parameter == parameter.ident)
        });
        for each in each {
            instances = instances
                .iter()
                .flat_map(|before| {
                    each.choices.iter().map(|(suffix, ty)| {
                        let mut types = before.types.clone();
                        types.push(ty.clone());
                        Instance {
                            name: format!("{}_{suffix}", before.name),
                            types,
                        }
                    })
                })
                .collect();
        }
        instances
    }

    /// Parameters of an entry, without those of the session.
    fn fields(&self) -> Vec<Field> {
        self.arguments.iter().flat_map(Argument::fields).collect()
    }

    fn has_session(&self) -> bool {
        self.context == Context::Session
    }

    /// Returns the types of the arrays in shared memory, and of their elements.
    fn arrays(&self) -> impl Iterator<Item = (&Type, &Type)> {
        self.arguments
            .iter()
            .filter_map(|argument| match &argument.kind {
                Kind::Shared(ty, element) => Some((ty, element)),
                _ => None,
            })
    }

    /// Names and types of the session's parameters of an entry.
    fn header(&self) -> Vec<(Ident, Ident, Type)> {
        if !self.has_session() {
            return Vec::new();
        }
        let constants: Type = syn::parse_quote!(*const ::fusewire_device::layout::CommConst);
        let word: Type = syn::parse_quote!(u64);
        [
            ("constants", constants),
            ("call", word.clone()),
            ("count", word.clone()),
            ("timeout_ns", word),
        ]
        .map(|(name, ty)| (format_ident!("{name}"), format_ident!("header_{name}"), ty))
        .to_vec()
    }

    /// The turbofish of a call of an instance.
    fn turbofish(&self, instance: &Instance) -> Tokens {
        let types = &instance.types;
        match (types.is_empty(), self.has_session()) {
            (true, _) => quote!(),
            (false, true) => quote!(::<#(#types,)* _>),
            (false, false) => quote!(::<#(#types),*>),
        }
    }

    /// The function that begins the session, calls the kernel and ends the session.
    fn launch_function(&self) -> Tokens {
        if !self.has_session() {
            return Tokens::new();
        }
        let (name, launch, vis) = (&self.name, &self.launch, &self.vis);
        let mut generics = self.generics.clone();
        generics
            .params
            .push(syn::parse_quote!(FusewireMachine: ::fusewire_device::Machine));
        let (parameters, _, clause) = generics.split_for_impl();
        let header = self.header();
        let (names, types): (Vec<_>, Vec<_>) =
            header.iter().map(|(_, name, ty)| (name, ty)).unzip();
        let fields = self.fields();
        let (field_names, field_types): (Vec<_>, Vec<_>) =
            fields.iter().map(|field| (&field.name, &field.ty)).unzip();
        let has_windows = self
            .arguments
            .iter()
            .any(|argument| matches!(argument.kind, Kind::Window(..) | Kind::Queue(..)))
            .then(|| quote!(session.declare_windows();));
        let is_grid = self.options.grid.then(|| quote!(session.declare_grid();));
        let arrays: Vec<&Type> = self.arrays().map(|(ty, _)| ty).collect();
        let shared = self.options.shared;
        let shared = (!arrays.is_empty()).then(|| {
            quote! {
                const {
                    ::fusewire_device::args::shared_bytes(#shared, &[#(<#arrays>::SHAPE),*])
                };
                let header_shared_end: usize = #shared as usize;
            }
        });
        let has_scratch = |argument: &Argument| matches!(argument.kind, Kind::Scratch(..));
        let scratch = self
            .arguments
            .iter()
            .any(has_scratch)
            .then(|| quote!(let header_scratch_end = 0u64;));
        let rebuilt = self
            .arguments
            .iter()
            .filter(|argument| !matches!(argument.kind, Kind::Before(..)))
            .enumerate()
            .map(|(index, argument)| argument.rebuild(index));
        let passed = self.arguments.iter().map(|argument| &argument.name);
        let (run, params) = (format_ident!("{name}__run"), &self.params);
        let field_values = fields.iter().map(|field| field.value(&quote!(params)));
        let inner = header.iter().map(|(name, ..)| name);
        let own: Vec<&Ident> = self
            .generics
            .type_params()
            .map(|parameter| &parameter.ident)
            .collect();
        let turbofish = if own.is_empty() {
            quote!()
        } else {
            quote!(::<#(#own),*>)
        };
        let call = quote!(#name #turbofish(&mut session, #(#passed),*));
        let call = if self.is_unsafe {
            quote!(unsafe { #call })
        } else {
            call
        };
        let before = self.arguments.iter().filter_map(|argument| {
            let name = &argument.name;
            match &argument.kind {
                Kind::Before(ty, value) => Some(quote!(let #name: #ty = #value;)),
                _ => None,
            }
        });
        let (wait, allow) = if self.options.dependent {
            (
                quote!(::fusewire_device::arch::await_dependency();),
                quote!(::fusewire_device::arch::allow_dependents();),
            )
        } else {
            (quote!(), quote!())
        };
        let on_failure = &self.options.on_failure;
        let finish = match on_failure {
            Some(code) => quote! {
                if unsafe { session.finish(outcome) }.is_err() {
                    #code;
                }
            },
            None => quote!(let _ = unsafe { session.finish(outcome) };),
        };
        quote! {
            // For native entries and models: the parameters by name.
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            #[doc(hidden)]
            #[inline(always)]
            #[allow(
                non_snake_case,
                clippy::missing_safety_doc,
                clippy::undocumented_unsafe_blocks
            )]
            #vis unsafe fn #run #parameters (
                block: ::fusewire_device::Block<FusewireMachine>,
                params: &#params,
            ) #clause {
                unsafe {
                    #launch::<#(#own,)* _>(
                        block,
                        #(params.header.#inner,)*
                        #(#field_values,)*
                    )
                }
            }

            #[doc(hidden)]
            #[inline(always)]
            #[deny(unsafe_op_in_unsafe_fn)]
            #[allow(
                non_snake_case,
                clippy::too_many_arguments,
                clippy::missing_safety_doc,
                clippy::undocumented_unsafe_blocks,
                clippy::multiple_unsafe_ops_per_block
            )]
            unsafe fn #launch #parameters (
                block: ::fusewire_device::Block<FusewireMachine>,
                #(#names: #types,)*
                #(#field_names: #field_types,)*
            ) #clause {
                #wait
                let header_approach = unsafe {
                    ::fusewire_device::session::Session::approach(block, header_constants)
                };
                #(#before)*
                let session = unsafe {
                    ::fusewire_device::session::Session::begin_from(
                        header_approach,
                        block,
                        #(#names),*
                    )
                };
                let ::core::option::Option::Some(mut session) = session else {
                    #on_failure;
                    return;
                };
                #allow
                #has_windows
                #is_grid
                let outcome: ::core::result::Result<(), ::fusewire_device::session::Aborted> = {
                    #shared
                    #scratch
                    let header_launch = ::fusewire_device::args::LaunchScope::begin();
                    let _ = &header_launch;
                    #(#rebuilt)*
                    #call
                };
                #finish
            }
        }
    }

    /// The assertion that another kernel's parameter struct is that of this one, too.
    fn same_params(&self) -> Tokens {
        let params = &self.params;
        let header = self.header();
        let header = header.iter().map(|(name, _, ty)| (name, ty));
        let fields = self.fields();
        let fields = fields.iter().map(|field| (&field.name, &field.ty));
        let (names, types): (Vec<_>, Vec<_>) = header.chain(fields).unzip();
        quote! {
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            const _: () = assert!(
                ::fusewire_device::native::has_fields(
                    <#params>::FIELDS,
                    &[#((stringify!(#names), ::core::mem::size_of::<#types>()),)*],
                ),
                "the parameter struct that `params` names has other fields than this kernel",
            );
        }
    }

    /// The parameter struct and its list of fields.
    fn params_struct(&self) -> Tokens {
        let (name, params, vis) = (&self.name, &self.params, &self.vis);
        let doc = format!("Parameters of the kernel [`{name}`], as its entries receive them.");
        let (stored, stored_types): (Vec<_>, Vec<_>) = self
            .arguments
            .iter()
            .filter_map(|argument| Some((&argument.name, argument.stored()?)))
            .unzip();
        let fields = self.fields();
        let (names, types): (Vec<_>, Vec<_>) =
            fields.iter().map(|field| (&field.name, &field.ty)).unzip();
        let offsets: Vec<Tokens> = fields.iter().map(|field| field.offset(params)).collect();
        let header = self.has_session().then(|| {
            quote! {
                /// The parameters of the session.
                pub header: ::fusewire_device::layout::LaunchHeader,
            }
        });
        let (inner, _): (Vec<_>, Vec<_>) = self
            .header()
            .into_iter()
            .map(|(name, _, ty)| (name, ty))
            .unzip();
        let inner_types: Vec<Type> = self.header().into_iter().map(|(_, _, ty)| ty).collect();
        quote! {
            #[doc = #doc]
            #[derive(Clone, Copy, Debug)]
            #[repr(C)]
            #[allow(missing_docs)] // the fields are the kernel's arguments
            #vis struct #params {
                #header
                #(pub #stored: #stored_types,)*
            }

            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            impl #params {
                /// Name, offset and size of every parameter, for the check against a GPU image.
                pub const FIELDS: &'static [::fusewire_device::native::ParamField] = &[
                    #(::fusewire_device::native::ParamField {
                        name: stringify!(#inner),
                        offset: ::core::mem::offset_of!(#params, header.#inner),
                        size: ::core::mem::size_of::<#inner_types>(),
                    },)*
                    #(::fusewire_device::native::ParamField {
                        name: stringify!(#names),
                        offset: #offsets,
                        size: ::core::mem::size_of::<#types>(),
                    },)*
                ];
            }

            // A table of these is written by the host and read by a GPU.
            #[cfg(target_pointer_width = "64")]
            const _: () = assert!(
                ::fusewire_device::multi_rank_grid::is_natural(
                    &[
                        #((
                            ::core::mem::offset_of!(#params, header.#inner),
                            ::core::mem::size_of::<#inner_types>(),
                        ),)*
                        #((
                            #offsets,
                            ::core::mem::size_of::<#types>(),
                        ),)*
                    ],
                    ::core::mem::size_of::<#params>(),
                ),
                "the parameter struct does not lie as scalars of natural alignment do",
            );
        }
    }

    /// The function that finds an instance by element type and reduction, if these are its
    /// parameters.
    fn select(&self, instances: &[Instance]) -> Option<Tokens> {
        if self.options.each.is_empty() {
            return None;
        }
        let roles: Vec<Role> = self
            .generics
            .type_params()
            .map(|parameter| role(&self.generics, &parameter.ident))
            .collect::<Option<_>>()?;
        let count = |wanted| roles.iter().filter(|role| **role == wanted).count();
        if count(Role::Element) != 1 || count(Role::Reduction) > 1 {
            return None;
        }
        let vis = &self.vis;
        let reduces = count(Role::Reduction) == 1;
        let arms =
            instances.iter().map(|instance| {
                let value = format_ident!("{}", instance.name.to_uppercase());
                let element = instance
                    .types
                    .iter()
                    .zip(&roles)
                    .find(|(_, role)| **role == Role::Element)
                    .map(|(ty, _)| ty);
                let conditions = instance.types.iter().zip(&roles).map(|(ty, role)| match role {
                Role::Element => quote! {
                    dtype as u8 == <#ty as ::fusewire_device::Element>::DTYPE as u8
                },
                Role::Reduction => quote! {
                    reduction as u8
                        == <#ty as ::fusewire_device::element::Reduction<#element>>::CODE as u8
                },
            });
                quote! {
                    if #(#conditions)&&* {
                        return ::core::option::Option::Some(const { &#value });
                    }
                }
            });
        let reduction =
            reduces.then(|| quote!(reduction: ::fusewire_device::element::ReductionCode,));
        let doc = if reduces {
            "Returns the instance for this element type and reduction, if there is one."
        } else {
            "Returns the instance for this element type, if there is one."
        };
        let (name, params) = (format_ident!("select_{}", self.name), &self.params);
        Some(quote! {
            #[doc = #doc]
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            #[allow(dead_code)]
            #vis const fn #name(
                dtype: ::fusewire_device::DType,
                #reduction
            ) -> ::core::option::Option<&'static ::fusewire_device::native::Kernel<#params>> {
                #(#arms)*
                ::core::option::Option::None
            }
        })
    }

    /// The launchable value of an instance.
    fn value(&self, instance: &Instance, module: &Ident) -> Tokens {
        let (name, params, vis) = (&self.name, &self.params, &self.vis);
        let symbol = &instance.name;
        let value = format_ident!("{}", symbol.to_uppercase());
        let doc = format!("The kernel [`{name}`], launchable, exported as `{symbol}`.");
        let [baseline, avx2, avx512, lanes] = ["baseline", "avx2", "avx512", "lanes"]
            .map(|variant| format_ident!("{symbol}__{variant}"));
        let contract = self.contract(instance);
        quote! {
            #[doc = #doc]
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            #vis const #value: ::fusewire_device::native::Kernel<#params> =
                // SAFETY: the entries read exactly this parameter struct.
                unsafe {
                    ::fusewire_device::native::Kernel::new(::fusewire_device::native::KernelInfo {
                        name: #symbol,
                        module: ::core::module_path!(),
                        params: <#params>::FIELDS,
                        native: ::fusewire_device::native::NativeEntries {
                            baseline: #module::#baseline,
                            avx2: #module::#avx2,
                            avx512: #module::#avx512,
                            lanes: #module::#lanes,
                        },
                        contract: #contract,
                    })
                };

            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            ::fusewire_device::register_kernel!(#value);
        }
    }

    /// The launch contract of an instance.
    fn contract(&self, instance: &Instance) -> Tokens {
        let Options {
            block,
            blocks,
            shared,
            signals,
            failures,
            ..
        } = self.options;
        let (dependent, grid, safe) = (
            self.options.dependent,
            self.options.grid,
            !self.is_unsafe && self.has_session(),
        );
        let known = |argument: &&Argument| !matches!(argument.kind, Kind::Before(..));
        let arguments = self.arguments.iter().filter(known).map(|argument| {
            let name = argument.name.to_string();
            let dtype = match &argument.kind {
                Kind::Buffer(_, element)
                | Kind::Window(_, element)
                | Kind::Queue(_, element)
                | Kind::Scratch(_, element) => {
                    let element = self.instantiate(element, instance);
                    quote! {
                        ::core::option::Option::Some(
                            <#element as ::fusewire_device::Element>::DTYPE
                        )
                    }
                }
                _ => quote!(::core::option::Option::None),
            };
            let writes =
                !matches!(&argument.kind, Kind::Buffer(ty, _) if arguments::is_named(ty, "In"));
            quote! {
                ::fusewire_device::native::ArgumentInfo {
                    name: #name,
                    dtype: #dtype,
                    writes: #writes,
                }
            }
        });
        let arrays = self.arrays().map(|(ty, element)| {
            let mut ty = ty.clone();
            if let Type::Path(path) = &mut ty
                && let Some(last) = path.path.segments.last_mut()
                && let PathArguments::AngleBracketed(list) = &mut last.arguments
            {
                list.args[0] = GenericArgument::Type(self.instantiate(element, instance));
            }
            quote!(<#ty>::SHAPE)
        });
        let (codes, texts): (Vec<_>, Vec<_>) =
            failures.iter().map(|(code, text)| (code, text)).unzip();
        quote! {
            &::fusewire_device::native::Contract {
                dependent: #dependent,
                grid: #grid,
                safe: #safe,
                threads: #block,
                blocks: #blocks,
                shared_bytes: const {
                    ::fusewire_device::args::shared_bytes(#shared, &[#(#arrays),*])
                },
                signals: #signals,
                arguments: &[#(#arguments),*],
                failures: &[#((#codes, #texts)),*],
            }
        }
    }

    /// Replaces a generic parameter by the type of the instance.
    fn instantiate(&self, ty: &Type, instance: &Instance) -> Type {
        let parameters = self.generics.type_params().zip(&instance.types);
        let found = parameters.into_iter().find(
            |(parameter, _)| matches!(ty, Type::Path(path) if path.path.is_ident(&parameter.ident)),
        );
        found.map_or_else(|| ty.clone(), |(_, ty)| ty.clone())
    }

    fn list(&self, instances: &[Instance]) -> Tokens {
        let (name, vis) = (&self.name, &self.vis);
        let list = format_ident!("{}_INSTANCES", name.to_string().to_uppercase());
        let doc = format!("All instances of the kernel [`{name}`].");
        let values = instances
            .iter()
            .map(|instance| format_ident!("{}", instance.name.to_uppercase()));
        quote! {
            #[doc = #doc]
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            #[allow(dead_code)]
            #vis const #list: &[::fusewire_device::native::KernelInfo] =
                &[#(*#values.info()),*];
        }
    }

    /// The arguments as a host gives them.
    fn typed_struct(&self) -> Tokens {
        if !self.has_session() {
            return Tokens::new();
        }
        let (name, params, vis) = (&self.name, &self.params, &self.vis);
        let typed = format_ident!("{}", camel(&name.to_string()));
        let generic = !self.options.each.is_empty();
        let is_parameter = |ty: &Type| {
            self.options
                .each
                .iter()
                .any(|each| matches!(ty, Type::Path(path) if path.path.is_ident(&each.parameter)))
        };
        let parameters = || {
            self.arguments
                .iter()
                .filter(|argument| !matches!(argument.kind, Kind::Before(..)))
        };
        let borrows = self.arguments.iter().any(|argument| {
            let kind = &argument.kind;
            matches!(kind, Kind::Buffer(..) | Kind::Window(..) | Kind::Queue(..))
        });
        let (declared, used) = if borrows {
            (quote!(<'a>), quote!(<'_>))
        } else {
            (quote!(), quote!())
        };
        let memory = |name: Tokens, element: &Type| match is_parameter(element) {
            true => quote!(::fusewire_device::native::#name<'a>),
            false => quote!(::fusewire_device::native::#name<'a, #element>),
        };
        let passed = |argument: &&Argument| !matches!(argument.kind, Kind::Shared(..));
        let fields = parameters().filter(passed).map(|argument| {
            let name = &argument.name;
            let ty = match &argument.kind {
                Kind::Raw(ty) | Kind::Words(ty, _) | Kind::Before(ty, _) | Kind::Shared(ty, ..) => {
                    quote!(#ty)
                }
                Kind::Scratch(..) => quote!(u64),
                Kind::Buffer(_, element) => memory(quote!(Buffer), element),
                Kind::Window(_, element) => memory(quote!(WindowBuffer), element),
                Kind::Queue(_, element) => memory(quote!(QueueBuffer), element),
            };
            quote!(pub #name: #ty,)
        });
        let instance = generic.then(|| {
            quote! {
                /// The instance.
                pub kernel: ::fusewire_device::native::Kernel<#params>,
            }
        });
        let value = format_ident!("{}", name.to_string().to_uppercase());
        let kernel = if generic {
            quote!(self.kernel)
        } else {
            quote!(#value)
        };
        let values = self.arguments.iter().filter_map(|argument| {
            let name = &argument.name;
            let value = match &argument.kind {
                Kind::Before(..) | Kind::Shared(..) => return None,
                Kind::Raw(_) | Kind::Words(..) | Kind::Scratch(..) => quote!(self.#name),
                Kind::Buffer(..) => quote!(self.#name.raw()),
                Kind::Window(..) => quote!(self.#name.description()),
                Kind::Queue(..) => quote!(self.#name.window().description()),
            };
            Some(quote!(#name: #value))
        });
        let visits = parameters().map(|argument| {
            let name = &argument.name;
            let visit = match &argument.kind {
                Kind::Buffer(..) => quote!(Buffer(self.#name.untyped())),
                Kind::Window(..) => quote!(Window(self.#name.untyped())),
                Kind::Queue(..) => quote!(Queue(self.#name.window().untyped())),
                Kind::Scratch(..) => quote!(Scratch(self.#name)),
                _ => quote!(Value),
            };
            quote!(visit(::fusewire_device::native::ArgumentValue::#visit);)
        });
        let agreed = self
            .arguments
            .iter()
            .filter(|argument| argument.agreed)
            .map(|argument| {
                let name = &argument.name;
                let word = match &argument.kind {
                    Kind::Raw(_) => quote!(::fusewire_device::native::ScalarWord::word(self.#name)),
                    _ => quote!(self.#name.len()),
                };
                quote!(#word)
            });
        let safe = (!self.is_unsafe).then(|| {
            quote! {
                #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
                // SAFETY: the kernel is a safe function.
                unsafe impl ::fusewire_device::native::SafeKernel for #typed #used {}
            }
        });
        let doc = format!(
            "Arguments of the kernel [`{name}`]; a communicator launches them with its method \
             `kernel`."
        );
        quote! {
            #[doc = #doc]
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            #[derive(Clone, Copy, Debug)]
            #[allow(missing_docs, dead_code)] // the fields are the kernel's arguments
            #vis struct #typed #declared {
                #instance
                #(#fields)*
            }

            // SAFETY: the parameters are those that the entries of this kernel read. Except for raw
            // pointers and the session, they refer only to the memory that `visit` is called with.
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            unsafe impl ::fusewire_device::native::KernelArguments for #typed #used {
                type Params = #params;

                fn kernel(&self) -> ::fusewire_device::native::Kernel<#params> {
                    #kernel
                }

                fn params(&self, header: ::fusewire_device::layout::LaunchHeader) -> #params {
                    #params { header, #(#values,)* }
                }

                fn visit<'s>(
                    &'s self,
                    visit: &mut dyn FnMut(::fusewire_device::native::ArgumentValue<'s>),
                ) {
                    let _ = &visit;
                    #(#visits)*
                }

                fn agreed(&self, visit: &mut dyn FnMut(u64)) {
                    let _ = &visit;
                    #(visit(#agreed);)*
                }
            }

            #safe
        }
    }

    fn gpu_entry(&self, instance: &Instance) -> Tokens {
        let launch = &self.launch;
        let turbofish = self.turbofish(instance);
        let wrapper = format_ident!("{}__entry", instance.name);
        let symbol = &instance.name;
        let header = self.header();
        let (names, types): (Vec<_>, Vec<_>) =
            header.iter().map(|(_, name, ty)| (name, ty)).unzip();
        let fields = self.fields();
        let (field_names, field_types): (Vec<_>, Vec<_>) =
            fields.iter().map(|field| (&field.name, &field.ty)).unzip();
        quote! {
            #[unsafe(export_name = #symbol)]
            #[doc(hidden)]
            #[allow(missing_docs, non_snake_case, clippy::missing_safety_doc)]
            pub unsafe extern "gpu-kernel" fn #wrapper(
                #(#names: #types,)*
                #(#field_names: #field_types),*
            ) {
                unsafe {
                    #launch #turbofish(
                        ::fusewire_device::Block::new(::fusewire_device::group::Gpu),
                        #(#names,)*
                        #(#field_names),*
                    )
                }
            }
        }
    }

    /// Generates the entry of the grid form, for all ranks.
    fn grid_entry(&self, instance: &Instance) -> Tokens {
        let (launch, params) = (&self.launch, &self.params);
        let turbofish = self.turbofish(instance);
        let wrapper = format_ident!("{}__grid_entry", instance.name);
        let symbol = format!("{}__grid", instance.name);
        let value = |value: Tokens, ty: &Type| match ty {
            Type::Ptr(pointer) => {
                let read = if pointer.mutability.is_some() {
                    quote!(pointer_mut)
                } else {
                    quote!(pointer)
                };
                quote!(::fusewire_device::multi_rank_grid::#read(&raw const #value))
            }
            _ => value,
        };
        let header = self.header();
        let header = header
            .iter()
            .map(|(name, _, ty)| value(quote!((*own).header.#name), ty));
        let fields = self.fields();
        let fields = fields
            .iter()
            .map(|field| value(field.value(&quote!((*own))), &field.ty));
        quote! {
            #[unsafe(export_name = #symbol)]
            #[doc(hidden)]
            #[allow(missing_docs, non_snake_case, private_interfaces, clippy::missing_safety_doc)]
            pub unsafe extern "gpu-kernel" fn #wrapper(
                parameters: *const #params,
                blocks_per_rank: u32,
            ) {
                unsafe {
                    let (block, own) =
                        ::fusewire_device::multi_rank_grid::enter(parameters, blocks_per_rank);
                    #launch #turbofish(block, #(#header,)* #(#fields),*)
                }
            }
        }
    }

    fn native_entries(&self, instance: &Instance) -> Tokens {
        let (launch, params) = (&self.launch, &self.params);
        let turbofish = self.turbofish(instance);
        let fields = self.fields();
        let fields = fields.iter().map(|field| field.value(&quote!(params)));
        let run = if self.has_session() {
            let run = format_ident!("{}__run", self.name);
            quote!(super::#run #turbofish(block, params))
        } else {
            quote!(super::#launch #turbofish(block, #(#fields),*))
        };
        let call = |machine: Tokens| {
            quote! {{
                unsafe {
                    let params = &*params.cast::<#params>();
                    let machine = ::fusewire_device::group::#machine::new(context);
                    let block = ::fusewire_device::Block::new(machine);
                    #run
                }
            }}
        };
        let single = |isa: u32| call(quote!(Single::<#isa>));
        // Kernels of different crates may have the same name.
        let krate = std::env::var("CARGO_CRATE_NAME").unwrap_or_default();
        let variant = |suffix: &str, features: Tokens, body: &Tokens| {
            let function = format_ident!("{}__{suffix}", instance.name);
            let symbol = format!("{krate}__{function}");
            quote! {
                #features
                #[unsafe(export_name = #symbol)]
                pub unsafe fn #function(
                    context: *const ::fusewire_device::group::cpu::LaneContext,
                    params: *const u8
                ) {
                    ::fusewire_device::native_body! { context, params, #body }
                }
            }
        };
        let several = call(quote!(Lanes));
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
}

/// Meaning of a generic parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Bounded by `Element`.
    Element,
    /// Bounded by `Reduction<T>`.
    Reduction,
}

fn role(generics: &Generics, parameter: &Ident) -> Option<Role> {
    let found = generics
        .type_params()
        .find(|candidate| candidate.ident == *parameter)?;
    found.bounds.iter().find_map(|bound| {
        let TypeParamBound::Trait(bound) = bound else {
            return None;
        };
        match bound.path.segments.last()?.ident.to_string().as_str() {
            "Element" => Some(Role::Element),
            "Reduction" => Some(Role::Reduction),
            _ => None,
        }
    })
}

/// Returns `name` in CamelCase, as an identifier for a struct.
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

#[cfg(test)]
mod tests {
    use proc_macro2::TokenStream as Tokens;
    use quote::quote;

    use super::expand;

    fn expanded(attribute: Tokens, item: Tokens) -> Result<String, String> {
        let options = syn::parse2(attribute).map_err(|error| error.to_string())?;
        let function = syn::parse2(item).expect("a function");
        let tokens = expand(&options, function).map_err(|error| error.to_string())?;
        // What is generated is Rust.
        syn::parse2::<syn::File>(tokens.clone()).expect("items");
        Ok(tokens.to_string())
    }

    /// Returns the error for a kernel with the argument `argument`.
    fn argument_error(argument: Tokens) -> String {
        let kernel = quote! {
            fn k(s: &mut Session<impl Machine>, #argument) -> Result<(), Aborted> { Ok(()) }
        };
        expanded(quote!(), kernel).expect_err("a wrong argument")
    }

    #[test]
    fn wrong_arguments_are_one_clear_error() {
        for argument in [
            quote!(x: &[f32]),
            quote!(x: usize),
            quote!(x: bool),
            quote!(x: Spec),
            quote!(x: [u32; 4]),
            quote!(x: (u32, u32)),
            quote!(x: Option<u32>),
        ] {
            let error = argument_error(argument);
            assert!(
                error.starts_with("an argument of a kernel is In<T>"),
                "{error}"
            );
        }
        for (argument, text) in [
            (
                quote!(x: *const f32),
                "a kernel with a raw pointer is an unsafe fn",
            ),
            (
                quote!(#[agreed] x: Shared<f32, 8>),
                "#[agreed] works on scalars",
            ),
            (
                quote!((a, b): In<f32>),
                "an argument of a kernel has a name",
            ),
            (quote!(header: u32), "this name is reserved"),
            (
                quote!(#[agreed] #[words(2)] x: Spec),
                "#[agreed] works on scalars",
            ),
            (quote!(#[words(two)] x: Spec), "expected integer literal"),
        ] {
            let error = argument_error(argument);
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn wrong_signatures_are_one_clear_error() {
        let session = "the first argument of a kernel is `s: &mut Session<impl Machine>`";
        for (attribute, kernel, text) in [
            (
                quote!(),
                quote!(
                    fn k() -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                session,
            ),
            (
                quote!(),
                quote!(
                    fn k(x: In<f32>) -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                session,
            ),
            (
                quote!(),
                quote!(
                    fn k(s: Session<impl Machine>) -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                session,
            ),
            (
                quote!(),
                quote!(
                    fn k(&self) -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                "a kernel has no self",
            ),
            (
                quote!(),
                quote!(
                    fn k<M: Machine>(s: &mut Session<M>) -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                "write `impl Machine`",
            ),
            (
                quote!(),
                quote!(
                    fn k(s: &mut Session<impl Machine>) {}
                ),
                "a kernel with a session returns `Result<(), Aborted>`",
            ),
            (
                quote!(),
                quote!(
                    fn k(s: &mut Session<impl Machine>) -> u32 {
                        0
                    }
                ),
                "a kernel with a session returns `Result<(), Aborted>`",
            ),
            (
                quote!(),
                quote!(
                    fn k(s: &mut Session<impl Machine>) -> Result<u32, Aborted> {
                        Ok(0)
                    }
                ),
                "a kernel with a session returns `Result<(), Aborted>`",
            ),
            (
                quote!(),
                quote!(
                    fn k(block: Block<impl Machine>, x: u32) {}
                ),
                "a kernel without a session is an unsafe fn",
            ),
            (
                quote!(),
                quote!(
                    unsafe fn k(block: Block<impl Machine>) -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                "a kernel without a session returns nothing",
            ),
            (
                quote!(),
                quote!(
                    unsafe fn k(block: Block<impl Machine>, x: In<f32>) {}
                ),
                "In, Out, InOut, Window, Queue, Scratch and Shared need a session",
            ),
            (
                quote!(),
                quote!(
                    fn k<T: Element>(
                        s: &mut Session<impl Machine>,
                        x: In<T>,
                    ) -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                "name the instances of this parameter",
            ),
            (
                quote!(warps = 4),
                quote!(
                    fn k(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                "expected each(PARAMETER: name = Type, ...), block = N",
            ),
            (
                quote!(blocks = 0),
                quote!(
                    fn k(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
                        Ok(())
                    }
                ),
                "expected at least 1",
            ),
        ] {
            let error = expanded(attribute, kernel).expect_err("a wrong kernel");
            assert!(error.contains(text), "{error} lacks {text}");
        }
    }

    #[test]
    fn a_safe_kernel_has_a_safe_launch_and_an_unsafe_one_has_not() {
        let safe = expanded(
            quote!(blocks = 2),
            quote!(
                pub fn k(s: &mut Session<impl Machine>, x: In<f32>) -> Result<(), Aborted> {
                    Ok(())
                }
            ),
        );
        let safe = safe.expect("a kernel");
        assert!(safe.contains("SafeKernel for K < '_ >"), "{safe}");
        let raw = expanded(
            quote!(),
            quote!(
                pub unsafe fn k(
                    s: &mut Session<impl Machine>,
                    x: *const f32,
                ) -> Result<(), Aborted> {
                    Ok(())
                }
            ),
        );
        assert!(!raw.expect("a kernel").contains("SafeKernel"));
    }
}
