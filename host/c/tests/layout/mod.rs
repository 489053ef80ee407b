//! Compares the library's types with C: the layouts through lines that a C program prints, and the
//! prototypes through the C compiler.

use core::ffi::{c_char, c_int, c_void};
use core::fmt::Write as _;
use core::mem::offset_of;

use fusewire::{Compare, DType};
use fusewire_c::{
    FusewireBytes, FusewireComm, FusewireGraph, FusewireMoe, FusewireMoeConfig,
    FusewireMoeDispatched, FusewireMoeInfo, FusewireNorm, FusewireOptions, FusewireOverlap,
    FusewireP2p, FusewireReadyFlags, FusewireVocab, FusewireWindow, FusewireWindowOptions,
    FusewireWork, codes, numbers,
};

/// A type that also exists in C.
trait CType {
    fn c() -> String;
}

macro_rules! c_types {
    ($($rust:ty = $c:literal,)*) => {$(
        impl CType for $rust {
            fn c() -> String {
                $c.to_owned()
            }
        }
    )*};
}

c_types!(
    c_int = "int",
    c_char = "char",
    c_void = "void",
    u32 = "uint32_t",
    u64 = "uint64_t",
    f32 = "float",
    f64 = "double",
    FusewireComm = "fusewire_comm",
    FusewireWork = "fusewire_work",
    FusewireGraph = "fusewire_graph",
    FusewireOptions = "fusewire_options",
    FusewireNorm = "fusewire_norm",
    FusewireVocab = "fusewire_vocab",
    FusewireOverlap = "fusewire_overlap",
    FusewireReadyFlags = "fusewire_ready_flags",
    FusewireP2p = "fusewire_p2p",
    FusewireWindow = "fusewire_window",
    FusewireWindowOptions = "fusewire_window_options",
    FusewireBytes = "fusewire_bytes",
    FusewireMoe = "fusewire_moe",
    FusewireMoeConfig = "fusewire_moe_config",
    FusewireMoeInfo = "fusewire_moe_info",
    FusewireMoeDispatched = "fusewire_moe_dispatched",
);

impl<T: CType> CType for *const T {
    fn c() -> String {
        format!("{} const *", T::c())
    }
}

impl<T: CType> CType for *mut T {
    fn c() -> String {
        format!("{} *", T::c())
    }
}

/// A function that C can call.
trait Prototype {
    /// Returns the declaration of a pointer `name` to the function.
    fn pointer(self, name: &str) -> String;
}

macro_rules! prototypes {
    ($(($($arg:ident)*))*) => {$(
        impl<R: CType, $($arg: CType),*> Prototype for unsafe extern "C" fn($($arg),*) -> R {
            fn pointer(self, name: &str) -> String {
                let args: Vec<String> = vec![$($arg::c()),*];
                let args = if args.is_empty() { "void".to_owned() } else { args.join(", ") };
                format!("{} (*{name})({args})", R::c())
            }
        }
    )*};
}

prototypes!(()(A)(A B)(A B C)(A B C D)(A B C D E)(A B C D E F)(A B C D E F G)(A B C D E F G H)
    (A B C D E F G H I));

/// The expected lines, and the names of the compared items.
#[derive(Default)]
pub(crate) struct Lines {
    expected: Vec<String>,
    prints: String,
    pointers: String,
    functions: Vec<&'static str>,
    numbers: Vec<&'static str>,
}

macro_rules! fields {
    ($lines:ident, $c:literal $name:ident: $($field:ident)*) => {{
        $lines.push($c, concat!("sizeof(", $c, ")"), size_of::<$name>() as u64);
        $($lines.push(
            concat!($c, ".", stringify!($field)),
            concat!("offsetof(", $c, ", ", stringify!($field), ")"),
            offset_of!($name, $field) as u64,
        );)*
        // Does not compile if the list above lacks a field of the struct.
        #[allow(dead_code)]
        fn all(value: &$name) {
            let $name { $($field: _),* } = value;
        }
    }};
}

