/*
 * Runs puts, gets and signals of windows from C on three ranks, and compares the results with plain
 * C. Started by c.rs:
 *   windows DEVICE RANK HOST:PORT
 */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#define RANKS 3
#include "check.h"

#include <time.h>

enum { BYTES = 4 * N + 64 };

static uint32_t next, before;

static fusewire_window *new_window(void) {
  fusewire_window *window;
  fusewire_window_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.signals = 5;
  options.counters = 2;
  options.cells = 3;
  OK(fusewire_window_alloc(comm, BYTES, &options, &window));
  return window;
}

static void end_window(fusewire_window *window) {
  OK(fusewire_window_free(comm, window));
  OK(fusewire_window_destroy(window));
}

static uint64_t signal_of(const fusewire_window *window, uint32_t signal, uint32_t sender) {
  uint64_t seen = 12345;
  OK(fusewire_window_read_signal(window, signal, sender, &seen));
  return seen;
}

/* Puts to the next rank and gets from the previous one, at offsets that are not aligned. */
static void transfers(int plain, int form) {
  fusewire_window *window = new_window();
  char *own = NULL, *buffer = memory(BYTES, plain);
  static char zeros[BYTES], bytes[BYTES];
  uint64_t size = 0;
  OK(fusewire_window_memory(window, (void **)&own, &size));
  TRUE(size == BYTES);
  OK(fusewire_download(comm, bytes, own, BYTES));
  TRUE(memcmp(bytes, zeros, BYTES) == 0);
  OK(fusewire_barrier(comm));

  put(buffer, N);
  RUN(form, window_put_signal, window, buffer, 4 * N - 1, next, 13, 2);
  RUN(form, window_wait_signal, window, 2, before, FUSEWIRE_COMPARE_GREATER_EQUAL, 1);
  TRUE(signal_of(window, 2, before) == 1 && signal_of(window, 2, next) == 0);
  for (int i = 0; i < N; i++) host[i] = value(before, i);
  OK(fusewire_download(comm, bytes, own, BYTES));
  TRUE(memcmp(bytes, zeros, 13) == 0 && memcmp(bytes + 13, host, 4 * N - 1) == 0);
  TRUE(memcmp(bytes + 13 + 4 * N - 1, zeros, BYTES - 13 - 4 * N + 1) == 0);
  /* No rank writes again before all ranks have read. */
  OK(fusewire_barrier(comm));

  /* A put without a signal, and a signal that covers it. */
  for (int i = 0; i < N; i++) host[i] = value(rank, i) + 1.0f;
  OK(fusewire_upload(comm, buffer, host, 4 * N));
  RUN(form, window_put, window, buffer, 4 * N, next, 64);
  RUN(form, window_signal, window, next, 4, FUSEWIRE_SIGNAL_ADD, 7);
  RUN(form, window_wait_signal, window, 4, before, FUSEWIRE_COMPARE_EQUAL, 7);
  get(own + 64, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(before, i) + 1.0f);

  /* A put to this rank, and a get of the part of each rank. */
  OK(fusewire_barrier(comm));
  for (int i = 0; i < N; i++) host[i] = value(rank, i) + 2.0f;
  OK(fusewire_upload(comm, buffer, host, 4 * N));
  RUN(form, window_put, window, buffer, 4 * N, rank, 0);
  OK(fusewire_barrier(comm));
  for (uint32_t peer = 0; peer < RANKS; peer++) {
    put(buffer, N);
    RUN(form, window_get, window, buffer, 4 * (N - 5), peer, 20);
    get(buffer, N);
    for (int i = 0; i < N; i++) {
      TRUE(got[i] == (i < N - 5 ? value(peer, i + 5) + 2.0f : value(rank, i)));
    }
    void *mapped = NULL;
    OK(fusewire_window_peer_memory(window, peer, &mapped));
    TRUE(mapped != NULL && (mapped == own) == (peer == rank));
    get(mapped, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == value(peer, i) + 2.0f);
  }
  RUN(form, window_put, window, NULL, 0, next, BYTES);
  RUN(form, window_get, window, NULL, 0, next, BYTES);
  OK(fusewire_barrier(comm));
  end_window(window);
  release(buffer, plain);
}

