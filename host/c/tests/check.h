/* State and helpers that the C programs share: the communicator, comparisons, memory. A program
   with another number of ranks defines RANKS before it includes this file. */
#ifndef CHECK_H
#define CHECK_H

#include <fusewire.h>

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef RANKS
#define RANKS 2
#endif
enum { N = 3000 };

static fusewire_comm *comm;
static uint32_t rank;
static const char *device;
static int failures;

static void expect_(int line, int code, int wanted, const char *what) {
  if (code != wanted) {
    printf("line %d: %s gave %d instead of %d: %s\n", line, what, code, wanted,
           fusewire_last_error());
    exit(1);
  }
}
#define OK(call) expect_(__LINE__, (call), FUSEWIRE_OK, #call)
#define GIVES(code, call) expect_(__LINE__, (call), (code), #call)
/* Checks the returned code, and that the message contains `words`. */
#define SAYS(code, words, call)                                                     \
  do {                                                                              \
    GIVES(code, call);                                                              \
    if (strstr(fusewire_last_error(), words) == NULL) {                             \
      printf("line %d: no \"%s\" in: %s\n", __LINE__, words, fusewire_last_error()); \
      failures++;                                                                   \
    }                                                                               \
  } while (0)
/* Prints the first failures only: c.rs reads the output after the program has ended, so a program
   must not fill the pipe. */
#define TRUE(condition)                                                      \
  do {                                                                       \
    if (!(condition) && failures++ < 50) {                                   \
      printf("line %d: not so: %s\n", __LINE__, #condition);                 \
    }                                                                        \
  } while (0)

static inline int on_cpu(void) { return strcmp(device, "cpu") == 0; }

/* Allocates memory in a window. With `plain` on a CPU, allocates memory outside any window. */
static inline void *memory(size_t bytes, int plain) {
  void *at = NULL;
  if (plain && on_cpu()) return malloc(bytes);
  OK(fusewire_alloc(comm, bytes, &at));
  return at;
}

static inline void release(void *at, int plain) {
  if (plain && on_cpu()) {
    free(at);
  } else {
    OK(fusewire_free(comm, at));
  }
}

static inline void end(fusewire_work *work) {
  OK(fusewire_work_wait(work, 60.0));
  OK(fusewire_work_destroy(work));
}

/* Runs an operation in its form: 0 for the blocking form, 1 for the _async form, 2 for the _async
   form without a work handle. */
#define RUN(form, name, ...)                                  \
  do {                                                        \
    fusewire_work *work_ = NULL;                              \
    if ((form) == 0) {                                        \
      OK(fusewire_##name(comm, __VA_ARGS__));                 \
    } else if ((form) == 1) {                                 \
      OK(fusewire_##name##_async(comm, __VA_ARGS__, &work_)); \
      end(work_);                                             \
    } else {                                                  \
      OK(fusewire_##name##_async(comm, __VA_ARGS__, NULL));   \
      OK(fusewire_comm_synchronize(comm));                    \
    }                                                         \
  } while (0)

static inline float value(uint32_t of, int i) {
  return (float)((i * 7 + (int)of * 13) % 31 - 15) / 4.0f;
}

static float host[RANKS * N], got[RANKS * N];

static inline void put(void *to, int count) {
  for (int i = 0; i < count; i++) host[i] = value(rank, i);
  OK(fusewire_upload(comm, to, host, (uint64_t)count * 4));
}

static inline void get(const void *from, int count) {
  memset(got, 0xff, sizeof got);
  OK(fusewire_download(comm, got, from, (uint64_t)count * 4));
}

/* Joins a communicator with the arguments of a program: DEVICE RANK HOST:PORT. */
static inline void start(char **argv, const char *name) {
  device = argv[1];
  rank = (uint32_t)atoi(argv[2]);
  OK(fusewire_comm_create(device, rank, RANKS, argv[3], name, NULL, &comm));
}

/* Ends the communicator and returns the exit status of the program. */
static inline int finish(void) {
  OK(fusewire_barrier(comm));
  OK(fusewire_comm_destroy(comm));
  printf("rank %u: %d failures\n", rank, failures);
  return failures != 0;
}

#endif
