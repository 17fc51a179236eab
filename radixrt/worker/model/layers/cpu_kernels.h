// The inner loops of `cpu_kernels.cpp`, which includes this file once for each instruction set, within a namespace.
// Each result is a sum in one order, whatever else is computed with it: it does not depend on the batch or on threads.
//
// A weight is q * scale + min in float32, where q has 4 or 8 bits and a group of 16 or 32 columns shares scale and min.

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

// Fetch scales and mins that are kAhead bytes after these.
inline void fetch_facts(const Matrix& w, int64_t place) {
  __builtin_prefetch(w.scales + place + kAhead / 4);
  if (w.mins) __builtin_prefetch(w.mins + place + kAhead / 4);
}

// Products of `count` rows of x with `wide` rows of w.
template <int bits, int group, int count, int wide>
inline void tile(const Matrix& w, const Product& job, int64_t row, int64_t first) {
  Floats sums[wide][count] = {};
  for (int64_t number = 0; number < w.columns / group; ++number) {
    for (int r = 0; r < wide; ++r) {
      Floats weights[group / kLanes];
      expand<bits, group>(w, row + r, number, weights);
      if (number % 16 == 0) fetch_facts(w, (row + r) * (w.columns / group) + number);
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
inline void strip(const Matrix& w, const Product& job, int64_t begin, int64_t end, int64_t first) {
  int64_t row = begin;
  for (; row + wide <= end; row += wide) tile<bits, group, count, wide>(w, job, row, first);
  for (; row < end; ++row) tile<bits, group, count, 1>(w, job, row, first);
}

template <int bits, int group>
void multiply(const Matrix& w, const Product& job, int64_t begin, int64_t end) {
  int64_t first = 0;
  for (; first + 8 <= job.count; first += 8) strip<bits, group, 8, 2>(w, job, begin, end, first);
  for (; first + 4 <= job.count; first += 4) strip<bits, group, 4, 4>(w, job, begin, end, first);
  for (; first + 2 <= job.count; first += 2) strip<bits, group, 2, 4>(w, job, begin, end, first);
  for (; first < job.count; ++first) strip<bits, group, 1, 4>(w, job, begin, end, first);
}

template <int bits, int group>
void dequantize(const Matrix& w, const Product& job, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; ++at) {
    const int64_t row = job.ids ? job.ids[at] : job.first + at;
    for (int64_t number = 0; number < w.columns / group; ++number) {
      Floats weights[group / kLanes];
      expand<bits, group>(w, row, number, weights);
      std::memcpy(job.out + at * w.columns + number * group, weights, sizeof weights);
    }
  }
}

// Rows [begin, end) of a Product.
inline void product(const void* task, int64_t begin, int64_t end) {
  const Product& job = *static_cast<const Product*>(task);
  const Matrix& w = *job.matrix;
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

// exp(x), as if x was between -87 and 88, within 2 units in the last place: 2^n 2^f, with f in [-1/2, 1/2] by its Taylor
// series. NaN stays NaN.
inline Floats exponential(Floats x) {
  const Floats low = x < -87.0f ? Floats{} - 87.0f : x, t = (low > 88.0f ? Floats{} + 88.0f : low) * 1.44269504f;
  const Floats n = (t + 12582912.0f) - 12582912.0f;  // rounds to an integer
  const Floats f = (t - n) * 0.693147181f;
  Floats sum = Floats{} + 1.0f / 5040;
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * f + term;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return sum * (Floats)power;
}

// Attention of `count` queries of one request to one KV head.
template <int count>
inline void attend(const Attention& job, int64_t request, int64_t kv_head, int64_t query, float* scores) {
  const int64_t *slots = job.slots + job.bounds[request], keys = job.bounds[request + 1] - job.bounds[request];
  const int64_t dim = job.dim, stride = job.kv_heads * dim, padded = (keys + kLanes - 1) / kLanes * kLanes;
  const int64_t head = request * job.heads + kv_head * (job.heads / job.kv_heads) + query;
  const float *q = job.q + head * dim, *k = job.k + kv_head * dim, *v = job.v + kv_head * dim;
  float most[count], total[count];
  for (int g = 0; g < count; ++g) most[g] = -INFINITY;
  for (int64_t i = 0; i < keys; ++i) {
    const float* key = k + slots[i] * stride;
    if (i + kKeysAhead < keys)
      for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(k + slots[i + kKeysAhead] * stride + d);
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(v + slots[i] * stride + d);
    Floats sums[count] = {};
    for (int64_t d = 0; d < dim; d += kLanes)
      for (int g = 0; g < count; ++g) sums[g] += load<Floats>(q + g * dim + d) * load<Floats>(key + d);
    for (int g = 0; g < count; ++g) {
      const float score = sum(sums[g]) * job.scale;
      scores[g * padded + i] = score;
      most[g] = std::max(most[g], score);
    }
  }
  for (int g = 0; g < count; ++g) {
    for (int64_t i = keys; i < padded; ++i) scores[g * padded + i] = -INFINITY;
    Floats sums = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      Floats weights = exponential(load<Floats>(scores + g * padded + i) - most[g]);
      for (int64_t past = std::max<int64_t>(0, keys - i); past < kLanes; ++past) weights[past] = 0;
      std::memcpy(scores + g * padded + i, &weights, sizeof weights);
      sums += weights;
    }
    total[g] = sum(sums);
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    Floats sums[count] = {};
    for (int64_t i = 0; i < keys; ++i) {
      const Floats value = load<Floats>(v + slots[i] * stride + d);
      for (int g = 0; g < count; ++g) sums[g] += scores[g * padded + i] * value;
    }
    for (int g = 0; g < count; ++g) {
      const Floats found = sums[g] / total[g];
      std::memcpy(job.out + (head + g) * dim + d, &found, sizeof found);
    }
  }
}

// Pairs [begin, end) of a request and a KV head of an Attention.
inline void attention(const void* task, int64_t begin, int64_t end) {
  const Attention& job = *static_cast<const Attention*>(task);
  static thread_local std::vector<float> scores;
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t request = pair / job.kv_heads, kv_head = pair % job.kv_heads, group = job.heads / job.kv_heads;
    scores.resize(4 * (job.bounds[request + 1] - job.bounds[request] + kLanes));
    int64_t query = 0;
    for (; query + 4 <= group; query += 4) attend<4>(job, request, kv_head, query, scores.data());
    for (; query + 3 <= group; query += 3) attend<3>(job, request, kv_head, query, scores.data());
    for (; query + 2 <= group; query += 2) attend<2>(job, request, kv_head, query, scores.data());
    for (; query < group; ++query) attend<1>(job, request, kv_head, query, scores.data());
  }
}

// Rows [begin, end) of a Norm.
inline void norm(const void* task, int64_t begin, int64_t end) {
  const Norm& job = *static_cast<const Norm*>(task);
  const int64_t whole = job.width / kLanes * kLanes;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = job.x + row * job.width;
    float* out = job.out + row * job.width;
    Floats squares = {};
    for (int64_t i = 0; i < whole; i += kLanes) squares += load<Floats>(x + i) * load<Floats>(x + i);
    float total = sum(squares);
    for (int64_t i = whole; i < job.width; ++i) total += x[i] * x[i];
    const float factor = 1 / std::sqrt(total / job.width + job.eps);
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Floats found = load<Floats>(job.weight + i) * (load<Floats>(x + i) * factor);
      std::memcpy(out + i, &found, sizeof found);
    }
    for (int64_t i = whole; i < job.width; ++i) out[i] = job.weight[i] * (x[i] * factor);
  }
}