/* Compares, sums and resets signals. Rank r sets its value at each peer to 10 * (r + 1). */
static void signals(int form) {
  fusewire_window *window = new_window();
  uint64_t sum = 0, counter = 9;
  for (uint32_t peer = 0; peer < RANKS; peer++) {
    RUN(form, window_signal, window, peer, 1, FUSEWIRE_SIGNAL_ADD, 3);
    RUN(form, window_signal, window, peer, 1, FUSEWIRE_SIGNAL_SET, 10 * (rank + 1));
  }
  OK(fusewire_barrier(comm));
  for (uint32_t r = 0; r < RANKS; r++) {
    uint64_t is = 10 * (r + 1);
    sum += is;
    TRUE(signal_of(window, 1, r) == is && signal_of(window, 0, r) == 0);
    RUN(form, window_wait_signal, window, 1, r, FUSEWIRE_COMPARE_EQUAL, is);
    RUN(form, window_wait_signal, window, 1, r, FUSEWIRE_COMPARE_NOT_EQUAL, is + 1);
    RUN(form, window_wait_signal, window, 1, r, FUSEWIRE_COMPARE_LESS, is + 1);
    RUN(form, window_wait_signal, window, 1, r, FUSEWIRE_COMPARE_LESS_EQUAL, is);
    RUN(form, window_wait_signal, window, 1, r, FUSEWIRE_COMPARE_GREATER, is - 1);
    RUN(form, window_wait_signal, window, 1, r, FUSEWIRE_COMPARE_GREATER_EQUAL, is);
  }
  RUN(form, window_wait_signal, window, 1, FUSEWIRE_ALL_RANKS, FUSEWIRE_COMPARE_EQUAL, sum);
  TRUE(signal_of(window, 1, FUSEWIRE_ALL_RANKS) == sum);
  OK(fusewire_barrier(comm));
  OK(fusewire_window_reset_signal(window, 1));
  TRUE(signal_of(window, 1, FUSEWIRE_ALL_RANKS) == 0);
  OK(fusewire_barrier(comm));
  RUN(form, window_signal, window, next, 1, FUSEWIRE_SIGNAL_ADD, 5);
  RUN(form, window_wait_signal, window, 1, before, FUSEWIRE_COMPARE_EQUAL, 5);
  OK(fusewire_window_read_counter(window, 1, &counter));
  TRUE(counter == 0);
  end_window(window);
}

/* Each wait ends only when its comparison holds. Rank 0 signals late, so a wait that returns at
   once sees the old value. */
static void waits(int form) {
  static const struct {
    uint32_t compare;
    uint64_t value, first, second;
  } cases[] = {
      {FUSEWIRE_COMPARE_EQUAL, 8, 5, 8},         {FUSEWIRE_COMPARE_NOT_EQUAL, 5, 5, 6},
      {FUSEWIRE_COMPARE_LESS, 5, 5, 4},          {FUSEWIRE_COMPARE_LESS_EQUAL, 5, 6, 5},
      {FUSEWIRE_COMPARE_GREATER, 5, 5, 6},       {FUSEWIRE_COMPARE_GREATER_EQUAL, 5, 4, 5},
  };
  fusewire_window *window = new_window();
  for (size_t at = 0; at < sizeof cases / sizeof *cases; at++) {
    uint32_t sender = at % 2 == 0 ? 0 : FUSEWIRE_ALL_RANKS;
    if (rank == 0) RUN(form, window_signal, window, 1, 0, FUSEWIRE_SIGNAL_SET, cases[at].first);
    OK(fusewire_barrier(comm));
    if (rank == 0) {
      struct timespec pause = {0, 20 * 1000 * 1000};
      nanosleep(&pause, NULL);
      RUN(form, window_signal, window, 1, 0, FUSEWIRE_SIGNAL_SET, cases[at].second);
    } else if (rank == 1) {
      RUN(form, window_wait_signal, window, 0, sender, cases[at].compare, cases[at].value);
      TRUE(signal_of(window, 0, sender) == cases[at].second);
    }
    OK(fusewire_barrier(comm));
  }
  end_window(window);
}

/* Waits that count. Each raise follows a value that the wait must cover: rank 0 raises late, and a
   wait that returns at once reads the old value. */
