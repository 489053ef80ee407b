/* Part of moe.c: the inputs of all ranks, and what a mixture of experts makes of them. The code
   follows the header and shares no code with the library. Inputs depend on the rank and on a seed,
   so each rank computes those of all ranks. */
#ifndef MOE_H
#define MOE_H

#include "check.h"

enum {
  EXPERTS = 6,
  TOP_K = 3,
  HIDDEN = 640,
  GROUPS = HIDDEN / FUSEWIRE_SCALE_GROUP,
  MAX_TOKENS = 5,
  MAX_ALIGNMENT = 4,
  MAX_ROWS = RANKS * MAX_TOKENS * TOP_K + EXPERTS * MAX_ALIGNMENT
};

/* The configuration of the test, and the place of each expert. */
static fusewire_moe_config config;
static uint32_t rank_of[EXPERTS], local_of[EXPERTS];
/* Not 0: the experts return their input. */
static int identity;
/* A rank that does not dispatch, or RANKS. */
static uint32_t absent = RANKS;

static inline uint32_t local_experts(void) {
  return config.local_experts > 0 ? config.local_experts : (EXPERTS + RANKS - 1) / RANKS;
}
static inline int is_expert_major(void) { return config.layout == FUSEWIRE_MOE_EXPERT_MAJOR; }
static inline int is_staged(void) { return config.mode == FUSEWIRE_MOE_HIGH_THROUGHPUT; }
/* Returns true if the first row of each expert or from each rank is known. */
static inline int has_offsets(void) { return is_expert_major() || is_staged(); }
static inline int is_fp8(void) { return config.payload == FUSEWIRE_MOE_PAYLOAD_FP8; }
static inline int has_flag(uint32_t flag) { return (config.flags & flag) != 0; }
/* Returns true if rows are received in fp8, with scales. */
static inline int has_scales(void) { return is_fp8() && !has_flag(FUSEWIRE_MOE_DEQUANTIZE); }
static inline int has_byte_scales(void) { return config.scale_dtype == FUSEWIRE_U8; }
static inline uint32_t input_type(void) {
  return config.dtype == FUSEWIRE_DTYPE_DEFAULT ? FUSEWIRE_BF16 : config.dtype;
}
static inline size_t element(void) { return config.dtype == FUSEWIRE_F32 ? 4 : 2; }

/* Sets a configuration that leaves all fields with a default at 0, except for the type. */
static inline void configure(uint32_t dtype, uint32_t payload, uint32_t scale_dtype,
                             uint32_t layout) {
  memset(&config, 0, sizeof config);
  config.struct_size = sizeof config;
  config.experts = EXPERTS;
  config.top_k = TOP_K;
  config.hidden = HIDDEN;
  config.max_tokens = MAX_TOKENS;
  config.dtype = dtype;
  config.payload = payload;
  config.scale_dtype = scale_dtype;
  config.layout = layout;
  /* The places of a new mixture of experts. */
  for (uint32_t e = 0; e < EXPERTS; e++) {
    rank_of[e] = e / local_experts();
    local_of[e] = e % local_experts();
  }
}

/* Selects high throughput mode. Most ranks need several rounds for their tokens. */
static inline void stage(void) {
  config.mode = FUSEWIRE_MOE_HIGH_THROUGHPUT;
  config.staging = 2;
  /* Several blocks would share the tokens. */
  config.blocks = 1;
}

/* ---- Inputs ---- */

/* One rank has no tokens, nor has an absent one. */
static inline uint32_t tokens_of(uint32_t of, int seed) {
  if (of == (1 + (uint32_t)seed) % RANKS || of == absent) return 0;
  return MAX_TOKENS - (of + (uint32_t)seed) % 3;
}

/* Token 1 selects an expert twice, and token 2 selects none. Others select different experts, or
   none for a selection. */