// Tokens [begin, end) of a Rotation.
inline void rotation(const void* task, int64_t begin, int64_t end) {
  const Rotation& job = *static_cast<const Rotation*>(task);
  for (int64_t token = begin; token < end; ++token) {
    const float *cos = job.cos + token * job.half, *sin = job.sin + token * job.half;
    for (int64_t head = 0; head < job.heads; ++head) {
      const float* x = job.x + token * job.stride + head * 2 * job.half;
      float* out = job.out + (token * job.heads + head) * 2 * job.half;
      for (int64_t i = 0; i < job.half; i += kLanes) {
        const Floats a = load<Floats>(x + i), b = load<Floats>(x + job.half + i);
        const Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
        const Floats first = a * c - b * s, second = b * c + a * s;
        std::memcpy(out + i, &first, sizeof first);
        std::memcpy(out + job.half + i, &second, sizeof second);
      }
    }
  }
}

// Rows [begin, end) of a Gate.
inline void gate(const void* task, int64_t begin, int64_t end) {
  const Gate& job = *static_cast<const Gate*>(task);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = job.x + row * 2 * job.width;
    for (int64_t i = 0; i < job.width; i += kLanes) {
      const Floats a = load<Floats>(x + i);
      const Floats u = job.tanh ? a * (1.59576912f + 0.0713548163f * (a * a)) : a;
      const Floats found = a / (1.0f + exponential(-u)) * load<Floats>(x + job.width + i);
      std::memcpy(job.out + row * job.width + i, &found, sizeof found);
    }
  }
}
