/*
 * Fusewire from C: GPU-resident collectives, and fused communication and arithmetic, on NVIDIA and
 * AMD GPUs and on the CPU.
 *
 * LINKING. Link with -lfusewire_c. The command cargo build --release -p fusewire-c writes
 * libfusewire_c.so (the SONAME is the same) and libfusewire_c.a to target/release. A program that
 * links the static library also needs -lm -lpthread -ldl. Never dlclose the shared library.
 *
 * NOT INCLUDED. These parts of the Rust API have no C functions: collectives of lists of buffers;
 * reduce_scatter_v with factors; factors in device memory; objects other than byte strings; queues;
 * persistent and quantized operations; options and timeouts of single calls; set_timeout; split
 * with other options; plans; adopted communicators; hints; dup and reconfigure; hooks and the
 * flight recorder; the transport; user kernels; the configuration of a mixture of experts, which
 * the program has passed.
 *
 * RETURN VALUES. Functions return FUSEWIRE_OK (0) or a FUSEWIRE_ERROR_ code. fusewire_last_error()
 * returns the message of the calling thread's last failed call. A call with an invalid argument,
 * such as a null handle, fails before any data moves. After a communicator has failed, every call
 * on it returns that failure. No function throws an exception or panics.
 *
 * THREADS. All ranks must issue the operations of a communicator in the same order. Several threads
 * may use a handle if they keep this order. A handle must be destroyed exactly once, when no thread
 * uses it any more. fusewire_comm_abort may be called at any time. A process that has a
 * communicator must not fork and use the communicator in the child.
 *
 * MEMORY. A buffer consists of an address in the memory of the communicator's device (on the CPU:
 * in the memory of the process), a number of elements, and a type. The address must be aligned to
 * the type; buffers of norms on a GPU must be aligned to 16 bytes. Calls do not copy their buffers
 * in advance. Peers read and write memory in a window (fusewire_alloc, fusewire_register) directly.
 * Operations copy other memory through the communicator's staging. In one operation, some ranks may
 * pass memory in a window while others pass other memory.
 *   - A blocking call uses its buffers until it returns.
 *   - An _async call uses its buffers until its work is done. A captured call uses them until every
 *     graph that contains the call is destroyed. Until then the caller must keep the buffers
 *     allocated, and must neither change an input nor access an output. Memory from fusewire_alloc
 *     stays allocated as long as work or a graph uses it.
 *   - The library reads structs and text during the call only. The caller may free them afterwards.
 *
 * STREAMS. Every handle has a stream: the communicator's own stream (fusewire_comm_on_own_stream),
 * a stream of the caller (fusewire_comm_on_stream), or a new stream (fusewire_comm_on_new_stream).
 * _async calls enqueue on the stream and return; blocking calls enqueue and wait. Launches of one
 * communicator on several streams run in the order in which they were issued.
 *
 * COMPATIBILITY. The first field of a struct is struct_size, which the program sets to the sizeof
 * of the struct, also if a function writes the struct. New fields are added at the end of a struct.
 * An older program continues to work. A newer program gets an error if it sets a field that an
 * older library does not know; an older library writes zero to such a field. Zero is the default of
 * every field. In C: fusewire_norm norm = {.struct_size = sizeof norm, ...}; in C++,
 * memset the struct first.
 */
#ifndef FUSEWIRE_H
#define FUSEWIRE_H

#include <stddef.h>
#include <stdint.h>

