// The three products of attention with a tile of 64 keys, for kLanes rows of a KV head; see
// attention.h.
#include "tile.h"

constexpr int kTileKeys = 64;
constexpr int kKeyRows = kLanes / 2;  // keys whose scores are taken at once
constexpr int kValueRows = std::min(8, kTileRows);
constexpr int kValueColumns = 2 * kLanes;  // columns of values that are summed at once
constexpr int kLineWords = 16;             // of a line of the cache
constexpr float kHidden = -1e30f;          // below any score

// Numbers of a 32-bit word: a pair of bfloat16, or one float32.
template <class T>
constexpr int kPerWord = 4 / sizeof(T);

// Rows of a tile's keys and values, as they lie in the cache.
template <class T>
struct TileRows {
  const T *keys[kTileKeys], *values[kTileKeys];
};

// sums + word . words, in each lane.
template <class T, class Sums, class Words>
inline Sums add_product(Sums sums, uint32_t word, Words words) {
  if constexpr (kPerWord<T> == 2)
    return dot(sums, word, words);
  else
    return fma(load_as<float>(&word) - Sums{}, Sums(words), sums);
}

// scores [kKeyRows][LANES] = keys . queries, of keys from `column` on. On the way it asks
// memory for keys and values of the tile after, so that the core has them by then.
template <class T, class Sums, class Queries, int LANES = sizeof(Sums) / sizeof(float)>
inline void score(const T* const* keys, int64_t column, const uint32_t* queries, int64_t words,
                  float* scores, const T* const* next_keys, const T* const* next_values,
                  int64_t value_column) {
  constexpr int kPer = kPerWord<T>;
  const T* rows[kKeyRows];
  Sums sums[kKeyRows][2] = {};  // of even and of odd words
  for (int i = 0; i < kKeyRows; i++) rows[i] = keys[i] + column;
  for (int64_t line = 0; line < words; line += kLineWords) {
    for (int i = 0; i < kKeyRows; i++) {
      _mm_prefetch((const char*)(next_keys[i] + column + kPer * line), _MM_HINT_T1);
      _mm_prefetch((const char*)(next_values[i] + value_column + kPer * line), _MM_HINT_T1);
    }
    for (int64_t k = line; k < line + kLineWords; k += 2)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        const auto query = load_as<Queries>(queries + (k + odd) * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < kKeyRows; i++)
          sums[i][odd] = add_product<T>(
              sums[i][odd], load_as<uint32_t>(rows[i] + kPer * (k + odd)), query);
      }
  }
  for (int i = 0; i < kKeyRows; i++) store(scores + i * LANES, sums[i][0] + sums[i][1]);
}

// Turns a tile's scores [kTileKeys][LANES] into weights, words of one key or of two neighbours
// [kTileKeys / kPerWord][LANES], and takes them into each row's softmax: its largest score so far,
// the sum of its weights, and what earlier sums are worth now. Keys are those from `begin` to before
// `stop`, which are even.
// A vector may have the scores of two keys; then it has all else twice.
template <class T, int LANES>
inline void soften(const float* scores, int begin, int stop, float scale, float* peaks,
                   float* totals, float* rescale, uint32_t* weights) {
  constexpr bool kHasTwo = LANES < kLanes;
  Floats top = load(peaks), total = set(0);
  for (int i = begin * LANES; i < stop * LANES; i += kLanes) top = max(load(scores + i), top);
  if (kHasTwo) top = max(top, swap_halves(top));
  const auto weight = [&](int key) {
    const Floats score = load(scores + key * LANES);
    return score == kHidden ? set(0) : exp((score - top) * scale);
  };
  for (int j = begin; j < stop; j += 2) {
    const Floats even = weight(j), odd = kHasTwo ? swap_halves(even) : weight(j + 1);
    if constexpr (kPerWord<T> == 2) {
      store(weights + j / 2 * LANES, rounded(even) | rounded(odd) << 16);
    } else {
      store(weights + j * LANES, even);
      if (!kHasTwo) store(weights + (j + 1) * LANES, odd);
    }
    total += even + odd;
  }
  const Floats worth = exp((load(peaks) - top) * scale);
  store(rescale, worth);
  store(totals, total + load(totals) * worth);
  store(peaks, top);
}

// sums [ROWS][width] = sums * rescale + weights . values, kValueColumns of them from `column` on.
template <class T, int LANES, int ROWS>
inline void add_values(const uint32_t* weights, const T* const* values, int64_t column,
                       int begin, int end, const float* rescale, float* sums, int64_t width) {
  Floats total[ROWS][2];
  for (int i = 0; i < ROWS; i++)
    for (int half = 0; half < 2; half++)
      total[i][half] = load(sums + i * width + half * kLanes) * rescale[i];
  for (int j = begin; j < end; j += kPerWord<T>) {
    Words words[2];
    if constexpr (kPerWord<T> == 2)
      pair_rows(values[j] + column, values[j + 1] + column, words);
    else
      for (int half = 0; half < 2; half++)
        words[half] = load_as<Words>(values[j] + column + half * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const uint32_t weight = weights[j / kPerWord<T> * LANES + i];
      total[i][0] = add_product<T>(total[i][0], weight, words[0]);
      total[i][1] = add_product<T>(total[i][1], weight, words[1]);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int half = 0; half < 2; half++)
      store(sums + i * width + half * kLanes, total[i][half]);
}
