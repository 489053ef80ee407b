/* Part of operations.c: collectives that overlap with a consumer or a producer stream. */
#include "check.h"

/* Runs all_gather and reduce_scatter on a new stream, concurrently with the compute stream, which
   is the stream of `comm`. */
static void overlapped(void) {
  enum { CHUNK = 700, CHUNKS = (N + CHUNK - 1) / CHUNK };
  float *part = memory(N * 4, 0), *all = memory(sizeof host, 0);
  fusewire_comm *on;
  fusewire_ready_flags *flags, *few;
  fusewire_work *work;
  uint32_t *words = NULL;
  fusewire_overlap overlap;
  memset(&overlap, 0, sizeof overlap);
  OK(fusewire_comm_on_new_stream(comm, &on));
  OK(fusewire_ready_flags_create(comm, RANKS * CHUNKS, &flags));
  OK(fusewire_ready_flags_create(comm, 1, &few));
  OK(fusewire_ready_flags_words(flags, &words));
  TRUE(words != NULL);
  overlap.struct_size = sizeof overlap;
  overlap.dtype = FUSEWIRE_F32;
  overlap.count = N;
  overlap.chunk = CHUNK;
  overlap.input = part;
  overlap.output = all;
  overlap.ready_flags = flags;

  put(part, N);
  OK(fusewire_all_gather_with_flags(on, comm, &overlap, &work));
  for (uint32_t step = 0; step < RANKS * CHUNKS; step++) {
    uint32_t chunk = (rank * CHUNKS + step) % (RANKS * CHUNKS);
    OK(fusewire_ready_flags_stream_wait(flags, comm, chunk));
    if (on_cpu()) OK(fusewire_ready_flags_wait(flags, chunk));
  }
  OK(fusewire_work_join(work, comm));
  OK(fusewire_comm_synchronize(comm));
  end(work);
  get(all, RANKS * N);
  for (int i = 0; i < RANKS * N; i++) TRUE(got[i] == value((uint32_t)(i / N), i % N));

  overlap.input = all;
  overlap.output = part;
  overlap.op = FUSEWIRE_SUM;
  overlap.target = 1;
  put(all, RANKS * N);
  OK(fusewire_reduce_scatter_on_arrival(on, comm, &overlap, &work));
  for (uint32_t tile = 0; tile < RANKS * CHUNKS; tile++) {
    if (on_cpu() && tile % 2 == 0) {
      /* This thread must not add to a word before the compute stream has cleared the words. */
      OK(fusewire_comm_synchronize(comm));
      OK(fusewire_ready_flags_add(flags, tile, 1));
    } else {
      OK(fusewire_ready_flags_stream_write(flags, comm, tile, 1));
    }
  }
  OK(fusewire_work_join(work, comm));
  OK(fusewire_comm_synchronize(comm));
  end(work);
  get(part, N);
  for (int i = 0; i < N; i++) {
    int at = (int)rank * N + i;
    TRUE(got[i] == value(0, at) + value(1, at));
  }

  SAYS(FUSEWIRE_ERROR_ARGUMENT, "stream",
       fusewire_reduce_scatter_on_arrival(comm, comm, &overlap, &work));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "producer is NULL",
       fusewire_reduce_scatter_on_arrival(on, NULL, &overlap, &work));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "op and target",
       fusewire_all_gather_with_flags(on, comm, &overlap, &work));
  overlap.flags = 4;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "flags 0x4",
       fusewire_reduce_scatter_on_arrival(on, comm, &overlap, &work));
  overlap.flags = 0;
  overlap.ready_flags = few;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "words",
       fusewire_reduce_scatter_on_arrival(on, comm, &overlap, &work));
  overlap.ready_flags = NULL;
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "ready flags are NULL",
       fusewire_reduce_scatter_on_arrival(on, comm, &overlap, &work));
  SAYS(FUSEWIRE_ERROR_ARGUMENT, "1", fusewire_ready_flags_stream_wait(few, comm, 1));
  TRUE(work == NULL);
  OK(fusewire_ready_flags_destroy(few));
  OK(fusewire_ready_flags_destroy(flags));
  OK(fusewire_ready_flags_destroy(NULL));
  OK(fusewire_comm_destroy(on));
  release(part, 0);
  release(all, 0);
}