static void counted(int form) {
  fusewire_window *window = new_window();
  for (uint64_t round = 1; round <= 3; round++) {
    OK(fusewire_barrier(comm));
    if (rank == 0) {
      struct timespec pause = {0, 20 * 1000 * 1000};
      nanosleep(&pause, NULL);
    }
    RUN(form, window_signal, window, next, 0, FUSEWIRE_SIGNAL_SET, round);
    RUN(form, window_raise, window, next, 1);
    RUN(form, window_wait_raised, window, 1, before);
    TRUE(signal_of(window, 0, before) == round && signal_of(window, 1, before) == round);
    OK(fusewire_barrier(comm));
    if (rank == 0) {
      struct timespec pause = {0, 20 * 1000 * 1000};
      nanosleep(&pause, NULL);
    }
    for (uint32_t peer = 0; peer < RANKS; peer++) {
      RUN(form, window_signal, window, peer, 0, FUSEWIRE_SIGNAL_SET, 10 * round);
      RUN(form, window_raise, window, peer, 2);
    }
    RUN(form, window_wait_raised, window, 2, FUSEWIRE_ALL_RANKS);
    TRUE(signal_of(window, 0, FUSEWIRE_ALL_RANKS) == 10 * round * RANKS);
  }
  OK(fusewire_window_reset_counter(window, 1));
  end_window(window);
}

/* Windows over a part of memory from fusewire_alloc. Collectives may use the memory of a window. */
static void existing_memory(void) {
  enum { SKIP = 48 };
  char *all = memory(BYTES + SKIP, 0);
  float *own = NULL;
  fusewire_window *window;
  const void *description = NULL;
  uint64_t size = 0;
  OK(fusewire_window_create(comm, all + SKIP, 4 * N, NULL, &window));
  OK(fusewire_window_memory(window, (void **)&own, &size));
  TRUE((char *)own == all + SKIP && size == 4 * N);
  OK(fusewire_window_device(window, &description));
  TRUE(description != NULL);
  /* The description has the size of a part at byte 16, and the number of signals at byte 24. */
  if (on_cpu()) TRUE(((const uint64_t *)description)[2] == size);
  if (on_cpu()) TRUE(((const uint32_t *)description)[6] == RANKS);
  put(own, N);
  OK(fusewire_all_reduce(comm, own, own, N, FUSEWIRE_F32, FUSEWIRE_SUM));
  get(own, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(0, i) + value(1, i) + value(2, i));
  put(own, N);
  OK(fusewire_barrier(comm));
  float *copy = memory(4 * N, 1);
  OK(fusewire_window_get(comm, window, copy, 4 * N, next, 0));
  get(copy, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(next, i));
  OK(fusewire_barrier(comm));
  OK(fusewire_window_free(comm, window));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "freed", fusewire_window_free(comm, window));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "freed",
       fusewire_window_put(comm, window, copy, 4, next, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "freed", fusewire_window_reset_signal(window, 0));
  OK(fusewire_window_destroy(window));
  OK(fusewire_window_destroy(NULL));
  /* The memory outlives the window. */
  put(own, N);
  OK(fusewire_all_reduce(comm, own, own, N, FUSEWIRE_F32, FUSEWIRE_MIN));
  release(all, 0), release(copy, 1);
}

/* Enqueues an operation on memory of a window that is freed and destroyed next: freeing waits. */
static void freed_in_flight(void) {
  fusewire_window *window = new_window();
  float *own = NULL, *sum = memory(4 * N, 0);
  uint64_t size;
  OK(fusewire_window_memory(window, (void **)&own, &size));
  put(own, N);
  OK(fusewire_all_reduce_async(comm, own, sum, N, FUSEWIRE_F32, FUSEWIRE_SUM, NULL));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "no memory of fusewire_alloc", fusewire_free(comm, own));
  OK(fusewire_window_free(comm, window));
  if (on_cpu()) {
    fusewire_window *again;
    SAYS(FUSEWIRE_ERROR_ARGUMENT, "peers cannot map",
         fusewire_window_create(comm, own, 64, NULL, &again));
  }
  OK(fusewire_window_destroy(window));
  get(sum, N);
  for (int i = 0; i < N; i++) TRUE(got[i] == value(0, i) + value(1, i) + value(2, i));
  release(sum, 0);
}

