/* Libraries that Fusewire must refuse, and libraries whose calls fail. A -D option selects one. */
#include <fusewire_backend.h>
#include <stdio.h>

#ifndef THE_MAGIC
#define THE_MAGIC FUSEWIRE_MAGIC
#endif
#ifndef THE_MAJOR
#define THE_MAJOR FUSEWIRE_ABI_MAJOR
#endif
#ifndef THE_BYTES
#define THE_BYTES sizeof(FusewireBackendTable)
#endif
#ifndef THE_ABORT
#define THE_ABORT stop
#endif

static const char *version(void) { return "0"; }

static void *create(const FusewireBackendSetup *setup, FusewireError *error) {
  const char *fabric = "none";
  size_t value_bytes = 0;
  uint8_t value[8] = {0};
  for (size_t i = 0; i < setup->hint_count; i++)
    if (setup->hint_keys[i][0] == 'f') fabric = setup->hint_values[i];
  const FusewireStore *store = setup->store;
  int64_t sum = 0;
  store->add(store->context, "count", 5, 40, NULL, NULL);
  store->add(store->context, "count", 5, 2, &sum, NULL);
  int32_t code = store->wait(store->context, "count", 5, 1000000, NULL);
  code |= store->get(store->context, "count", 5, 1000000, value, sizeof value, &value_bytes, NULL);
  error->code = FUSEWIRE_CODE_UNSUPPORTED;
  snprintf(error->message, error->message_capacity,
           "no fabric %s for rank %u of %u in %s, %d %lld %.*s", fabric, setup->rank, setup->size,
           setup->name, code, (long long)sum, (int)value_bytes, (const char *)value);
  return NULL;
}

static void destroy(void *handle) { (void)handle; }
static void stop(void *handle) { (void)handle; }

static int32_t supports(void *handle, uint32_t operation, uint32_t dtype, uint32_t reduction) {
  (void)handle, (void)operation, (void)dtype, (void)reduction;
  return 0;
}

static int32_t is_bitwise(void *handle) { return (void)handle, 0; }

static int32_t plain(void *handle, FusewireError *error) {
  (void)handle, (void)error;
  return FUSEWIRE_CODE_OTHER;
}

static int32_t move(void *handle, const void *from, void *to, uint64_t count,
                    const FusewireCall *call, FusewireError *error) {
  (void)handle, (void)from, (void)to, (void)count, (void)call, (void)error;
  return FUSEWIRE_CODE_OTHER;
}

static int32_t rooted(void *handle, const void *from, void *to, uint64_t count, uint32_t root,
                      const FusewireCall *call, FusewireError *error) {
  (void)root;
  return move(handle, from, to, count, call, error);
}

static int32_t into(void *handle, void *to, uint64_t count, uint32_t root, const FusewireCall *call,
                    FusewireError *error) {
  return rooted(handle, NULL, to, count, root, call, error);
}

static int32_t out(void *handle, const void *from, uint64_t count, uint32_t root,
                   const FusewireCall *call, FusewireError *error) {
  return rooted(handle, from, NULL, count, root, call, error);
}

static const FusewireBackendTable table = {
    .magic = THE_MAGIC,
    .abi_major = THE_MAJOR,
    .abi_minor = 7,
    .struct_bytes = THE_BYTES,
    .name = "broken",
    .version = version,
    .create = create,
    .destroy = destroy,
    .supports = supports,
    .is_bitwise = is_bitwise,
    .group_start = plain,
    .group_end = plain,
    .all_reduce = move,
    .reduce = rooted,
    .broadcast = into,
    .all_gather = move,
    .reduce_scatter = move,
    .send = out,
    .recv = into,
    .abort = THE_ABORT,
};

#ifdef NO_TABLE
const FusewireBackendTable *fusewire_backend_v1(void) { return (void)&table, NULL; }
#elif defined(NO_SYMBOL)
const FusewireBackendTable *fusewire_backend_v0(void);
const FusewireBackendTable *fusewire_backend_v0(void) { return &table; }
#else
const FusewireBackendTable *fusewire_backend_v1(void) { return &table; }
#endif
