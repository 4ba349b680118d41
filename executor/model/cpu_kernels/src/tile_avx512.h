// Tile for CPUs with AVX512 and its dot product of bfloat16 pairs. See tile.h.
#pragma once

#include <immintrin.h>

constexpr int kTileRows = 12;  // x 2 sums, two vectors of weights and a row's pair: 27 of 32 registers

using Floats = __m512;  // takes + - * /

inline Floats set(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256((const __m256i*)p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(bf16* p, Floats x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
}
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline Floats round(Floats x) { return _mm512_roundscale_ps(x, 8); }
inline Floats pow2(Floats n) { return _mm512_scalef_ps(set(1), n); }  // n whole
inline Floats select(Mask mask, Floats a, Floats b) { return _mm512_mask_blend_ps(mask, b, a); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }

constexpr int kDotLanes = 16;

// sums + pair . pairs, in each lane.
inline __m512 dot(__m512 sums, uint32_t pair, __m512i pairs) {
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
}
inline __m256 dot(__m256 sums, uint32_t pair, __m256i pairs) {
  return _mm256_dpbf16_ps(sums, (__m256bh)_mm256_set1_epi32(pair), (__m256bh)pairs);
}

// Pairs (even[i], odd[i]) of 32 columns.
inline void pair_rows(const bf16* even, const bf16* odd, __m512i (&pairs)[2]) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(kLanes));
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  pairs[0] = _mm512_permutex2var_epi16(a, low, b);
  pairs[1] = _mm512_permutex2var_epi16(a, high, b);
}

template <int ROWS>
inline void product(const bf16* const* rows, const bf16* panel, int64_t pairs, float* result) {
  __m512 sums[ROWS][2];
  for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; k++, panel += 2 * kColumns) {
    const __m512bh low = (__m512bh)_mm512_loadu_si512(panel);
    const __m512bh high = (__m512bh)_mm512_loadu_si512(panel + kColumns);
    if (ROWS <= 8) {  // bound by memory: ask 4 KiB ahead
      _mm_prefetch((const char*)panel + 4096, _MM_HINT_T0);
      _mm_prefetch((const char*)panel + 4160, _MM_HINT_T0);
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
      int pair;
      std::memcpy(&pair, rows[i] + 2 * k, sizeof pair);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, low);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, high);
    }
  }
  for (int i = 0; i < ROWS; i++) {
    store(result + i * kColumns, sums[i][0]);
    store(result + i * kColumns + kLanes, sums[i][1]);
  }
}
