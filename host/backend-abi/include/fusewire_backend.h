/*
 * The C table through which Fusewire loads a communication backend at run time. The documentation
 * of the crate fusewire-backend-abi has the rules (threads, lifetime, null pointers, growth).
 * In short:
 *
 * - A library exports `const FusewireBackendTable *fusewire_backend_v1(void);`. It is never closed.
 * - Calls of one handle do not overlap, except supports, is_bitwise and abort, which may be called
 *   at any time.
 * - Every call returns within its timeout, and soon after abort. No exception leaves a function.
 * - Functions return 0 or a FUSEWIRE_CODE_. They store the code and a message in `error`, unless
 *   `error` is null.
 * - Structs grow at their end. Check struct_bytes before reading fields added after version 1.0.
 */
#ifndef FUSEWIRE_BACKEND_H
#define FUSEWIRE_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FUSEWIRE_MAGIC UINT64_C(0x4552495745535546) /* "FUSEWIRE" in memory order */
#define FUSEWIRE_ABI_MAJOR 1
#define FUSEWIRE_ABI_MINOR 0
#define FUSEWIRE_TABLE_BYTES_1_0 232
#define FUSEWIRE_MAX_KEY_BYTES 4096
#define FUSEWIRE_MAX_VALUE_BYTES 16777216

#define FUSEWIRE_CODE_OK 0
#define FUSEWIRE_CODE_OTHER 1
#define FUSEWIRE_CODE_TIMEOUT 2
#define FUSEWIRE_CODE_PEER 3
#define FUSEWIRE_CODE_ABORTED 4
#define FUSEWIRE_CODE_UNSUPPORTED 5
#define FUSEWIRE_CODE_INVALID 6
#define FUSEWIRE_CODE_STORE 7
#define FUSEWIRE_CODE_INTERNAL 8

#define FUSEWIRE_DEVICE_CPU 0
#define FUSEWIRE_DEVICE_CUDA 1
#define FUSEWIRE_DEVICE_HIP 2

#define FUSEWIRE_DTYPE_F64 1
#define FUSEWIRE_DTYPE_F32 2
#define FUSEWIRE_DTYPE_F16 3
#define FUSEWIRE_DTYPE_BF16 4
#define FUSEWIRE_DTYPE_E4M3 5
#define FUSEWIRE_DTYPE_E5M2 6
#define FUSEWIRE_DTYPE_I8 7
#define FUSEWIRE_DTYPE_U8 8
#define FUSEWIRE_DTYPE_I32 9
#define FUSEWIRE_DTYPE_U32 10
#define FUSEWIRE_DTYPE_I64 11
#define FUSEWIRE_DTYPE_U64 12
#define FUSEWIRE_DTYPE_F32_INDEX 13 /* a float and its uint32_t index */

#define FUSEWIRE_REDUCE_NONE 0
#define FUSEWIRE_REDUCE_SUM 1
#define FUSEWIRE_REDUCE_PRODUCT 2
#define FUSEWIRE_REDUCE_MIN 3
#define FUSEWIRE_REDUCE_MAX 4
#define FUSEWIRE_REDUCE_AVERAGE 5
#define FUSEWIRE_REDUCE_PREMUL_SUM 6
#define FUSEWIRE_REDUCE_BIT_AND 7
#define FUSEWIRE_REDUCE_BIT_OR 8
#define FUSEWIRE_REDUCE_BIT_XOR 9

#define FUSEWIRE_OPERATION_ALL_REDUCE 1
#define FUSEWIRE_OPERATION_REDUCE_SCATTER 2
#define FUSEWIRE_OPERATION_ALL_GATHER 3
#define FUSEWIRE_OPERATION_ALL_GATHER_V 4
#define FUSEWIRE_OPERATION_BROADCAST 5
#define FUSEWIRE_OPERATION_REDUCE 6
#define FUSEWIRE_OPERATION_SCATTER 7
#define FUSEWIRE_OPERATION_GATHER 8
#define FUSEWIRE_OPERATION_ALL_TO_ALL 9
#define FUSEWIRE_OPERATION_ALL_TO_ALL_V 10
#define FUSEWIRE_OPERATION_BARRIER 11
#define FUSEWIRE_OPERATION_SEND 32
#define FUSEWIRE_OPERATION_RECV 33

typedef struct FusewireError {
  uint32_t struct_bytes;
  int32_t code;
  char *message; /* the caller's memory; null only if the capacity is 0 */
  size_t message_capacity;
} FusewireError;

/* Lives until the handle that was created with the store, and all handles split from this handle,
   are destroyed. The functions may be called from any thread. */
