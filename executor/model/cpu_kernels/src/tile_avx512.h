// Tile for CPUs with AVX512 and its dot product of bfloat16 pairs. See tile.h.
#ifndef TILE_AMX
constexpr int kTileRows = 12;  // x 2 sums, 2 vectors of weights, a row's pair: 27 of 32 registers
#endif

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline Floats8 fma(Floats8 a, Floats8 b, Floats8 c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b if either is NaN
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats swap_halves(Floats x) { return _mm512_shuffle_f32x4(x, x, 0x4e); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline Floats load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(p)));
}
// Each number in the low half of a word.
inline Words widen(const bf16* p) { return (Words)_mm512_cvtepu16_epi32(load_as<__m256i>(p)); }
inline Words rounded(Floats x) {
  return (Words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
}
inline void store(bf16* p, Floats x) { store<__m256bh>(p, _mm512_cvtneps_pbh(x)); }

// sums + pair . pairs, in each lane.
inline Floats dot(Floats sums, uint32_t pair, Words pairs) {
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
}
inline Floats8 dot(Floats8 sums, uint32_t pair, Words8 pairs) {
  return _mm256_dpbf16_ps(sums, (__m256bh)_mm256_set1_epi32(pair), (__m256bh)pairs);
}

// Pairs of numbers that bfloat16 has, to take dot products with.
inline Words pairs_of(Floats even, Floats odd) { return Words(even) >> 16 | Words(odd); }

// Pairs (even[i], odd[i]) of 32 columns.
inline void pair_rows(const bf16* even, const bf16* odd, Words (&pairs)[2]) {
  const Words places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Words low = places * 0x10001 + 0x200000;
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  pairs[0] = (Words)_mm512_permutex2var_epi16(a, (__m512i)low, b);
  pairs[1] = (Words)_mm512_permutex2var_epi16(a, (__m512i)(low + 0x100010), b);
}
