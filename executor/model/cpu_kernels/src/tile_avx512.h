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