/* Captures a put with a signal and replays it. */
static void captured(void) {
  fusewire_window *window = new_window();
  float *own = NULL, *buffer = memory(4 * N, 0);
  uint64_t size;
  fusewire_graph *replay;
  OK(fusewire_window_memory(window, (void **)&own, &size));
  OK(fusewire_comm_warm_up(comm));
  OK(fusewire_capture_begin(comm));
  OK(fusewire_window_put_signal_async(comm, window, buffer, 4 * N, next, 0, 3, NULL));
  OK(fusewire_window_put_signal_async(comm, window, buffer, 0, next, 0, 4, NULL));
  OK(fusewire_window_wait_raised_async(comm, window, 4, before, NULL));
  SAYS(FUSEWIRE_ERROR_CAPTURE, "use fusewire_window_put_async",
       fusewire_window_put(comm, window, buffer, 4 * N, next, 0));
  SAYS(FUSEWIRE_ERROR_CAPTURE, "cannot end", fusewire_window_free(comm, window));
  /* The graph does not contain the creation of a window. */
  fusewire_window *other = new_window();
  OK(fusewire_capture_end(comm, &replay));
  end_window(other);
  for (uint64_t round = 1; round <= 3; round++) {
    for (int i = 0; i < N; i++) host[i] = value(rank, i) + (float)round;
    OK(fusewire_upload(comm, buffer, host, 4 * N));
    OK(fusewire_graph_run(replay, comm));
    OK(fusewire_window_wait_signal(comm, window, 3, before, FUSEWIRE_COMPARE_EQUAL, round));
    get(own, N);
    for (int i = 0; i < N; i++) TRUE(got[i] == value(before, i) + (float)round);
    OK(fusewire_barrier(comm));
  }
  OK(fusewire_graph_destroy(replay));
  end_window(window);
  release(buffer, 0);
}

/* A window of another communicator is refused. A window that is not freed lives as long as the
   communicator, and its handle may be destroyed before. */
static void other_communicator(void) {
  static const uint32_t all[RANKS] = {0, 1, 2};
  fusewire_comm *part;
  fusewire_window *window;
  char x[4] = {0};
  OK(fusewire_comm_split(comm, all, RANKS, "other", &part));
  OK(fusewire_window_alloc(part, 64, NULL, &window));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "another communicator",
       fusewire_window_put(comm, window, x, 4, next, 0));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "another communicator", fusewire_window_free(comm, window));
  OK(fusewire_window_signal(part, window, next, 0, FUSEWIRE_SIGNAL_ADD, 1));
  OK(fusewire_window_wait_signal(part, window, 0, before, FUSEWIRE_COMPARE_EQUAL, 1));
  OK(fusewire_window_destroy(window));
  OK(fusewire_barrier(part));
  OK(fusewire_comm_destroy(part));
}