#define FUSEWIRE_VERSION_MAJOR 0
#define FUSEWIRE_VERSION_MINOR 1
#define FUSEWIRE_VERSION_PATCH 0
#define FUSEWIRE_VERSION \
  (FUSEWIRE_VERSION_MAJOR * 10000 + FUSEWIRE_VERSION_MINOR * 100 + FUSEWIRE_VERSION_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/* Codes. */
#define FUSEWIRE_OK 0
#define FUSEWIRE_ERROR_ARGUMENT 1      /* an argument is invalid; no data was moved */
#define FUSEWIRE_ERROR_TIMEOUT 2       /* a wait timed out; the message names the late rank */
#define FUSEWIRE_ERROR_MISMATCH 3      /* ranks called different operations, sizes or types */
#define FUSEWIRE_ERROR_PEER 4          /* a rank's process has ended */
#define FUSEWIRE_ERROR_ABORTED 5       /* the communicator was aborted */
#define FUSEWIRE_ERROR_FAILED 6        /* a kernel stopped for another reason */
#define FUSEWIRE_ERROR_BOOTSTRAP 7     /* rank, size or store is unknown, or the store failed */
#define FUSEWIRE_ERROR_COMMUNICATOR 8  /* no communicator or window was created, or the
                                          communicator has ended */
#define FUSEWIRE_ERROR_DEVICE 9        /* a device does not exist, or its driver failed */
#define FUSEWIRE_ERROR_MEMORY 10       /* memory could not be allocated, mapped or shared */
#define FUSEWIRE_ERROR_CAPTURE 11      /* not allowed in the capture state of the stream */
#define FUSEWIRE_ERROR_BACKEND 12      /* another library (NCCL, RCCL, Gloo) failed */
#define FUSEWIRE_ERROR_NOT_DONE 13     /* a bounded wait timed out; the work continues */
#define FUSEWIRE_ERROR_OTHER 14
#define FUSEWIRE_ERROR_INTERNAL 15     /* a bug of the library */

/* Types of elements. Operations can move fp8 elements, and norms can write them, but reductions do
   not accept them. */
#define FUSEWIRE_DTYPE_DEFAULT 0 /* only for fields that document it */
#define FUSEWIRE_F64 1
#define FUSEWIRE_F32 2
#define FUSEWIRE_F16 3
#define FUSEWIRE_BF16 4
#define FUSEWIRE_E4M3 5 /* fp8, E4M3FN */
#define FUSEWIRE_E5M2 6 /* fp8 */
#define FUSEWIRE_I8 7
#define FUSEWIRE_U8 8
#define FUSEWIRE_I32 9
#define FUSEWIRE_U32 10
#define FUSEWIRE_I64 11
#define FUSEWIRE_U64 12
/* A float and its uint32_t index, aligned to 8 bytes. FUSEWIRE_MAX finds the greatest value of all
   ranks and its index, FUSEWIRE_MIN the least. Of equal values, the lowest index is taken. */
#define FUSEWIRE_F32_INDEX 13

/* Reductions. Ranks are reduced in rank order, so the results are bitwise identical on every rank
   and in every run. f16 and bf16 are summed in f32 and rounded once. */
#define FUSEWIRE_SUM 1
#define FUSEWIRE_PRODUCT 2
#define FUSEWIRE_MIN 3 /* NaN propagates */
#define FUSEWIRE_MAX 4 /* NaN propagates */
#define FUSEWIRE_AVERAGE 5 /* integers truncate */
#define FUSEWIRE_BIT_AND 6 /* bitwise reductions are for integers only */
#define FUSEWIRE_BIT_OR 7
#define FUSEWIRE_BIT_XOR 8

/* Algorithms. Must be equal on all ranks. The results of all algorithms except NVLS are bitwise
   identical. */
#define FUSEWIRE_ALGORITHM_AUTO 0
#define FUSEWIRE_ALGORITHM_PACKET 1   /* one hop by packets */
#define FUSEWIRE_ALGORITHM_SIGNAL 2   /* one hop by signals */
#define FUSEWIRE_ALGORITHM_TWO_SHOT 3 /* two hops: ranks reduce shards, then gather them */
#define FUSEWIRE_ALGORITHM_NVLS 7     /* multicast; needs any_order; not for norms */
#define FUSEWIRE_ALGORITHM_PACKET_TWO_SHOT 8 /* two hops by packets; not for norms */

typedef struct fusewire_comm fusewire_comm;   /* a communicator on a stream */
typedef struct fusewire_work fusewire_work;   /* an enqueued operation */
typedef struct fusewire_graph fusewire_graph; /* captured operations that can be replayed */
typedef struct fusewire_ready_flags fusewire_ready_flags; /* one word per chunk or tile */
typedef struct fusewire_window fusewire_window; /* memory that peers access by put and get */
typedef struct fusewire_bytes fusewire_bytes;   /* byte strings that an operation returned */
typedef struct fusewire_moe fusewire_moe;       /* a mixture of experts */

/* Returns FUSEWIRE_VERSION of the library. */
uint32_t fusewire_version(void);

/* Returns the message of the calling thread's last failed call, or "" if no call has failed. The
   text is UTF-8 and stays valid until the next failed call of the thread, or until the thread ends.
   The result is never null. */
const char *fusewire_last_error(void);

/* ---- Communicators ---- */

/* Options. Options marked * must be equal on all ranks. A null pointer to the struct selects all
   defaults. */
typedef struct fusewire_options {
  size_t struct_size;         /* sizeof(fusewire_options) */
  double timeout_seconds;     /* limit of every wait, and (at least 5 s) of the bootstrap; default
                                 FUSEWIRE_TIMEOUT_SECONDS or TORCHCOMM_TIMEOUT_SECONDS in the
                                 environment, or 600 */
  uint64_t staging_bytes;     /* * size of each of the two staging areas, for input and output;
                                 default 8 MiB on a GPU, 1 MiB on a CPU */
  uint64_t packet_slot_bytes; /* * size of a packet slot; default 64 KiB on a GPU, 32 KiB on a
                                 CPU */
  uint32_t blocks;            /* * blocks of a launch, at most 64; default 16 on a GPU, 1 on a
                                 CPU */
  uint32_t threads;           /* * threads of a block on a GPU: a multiple of 64, at most 512 (the
                                 default) */
  uint32_t algorithm;         /* * algorithm of all_reduce */
  uint32_t any_order;         /* * not 0: reduce in any order of ranks; NVLS needs it */
  uint32_t store_is_served;   /* fusewire_comm_create: not 0 if the store is already served, so
                                 rank 0 does not serve it */
  uint32_t abort_process;     /* not 0: a watchdog ends the process after a failure; 0: only if
                                 TORCHCOMM_ABORT_ON_ERROR is set in the environment */
  const char *backend;        /* "fusewire" (default), "nccl", "rccl", ...; norms, sampling, overlap
                                 and windows need "fusewire" */
  uint32_t high_priority_stream; /* not 0: the communicator's own stream has a high priority */
  uint64_t max_object_bytes;  /* * limit of a byte string, with a header of less than 1 KiB, that
                                 the functions *_bytes transfer; default 64 MiB */
  uint32_t large_blocks;      /* * blocks of a launch on a GPU that moves 4 MiB or more for a
                                 collective, at most 64; default 32, or `blocks` if it is not 0 */
} fusewire_options;

/* Joins the communicator "world". The environment names the rank: fusewire run, torchrun, mpirun or
   srun sets the variables. `device` is "cpu" (the default if null), "cuda:N" or "hip:N", with N
   among the devices that the process sees. All ranks call this function together; the timeout
   limits the call. `comm` is null after a failure. If no agent of a launcher serves the store, rank
   0 serves it. Only one communicator from the environment can then exist at a time; create more
   communicators with fusewire_comm_split. */
int fusewire_comm_from_env(const char *device, const fusewire_options *options,
                           fusewire_comm **comm);

/* Joins a communicator as rank `rank` of `size`. The rendezvous uses the store at `store`,
   "host:port" ("[::1]:29500" for IPv6). Rank 0 serves the store at this address as long as the
   communicator lives. If the store is already served (store_is_served), several communicators with
   different `name` (default "world") may share it. All ranks call this function together. */
int fusewire_comm_create(const char *device, uint32_t rank, uint32_t size, const char *store,
                         const char *name, const fusewire_options *options,
                         fusewire_comm **comm);

/* Creates a communicator of the `count` ranks listed in `ranks`: rank ranks[i] of this communicator
   becomes rank i of the new one. All ranks of this communicator call the function together. Each
   rank passes the list that contains it, or an empty list (count 0); `part` is then null. Different
   ranks may pass lists of different groups. The new handle is destroyed like any other, before or
   after the handle of this communicator. `name` (default "part") appears in messages. */
int fusewire_comm_split(const fusewire_comm *comm, const uint32_t *ranks, uint32_t count,
                        const char *name, fusewire_comm **part);

/* Creates another handle of the same communicator, on `stream`: a CUstream or hipStream_t of the
   device's primary context or of a green context of the device. The stream must outlive the handle,
   all work that the handle enqueued, and the next use of the communicator on another stream.

   The value of at::cuda::getCurrentCUDAStream().stream() can be passed as it is. Null is the legacy
   default stream, which is PyTorch's default stream. Operations run in order with all other work of
   that stream and of blocking streams. The legacy default stream cannot be captured. While a
   blocking stream or a stream of this library is capturing, calls with *on_stream fail with
   FUSEWIRE_ERROR_CAPTURE and leave the capture valid. (CUstream)2 is the default stream of the
   calling thread. It can be captured. Calls that enqueue work with *on_stream on any other thread
   fail with FUSEWIRE_ERROR_ARGUMENT.

   Fails with FUSEWIRE_ERROR_ARGUMENT if the communicator is on a CPU. */
int fusewire_comm_on_stream(const fusewire_comm *comm, void *stream, fusewire_comm **on_stream);

/* Creates another handle of the same communicator, on the communicator's own stream. */
int fusewire_comm_on_own_stream(const fusewire_comm *comm, fusewire_comm **on_stream);

/* Creates another handle of the same communicator, on a new stream. The stream lives as long as the
   handle and its work. Also supported on a CPU. */
int fusewire_comm_on_new_stream(const fusewire_comm *comm, fusewire_comm **on_stream);

/* Destroys a handle, even if the call returns a failure. Destroying the last handle of a
   communicator waits for all work, ends the communicator on this rank, and returns the failure of
   the communicator, or of work that no call waited for. Null is allowed. Peers may still use memory
   of this rank that they have mapped. If rank 0 serves the store, rank 0 must not destroy its
   communicator before all other ranks have ended theirs: call fusewire_barrier first. */
int fusewire_comm_destroy(fusewire_comm *comm);

/* Stops the communicator. May be called from any thread. Waiting calls return
   FUSEWIRE_ERROR_ABORTED within milliseconds, on every rank that this rank reaches by load and
   store. Every later call returns the same code. */
int fusewire_comm_abort(const fusewire_comm *comm);

/* Waits for all work on the handle's stream. Returns the first failure since the last call of this
   function. */
int fusewire_comm_synchronize(const fusewire_comm *comm);

/* Loads in advance everything that the first operations would otherwise load. Call it before a
   capture on a GPU. */
int fusewire_comm_warm_up(const fusewire_comm *comm);

/* Returns the communicator's failure, or FUSEWIRE_OK. Does not wait. */
int fusewire_comm_failure(const fusewire_comm *comm);

int fusewire_comm_rank(const fusewire_comm *comm, uint32_t *rank);
int fusewire_comm_size(const fusewire_comm *comm, uint32_t *size);

/* Stores in `bytes` the number of bytes of device memory that this rank holds for the communicator:
   signals, slots and staging, but not windows. */
int fusewire_comm_workspace_bytes(const fusewire_comm *comm, uint64_t *bytes);

/* Stores in `bytes` the number of bytes that fusewire_comm_workspace_bytes would give for a
   communicator of `size` ranks with these options, without creating the communicator. */
int fusewire_workspace_bytes(const char *device, uint32_t size, const fusewire_options *options,
                             uint64_t *bytes);

/* ---- Memory ---- */

/* Allocates zeroed memory of the device in a new window, aligned to at least 16 bytes. All ranks
   call the function together, with the same size, which must be at least 1. A communicator has
   at most 1024 windows at a time. A freed window no longer counts, unless a rank has captured an
   operation that may use it. */
int fusewire_alloc(const fusewire_comm *comm, uint64_t bytes, void **memory);

/* Frees memory from fusewire_alloc. All ranks call the function together. The call waits until no
   operation uses the memory. Graphs that use the memory must not be replayed any more. Memory that
   is not freed, and memory of a failed communicator, stays allocated until the communicator is
   destroyed. */
int fusewire_free(const fusewire_comm *comm, void *memory);

/* Places GPU memory that the caller allocated into a window. All ranks call the function together,
   with the same size. The caller must keep the memory allocated until it is deregistered (after a
   failure: until the communicator is destroyed). On a CPU the call returns FUSEWIRE_ERROR_ARGUMENT,
   because peers cannot map ordinary memory of a process. Pass this memory to operations without
   registering it, or use memory from fusewire_alloc. */
int fusewire_register(const fusewire_comm *comm, void *memory, uint64_t bytes);
int fusewire_deregister(const fusewire_comm *comm, void *memory);

/* Copies between device memory and host memory, and waits until the copy is complete. For tests and
   set-up. No operation may use the memory at the same time. */
int fusewire_upload(const fusewire_comm *comm, void *device, const void *host, uint64_t bytes);
int fusewire_download(const fusewire_comm *comm, void *host, const void *device, uint64_t bytes);

/* ---- Operations ----
   The plain form waits until the operation is complete. The _async form enqueues the operation on
   the handle's stream and returns; if the operation fails later, waiting for its work returns the
   failure. If `work` is not null, it receives a handle, which the caller must destroy, or null if
   the call fails. Counts are in elements. A count of 0 is always allowed, and a buffer of 0
   elements may be null. Input and output must not overlap, unless stated otherwise. Count, type,
   reduction and root must be equal on all ranks, unless stated otherwise. */

/* Reduces `count` elements of every rank and stores the result on every rank. Output may be equal
   to input. */
int fusewire_all_reduce(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                        uint32_t dtype, uint32_t reduction);
int fusewire_all_reduce_async(const fusewire_comm *comm, const void *input, void *output,
                              uint64_t count, uint32_t dtype, uint32_t reduction,
                              fusewire_work **work);

/* Multiplies the input of each rank by the rank's `factor`, and stores the sum on every rank. Ranks
   may pass different factors. For integers, the factor must be an integer. Products and sums of f16
   and bf16 are computed in f32 and rounded once. Output may be equal to input. */
int fusewire_all_reduce_premul_sum(const fusewire_comm *comm, const void *input, void *output,
                                   uint64_t count, uint32_t dtype, double factor);
int fusewire_all_reduce_premul_sum_async(const fusewire_comm *comm, const void *input,
                                         void *output, uint64_t count, uint32_t dtype,
                                         double factor, fusewire_work **work);

/* Reduces `count` elements of every rank and stores the result on the root. Other ranks ignore
   `output`, which may be null. On the root, output may be equal to input. */
int fusewire_reduce(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                    uint32_t dtype, uint32_t reduction, uint32_t root);
int fusewire_reduce_async(const fusewire_comm *comm, const void *input, void *output,
                          uint64_t count, uint32_t dtype, uint32_t reduction, uint32_t root,
                          fusewire_work **work);

/* fusewire_all_reduce_premul_sum with the result on the root only, as in fusewire_reduce. */
int fusewire_reduce_premul_sum(const fusewire_comm *comm, const void *input, void *output,
                               uint64_t count, uint32_t dtype, double factor, uint32_t root);
int fusewire_reduce_premul_sum_async(const fusewire_comm *comm, const void *input, void *output,
                                     uint64_t count, uint32_t dtype, double factor, uint32_t root,
                                     fusewire_work **work);

/* Reduces row r of every rank's input and stores the result in the output of rank r. The input has
   one row of `count` elements for each rank. The output may be this rank's row of the input. */
int fusewire_reduce_scatter(const fusewire_comm *comm, const void *input, void *output,
                            uint64_t count, uint32_t dtype, uint32_t reduction);
int fusewire_reduce_scatter_async(const fusewire_comm *comm, const void *input, void *output,
                                  uint64_t count, uint32_t dtype, uint32_t reduction,
                                  fusewire_work **work);

/* fusewire_reduce_scatter of inputs that are multiplied by the rank's `factor`, as in
   fusewire_all_reduce_premul_sum. */
int fusewire_reduce_scatter_premul_sum(const fusewire_comm *comm, const void *input, void *output,
                                       uint64_t count, uint32_t dtype, double factor);
int fusewire_reduce_scatter_premul_sum_async(const fusewire_comm *comm, const void *input,
                                             void *output, uint64_t count, uint32_t dtype,
                                             double factor, fusewire_work **work);

/* Reduces part r of every rank's input and stores the result in the output of rank r. Part r of the
   input and the output of rank r have counts[r] elements. `counts` has one number per rank, equal
   on all ranks, in host memory. The call copies it, so an _async call or a graph does not refer to
   it afterwards. The parts of the input are contiguous, in rank order. The output may be this
   rank's part of the input. */
int fusewire_reduce_scatter_v(const fusewire_comm *comm, const void *input, void *output,
                              const uint64_t *counts, uint32_t dtype, uint32_t reduction);
int fusewire_reduce_scatter_v_async(const fusewire_comm *comm, const void *input, void *output,
                                    const uint64_t *counts, uint32_t dtype, uint32_t reduction,
                                    fusewire_work **work);

/* Copies the `count` elements of rank r to row r of every rank's output. The input may be this
   rank's row of the output. */
int fusewire_all_gather(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                        uint32_t dtype);
int fusewire_all_gather_async(const fusewire_comm *comm, const void *input, void *output,
                              uint64_t count, uint32_t dtype, fusewire_work **work);

/* Copies the counts[r] elements of rank r to part r of every rank's output. `counts` has one number
   per rank, equal on all ranks, in host memory. The call copies it, so an _async call or a graph
   does not refer to it afterwards. The parts of the output are contiguous, in rank order. The input
   may be this rank's part of the output. */
int fusewire_all_gather_v(const fusewire_comm *comm, const void *input, void *output,
                          const uint64_t *counts, uint32_t dtype);
int fusewire_all_gather_v_async(const fusewire_comm *comm, const void *input, void *output,
                                const uint64_t *counts, uint32_t dtype, fusewire_work **work);

/* fusewire_all_gather_v with `counts` in memory of the communicator's device. The operation reads
   them when it runs, and each replay of a graph reads them again. `input_count` and `output_count`
   are the sizes of the buffers. On a CPU, the call also reads the counts and compares them with the
   sizes, which must be counts[rank] and the sum of the counts. On a GPU, the host never reads the
   counts. If the counts exceed a buffer, no data moves and the operation fails. */
int fusewire_all_gather_v_device(const fusewire_comm *comm, const void *input,
                                 uint64_t input_count, void *output, uint64_t output_count,
                                 const uint64_t *counts, uint32_t dtype);
int fusewire_all_gather_v_device_async(const fusewire_comm *comm, const void *input,
                                       uint64_t input_count, void *output, uint64_t output_count,
                                       const uint64_t *counts, uint32_t dtype,
                                       fusewire_work **work);

/* Copies row r of the input of rank s to row s of the output of rank r. A row has `count`
   elements. */
int fusewire_all_to_all(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                        uint32_t dtype);
int fusewire_all_to_all_async(const fusewire_comm *comm, const void *input, void *output,
                              uint64_t count, uint32_t dtype, fusewire_work **work);

/* Sends input_splits[r] elements to rank r, and receives output_splits[r] elements from it. The
   parts of both buffers are contiguous, in rank order. The splits have one number per rank and may
   differ between ranks, but output_splits[s] of rank r must be equal to input_splits[r] of rank s.
   They are in host memory. The call copies them, so an _async call or a graph does not refer to
   them afterwards. */
int fusewire_all_to_all_v(const fusewire_comm *comm, const void *input,
                          const uint64_t *input_splits, void *output,
                          const uint64_t *output_splits, uint32_t dtype);
int fusewire_all_to_all_v_async(const fusewire_comm *comm, const void *input,
                                const uint64_t *input_splits, void *output,
                                const uint64_t *output_splits, uint32_t dtype,
                                fusewire_work **work);

/* fusewire_all_to_all_v with splits in memory of the communicator's device. The operation reads
   them when it runs, and each replay of a graph reads them again. `input_count` and `output_count`
   are the sizes of the buffers. If the splits exceed a buffer, no data moves: on a CPU the call
   fails, on a GPU the operation fails. */
int fusewire_all_to_all_v_device(const fusewire_comm *comm, const void *input,
                                 uint64_t input_count, const uint64_t *input_splits, void *output,
                                 uint64_t output_count, const uint64_t *output_splits,
                                 uint32_t dtype);
int fusewire_all_to_all_v_device_async(const fusewire_comm *comm, const void *input,
                                       uint64_t input_count, const uint64_t *input_splits,
                                       void *output, uint64_t output_count,
                                       const uint64_t *output_splits, uint32_t dtype,
                                       fusewire_work **work);

/* Copies the root's `count` elements to every rank. */
int fusewire_broadcast(const fusewire_comm *comm, void *buffer, uint64_t count, uint32_t dtype,
                       uint32_t root);
int fusewire_broadcast_async(const fusewire_comm *comm, void *buffer, uint64_t count,
                             uint32_t dtype, uint32_t root, fusewire_work **work);

/* Copies row r of the root's input to the output of rank r. A row has `count` elements. Other ranks
   ignore `input`, which may be null. The root's output may be its row of the input. */
int fusewire_scatter(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                     uint32_t dtype, uint32_t root);
int fusewire_scatter_async(const fusewire_comm *comm, const void *input, void *output,
                           uint64_t count, uint32_t dtype, uint32_t root, fusewire_work **work);

/* Copies the `count` elements of rank r to row r of the root's output. Other ranks ignore `output`,
   which may be null. The root's input may be its row of the output. */
int fusewire_gather(const fusewire_comm *comm, const void *input, void *output, uint64_t count,
                    uint32_t dtype, uint32_t root);
int fusewire_gather_async(const fusewire_comm *comm, const void *input, void *output,
                          uint64_t count, uint32_t dtype, uint32_t root, fusewire_work **work);

/* Sends to another rank, which must receive the same number of elements of the same type. The plain
   form returns when the data is in the channel. */
int fusewire_send(const fusewire_comm *comm, const void *input, uint64_t count, uint32_t dtype,
                  uint32_t peer);
int fusewire_send_async(const fusewire_comm *comm, const void *input, uint64_t count,
                        uint32_t dtype, uint32_t peer, fusewire_work **work);
int fusewire_recv(const fusewire_comm *comm, void *output, uint64_t count, uint32_t dtype,
                  uint32_t peer);
int fusewire_recv_async(const fusewire_comm *comm, void *output, uint64_t count, uint32_t dtype,
                        uint32_t peer, fusewire_work **work);

/* Completes when every rank has called this function. */
int fusewire_barrier(const fusewire_comm *comm);
int fusewire_barrier_async(const fusewire_comm *comm, fusewire_work **work);

/* ---- Batches of sends and receives ---- */

#define FUSEWIRE_P2P_SEND 1
#define FUSEWIRE_P2P_RECV 2

/* A send or receive of a batch. */
typedef struct fusewire_p2p {
  size_t struct_size; /* sizeof(fusewire_p2p), in every element of the array */
  uint32_t kind;      /* FUSEWIRE_P2P_SEND, FUSEWIRE_P2P_RECV */
  uint32_t peer;      /* the other rank; this rank if the batch has matching sends and receives */
  void *buffer;       /* count elements, which a send only reads */
  uint64_t count;     /* of elements; equal on both ranks */
  uint32_t dtype;     /* equal on both ranks */
} fusewire_p2p;

/* Runs `count` sends and receives concurrently, like a group of NCCL or batch_isend_irecv of
   PyTorch. No pattern (ring, exchange of two ranks, all-to-all) can deadlock, regardless of the
   sizes. Messages between the same two ranks keep the order of the array. A batch matches batches
   and the functions fusewire_send and fusewire_recv of other ranks. Memory that one operation
   receives must not overlap memory of another one. A batch of 0 operations is allowed. */
int fusewire_batch(const fusewire_comm *comm, const fusewire_p2p *ops, uint32_t count);
int fusewire_batch_async(const fusewire_comm *comm, const fusewire_p2p *ops, uint32_t count,
                         fusewire_work **work);

/* ---- Windows: one-sided communication ----
   Every rank contributes a part of the same size to a window. Each rank can write, read and signal
   the part of every other rank without that rank's participation. Offsets and sizes are in bytes.

   A put does not check that its target may be overwritten: the program must order the accesses, by
   signals or barriers. A signal covers the puts that this rank has issued before it to the same
   peer on this communicator: when the peer sees the value, it also sees the data. `peer` may be
   this rank.

   A signal has one 64-bit value for each sender. fusewire_window_wait_raised counts: each wait uses
   up one fusewire_window_raise or fusewire_window_put_signal of the sender, also in replays of a
   graph. fusewire_window_wait_signal compares the value and uses up nothing: either let the awaited
   value grow, or reset the signal while no rank can update it. Use a signal with only one of
   these two functions.

   A typical exchange: rank 0 calls fusewire_window_put_signal(comm, window, data, bytes, 1, 0, 3);
   rank 1 calls fusewire_window_wait_raised(comm, window, 3, 0) and then reads the memory from
   fusewire_window_memory. */

#define FUSEWIRE_ALL_RANKS 0xffffffffu /* sender: all ranks, or the sum of their values */

#define FUSEWIRE_SIGNAL_SET 1
#define FUSEWIRE_SIGNAL_ADD 2 /* wraps */

/* Comparisons of a signal's value (left) with the value of the call (right). */
#define FUSEWIRE_COMPARE_EQUAL 0
#define FUSEWIRE_COMPARE_NOT_EQUAL 1
#define FUSEWIRE_COMPARE_LESS 2
#define FUSEWIRE_COMPARE_LESS_EQUAL 3
#define FUSEWIRE_COMPARE_GREATER 4
#define FUSEWIRE_COMPARE_GREATER_EQUAL 5

/* Options. Must be equal on all ranks. A null pointer to the struct selects all defaults. */
typedef struct fusewire_window_options {
  size_t struct_size; /* sizeof(fusewire_window_options) */
  uint32_t signals;   /* default: the number of ranks */
  uint32_t counters;  /* of kernels; default: the number of ranks */
  uint32_t barriers;  /* of kernels; default: 1 */
  uint32_t cells;     /* words that kernels of all ranks update atomically; default: 0 */
} fusewire_window_options;

/* Creates a window over `bytes` bytes of zeroed new memory of the device on each rank. All ranks
   call the function together, with the same size, which must be at least 1, and the same options.
   Backends other than "fusewire" have no windows. A window and its signals count as two of the
   windows that fusewire_alloc limits. Captures do not record this call. */
int fusewire_window_alloc(const fusewire_comm *comm, uint64_t bytes,
                          const fusewire_window_options *options, fusewire_window **window);

/* Like fusewire_window_alloc, over existing memory: memory or a part of memory from fusewire_alloc
   or fusewire_register, or GPU memory that the caller allocated. Peers must be able to map it, so
   on a CPU only memory from fusewire_alloc is possible, and on AMD GPUs no memory that the caller
   allocated. The memory must stay allocated and registered until the window is freed. */
int fusewire_window_create(const fusewire_comm *comm, void *memory, uint64_t bytes,
                           const fusewire_window_options *options, fusewire_window **window);

/* Ends a window. All ranks call the function together. The call waits until no operation uses the
   window. Graphs that use the window must not be replayed any more. Afterwards only
   fusewire_window_destroy may use the handle; other functions return FUSEWIRE_ERROR_ARGUMENT. */
int fusewire_window_free(const fusewire_comm *comm, const fusewire_window *window);

/* Destroys a handle, before the communicator's last handle is destroyed. If the window was freed,
   also releases its memory. Otherwise the window stays until the communicator is destroyed. Null is
   allowed. */
int fusewire_window_destroy(fusewire_window *window);

/* Stores address and size of this rank's part. Operations use this memory without a copy. The
   address is valid until the window is freed. */
int fusewire_window_memory(const fusewire_window *window, void **memory, uint64_t *bytes);

/* Stores the device address at which this process has mapped the part of `peer`. It is valid until
   the window is freed. Fails with FUSEWIRE_ERROR_ARGUMENT if the peer is reachable only by a
   network. */
int fusewire_window_peer_memory(const fusewire_window *window, uint32_t peer, void **memory);

/* Stores the device address of the window's description, an argument of kernels that use the device
   API (`fusewire_device::window::DeviceWindow`). It is valid until the handle is destroyed. */
int fusewire_window_device(const fusewire_window *window, const void **device_window);

/* Writes `bytes` bytes at `source` to the part of `peer`, from byte `offset`. */
int fusewire_window_put(const fusewire_comm *comm, const fusewire_window *window,
                        const void *source, uint64_t bytes, uint32_t peer, uint64_t offset);
int fusewire_window_put_async(const fusewire_comm *comm, const fusewire_window *window,
                              const void *source, uint64_t bytes, uint32_t peer, uint64_t offset,
                              fusewire_work **work);

/* Puts, then adds 1 to this rank's value of signal `signal` at `peer`. */
int fusewire_window_put_signal(const fusewire_comm *comm, const fusewire_window *window,
                               const void *source, uint64_t bytes, uint32_t peer, uint64_t offset,
                               uint32_t signal);
int fusewire_window_put_signal_async(const fusewire_comm *comm, const fusewire_window *window,
                                     const void *source, uint64_t bytes, uint32_t peer,
                                     uint64_t offset, uint32_t signal, fusewire_work **work);

/* Reads `bytes` bytes of the part of `peer`, from byte `offset`, to `target`. */
int fusewire_window_get(const fusewire_comm *comm, const fusewire_window *window, void *target,
                        uint64_t bytes, uint32_t peer, uint64_t offset);
int fusewire_window_get_async(const fusewire_comm *comm, const fusewire_window *window,
                              void *target, uint64_t bytes, uint32_t peer, uint64_t offset,
                              fusewire_work **work);

/* Adds 1 to this rank's value of signal `signal` at `peer`, for fusewire_window_wait_raised. */
int fusewire_window_raise(const fusewire_comm *comm, const fusewire_window *window, uint32_t peer,
                          uint32_t signal);
int fusewire_window_raise_async(const fusewire_comm *comm, const fusewire_window *window,
                                uint32_t peer, uint32_t signal, fusewire_work **work);

/* Waits until `sender` has raised signal `signal` of this rank once more than this rank has waited
   for it. FUSEWIRE_ALL_RANKS waits for every rank, this one included. After the _async form, later
   work on the stream waits. */
int fusewire_window_wait_raised(const fusewire_comm *comm, const fusewire_window *window,
                                uint32_t signal, uint32_t sender);
int fusewire_window_wait_raised_async(const fusewire_comm *comm, const fusewire_window *window,
                                      uint32_t signal, uint32_t sender, fusewire_work **work);

/* Sets this rank's value of signal `signal` at `peer` (FUSEWIRE_SIGNAL_SET), or adds to it
   (FUSEWIRE_SIGNAL_ADD). */
int fusewire_window_signal(const fusewire_comm *comm, const fusewire_window *window, uint32_t peer,
                           uint32_t signal, uint32_t update, uint64_t value);
int fusewire_window_signal_async(const fusewire_comm *comm, const fusewire_window *window,
                                 uint32_t peer, uint32_t signal, uint32_t update, uint64_t value,
                                 fusewire_work **work);

/* Waits until signal `signal` of this rank satisfies the comparison with `value`. `sender` is a
   rank, or FUSEWIRE_ALL_RANKS for the sum over all ranks. After the _async form, later work on the
   stream waits. */
int fusewire_window_wait_signal(const fusewire_comm *comm, const fusewire_window *window,
                                uint32_t signal, uint32_t sender, uint32_t compare,
                                uint64_t value);
int fusewire_window_wait_signal_async(const fusewire_comm *comm, const fusewire_window *window,
                                      uint32_t signal, uint32_t sender, uint32_t compare,
                                      uint64_t value, fusewire_work **work);

/* Stores the current value of a signal of this rank in `value`. Does not wait. `sender` is as in
   fusewire_window_wait_signal. */
int fusewire_window_read_signal(const fusewire_window *window, uint32_t signal, uint32_t sender,
                                uint64_t *value);

/* Sets a signal of this rank to 0 for all senders. No sender may be updating it, and none may
   update it before it knows that this function has returned. */
int fusewire_window_reset_signal(const fusewire_window *window, uint32_t signal);

/* Stores the current value of a counter of this rank in `value`. A kernel adds 1 to a counter once
   the sources of its puts may be reused. */
int fusewire_window_read_counter(const fusewire_window *window, uint32_t counter, uint64_t *value);

/* Sets a counter of this rank to 0. No kernel may count in it meanwhile. */
int fusewire_window_reset_counter(const fusewire_window *window, uint32_t counter);

/* ---- Byte strings ----
   Operations on byte strings in host memory, also if the communicator is on a GPU. The size may
   differ between ranks, and receivers need not know it. Results are in memory of the library, which
   fusewire_bytes_destroy frees. `data` may be null if the size is 0. All functions block. The
   option max_object_bytes limits the size. If one string is too large, all ranks that take part get
   FUSEWIRE_ERROR_OTHER, and the communicator remains usable.

   Ranks in Rust take part with the object collectives and the type serde_bytes::ByteBuf
   (all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_object_list,
   recv_object_list). A list of several strings that such a rank sends or broadcasts has several
   parts. */

/* Returns the string of every rank on every rank, as part r of the result. */
int fusewire_all_gather_bytes(const fusewire_comm *comm, const void *data, uint64_t size,
                              fusewire_bytes **bytes);

/* Returns the string of every rank on the root, as part r of the result. On other ranks the result
   is null. */
int fusewire_gather_bytes(const fusewire_comm *comm, const void *data, uint64_t size,
                          uint32_t root, fusewire_bytes **bytes);

/* Returns the root's string on every rank, as part 0 of the result. Other ranks ignore `data` and
   `size`. */
int fusewire_broadcast_bytes(const fusewire_comm *comm, const void *data, uint64_t size,
                             uint32_t root, fusewire_bytes **bytes);

/* Returns string r of the root on rank r, as part 0 of the result. The root passes an address and a
   size for each rank. Other ranks ignore `data` and `sizes`, which may be null. */
int fusewire_scatter_bytes(const fusewire_comm *comm, const void *const *data,
                           const uint64_t *sizes, uint32_t root, fusewire_bytes **bytes);

/* Sends a string to another rank, which must receive it with fusewire_recv_bytes, as part 0 of the
   result. */
int fusewire_send_bytes(const fusewire_comm *comm, const void *data, uint64_t size,
                        uint32_t peer);
int fusewire_recv_bytes(const fusewire_comm *comm, uint32_t peer, fusewire_bytes **bytes);

/* Stores the number of parts in `count`. */
int fusewire_bytes_count(const fusewire_bytes *bytes, uint64_t *count);

/* Stores address and size of part `index`. The address is valid until the handle is destroyed, and
   is not null. */
int fusewire_bytes_part(const fusewire_bytes *bytes, uint64_t index, const void **data,
                        uint64_t *size);

/* Frees a result. Null is allowed. */
int fusewire_bytes_destroy(fusewire_bytes *bytes);

/* ---- Fused norms ---- */

#define FUSEWIRE_NORM_RMS 0   /* y = v / sqrt(mean(v * v) + epsilon) * weight */
#define FUSEWIRE_NORM_LAYER 1 /* with m the mean of v:
                                 y = (v - m) / sqrt(mean((v - m)^2) + epsilon) * weight */

#define FUSEWIRE_NORM_UNIT_OFFSET 1 /* flag: multiply by 1 + weight */
#define FUSEWIRE_NORM_DEPENDENT 2   /* flag: programmatic dependent launch (NVIDIA, from sm_90) */

#define FUSEWIRE_SCALE_NONE 0   /* output is of `dtype` */
#define FUSEWIRE_SCALE_STATIC 1 /* output is E4M3, out = y / *scale */
#define FUSEWIRE_SCALE_ROWS 2   /* output is E4M3 with a scale for each row: the greatest magnitude
                                   in the row, at least 1e-10, divided by 448 */
#define FUSEWIRE_SCALE_GROUPS 3 /* as SCALE_ROWS, but with a scale for each group of
                                   FUSEWIRE_SCALE_GROUP elements */
#define FUSEWIRE_SCALE_GROUP 128

/* Let v be the sum of the input over the ranks, rounded to `dtype`, plus the residual. v is rounded
   to the type of the residual. The norm y is rounded to `dtype`; an fp8 output is computed from the
   rounded y. The results are bitwise identical to those of an all_reduce followed by separate
   steps. Buffers must not overlap, except that output or residual_out may be the same memory as
   residual, or as the same rows of input. All fields except the addresses must be equal on all
   ranks. */
typedef struct fusewire_norm {
  size_t struct_size;      /* sizeof(fusewire_norm) */
  uint32_t kind;           /* FUSEWIRE_NORM_RMS, FUSEWIRE_NORM_LAYER */
  uint32_t flags;          /* FUSEWIRE_NORM_UNIT_OFFSET | FUSEWIRE_NORM_DEPENDENT */
  uint64_t rows;           /* of the output; 0 is allowed */
  uint64_t hidden;         /* elements of a row: a multiple of 8 */
  uint32_t dtype;          /* F32, F16, BF16: of input, weight and bias */
  uint32_t residual_dtype; /* of residual and residual_out: `dtype` (or 0), or F32 */
  float epsilon;
  uint32_t algorithm;      /* AUTO, PACKET, SIGNAL, TWO_SHOT */
  const void *input;       /* rows x hidden; for reduce_scatter_norm size x rows x hidden */
  const void *weight;      /* hidden */
  const void *bias;        /* hidden, or null: added to y */
  const void *residual;    /* rows x hidden, or null */
  void *residual_out;      /* rows x hidden, or null: v */
  void *output;            /* rows x hidden, of `dtype`, or E4M3 with scales */
  uint32_t scaling;        /* FUSEWIRE_SCALE_ */
  uint32_t scale_dtype;    /* of `scales`: F32 (or 0), or U8 for powers of two (UE8M0) */
  const void *scale;       /* SCALE_STATIC: one f32; else null */
  void *scales;            /* SCALE_ROWS: rows; SCALE_GROUPS: see scale_stride; else null */
  uint64_t scale_stride;   /* SCALE_GROUPS, with G = ceil(hidden / 128) groups per row. If 0, the
                              scale of row r and group g is at r * G + g. Otherwise it is at
                              g * scale_stride + r, and scale_stride is at least rows. */
} fusewire_norm;

/* Stores all rows on every rank. */
int fusewire_all_reduce_norm(const fusewire_comm *comm, const fusewire_norm *norm);
int fusewire_all_reduce_norm_async(const fusewire_comm *comm, const fusewire_norm *norm,
                                   fusewire_work **work);

/* Stores rows r * rows to (r + 1) * rows of the result on rank r, which passes the residual of
   these rows. */
int fusewire_reduce_scatter_norm(const fusewire_comm *comm, const fusewire_norm *norm);
int fusewire_reduce_scatter_norm_async(const fusewire_comm *comm, const fusewire_norm *norm,
                                       fusewire_work **work);

/* ---- Sampling ---- */

#define FUSEWIRE_VOCAB_DEPENDENT 1 /* flag: programmatic dependent launch (NVIDIA, from sm_90) */

/* Logits whose columns are split over the ranks, as a tensor-parallel output layer produces them.
   Among equal logits the lower column comes first. -0 is less than +0, and NaN is less than every
   number. A result for which no rank has a column gets index -1 and value NaN. The log-sum-exp is
   NaN for a row that contains NaN, and -inf for a row in which all logits are -inf. dtype, rows,
   vocabulary and k must be equal on all ranks, and log_sum_exp must be null on all ranks or on
   none. The columns of different ranks must not overlap; this is not checked. */
typedef struct fusewire_vocab {
  size_t struct_size;   /* sizeof(fusewire_vocab) */
  uint32_t dtype;       /* F32, F16, BF16: of logits */
  uint32_t flags;       /* FUSEWIRE_VOCAB_DEPENDENT */
  uint64_t rows;        /* 0 is allowed */
  uint64_t vocabulary;  /* columns of all ranks: from 1 to 2^31 - 1 */
  uint64_t first;       /* this rank has columns first to first + columns - 1 */
  uint64_t columns;     /* 0 is allowed */
  uint64_t stride;      /* elements from a row's first logit to the next row's: at least
                           `columns`; 0 selects `columns` */
  uint32_t k;           /* logits to find in each row: from 0 to 64, at most vocabulary */
  uint32_t index_dtype; /* I64 (or 0), I32, U32, U64 */
  const void *logits;   /* rows x columns, stride apart */
  void *indices;        /* rows x k: columns of the k greatest logits, descending; null if k is 0 */
  void *values;         /* rows x k f32, or null: the k greatest logits */
  void *log_sum_exp;    /* rows f32, or null: logarithm of the sum of exponentials of the row */
} fusewire_vocab;

/* Stores all results on every rank. They are bitwise identical on all ranks. */
int fusewire_vocab_parallel(const fusewire_comm *comm, const fusewire_vocab *vocab);
int fusewire_vocab_parallel_async(const fusewire_comm *comm, const fusewire_vocab *vocab,
                                  fusewire_work **work);

/* ---- Collectives that overlap with computation (docs/overlap.md) ---- */

/* Allocates `count` u32 words, one for each chunk or tile, in memory of the communicator's device.
   A consumer reads the words to see which chunks have arrived. A producer counts in the word of a
   tile how much of the tile is complete. Only one operation at a time may use the words. */
int fusewire_ready_flags_create(const fusewire_comm *comm, uint64_t count,
                                fusewire_ready_flags **flags);

/* Destroys a handle. Operations and graphs that use the words keep the memory. Null is allowed. */
int fusewire_ready_flags_destroy(fusewire_ready_flags *flags);

/* Stores in `words` the address of the first word, for the kernels of a consumer or producer. The
   word of a chunk changes from 0 to 1; read it with acquire semantics. The word of a tile is a
   counter; increment it with release semantics. After the operation has failed, a word has the
   value 0x40000000. */
int fusewire_ready_flags_words(const fusewire_ready_flags *flags, uint32_t **words);

/* For threads on a CPU. _wait waits until a chunk has arrived, for at most twice the communicator's
   timeout. _add adds `count` to the word of a tile. */
int fusewire_ready_flags_wait(const fusewire_ready_flags *flags, uint64_t index);
int fusewire_ready_flags_add(const fusewire_ready_flags *flags, uint64_t index, uint32_t count);

/* For streams. After _wait, work that is enqueued on the stream of `consumer` waits until the chunk
   has arrived. _write enqueues on the stream of `producer` a write of `value` to the tile's word.
   The write runs after all earlier work of that stream. Both functions use stream memory
   operations, which occupy no SM. In a capture, these operations become nodes of the graph. */
int fusewire_ready_flags_stream_wait(const fusewire_ready_flags *flags,
                                     const fusewire_comm *consumer, uint64_t index);
int fusewire_ready_flags_stream_write(const fusewire_ready_flags *flags,
                                      const fusewire_comm *producer, uint64_t index,
                                      uint32_t value);

typedef struct fusewire_overlap {
  size_t struct_size;
  uint32_t dtype;
  uint32_t op;         /* reduction; 0 for all_gather */
  uint32_t target;     /* a tile is done when its word is this or more; 0 for all_gather */
  uint32_t flags;      /* 0 */
  uint64_t count;      /* elements of each rank */
  uint64_t chunk;      /* elements of a chunk or tile; the last of a rank may have fewer */
  const void *input;   /* count elements; for reduce_scatter a row of count for every rank */
  void *output;        /* a row of count for every rank; for reduce_scatter count elements */
  const fusewire_ready_flags *ready_flags; /* size x C words with C = ceil(count / chunk): chunk c
                                              of rank r, or tile c of row r, has word r * C + c */
} fusewire_overlap;

/* Enqueues the operation on the stream of `comm`. It runs concurrently with the compute stream,
   which is the stream of `consumer` or `producer`: another handle of the same communicator
   (fusewire_comm_on_stream, fusewire_comm_on_new_stream). The call first clears the words on the
   compute stream, so work that is enqueued on the compute stream afterwards sees only values of
   this call. This also holds in replays of a graph. Enqueue the computation next, then call
   fusewire_work_join with the handle of the compute stream, which makes the compute stream wait for
   the operation. In a capture, call fusewire_work_join before the capture ends. The library does
   not order accesses to single chunks and tiles: do not access a chunk of the output before its
   word is 1, and do not write a chunk, or a tile whose word may have reached `target`, before the
   operation has ended. */
int fusewire_all_gather_with_flags(const fusewire_comm *comm, const fusewire_comm *consumer,
                                   const fusewire_overlap *overlap, fusewire_work **work);
int fusewire_reduce_scatter_on_arrival(const fusewire_comm *comm, const fusewire_comm *producer,
                                       const fusewire_overlap *overlap, fusewire_work **work);

/* ---- Mixture of experts (docs/moe.md) ----
   A router selects top_k experts for each token, and each rank holds some of the experts. A token
   with one of its experts is a selection. Dispatch sends each token once to every rank that holds
   any of its experts. The program computes the results of the experts. Combine returns the results
   to the ranks of their tokens, and stores the weighted sum of the results of each token.

   The functions fusewire_moe_dispatch*, fusewire_moe_redispatch* and fusewire_moe_combine* enqueue
   on the stream of `comm` and return. They allocate no device memory and can be captured. They use
   their buffers as an _async call does; in addition, combine reads `ids` and `weights` of its
   dispatch. They have no work handle: fusewire_comm_synchronize waits, and returns the failure of
   an operation. A failure, such as an expert that does not exist, fails the communicator on all
   ranks; only missing ranks can be masked instead (FUSEWIRE_MOE_MASK_MISSING). If the communicator
   has already failed, the call itself returns the failure. Buffers must be aligned to 16 bytes. If
   the program computes on another stream than that of `comm`, it must order the accesses by events
   of the driver.

   All ranks call the same operations in the same order. The number of tokens may differ between
   ranks, and may be 0. A dispatch may follow a dispatch without a combine, and a dispatch may be
   combined twice. Results are bitwise identical in every run. */

#define FUSEWIRE_MOE_PAYLOAD_SAME 0 /* tokens are sent in their type */
#define FUSEWIRE_MOE_PAYLOAD_FP8 1  /* tokens are sent in E4M3, with a scale for each group of
                                       FUSEWIRE_SCALE_GROUP elements */

#define FUSEWIRE_MOE_RESULTS_SAME 0 /* results are sent in the type of the tokens */
#define FUSEWIRE_MOE_RESULTS_FP8 1  /* results are sent in E4M3, with an F32 scale for each group of
                                       FUSEWIRE_SCALE_GROUP elements */

#define FUSEWIRE_MOE_LOW_LATENCY 0     /* for few tokens, as in decoding: a rank sends all rows at
                                          once, and peers have room for as many as can arrive. An
                                          operation is one launch, or two with MASK_MISSING and
                                          several blocks, and has two halves. */
#define FUSEWIRE_MOE_HIGH_THROUGHPUT 1 /* for many tokens, as in prefill: the ranks first exchange
                                          row counts. Rows and results then pass through
                                          staging in rounds, each of which is a launch. Operations
                                          have no halves. Not with MASK_MISSING. */

#define FUSEWIRE_MOE_EXPERT_MAJOR 0 /* a row for each selection of an expert of this rank, in the
                                       order of expert, rank, token, selection */
#define FUSEWIRE_MOE_RANK_MAJOR 1   /* a row for each token with an expert of this rank, in the
                                       order of rank and token. In LOW_LATENCY mode, the i-th such
                                       token of rank r has row r * max_tokens + i; in
                                       HIGH_THROUGHPUT mode, the rows of all ranks are
                                       contiguous. */

/* Flag: a rank that does not send within the timeout, or whose process has ended, does not fail the
   communicator. Instead, this rank masks the missing rank and continues without it: neither sends
   to it nor waits for it, and ignores what it still writes. Dispatch receives no tokens of a masked
   rank, and the sums of combine lack the results of its experts. Weights do not change. Each rank
   masks by itself. A mask lasts as long as the fusewire_moe. Other operations of the communicator
   still fail if a rank is dead. */
#define FUSEWIRE_MOE_MASK_MISSING 1
/* Flag: the scales of the same group of all rows are contiguous, and columns start at multiples of
   16 bytes, as the tensor maps of TMA require. UE8M0 scales are then U32 words of the scales of
   four groups of a row, the first in the lowest byte. Only for PAYLOAD_FP8, in EXPERT_MAJOR order
   or in HIGH_THROUGHPUT mode. */
#define FUSEWIRE_MOE_COLUMN_SCALES 2
/* Flag: received rows are converted to the dtype of the configuration: the fp8 element times its
   scale, in f32, rounded once. There are no scales. Only for PAYLOAD_FP8, in EXPERT_MAJOR order or
   in HIGH_THROUGHPUT mode. */
#define FUSEWIRE_MOE_DEQUANTIZE 4

/* Configuration. Must be equal on all ranks. */
typedef struct fusewire_moe_config {
  size_t struct_size;     /* sizeof(fusewire_moe_config) */
  uint32_t experts;       /* of all ranks */
  uint32_t top_k;         /* experts of a token: from 1 to 16 */
  uint64_t hidden;        /* elements of a token: a multiple of 8, or of 128 for PAYLOAD_FP8 or
                             RESULTS_FP8 */
  uint64_t max_tokens;    /* of a rank */
  uint64_t capacity;      /* limit of the rows of a rank, with those that the alignment adds;
                             default: all that can arrive. Has no effect in RANK_MAJOR order in
                             LOW_LATENCY mode. With fewer, the ranks exchange row counts before the
                             rows, which takes one or two more messages; if the rows of any rank
                             exceed the capacity, dispatch fails before any row moves. */
  uint64_t alignment;     /* in EXPERT_MAJOR order, the rows of each expert start at a multiple of
                             this number; default: 1 */
  uint32_t dtype;         /* of tokens and results: BF16 (or 0), F16, F32 */
  uint32_t payload;       /* FUSEWIRE_MOE_PAYLOAD_SAME, FUSEWIRE_MOE_PAYLOAD_FP8 */
  uint32_t scale_dtype;   /* PAYLOAD_FP8: F32 (or 0), or U8 for powers of two (UE8M0); else 0 */
  uint32_t layout;        /* FUSEWIRE_MOE_EXPERT_MAJOR, FUSEWIRE_MOE_RANK_MAJOR */
  uint32_t in_flight;     /* micro-batches: 1 (default) or 2, each with separate memory */
  uint32_t local_experts; /* limit of the experts of a rank; default: experts divided by the number
                             of ranks, rounded up */
  uint32_t blocks;        /* of a launch; default: those of the communicator */
  uint32_t flags;         /* FUSEWIRE_MOE_MASK_MISSING | FUSEWIRE_MOE_COLUMN_SCALES |
                             FUSEWIRE_MOE_DEQUANTIZE */
  double timeout_seconds; /* limit of every wait; default: that of the communicator. A rank that
                             is itself waiting for a missing rank is masked after four times it. */
  uint32_t mode;          /* FUSEWIRE_MOE_LOW_LATENCY, FUSEWIRE_MOE_HIGH_THROUGHPUT */
  uint32_t results;       /* FUSEWIRE_MOE_RESULTS_SAME, FUSEWIRE_MOE_RESULTS_FP8 */
  uint64_t staging;       /* HIGH_THROUGHPUT: tokens that each rank sends in a round: at most
                             max_tokens, rounded up to a multiple of the blocks; default: 512. A
                             rank has staging for the rows of two rounds from each rank, and for the
                             results of two rounds. Else 0. */
} fusewire_moe_config;

/* Sizes. */
typedef struct fusewire_moe_info {
  size_t struct_size;     /* sizeof(fusewire_moe_info) */
  uint64_t rows;          /* of fusewire_moe_dispatched.x */
  uint64_t results;       /* rows of the experts' results: `rows` in EXPERT_MAJOR order, otherwise
                             rows * top_k */
  uint64_t x_stride;      /* elements from a row of x to the next */
  uint64_t scales_stride; /* elements (fusewire_moe_dispatched.scale_dtype) from the scales of a row
                             to those of the next, or with COLUMN_SCALES from a column to the next;
                             0 without scales */
  uint64_t row_bytes;     /* bytes of a row that one rank sends to another */
  uint64_t bytes;         /* bytes of memory on this rank, for all micro-batches */
  uint32_t local_experts; /* limit of the experts of a rank */
  uint32_t blocks;        /* of a launch */
} fusewire_moe_info;

/* The tokens that a rank has received. Functions write this struct; the program sets struct_size.
   The addresses are in memory of the device and are the same for all dispatches of a micro-batch.
   Each dispatch of the micro-batch overwrites the contents. Experts are numbered from 0 on each
   rank. Rows without a token have the id -1 and keep their other contents.

   In RANK_MAJOR order in LOW_LATENCY mode, x and scales are valid until the next combine, and are
   in the memory in which rows arrive: the program must not write between the rows. */
typedef struct fusewire_moe_dispatched {
  size_t struct_size;      /* sizeof(fusewire_moe_dispatched) */
  uint64_t moe;            /* these three identify the dispatch: do not change them */
  uint64_t number;
  uint32_t micro_batch;
  uint32_t dtype;          /* of x: dtype of the configuration, or E4M3 */
  uint32_t scale_dtype;    /* of scales: F32; U8 (UE8M0), or U32 with COLUMN_SCALES; 0 without */
  uint32_t ids_per_row;    /* of ids and weights: 1 in EXPERT_MAJOR order, otherwise top_k */
  uint64_t rows;           /* these three are those of fusewire_moe_info */
  uint64_t x_stride;
  uint64_t scales_stride;
  void *x;                 /* `rows` rows of `hidden` elements, x_stride apart */
  void *scales;            /* hidden / 128 for each row, scales_stride apart; with COLUMN_SCALES, a
                              column of `rows` elements for each group, or for each four groups
                              (U32), scales_stride apart; null without scales */
  const uint32_t *counts;  /* EXPERT_MAJOR: rows of each expert, for local_experts experts;
                              RANK_MAJOR: rows from each rank */
  const uint32_t *offsets; /* EXPERT_MAJOR: the first row of each expert, and the end of the last
                              one: local_experts + 1 elements; RANK_MAJOR: in HIGH_THROUGHPUT
                              mode the first row from each rank, and the end of the last one, or
                              else null */
  const uint32_t *sources; /* rows x 2: the rank and the token of each row */
  const int32_t *ids;      /* rows x ids_per_row: EXPERT_MAJOR: the expert of the row; RANK_MAJOR:
                              the experts of the token, -1 for those of other ranks */
  const float *weights;    /* rows x ids_per_row: the weights of the token for these experts */
} fusewire_moe_dispatched;

/* Allocates the memory and loads the kernels. All ranks call the function together, with the same
   configuration. Fails if the communicator's backend is not "fusewire". Captures do not record this
   call. A micro-batch counts as four of the windows that fusewire_alloc limits.

   Expert e is expert e % n of rank e / n, with n = ceil(experts / ranks);
   fusewire_moe_set_placement changes this. */
int fusewire_moe_create(const fusewire_comm *comm, const fusewire_moe_config *config,
                        fusewire_moe **moe);

/* Frees the memory that peers can write. All ranks call the function together; if a rank is dead,
   call only fusewire_moe_destroy. The call waits until no operation uses the memory. Graphs that
   use it must not be replayed any more. Afterwards only fusewire_moe_destroy may use the handle;
   other functions return FUSEWIRE_ERROR_ARGUMENT. */
int fusewire_moe_free(const fusewire_comm *comm, const fusewire_moe *moe);

/* Destroys a handle, before the communicator's last handle is destroyed. Releases the memory,
   except memory that peers can write and that was not freed, which stays until the communicator is
   destroyed. Null is allowed. */
int fusewire_moe_destroy(fusewire_moe *moe);

/* Stores the sizes in `info`, whose struct_size the program has set. */
int fusewire_moe_query(const fusewire_moe *moe, fusewire_moe_info *info);

/* Sends each token of this rank to the ranks of its experts, and receives the tokens for the
   experts of this rank. `micro_batch` is less than in_flight. `tokens` is at most max_tokens. `x`
   has `hidden` elements of each token, `ids` top_k experts, and `weights` their weights. A
   selection with a negative id is not sent. An expert that a token selects twice counts twice.
   Every combine of this dispatch, and of each redispatch that follows it, reads `ids` and
   `weights`: they must stay allocated and unchanged until the last of these combines has ended.

   Stores the addresses of the result in `dispatched`, whose struct_size the program has set. The
   contents are valid for work that is enqueued on the stream afterwards. After a failed call, all
   other fields are zero. */
int fusewire_moe_dispatch(const fusewire_comm *comm, const fusewire_moe *moe, uint32_t micro_batch,
                          const void *x, const int32_t *ids, const float *weights,
                          uint64_t tokens, fusewire_moe_dispatched *dispatched);

/* The halves of fusewire_moe_dispatch. Between them, the program can enqueue a computation, or a
   half of the other micro-batch. The result is valid after _receive. In HIGH_THROUGHPUT mode, the
   functions *_send and *_receive of dispatch, redispatch and combine return
   FUSEWIRE_ERROR_ARGUMENT. */
int fusewire_moe_dispatch_send(const fusewire_comm *comm, const fusewire_moe *moe,
                               uint32_t micro_batch, const void *x, const int32_t *ids,
                               const float *weights, uint64_t tokens,
                               fusewire_moe_dispatched *dispatched);
int fusewire_moe_dispatch_receive(const fusewire_comm *comm, const fusewire_moe *moe,
                                  const fusewire_moe_dispatched *dispatched);

/* Dispatches other tokens to the same experts: uses the ids and weights of `previous`, the result
   of the last dispatch of its micro-batch, without reading the ids and counting them again. The
   experts are on the ranks on which they were then. `x` has as many tokens. When the call or a
   replay of it runs, the last dispatch of the micro-batch on the device must have had the same ids
   and weights; otherwise the sums of combine are wrong. All ranks call the function together.
   `dispatched` may be `previous`, and is not changed by a call that fails. */
int fusewire_moe_redispatch(const fusewire_comm *comm, const fusewire_moe *moe, const void *x,
                            const fusewire_moe_dispatched *previous,
                            fusewire_moe_dispatched *dispatched);

/* The sending half of fusewire_moe_redispatch. fusewire_moe_dispatch_receive is the other one. */
int fusewire_moe_redispatch_send(const fusewire_comm *comm, const fusewire_moe *moe, const void *x,
                                 const fusewire_moe_dispatched *previous,
                                 fusewire_moe_dispatched *dispatched);

/* Returns the results of the experts to the ranks of their tokens, and stores the weighted sums of
   this rank's tokens in `out`: 0 + weight * result + weight * result .. in the order of the token's
   selections, in f32, without fused multiply-add, rounded once. A token without experts has the sum
   0. With RESULTS_FP8, a result is the fp8 element times its scale, in f32. `dispatched` is the
   result of the last dispatch of its micro-batch; otherwise the call returns
   FUSEWIRE_ERROR_ARGUMENT.

   `y` has `results` rows of `hidden` elements (fusewire_moe_info), of the configuration's dtype. In
   EXPERT_MAJOR order, row i is the result for row i of dispatched->x, and `y` may be dispatched->x
   if it has this type. In RANK_MAJOR order, row i * top_k + k is the result for row i of its expert
   k. Other rows are not read. `out` has `hidden` elements for each token of the dispatch. */
int fusewire_moe_combine(const fusewire_comm *comm, const fusewire_moe *moe, const void *y,
                         const fusewire_moe_dispatched *dispatched, void *out);

/* The halves of fusewire_moe_combine. */
int fusewire_moe_combine_send(const fusewire_comm *comm, const fusewire_moe *moe, const void *y,
                              const fusewire_moe_dispatched *dispatched);
int fusewire_moe_combine_receive(const fusewire_comm *comm, const fusewire_moe *moe,
                                 const fusewire_moe_dispatched *dispatched, void *out);

/* Makes later operations of this handle return once they have completed, with their failure, or, if
   `blocking` is 0 (default), once they are enqueued. While the stream is capturing, operations are
   captured in both cases. On an idle CPU stream, a blocking operation runs on the calling thread,
   which is about 20 us faster; a thread that calls for several ranks in turn would wait for
   itself. Do not call this function concurrently with operations of the handle. */
int fusewire_moe_set_blocking(const fusewire_moe *moe, int blocking);

/* Assigns expert e to rank ranks[e]. The experts of a rank are numbered in their order. `count`
   must be the number of experts, and `ranks` is in host memory. All ranks must set the same
   placement between the same operations. Waits until operations that use the placement have
   ended. */
int fusewire_moe_set_placement(const fusewire_moe *moe, const uint32_t *ranks, uint64_t count);

/* Stores in `places` the device address of the place of each expert: rank << 16 | index of the
   expert on the rank. Each dispatch reads the places, so kernels may change them between operations
   and between replays of a graph, in the same way on all ranks. */
int fusewire_moe_placement(const fusewire_moe *moe, uint32_t **places);

/* Stores in `tokens` the device address of the number of selections of each expert of this rank
   (local_experts elements), over all dispatches. */
int fusewire_moe_tokens_per_expert(const fusewire_moe *moe, uint64_t **tokens);

/* Stores in `nanoseconds` the device address of the time for which block 0 has waited for the rows
   of each rank, over all dispatches. Each time is measured from the start of the wait, which all
   ranks share. In HIGH_THROUGHPUT mode, the wait for the row counts is included. */
int fusewire_moe_wait_ns(const fusewire_moe *moe, uint64_t **nanoseconds);

/* Stores in `mask` the device address of the state of each rank (FUSEWIRE_MOE_MASK_MISSING): 0 if
   the rank takes part, 1 if this rank has masked it because it was late, 2 because its process had
   ended. */
int fusewire_moe_mask(const fusewire_moe *moe, uint32_t **mask);

/* Stores in `missing` the device address of a word for each token of this rank (max_tokens words),
   which each combine of the micro-batch writes with FUSEWIRE_MOE_MASK_MISSING: bit k is 1 if the
   sum of the token lacks the result of its selection k. Words after the last token keep their
   contents. */
int fusewire_moe_missing(const fusewire_moe *moe, uint32_t micro_batch, uint32_t **missing);

/* ---- Work and graphs ---- */

/* Blocks this thread until the operation is complete, and returns its result. `timeout_seconds`
   limits the wait; the call returns FUSEWIRE_ERROR_NOT_DONE if the wait times out. 0 means that
   only the communicator's timeout limits the wait. */
int fusewire_work_wait(const fusewire_work *work, double timeout_seconds);

/* Makes work that is enqueued on the handle's stream after this call wait for the operation. Does
   not block this thread. */
int fusewire_work_join(const fusewire_work *work, const fusewire_comm *comm);

/* Destroys a handle. The operation continues. Null is allowed. */
int fusewire_work_destroy(fusewire_work *work);

/* Between _begin and _end, _async operations of handles on this stream are recorded instead of run.
   On a GPU, a capture that the caller began with cudaStreamBeginCapture also records them. */
int fusewire_capture_begin(const fusewire_comm *comm);
int fusewire_capture_end(const fusewire_comm *comm, fusewire_graph **graph);

/* Replays a graph on the handle's stream. _run waits until the replay is complete, _launch does
   not. All ranks must replay their graphs in the same order. */
int fusewire_graph_run(const fusewire_graph *graph, const fusewire_comm *comm);
int fusewire_graph_launch(const fusewire_graph *graph, const fusewire_comm *comm);

/* Destroys a graph. Replays that were enqueued continue. Null is allowed. */
int fusewire_graph_destroy(fusewire_graph *graph);

#ifdef __cplusplus
}
#endif

#endif
