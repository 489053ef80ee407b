//! The attribute `#[kernel]` of `fusewire-device`.

mod arguments;
mod expand;
mod options;

use proc_macro::TokenStream;
use syn::{ItemFn, parse_macro_input};

/// Marks a function as a kernel: one body for NVIDIA, AMD and the CPU.
///
/// # Signature
/// A kernel that communicates takes the session first and returns `Result<(), Aborted>`:
///
/// ```text
/// #[kernel]
/// pub fn scale(s: &mut Session<impl Machine>, x: InOut<f32>, factor: f32) -> Result<(), Aborted>
/// ```
///
/// The generated entry enters the communicator, calls the function on every lane, and leaves the
/// communicator when the function returns `Ok`. An `Err` is a failure that has been recorded. All
/// lanes of a block must return the same result; see the module `session` of `fusewire-device`.
///
/// | argument | meaning | field for the host |
/// |---|---|---|
/// | `In<T>`, `Out<T>`, `InOut<T>` | memory of this rank; accesses are checked | `Buffer<T>` |
/// | `Window<T>` | a window of the communicator | `WindowBuffer<T>`, from a window |
/// | `Queue<T>` | a queue of the communicator | `QueueBuffer<T>`, from a queue |
/// | `u8` to `u64`, `i8` to `i64`, `f32`, `f64` | a scalar | the same |
/// | `*const T`, `*mut T` | a raw pointer; the kernel must be an `unsafe fn` | the same |
/// | `Scratch<T>` | temporary memory of this rank that a network can read and write | `u64`: the elements |
/// | `Shared<T, N>` | N elements of memory that the lanes of a block share | none |
/// | `#[words(N)] T` | a `Pod` struct of N 8-byte words, passed as N scalars | `T` |
/// | `#[before(EXPRESSION)] T` | a value that each lane computes before the session begins | none |
///
/// `#[agreed]` before an argument says that it must be equal on all ranks (the length, for memory).
/// Ranks that pass different values get an error that names a rank.
///
/// A kernel without communication takes `block: Block<impl Machine>` instead of the session, and
/// scalars and raw pointers. It is an `unsafe fn` that returns nothing.
///
/// # Generated items
/// For `scale`:
///
/// - `Scale { x, factor }`, the typed arguments that a host launches;
/// - `ScaleParams`, the parameters as entries receive them, `#[repr(C)]`, with a `RawBuffer` for
///   each argument that is memory; and on a GPU the exported entry `scale`, with the parameters
///   flattened;
/// - on the CPU native entries for several instruction sets and for several lanes a block, the
///   value `SCALE: Kernel<ScaleParams>`, and `SCALE_INSTANCES: &[KernelInfo]`;
/// - in an image built with `fusewire-build build --multi-rank-grid`, instead of the GPU entry, its
///   grid form `scale__grid(parameters, blocks_per_rank)`, which runs the blocks of all ranks in
///   one launch. See `fusewire_device::multi_rank_grid`.
///
/// # Instances
/// `#[kernel(each(T: f32 = f32, bf16 = Bf16), each(O: sum = Sum))]` compiles a generic function
/// once for each combination, as `scale_f32_sum`, `scale_bf16_sum` and so on. `Scale` then has a
/// field `kernel` that names the instance. If one parameter of `each` is bounded by `Element`, and
/// the only other one, if any, by `Reduction`, `select_scale(dtype)` or `select_scale(dtype,
/// reduction)` finds the instance at run time.
///
/// `params = OtherParams` uses the parameter struct of another kernel with the same arguments, so
/// that a host can choose among the kernels with one struct.
///
/// # Launch contract
/// `Communicator::kernel` refuses a launch that does not meet the contract. Launches of kernels
/// without a session are not checked. The keys of the contract:
///
/// | key | meaning |
/// |---|---|
/// | `block = N` | threads of a block on a GPU |
/// | `blocks = N` | blocks of the launch |
/// | `shared = N` | bytes of block-shared memory that the kernel uses by raw pointers; `Shared` arrays follow them |
/// | `signals = N` | signals that every window argument must have |
/// | `grid` | all blocks run at the same time, for `Session::grid_barrier` |
///
/// `dependent` permits programmatic dependent launches: before anything else, the entry waits for
/// the launches that it depends on; after the session has begun, it permits dependents to begin.
/// `on_failure(EXPRESSION)` is evaluated on every lane of a block that fails, or that cannot enter
/// the communicator. The expressions of `on_failure` and `#[before]` can use `block`,
/// `header_constants`, `header_count` and the parameters of the entry: scalars and raw pointers by
/// their names, memory `x` as the address `x` and the number of elements `x_len`, and the words of
/// a struct `x` as `x_0`, `x_1` and so on.
///
/// `failures(CODE = "text {a} {b}", ...)` gives the texts of the failures that the kernel records
/// with `Session::ensure` and `Session::fault`; `{a}` and `{b}` are the two values.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let options = parse_macro_input!(attribute as options::Options);
    let function = parse_macro_input!(item as ItemFn);
    expand::expand(&options, function)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}
