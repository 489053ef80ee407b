/*
 * Exchanges byte strings from C on three ranks, and compares the results. Started by c.rs:
 *   bytes DEVICE RANK HOST:PORT
 *   bytes DEVICE RANK HOST:PORT rust    as rank 1 of 2, of which rank 0 is in Rust
 */
#define RANKS 3
#include "check.h"

enum { MOST = 300000 };

/* Sizes of the strings of rank `of`. Rank 1 has an empty string. */
static uint64_t size_of(uint32_t of) { return of == 1 ? 0 : of == 0 ? 5 : MOST; }

/* A string of rank `of` for rank `to`. It contains zero bytes. */
static const char *string(uint32_t of, uint32_t to) {
  static char bytes[MOST];
  for (int i = 0; i < MOST; i++) bytes[i] = (char)((uint32_t)i * (of + 3) + to * 7);
  return bytes;
}

static uint64_t count_of(const fusewire_bytes *bytes) {
  uint64_t count = 99;
  OK(fusewire_bytes_count(bytes, &count));
  return count;
}

/* Returns 1 if part `index` has these bytes. */
static int is(const fusewire_bytes *bytes, uint64_t index, const char *wanted, uint64_t count) {
  const void *data = NULL;
  uint64_t size = 99;
  OK(fusewire_bytes_part(bytes, index, &data, &size));
  return data != NULL && size == count && memcmp(data, wanted, size) == 0;
}

static void exchange(void) {
  fusewire_bytes *bytes;
  uint32_t next = (rank + 1) % RANKS, before = (rank + RANKS - 1) % RANKS;
  const void *own = size_of(rank) == 0 ? NULL : string(rank, 0);
  OK(fusewire_all_gather_bytes(comm, own, size_of(rank), &bytes));
  TRUE(count_of(bytes) == RANKS);
  for (uint32_t r = 0; r < RANKS; r++) TRUE(is(bytes, r, string(r, 0), size_of(r)));
  OK(fusewire_bytes_destroy(bytes));

  for (uint32_t root = 0; root < RANKS; root++) {
    own = string(rank, root);
    OK(fusewire_gather_bytes(comm, own, size_of(rank), root, &bytes));
    TRUE((bytes != NULL) == (rank == root));
    if (bytes != NULL) {
      TRUE(count_of(bytes) == RANKS);
      for (uint32_t r = 0; r < RANKS; r++) TRUE(is(bytes, r, string(r, root), size_of(r)));
    }
    OK(fusewire_bytes_destroy(bytes));

    own = rank == root ? string(rank, 1) : NULL;
    OK(fusewire_broadcast_bytes(comm, own, size_of(rank), root, &bytes));
    TRUE(count_of(bytes) == 1 && is(bytes, 0, string(root, 1), size_of(root)));
    OK(fusewire_bytes_destroy(bytes));

    static char copies[RANKS][MOST];
    const void *data[RANKS];
    uint64_t sizes[RANKS];
    for (uint32_t r = 0; r < RANKS; r++) {
      data[r] = memcpy(copies[r], string(rank, r), MOST);
      sizes[r] = size_of((r + 1) % RANKS);
    }
    OK(fusewire_scatter_bytes(comm, rank == root ? data : NULL, rank == root ? sizes : NULL, root,
                              &bytes));
    TRUE(count_of(bytes) == 1);
    TRUE(is(bytes, 0, string(root, rank), size_of((rank + 1) % RANKS)));
    OK(fusewire_bytes_destroy(bytes));
  }

  /* Rank 0 receives last, because a send of a large string waits for the receiver. */
  if (rank == 0) OK(fusewire_send_bytes(comm, string(rank, next), size_of(rank), next));
  OK(fusewire_recv_bytes(comm, before, &bytes));
  if (rank != 0) OK(fusewire_send_bytes(comm, string(rank, next), size_of(rank), next));
  TRUE(count_of(bytes) == 1 && is(bytes, 0, string(before, rank), size_of(before)));
  OK(fusewire_bytes_destroy(bytes));
}