typedef struct FusewireStore {
  uint32_t struct_bytes;
  uint32_t reserved;
  void *context;
  int32_t (*set)(void *context, const char *key, size_t key_bytes, const uint8_t *value,
                 size_t value_bytes, FusewireError *error);
  int32_t (*get)(void *context, const char *key, size_t key_bytes, uint64_t timeout_ns,
                 uint8_t *value, size_t capacity, size_t *value_bytes, FusewireError *error);
  int32_t (*wait)(void *context, const char *key, size_t key_bytes, uint64_t timeout_ns,
                  FusewireError *error);
  int32_t (*add)(void *context, const char *key, size_t key_bytes, int64_t amount, int64_t *sum,
                 FusewireError *error);
} FusewireStore;

typedef struct FusewireBackendSetup {
  uint32_t struct_bytes;
  uint32_t abi_minor;
  uint32_t rank;
  uint32_t size;
  uint32_t device;
  uint32_t device_index;
  uint64_t timeout_ns;
  const char *name;
  size_t hint_count;
  const char *const *hint_keys;
  const char *const *hint_values;
  const FusewireStore *store;
} FusewireBackendSetup;

typedef struct FusewireCall {
  uint32_t struct_bytes;
  uint32_t dtype;
  uint32_t reduction;
  uint32_t reserved;
  double factor;
  uint64_t timeout_ns;
  uint64_t stream;
} FusewireCall;

typedef struct FusewireBackendTable {
  uint64_t magic;
  uint32_t abi_major;
  uint32_t abi_minor;
  uint32_t struct_bytes;
  uint32_t reserved;
  const char *name;
  const char *(*version)(void);
  void *(*create)(const FusewireBackendSetup *setup, FusewireError *error);
  void (*destroy)(void *handle);
  int32_t (*supports)(void *handle, uint32_t operation, uint32_t dtype, uint32_t reduction);
  int32_t (*is_bitwise)(void *handle);
  int32_t (*group_start)(void *handle, FusewireError *error);
  int32_t (*group_end)(void *handle, FusewireError *error);
  int32_t (*all_reduce)(void *handle, const void *from, void *to, uint64_t count,
                        const FusewireCall *call, FusewireError *error);
  int32_t (*reduce)(void *handle, const void *from, void *to, uint64_t count, uint32_t root,
                    const FusewireCall *call, FusewireError *error);
  int32_t (*broadcast)(void *handle, void *buffer, uint64_t count, uint32_t root,
                       const FusewireCall *call, FusewireError *error);
  int32_t (*all_gather)(void *handle, const void *from, void *to, uint64_t count,
                        const FusewireCall *call, FusewireError *error);
  int32_t (*reduce_scatter)(void *handle, const void *from, void *to, uint64_t count,
                            const FusewireCall *call, FusewireError *error);
  int32_t (*send)(void *handle, const void *from, uint64_t count, uint32_t peer,
                  const FusewireCall *call, FusewireError *error);
  int32_t (*recv)(void *handle, void *to, uint64_t count, uint32_t peer, const FusewireCall *call,
                  FusewireError *error);
  /* The functions below, except abort, may be null. */
  int32_t (*all_to_all)(void *handle, const void *from, void *to, uint64_t count,
                        const FusewireCall *call, FusewireError *error);
  int32_t (*all_to_all_v)(void *handle, const void *from, const uint64_t *from_counts, void *to,
                          const uint64_t *to_counts, const FusewireCall *call,
                          FusewireError *error);
  int32_t (*all_gather_v)(void *handle, const void *from, void *to, const uint64_t *counts,
                          const FusewireCall *call, FusewireError *error);
  int32_t (*scatter)(void *handle, const void *from, void *to, uint64_t count, uint32_t root,
                     const FusewireCall *call, FusewireError *error);
  int32_t (*gather)(void *handle, const void *from, void *to, uint64_t count, uint32_t root,
                    const FusewireCall *call, FusewireError *error);
  int32_t (*barrier)(void *handle, const FusewireCall *call, FusewireError *error);
  /* `register` is a keyword of C. */
  int32_t (*register_memory)(void *handle, void *at, uint64_t bytes, uint64_t *registration,
                             FusewireError *error);
  int32_t (*deregister_memory)(void *handle, uint64_t registration, FusewireError *error);
  int32_t (*split)(void *handle, const uint32_t *ranks, uint32_t count, void **part,
                   FusewireError *error);
  void (*abort)(void *handle);
  int32_t (*async_error)(void *handle, FusewireError *error);
} FusewireBackendTable;

/* The only symbol that a library must export. */
const FusewireBackendTable *fusewire_backend_v1(void);

#ifdef __cplusplus
}
#endif

#endif
