/* State and helpers that the parts of operations.c share: the communicator, comparisons, memory. */
#ifndef CHECK_H
#define CHECK_H

#include <fusewire.h>

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, N = 3000 };

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
#define TRUE(condition)                                        \
  do {                                                         \
    if (!(condition)) {                                        \
      printf("line %d: not so: %s\n", __LINE__, #condition);   \
      failures++;                                              \
    }                                                          \
  } while (0)

static int on_cpu(void) { return strcmp(device, "cpu") == 0; }

/* Allocates memory in a window. With `plain` on a CPU, allocates memory outside any window. */
static void *memory(size_t bytes, int plain) {
  void *at = NULL;
  if (plain && on_cpu()) return malloc(bytes);
  OK(fusewire_alloc(comm, bytes, &at));
  return at;
}

static void release(void *at, int plain) {
  if (plain && on_cpu()) {
    free(at);
  } else {
    OK(fusewire_free(comm, at));
  }
}

static void end(fusewire_work *work) {
  OK(fusewire_work_wait(work, 60.0));
  OK(fusewire_work_destroy(work));
}

static float value(uint32_t of, int i) { return (float)((i * 7 + (int)of * 13) % 31 - 15) / 4.0f; }

static float host[RANKS * N], got[RANKS * N];

static void put(void *to, int count) {
  for (int i = 0; i < count; i++) host[i] = value(rank, i);
  OK(fusewire_upload(comm, to, host, (uint64_t)count * 4));
}

static void get(const void *from, int count) {
  memset(got, 0xff, sizeof got);
  OK(fusewire_download(comm, got, from, (uint64_t)count * 4));
}

#endif