/* Makes calls that are refused. They move no data: only rank 1 makes them. */
static void refused(void) {
  char x[8] = {0};
  const void *data[RANKS] = {x, NULL, x};
  uint64_t sizes[RANKS] = {8, 8, 8}, number;
  fusewire_bytes *bytes = (fusewire_bytes *)x;
#define REFUSED(words, call) SAYS(FUSEWIRE_ERROR_ARGUMENT, words, call)
  REFUSED("communicator is NULL", fusewire_all_gather_bytes(NULL, x, 8, &bytes));
  TRUE(bytes == NULL);
  REFUSED("bytes is NULL", fusewire_all_gather_bytes(comm, x, 8, NULL));
  REFUSED("data is NULL", fusewire_all_gather_bytes(comm, NULL, 8, &bytes));
  REFUSED("larger than memory", fusewire_all_gather_bytes(comm, x, UINT64_MAX, &bytes));
  REFUSED("data is NULL", fusewire_gather_bytes(comm, NULL, 8, 0, &bytes));
  REFUSED("root 3", fusewire_gather_bytes(comm, x, 8, RANKS, &bytes));
  REFUSED("data is NULL", fusewire_broadcast_bytes(comm, NULL, 8, rank, &bytes));
  REFUSED("root 3", fusewire_broadcast_bytes(comm, x, 8, RANKS, &bytes));
  REFUSED("data is NULL", fusewire_scatter_bytes(comm, NULL, sizes, rank, &bytes));
  REFUSED("sizes is NULL", fusewire_scatter_bytes(comm, data, NULL, rank, &bytes));
  REFUSED("data[1] is NULL", fusewire_scatter_bytes(comm, data, sizes, rank, &bytes));
  REFUSED("root 3", fusewire_scatter_bytes(comm, data, sizes, RANKS, &bytes));
  REFUSED("data is NULL", fusewire_send_bytes(comm, NULL, 8, 0));
  REFUSED("peer 3", fusewire_send_bytes(comm, x, 8, RANKS));
  REFUSED("this rank itself", fusewire_send_bytes(comm, x, 8, rank));
  REFUSED("peer 3", fusewire_recv_bytes(comm, RANKS, &bytes));
  REFUSED("bytes are NULL", fusewire_bytes_count(NULL, &number));
  REFUSED("bytes are NULL", fusewire_bytes_part(NULL, 0, data, &number));
  OK(fusewire_bytes_destroy(NULL));
#undef REFUSED
}

/* One string that is too large is an error on all ranks. The communicator remains usable. */
static void limited(const char *store) {
  fusewire_options options;
  fusewire_comm *small;
  fusewire_bytes *bytes;
  const void *data;
  uint64_t size;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.store_is_served = 1;
  options.max_object_bytes = 2000;
  OK(fusewire_comm_create("cpu", rank, RANKS, store, "small", &options, &small));
  SAYS(FUSEWIRE_ERROR_OTHER, "rank 1",
       fusewire_all_gather_bytes(small, string(0, 0), rank == 1 ? 2001 : 20, &bytes));
  TRUE(bytes == NULL);
  OK(fusewire_all_gather_bytes(small, string(rank, 0), 900, &bytes));
  for (uint32_t r = 0; r < RANKS; r++) TRUE(is(bytes, r, string(r, 0), 900));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "part 3 of 3", fusewire_bytes_part(bytes, RANKS, &data, &size));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "data is NULL", fusewire_bytes_part(bytes, 0, NULL, &size));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "count is NULL", fusewire_bytes_count(bytes, NULL));
  OK(fusewire_bytes_destroy(bytes));
  OK(fusewire_barrier(small));
  OK(fusewire_comm_destroy(small));
}

/* Runs as rank 1 of 2. */
static void with_rust(const char *store) {
  static const char own[] = "from\0C", theirs[] = "from\0Rust";
  const uint64_t size = sizeof own - 1, their_size = sizeof theirs - 1;
  const void *const data[2] = {own, theirs};
  const uint64_t sizes[2] = {size, their_size};
  fusewire_options options;
  fusewire_bytes *bytes;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.store_is_served = 1;
  OK(fusewire_comm_create("cpu", rank, 2, store, "rust", &options, &comm));
  OK(fusewire_all_gather_bytes(comm, own, size, &bytes));
  TRUE(count_of(bytes) == 2);
  TRUE(is(bytes, 0, theirs, their_size) && is(bytes, 1, own, size));
  OK(fusewire_bytes_destroy(bytes));
  OK(fusewire_gather_bytes(comm, own, size, 0, &bytes));
  TRUE(bytes == NULL);
  OK(fusewire_gather_bytes(comm, own, size, 1, &bytes));
  TRUE(is(bytes, 0, theirs, their_size) && is(bytes, 1, own, size));
  OK(fusewire_bytes_destroy(bytes));
  /* Rust broadcasts two strings. */
  OK(fusewire_broadcast_bytes(comm, NULL, 0, 0, &bytes));
  TRUE(count_of(bytes) == 2 && is(bytes, 0, theirs, their_size) && is(bytes, 1, "", 0));
  OK(fusewire_bytes_destroy(bytes));
  OK(fusewire_broadcast_bytes(comm, own, size, 1, &bytes));
  TRUE(count_of(bytes) == 1 && is(bytes, 0, own, size));
  OK(fusewire_bytes_destroy(bytes));
  OK(fusewire_scatter_bytes(comm, data, sizes, 1, &bytes));
  TRUE(is(bytes, 0, theirs, their_size));
  OK(fusewire_bytes_destroy(bytes));
  OK(fusewire_recv_bytes(comm, 0, &bytes));
  TRUE(count_of(bytes) == 2);
  TRUE(is(bytes, 0, theirs, their_size) && is(bytes, 1, own, size));
  OK(fusewire_bytes_destroy(bytes));
  OK(fusewire_send_bytes(comm, own, size, 0));
  SAYS(FUSEWIRE_ERROR_OTHER, "that rank sent a", fusewire_recv_bytes(comm, 0, &bytes));
  TRUE(bytes == NULL);
}

int main(int argc, char **argv) {
  if (argc == 5) {
    rank = (uint32_t)atoi(argv[2]);
    with_rust(argv[3]);
    return finish();
  }
  if (argc != 4) return 2;
  start(argv, "bytes");
  exchange();
  if (rank == 1) refused();
  limited(argv[3]);
  exchange();
  return finish();
}
