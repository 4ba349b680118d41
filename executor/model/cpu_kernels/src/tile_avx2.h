// Tile for CPUs with AVX2 and FMA: bfloat16 widened to float32, which is a shift or a mask. See tile.h.
#pragma once

#include <immintrin.h>

constexpr int kTileRows = 4;  // x 2 sums of 8 lanes, four vectors of weights, a row's pair: 14 of 16

struct Floats {
  __m256 low, high;
};

inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }

inline __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
}
inline __m256 widen(__m128i half) { return even(_mm256_cvtepu16_epi32(half)); }

// Rounds to the nearest, halves to even; NaN stays NaN. The result is in the low half of each word.
inline __m256i narrow(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, is_nan), 16);
}

inline Floats set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline Floats load(const bf16* p) {
  return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void store(bf16* p, Floats x) {
  const __m256i halves = _mm256_packus_epi32(narrow(x.low), narrow(x.high));  // by 128-bit lanes
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(halves, 0xd8));
}
inline Floats min(Floats a, Floats b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Floats max(Floats a, Floats b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Floats fma(Floats a, Floats b, Floats c) {  // a * b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats round(Floats x) { return {_mm256_round_ps(x.low, 8), _mm256_round_ps(x.high, 8)}; }
inline __m256 pow2(__m256 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Floats pow2(Floats n) { return {pow2(n.low), pow2(n.high)}; }  // n whole, -126 to 127
inline __m256 lanes_of(int mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), bits), bits));
}
inline Floats select(Mask mask, Floats a, Floats b) {
  return {_mm256_blendv_ps(b.low, a.low, lanes_of(mask)),
          _mm256_blendv_ps(b.high, a.high, lanes_of(mask >> 8))};
}
inline Mask equal(Floats a, Floats b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ)) |
         _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ)) << 8;
}
inline float sum(Floats x) {
  float lanes[8];
  _mm256_storeu_ps(lanes, x.low + x.high);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}
inline float largest(Floats x) {
  float lanes[8];
  _mm256_storeu_ps(lanes, _mm256_max_ps(x.low, x.high));
  return *std::max_element(lanes, lanes + 8);
}

constexpr int kDotLanes = 8;

// sums + pair . pairs, in each lane.
inline __m256 dot(__m256 sums, uint32_t pair, __m256i pairs) {
  const __m256i word = _mm256_set1_epi32(pair);
  return _mm256_fmadd_ps(odd(word), odd(pairs), _mm256_fmadd_ps(even(word), even(pairs), sums));
}

// Pairs (even[i], odd[i]) of 16 columns.
inline void pair_rows(const bf16* even, const bf16* odd, __m256i (&pairs)[2]) {
  for (int i = 0; i < 2; i++) {
    const __m128i a = _mm_loadu_si128((const __m128i*)(even + 8 * i));
    const __m128i b = _mm_loadu_si128((const __m128i*)(odd + 8 * i));
    pairs[i] = _mm256_or_si256(_mm256_cvtepu16_epi32(a), _mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16));
  }
}

template <int ROWS>
inline void product(const bf16* const* rows, const bf16* panel, int64_t pairs, float* result) {
  for (int column = 0; column < kColumns; column += 16) {
    __m256 sums[ROWS][2];
    for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
      const bf16* weights = panel + 2 * (k * kColumns + column);
      const __m256i low = _mm256_loadu_si256((const __m256i*)weights);
      const __m256i high = _mm256_loadu_si256((const __m256i*)(weights + 16));
      const __m256 low_even = even(low), low_odd = odd(low);
      const __m256 high_even = even(high), high_odd = odd(high);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i++) {
        int pair;
        std::memcpy(&pair, rows[i] + 2 * k, sizeof pair);
        const __m256i word = _mm256_set1_epi32(pair);
        const __m256 x_even = even(word), x_odd = odd(word);
        sums[i][0] = _mm256_fmadd_ps(x_odd, low_odd, _mm256_fmadd_ps(x_even, low_even, sums[i][0]));
        sums[i][1] = _mm256_fmadd_ps(x_odd, high_odd, _mm256_fmadd_ps(x_even, high_even, sums[i][1]));
      }
    }
    for (int i = 0; i < ROWS; i++) {
      _mm256_storeu_ps(result + i * kColumns + column, sums[i][0]);
      _mm256_storeu_ps(result + i * kColumns + column + 8, sums[i][1]);
    }
  }
}