/* Makes calls that are refused. They move no data: only rank 1 makes them. */
static void refused(const fusewire_window *window) {
  static char x[64];
  void *at = x;
  uint64_t number;
  fusewire_window *made = (fusewire_window *)x;
  fusewire_work *work = (fusewire_work *)x;
  fusewire_window_options options;
  memset(&options, 0, sizeof options);
#define REFUSED(words, call) SAYS(FUSEWIRE_ERROR_ARGUMENT, words, call)
  REFUSED("communicator is NULL", fusewire_window_alloc(NULL, 64, NULL, &made));
  TRUE(made == NULL);
  REFUSED("window is NULL", fusewire_window_alloc(comm, 64, NULL, NULL));
  REFUSED("0 bytes", fusewire_window_alloc(comm, 0, NULL, &made));
  REFUSED("18446744073709551615 bytes", fusewire_window_alloc(comm, UINT64_MAX, NULL, &made));
  REFUSED("struct_size is 0", fusewire_window_alloc(comm, 64, &options, &made));
  REFUSED("memory is NULL", fusewire_window_create(comm, NULL, 64, NULL, &made));
  REFUSED("0 bytes", fusewire_window_create(comm, x, 0, NULL, &made));
  if (on_cpu()) REFUSED("peers cannot map", fusewire_window_create(comm, x, 64, NULL, &made));
  REFUSED("window is NULL", fusewire_window_free(comm, NULL));
  REFUSED("window is NULL", fusewire_window_memory(NULL, &at, &number));
  REFUSED("memory is NULL", fusewire_window_memory(window, NULL, &number));
  REFUSED("bytes is NULL", fusewire_window_memory(window, &at, NULL));
  /* The memory of a window lies in a region of that size. */
  OK(fusewire_window_memory(window, &at, &number));
  REFUSED("of memory of 12064 bytes", fusewire_window_create(comm, at, BYTES + 1, NULL, &made));
  REFUSED("peer 3", fusewire_window_peer_memory(window, RANKS, &at));
  TRUE(at == NULL);
  REFUSED("device_window is NULL", fusewire_window_device(window, NULL));

  REFUSED("communicator is NULL", fusewire_window_put(NULL, window, x, 4, 0, 0));
  REFUSED("window is NULL", fusewire_window_put_async(comm, NULL, x, 4, 0, 0, &work));
  TRUE(work == NULL);
  REFUSED("source is NULL", fusewire_window_put(comm, window, NULL, 4, 0, 0));
  REFUSED("source has more elements", fusewire_window_put(comm, window, x, UINT64_MAX, 0, 0));
  REFUSED("peer 3", fusewire_window_put(comm, window, x, 4, RANKS, 0));
  REFUSED("elements 12061..12065", fusewire_window_put(comm, window, x, 4, 0, BYTES - 3));
  REFUSED("of a window of 12064", fusewire_window_put(comm, window, x, 4, 0, UINT64_MAX));
  REFUSED("signal 5", fusewire_window_put_signal(comm, window, x, 4, 0, 0, 5));
  REFUSED("peer 4", fusewire_window_put_signal(comm, window, x, 4, 4, 0, 0));
  REFUSED("target is NULL", fusewire_window_get(comm, window, NULL, 4, 0, 0));
  REFUSED("of a window of 12064", fusewire_window_get(comm, window, x, 4, 0, BYTES));
  REFUSED("peer 3", fusewire_window_get(comm, window, x, 4, RANKS, 0));
  REFUSED("update 0", fusewire_window_signal(comm, window, 0, 0, 0, 1));
  REFUSED("signal 5", fusewire_window_signal(comm, window, 0, 5, FUSEWIRE_SIGNAL_ADD, 1));
  REFUSED("peer 3", fusewire_window_signal(comm, window, RANKS, 0, FUSEWIRE_SIGNAL_ADD, 1));
  REFUSED("6 is no comparison", fusewire_window_wait_signal(comm, window, 0, 0, 6, 1));
  REFUSED("peer 3", fusewire_window_wait_signal(comm, window, 0, RANKS, 0, 1));
  REFUSED("signal 5", fusewire_window_wait_signal(comm, window, 5, 0, 0, 1));
  REFUSED("signal 5", fusewire_window_raise(comm, window, 0, 5));
  REFUSED("peer 3", fusewire_window_raise_async(comm, window, RANKS, 0, &work));
  REFUSED("signal 5", fusewire_window_wait_raised(comm, window, 5, 0));
  REFUSED("peer 3", fusewire_window_wait_raised_async(comm, window, 0, RANKS, &work));
  REFUSED("counter 2 of 2", fusewire_window_reset_counter(window, 2));
  REFUSED("signal 5", fusewire_window_read_signal(window, 5, 0, &number));
  REFUSED("peer 3", fusewire_window_read_signal(window, 0, RANKS, &number));
  REFUSED("value is NULL", fusewire_window_read_signal(window, 0, 0, NULL));
  REFUSED("signal 5", fusewire_window_reset_signal(window, 5));
  REFUSED("window is NULL", fusewire_window_reset_signal(NULL, 0));
  REFUSED("counter 2 of 2", fusewire_window_read_counter(window, 2, &number));
#undef REFUSED
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  start(argv, "windows");
  next = (rank + 1) % RANKS;
  before = (rank + RANKS - 1) % RANKS;
  for (int form = 0; form < 3; form++) {
    transfers(0, form);
    transfers(1, form);
    signals(form);
    waits(form);
    counted(form);
  }
  existing_memory();
  freed_in_flight();
  captured();
  other_communicator();
  fusewire_window *window = new_window();
  if (rank == 1) refused(window);
  end_window(window);
  /* Ranks that pass different sizes get an error on all ranks. */
  SAYS(FUSEWIRE_ERROR_COMMUNICATOR, "they must be equal",
       fusewire_window_alloc(comm, 64 + rank, NULL, &window));
  TRUE(window == NULL);
  return finish();
}