macro_rules! numbers_of {
    ($lines:ident: $($name:ident = $value:expr,)*) => {$(
        $lines.numbers.push(stringify!($name));
        $lines.push(stringify!($name), stringify!($name), $value as u64);
    )*};
    ($lines:ident from $module:ident: $($name:ident)*) => {
        numbers_of!($lines: $($name = $module::$name,)*);
    };
}

macro_rules! functions {
    ($lines:ident: $($name:ident($($arg:ty),*))*) => {$({
        let function: unsafe extern "C" fn($($arg),*) -> _ = fusewire_c::$name;
        let pointer = function.pointer(concat!("p_", stringify!($name)));
        writeln!($lines.pointers, "{pointer} = {};", stringify!($name)).expect("memory");
        $lines.functions.push(stringify!($name));
    })*};
}

impl Lines {
    pub(crate) fn new() -> Self {
        let mut lines = Self::default();
        fields!(lines, "fusewire_options" FusewireOptions: struct_size timeout_seconds staging_bytes
            packet_slot_bytes blocks threads algorithm any_order store_is_served abort_process
            backend high_priority_stream max_object_bytes large_blocks);
        fields!(lines, "fusewire_norm" FusewireNorm: struct_size kind flags rows hidden dtype
            residual_dtype epsilon algorithm input weight bias residual residual_out output scaling
            scale_dtype scale scales scale_stride);
        fields!(lines, "fusewire_vocab" FusewireVocab: struct_size dtype flags rows vocabulary first
            columns stride k index_dtype logits indices values log_sum_exp);
        fields!(lines, "fusewire_p2p" FusewireP2p: struct_size kind peer buffer count dtype);
        fields!(lines, "fusewire_window_options" FusewireWindowOptions: struct_size signals counters
            barriers cells);
        fields!(lines, "fusewire_overlap" FusewireOverlap: struct_size dtype op target flags count
            chunk input output ready_flags);
        fields!(lines, "fusewire_moe_config" FusewireMoeConfig: struct_size experts top_k hidden
            max_tokens capacity alignment dtype payload scale_dtype layout in_flight local_experts
            blocks flags timeout_seconds mode results staging);
        fields!(lines, "fusewire_moe_info" FusewireMoeInfo: struct_size rows results x_stride
            scales_stride row_bytes bytes local_experts blocks);
        fields!(lines, "fusewire_moe_dispatched" FusewireMoeDispatched: struct_size moe number
            micro_batch dtype scale_dtype ids_per_row rows x_stride scales_stride x scales counts
            offsets sources ids weights);
        numbers_of!(lines from codes: FUSEWIRE_OK FUSEWIRE_ERROR_ARGUMENT FUSEWIRE_ERROR_TIMEOUT
            FUSEWIRE_ERROR_MISMATCH FUSEWIRE_ERROR_PEER FUSEWIRE_ERROR_ABORTED FUSEWIRE_ERROR_FAILED
            FUSEWIRE_ERROR_BOOTSTRAP FUSEWIRE_ERROR_COMMUNICATOR FUSEWIRE_ERROR_DEVICE
            FUSEWIRE_ERROR_MEMORY FUSEWIRE_ERROR_CAPTURE FUSEWIRE_ERROR_BACKEND
            FUSEWIRE_ERROR_NOT_DONE FUSEWIRE_ERROR_OTHER FUSEWIRE_ERROR_INTERNAL);
        numbers_of!(lines from numbers: FUSEWIRE_DTYPE_DEFAULT);
        numbers_of!(lines: FUSEWIRE_F64 = DType::F64, FUSEWIRE_F32 = DType::F32,
            FUSEWIRE_F16 = DType::F16, FUSEWIRE_BF16 = DType::Bf16,
            FUSEWIRE_E4M3 = DType::E4m3, FUSEWIRE_E5M2 = DType::E5m2,
            FUSEWIRE_I8 = DType::I8, FUSEWIRE_U8 = DType::U8, FUSEWIRE_I32 = DType::I32,
            FUSEWIRE_U32 = DType::U32, FUSEWIRE_I64 = DType::I64, FUSEWIRE_U64 = DType::U64,
            FUSEWIRE_F32_INDEX = DType::F32Index,);
        numbers_of!(lines from numbers: FUSEWIRE_SUM FUSEWIRE_PRODUCT FUSEWIRE_MIN FUSEWIRE_MAX
            FUSEWIRE_AVERAGE FUSEWIRE_BIT_AND FUSEWIRE_BIT_OR FUSEWIRE_BIT_XOR
            FUSEWIRE_ALGORITHM_AUTO FUSEWIRE_ALGORITHM_PACKET FUSEWIRE_ALGORITHM_SIGNAL
            FUSEWIRE_ALGORITHM_TWO_SHOT FUSEWIRE_ALGORITHM_NVLS
            FUSEWIRE_ALGORITHM_PACKET_TWO_SHOT
            FUSEWIRE_P2P_SEND FUSEWIRE_P2P_RECV
            FUSEWIRE_ALL_RANKS FUSEWIRE_SIGNAL_SET FUSEWIRE_SIGNAL_ADD);
        numbers_of!(lines: FUSEWIRE_COMPARE_EQUAL = Compare::Equal,
            FUSEWIRE_COMPARE_NOT_EQUAL = Compare::NotEqual, FUSEWIRE_COMPARE_LESS = Compare::Less,
            FUSEWIRE_COMPARE_LESS_EQUAL = Compare::LessEqual,
            FUSEWIRE_COMPARE_GREATER = Compare::Greater,
            FUSEWIRE_COMPARE_GREATER_EQUAL = Compare::GreaterEqual,);
        numbers_of!(lines from numbers:
            FUSEWIRE_NORM_RMS FUSEWIRE_NORM_LAYER FUSEWIRE_NORM_UNIT_OFFSET FUSEWIRE_NORM_DEPENDENT
            FUSEWIRE_SCALE_NONE FUSEWIRE_SCALE_STATIC FUSEWIRE_SCALE_ROWS FUSEWIRE_SCALE_GROUPS
            FUSEWIRE_SCALE_GROUP FUSEWIRE_VOCAB_DEPENDENT
            FUSEWIRE_MOE_PAYLOAD_SAME FUSEWIRE_MOE_PAYLOAD_FP8
            FUSEWIRE_MOE_RESULTS_SAME FUSEWIRE_MOE_RESULTS_FP8
            FUSEWIRE_MOE_LOW_LATENCY FUSEWIRE_MOE_HIGH_THROUGHPUT
            FUSEWIRE_MOE_EXPERT_MAJOR FUSEWIRE_MOE_RANK_MAJOR FUSEWIRE_MOE_MASK_MISSING
            FUSEWIRE_MOE_COLUMN_SCALES FUSEWIRE_MOE_DEQUANTIZE);
        functions!(lines:
            fusewire_version() fusewire_last_error() fusewire_comm_from_env(_, _, _)
            fusewire_comm_create(_, _, _, _, _, _, _) fusewire_comm_split(_, _, _, _, _)
            fusewire_comm_on_stream(_, _, _) fusewire_comm_on_own_stream(_, _)
            fusewire_comm_on_new_stream(_, _) fusewire_comm_destroy(_) fusewire_comm_abort(_)
            fusewire_comm_synchronize(_) fusewire_comm_warm_up(_) fusewire_comm_failure(_)
            fusewire_comm_rank(_, _) fusewire_comm_size(_, _) fusewire_comm_workspace_bytes(_, _)
            fusewire_workspace_bytes(_, _, _, _) fusewire_alloc(_, _, _) fusewire_free(_, _)
            fusewire_register(_, _, _) fusewire_deregister(_, _) fusewire_upload(_, _, _, _)
            fusewire_download(_, _, _, _) fusewire_all_reduce(_, _, _, _, _, _)
            fusewire_all_reduce_async(_, _, _, _, _, _, _)
            fusewire_all_reduce_premul_sum(_, _, _, _, _, _)
            fusewire_all_reduce_premul_sum_async(_, _, _, _, _, _, _)
            fusewire_reduce(_, _, _, _, _, _, _) fusewire_reduce_async(_, _, _, _, _, _, _, _)
            fusewire_reduce_premul_sum(_, _, _, _, _, _, _)
            fusewire_reduce_premul_sum_async(_, _, _, _, _, _, _, _)
            fusewire_reduce_scatter(_, _, _, _, _, _)
            fusewire_reduce_scatter_async(_, _, _, _, _, _, _)
            fusewire_reduce_scatter_premul_sum(_, _, _, _, _, _)
            fusewire_reduce_scatter_premul_sum_async(_, _, _, _, _, _, _)
            fusewire_reduce_scatter_v(_, _, _, _, _, _)
            fusewire_reduce_scatter_v_async(_, _, _, _, _, _, _)
            fusewire_all_gather(_, _, _, _, _) fusewire_all_gather_async(_, _, _, _, _, _)
            fusewire_all_gather_v(_, _, _, _, _) fusewire_all_gather_v_async(_, _, _, _, _, _)
            fusewire_all_gather_v_device(_, _, _, _, _, _, _)
            fusewire_all_gather_v_device_async(_, _, _, _, _, _, _, _)
            fusewire_all_to_all(_, _, _, _, _) fusewire_all_to_all_async(_, _, _, _, _, _)
            fusewire_all_to_all_v(_, _, _, _, _, _) fusewire_all_to_all_v_async(_, _, _, _, _, _, _)
            fusewire_all_to_all_v_device(_, _, _, _, _, _, _, _)
            fusewire_all_to_all_v_device_async(_, _, _, _, _, _, _, _, _)
            fusewire_broadcast(_, _, _, _, _) fusewire_broadcast_async(_, _, _, _, _, _)
            fusewire_scatter(_, _, _, _, _, _) fusewire_scatter_async(_, _, _, _, _, _, _)
            fusewire_gather(_, _, _, _, _, _) fusewire_gather_async(_, _, _, _, _, _, _)
            fusewire_send(_, _, _, _, _) fusewire_send_async(_, _, _, _, _, _)
            fusewire_recv(_, _, _, _, _) fusewire_recv_async(_, _, _, _, _, _) fusewire_barrier(_)
            fusewire_barrier_async(_, _) fusewire_batch(_, _, _) fusewire_batch_async(_, _, _, _)
            fusewire_window_alloc(_, _, _, _) fusewire_window_create(_, _, _, _, _)
            fusewire_window_free(_, _) fusewire_window_destroy(_) fusewire_window_memory(_, _, _)
            fusewire_window_peer_memory(_, _, _) fusewire_window_device(_, _)
            fusewire_window_put(_, _, _, _, _, _) fusewire_window_put_async(_, _, _, _, _, _, _)
            fusewire_window_put_signal(_, _, _, _, _, _, _)
            fusewire_window_put_signal_async(_, _, _, _, _, _, _, _)
            fusewire_window_get(_, _, _, _, _, _) fusewire_window_get_async(_, _, _, _, _, _, _)
            fusewire_window_raise(_, _, _, _) fusewire_window_raise_async(_, _, _, _, _)
            fusewire_window_wait_raised(_, _, _, _) fusewire_window_wait_raised_async(_, _, _, _, _)
            fusewire_window_signal(_, _, _, _, _, _)
            fusewire_window_signal_async(_, _, _, _, _, _, _)
            fusewire_window_wait_signal(_, _, _, _, _, _)
            fusewire_window_wait_signal_async(_, _, _, _, _, _, _)
            fusewire_window_read_signal(_, _, _, _) fusewire_window_reset_signal(_, _)
            fusewire_window_read_counter(_, _, _) fusewire_window_reset_counter(_, _)
            fusewire_all_gather_bytes(_, _, _, _)
            fusewire_gather_bytes(_, _, _, _, _) fusewire_broadcast_bytes(_, _, _, _, _)
            fusewire_scatter_bytes(_, _, _, _, _) fusewire_send_bytes(_, _, _, _)
            fusewire_recv_bytes(_, _, _) fusewire_bytes_count(_, _) fusewire_bytes_part(_, _, _, _)
            fusewire_bytes_destroy(_) fusewire_all_reduce_norm(_, _)
            fusewire_all_reduce_norm_async(_, _, _) fusewire_reduce_scatter_norm(_, _)
            fusewire_reduce_scatter_norm_async(_, _, _) fusewire_vocab_parallel(_, _)
            fusewire_vocab_parallel_async(_, _, _) fusewire_ready_flags_create(_, _, _)
            fusewire_ready_flags_destroy(_) fusewire_ready_flags_words(_, _)
            fusewire_ready_flags_wait(_, _) fusewire_ready_flags_add(_, _, _)
            fusewire_ready_flags_stream_wait(_, _, _) fusewire_ready_flags_stream_write(_, _, _, _)
            fusewire_all_gather_with_flags(_, _, _, _)
            fusewire_reduce_scatter_on_arrival(_, _, _, _)
            fusewire_moe_create(_, _, _) fusewire_moe_free(_, _) fusewire_moe_destroy(_)
            fusewire_moe_query(_, _) fusewire_moe_dispatch(_, _, _, _, _, _, _, _)
            fusewire_moe_dispatch_send(_, _, _, _, _, _, _, _)
            fusewire_moe_dispatch_receive(_, _, _) fusewire_moe_redispatch(_, _, _, _, _)
            fusewire_moe_redispatch_send(_, _, _, _, _) fusewire_moe_combine(_, _, _, _, _)
            fusewire_moe_combine_send(_, _, _, _) fusewire_moe_combine_receive(_, _, _, _)
            fusewire_moe_set_blocking(_, _) fusewire_moe_set_placement(_, _, _)
            fusewire_moe_placement(_, _)
            fusewire_moe_tokens_per_expert(_, _) fusewire_moe_wait_ns(_, _)
            fusewire_moe_mask(_, _) fusewire_moe_missing(_, _, _)
            fusewire_work_wait(_, _)
            fusewire_work_join(_, _) fusewire_work_destroy(_) fusewire_capture_begin(_)
            fusewire_capture_end(_, _) fusewire_graph_run(_, _) fusewire_graph_launch(_, _)
            fusewire_graph_destroy(_)
        );
        lines.push(
            "version",
            "fusewire_version()",
            u64::from(fusewire_c::fusewire_version()),
        );
        lines.push(
            "version",
            "FUSEWIRE_VERSION",
            u64::from(fusewire_c::fusewire_version()),
        );
        lines
    }

    fn push(&mut self, what: &str, c: &str, value: u64) {
        self.expected.push(format!("{what} {value}"));
        writeln!(
            self.prints,
            "  printf(\"{what} %llu\\n\", (unsigned long long)({c}));"
        )
        .expect("memory");
    }

    /// Returns the source of the C program.
    pub(crate) fn program(&self) -> String {
        format!(
            "#include <fusewire.h>\n#include <stdio.h>\n{}int main(void) {{\n{}  return 0;\n}}\n",
            self.pointers, self.prints
        )
    }

    /// Returns the lines that the program prints.
    pub(crate) fn expected(&self) -> &[String] {
        &self.expected
    }

    pub(crate) fn functions(&self) -> &[&'static str] {
        &self.functions
    }

    pub(crate) fn numbers(&self) -> &[&'static str] {
        &self.numbers
    }
}
