// The inner loops of `int_products.cpp`, which includes this file once for each instruction set, within a namespace.
//
// A weight is q * scale + min in float32, where q has 4 or 8 bits and a group of 16 or 32 columns shares scale and min.
// Each result is a sum in one order, whatever else is computed with it: it does not depend on the batch or on threads.

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

template <typename Vector, typename Element>
inline Vector load(const Element* from) {
  Vector found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// kLanes bytes as int32. Compilers do not find these instructions by themselves.
inline Ints unsigned_bytes(const uint8_t* from) {
#if defined(RADIXRT_V4)
  return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(RADIXRT_V3)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  Ints found;
  for (int i = 0; i < kLanes; ++i) found[i] = from[i];
  return found;
#endif
}

inline Ints signed_bytes(const uint8_t* from) {
#if defined(RADIXRT_V4)
  return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(RADIXRT_V3)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  Ints found;
  for (int i = 0; i < kLanes; ++i) found[i] = static_cast<int8_t>(from[i]);
  return found;
#endif
}

inline float sum(Floats x) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// The weights of a group: kLanes columns in each of `out`.
template <int bits, int group>
inline void expand(const Matrix& w, int64_t row, int64_t number, Floats (&out)[group / kLanes]) {
  const int64_t place = row * (w.columns / group) + number;
  const uint8_t* from = w.values + place * (group * bits / 8);
  __builtin_prefetch(from + kAhead);
  const float scale = w.scales[place], min = w.mins ? w.mins[place] : 0;
  if constexpr (bits == 4) {
    for (int i = 0; i < 16 / kLanes; ++i) {
      const Ints both = unsigned_bytes(from + i * kLanes);
      out[i] = __builtin_convertvector(both & 15, Floats) * scale + min;
      out[16 / kLanes + i] = __builtin_convertvector(both >> 4, Floats) * scale + min;
    }
  } else {
    for (int i = 0; i < group / kLanes; ++i)
      out[i] = __builtin_convertvector(signed_bytes(from + i * kLanes), Floats) * scale + min;
  }
}

// Products of `count` rows of x with `wide` rows of w.
template <int bits, int group, int count, int wide>
inline void tile(const Matrix& w, const Job& job, int64_t row, int64_t first) {
  Floats sums[wide][count] = {};
  for (int64_t number = 0; number < w.columns / group; ++number) {
    for (int r = 0; r < wide; ++r) {
      Floats weights[group / kLanes];
      expand<bits, group>(w, row + r, number, weights);
      for (int t = 0; t < count; ++t)
        for (int i = 0; i < group / kLanes; ++i)
          sums[r][t] += weights[i] * load<Floats>(job.x + (first + t) * w.columns + number * group + i * kLanes);
    }
  }
  for (int t = 0; t < count; ++t)
    for (int r = 0; r < wide; ++r) {
      float& out = job.out[(first + t) * w.rows + row + r];
      out = job.add ? out + sum(sums[r][t]) : sum(sums[r][t]);
    }
}

template <int bits, int group, int count, int wide>
inline void strip(const Matrix& w, const Job& job, int64_t begin, int64_t end, int64_t first) {
  int64_t row = begin;
  for (; row + wide <= end; row += wide) tile<bits, group, count, wide>(w, job, row, first);
  for (; row < end; ++row) tile<bits, group, count, 1>(w, job, row, first);
}

template <int bits, int group>
void multiply(const Matrix& w, const Job& job, int64_t begin, int64_t end) {
  int64_t first = 0;
  for (; first + 8 <= job.count; first += 8) strip<bits, group, 8, 2>(w, job, begin, end, first);
  for (; first + 4 <= job.count; first += 4) strip<bits, group, 4, 4>(w, job, begin, end, first);
  for (; first + 2 <= job.count; first += 2) strip<bits, group, 2, 4>(w, job, begin, end, first);
  for (; first < job.count; ++first) strip<bits, group, 1, 4>(w, job, begin, end, first);
}

template <int bits, int group>
void dequantize(const Matrix& w, const Job& job, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; ++at) {
    const int64_t row = job.ids ? job.ids[at] : job.first + at;
    for (int64_t number = 0; number < w.columns / group; ++number) {
      Floats weights[group / kLanes];
      expand<bits, group>(w, row, number, weights);
      std::memcpy(job.out + at * w.columns + number * group, weights, sizeof weights);
    }
  }
}

inline void compute(const Matrix& w, const Job& job, int64_t begin, int64_t end) {
  if (w.bits == 4) {
    if (job.x) multiply<4, 32>(w, job, begin, end);
    else dequantize<4, 32>(w, job, begin, end);
  } else if (w.group == 32) {
    if (job.x) multiply<8, 32>(w, job, begin, end);
    else dequantize<8, 32>(w, job, begin, end);
  } else {
    if (job.x) multiply<8, 16>(w, job, begin, end);
    else dequantize<8, 16>(w, job, begin, end);
  }
}