static inline int32_t id_of(uint32_t of, uint32_t token, int k, int seed) {
  if (token == 2) return -1;
  int first = (int)(of * 5 + token * 3) + seed;
  int id = (first + (token == 1 && k == 2 ? 0 : k * (k + 1))) % (EXPERTS + 1);
  return id == EXPERTS ? -1 - (int)of : id;
}

static inline float weight_of(uint32_t of, uint32_t token, int k) {
  return (float)(1 + (of + token + (uint32_t)k) % 5) / 7.0f;
}

/* The values are exact in bf16. */
static inline float x_of(uint32_t of, uint32_t token, int i, int seed) {
  return (float)((i * 7 + (int)(of * 13 + token * 5) + seed * 3) % 31 - 15) / 4.0f;
}

/* ---- Numbers ---- */

/* Stores a number in the type of the tokens, rounded to nearest, ties to even. */
static inline void store(void *to, size_t at, float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  if (config.dtype == FUSEWIRE_F32) {
    memcpy((char *)to + 4 * at, &bits, 4);
  } else {
    uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    memcpy((char *)to + 2 * at, &half, 2);
  }
}

static inline float rounded(float number) {
  uint32_t bits = 0;
  store(&bits, 0, number);
  if (config.dtype != FUSEWIRE_F32) bits <<= 16;
  memcpy(&number, &bits, 4);
  return number;
}

static inline float e4m3_value(int code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  float size = exponent == 0 ? ldexpf((float)mantissa, -9)
                             : ldexpf((float)(8 + mantissa), exponent - 10);
  return code & 0x80 ? -size : size;
}

/* Returns the code of the nearest number; of two, the even code. */
static inline uint8_t e4m3_code(float number) {
  double size = fabs(number);
  int best = 0;
  for (int code = 1; code < 0x7f; code++) {
    double nearer = fabs(e4m3_value(best) - size) - fabs(e4m3_value(code) - size);
    if (nearer > 0 || (nearer == 0 && code % 2 == 0)) best = code;
  }
  return (uint8_t)(best | (signbit(number) ? 0x80 : 0));
}

/* Converts the numbers of a row to E4M3 with a scale for each group, and replaces each number by
   the product of its element and the scale. */
static inline void quantize(float *numbers, int has_bytes, uint8_t *x, uint8_t *scales) {
  for (int group = 0; group < GROUPS; group++) {
    float *values = numbers + group * FUSEWIRE_SCALE_GROUP, most = 1e-4f;
    for (int i = 0; i < FUSEWIRE_SCALE_GROUP; i++) most = fmaxf(most, fabsf(values[i]));
    float scale = most / 448.0f, factor = 448.0f / most;
    if (has_bytes) {
      int exponent;
      if (frexpf(scale, &exponent) == 0.5f) exponent--;
      scale = ldexpf(1.0f, exponent);
      factor = ldexpf(1.0f, -exponent);
      scales[group] = (uint8_t)(exponent + 127);
    } else {
      memcpy(scales + 4 * group, &scale, 4);
    }
    for (int i = 0; i < FUSEWIRE_SCALE_GROUP; i++) {
      uint8_t code = e4m3_code(values[i] * factor);
      x[group * FUSEWIRE_SCALE_GROUP + i] = code;
      values[i] = e4m3_value(code) * scale;
    }
  }
}

/* ---- Rows ---- */

/* A token as it is received: its bytes, its scales, and the numbers that an expert reads. */
typedef struct sent {
  uint8_t x[HIDDEN * 4];
  uint8_t scales[GROUPS * 4];
  float values[HIDDEN];
} sent;

static inline void send_token(uint32_t of, uint32_t token, int seed, sent *to) {
  for (int i = 0; i < HIDDEN; i++) {
    to->values[i] = x_of(of, token, i, seed);
    if (!is_fp8()) store(to->x, (size_t)i, to->values[i]);
  }
  if (is_fp8()) quantize(to->values, has_byte_scales(), to->x, to->scales);
  for (int i = 0; has_flag(FUSEWIRE_MOE_DEQUANTIZE) && i < HIDDEN; i++) {
    to->values[i] = rounded(to->values[i]);
    store(to->x, (size_t)i, to->values[i]);
  }
}

/* Returns the result of an expert for a number. */
static inline float apply(int32_t expert, float number) {
  return rounded(identity ? number : number * (float)(expert + 1));
}

/* A row that this rank must receive. `experts` are numbers of all ranks, `ids` those of this rank,
   or -1. */
typedef struct row {
  int is_used, width;
  uint32_t source, token;
  int32_t ids[TOP_K], experts[TOP_K];
  float weights[TOP_K];
} row;

/* What this rank must receive. */
typedef struct expected {
  row rows[MAX_ROWS];
  uint32_t counts[RANKS + EXPERTS], offsets[RANKS + EXPERTS + 1];
  uint64_t selections[EXPERTS];
} expected;

static inline void expect_rows(int seed, expected *to) {
  memset(to, 0, sizeof *to);
  uint32_t next = 0, align = config.alignment == 0 ? 1 : (uint32_t)config.alignment;
  for (uint32_t e = 0; is_expert_major() && e < local_experts(); e++) {
    for (uint32_t r = 0; r < RANKS; r++) {
      for (uint32_t t = 0; t < tokens_of(r, seed); t++) {
        for (int k = 0; k < TOP_K; k++) {
          int32_t id = id_of(r, t, k, seed);
          if (id < 0 || rank_of[id] != rank || local_of[id] != e) continue;
          row *of = &to->rows[next++];
          of->is_used = of->width = 1;
          of->source = r, of->token = t;
          of->ids[0] = (int32_t)e, of->experts[0] = id, of->weights[0] = weight_of(r, t, k);
          to->counts[e]++, to->selections[e]++;
        }
      }
    }
    next = (next + align - 1) / align * align;
    to->offsets[e + 1] = next;
  }
  for (uint32_t r = 0; !is_expert_major() && r < RANKS; r++) {
    uint32_t first = is_staged() ? to->offsets[r] : r * MAX_TOKENS;
    for (uint32_t t = 0; t < tokens_of(r, seed); t++) {
      row *of = &to->rows[first + to->counts[r]];
      for (int k = 0; k < TOP_K; k++) {
        int32_t id = id_of(r, t, k, seed);
        int is_here = id >= 0 && rank_of[id] == rank;
        of->ids[k] = is_here ? (int32_t)local_of[id] : -1;
        of->experts[k] = id, of->weights[k] = weight_of(r, t, k);
        of->is_used |= is_here;
        if (is_here) to->selections[local_of[id]]++;
      }
      of->width = TOP_K;
      of->source = r, of->token = t;
      to->counts[r] += (uint32_t)of->is_used;
    }
    to->offsets[r + 1] = first + to->counts[r];
  }
}

/* Returns true if no result of an expert arrives, because its rank is absent. */
static inline int is_missing(int32_t id) { return id >= 0 && rank_of[id] == absent; }

/* Computes the sum of a token of this rank. */
static inline void expect_sum(uint32_t token, int seed, void *to) {
  static sent of, result;
  float sums[HIDDEN] = {0};
  send_token(rank, token, seed, &of);
  for (int k = 0; k < TOP_K; k++) {
    int32_t id = id_of(rank, token, k, seed);
    if (id < 0 || is_missing(id)) continue;
    for (int i = 0; i < HIDDEN; i++) result.values[i] = apply(id, of.values[i]);
    if (config.results == FUSEWIRE_MOE_RESULTS_FP8) {
      quantize(result.values, 0, result.x, result.scales);
    }
    for (int i = 0; i < HIDDEN; i++) {
      float product = weight_of(rank, token, k) * result.values[i];
      sums[i] += product;
    }
  }
  for (int i = 0; i < HIDDEN; i++) store(to, (size_t)i, sums[i]);
}

#endif
