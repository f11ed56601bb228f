// SPDX-License-Identifier: Apache-2.0
// Checks and times the kernels of rms_steps.cuh, and that of cc/normalization beside them.
//
//     make guide                   on the GPU at hand; ARGS=OUT.json keeps the results
//     build/rms_steps --check      the checks alone, as for compute-sanitizer
//     build/rms_steps --once       a launch of each, for a profiler
//
// Each step is checked against a reference in double, at widths with and without tails. Times are
// medians over many launches; buffers rotate, so that nothing is in the second-level cache.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cc/normalization/normalization.h"
#include "docs/guide/rms_steps.cuh"

namespace {

// A call of a step.
struct Problem {
  int64_t rows, cols;
  const bf16 *x, *scale;
  bf16* y;
  float epsilon = 1e-3f;
};

int64_t BlocksOf(int64_t threads, int threads_per_block) {
  return (threads + threads_per_block - 1) / threads_per_block;
}

// Calls f(vectors of 8) where rows and pointers are multiples of 16 bytes, else f(vectors of 1).
template <typename F>
void WithVectors(const Problem& p, F f) {
  bool aligned = p.cols % 8 == 0;
  for (const bf16* pointer : {p.x, p.scale, static_cast<const bf16*>(p.y)}) {
    aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  }
  aligned ? f(std::integral_constant<int, 8>{}) : f(std::integral_constant<int, 1>{});
}

template <int kVec>
const Vector<kVec>* AsVectors(const bf16* pointer) {
  return reinterpret_cast<const Vector<kVec>*>(pointer);
}
template <int kVec>
Vector<kVec>* AsVectors(bf16* pointer) {
  return reinterpret_cast<Vector<kVec>*>(pointer);
}

void Step1(const Problem& p) {
  OneThreadPerRow<<<BlocksOf(p.rows, 128), 128>>>(p.x, p.scale, p.rows, p.cols, p.epsilon, p.y);
}

void Step2(const Problem& p) {
  const int64_t blocks = BlocksOf(32 * p.rows, 256);
  OneWarpPerRow<<<blocks, 256>>>(p.x, p.scale, p.rows, p.cols, p.epsilon, p.y);
}

void Step3(const Problem& p) {
  WithVectors(p, [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    SixteenBytesPerLoad<<<BlocksOf(32 * p.rows, 256), 256>>>(
        AsVectors<kVec>(p.x), AsVectors<kVec>(p.scale), p.rows, p.cols, p.epsilon,
        AsVectors<kVec>(p.y));
  });
}

void Step4(const Problem& p) {
  WithVectors(p, [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    constexpr int64_t kMostBytes = 46 << 10;  // of 48 KB that every launch may have
    const int64_t kept =
        std::min(p.cols * int64_t{sizeof(bf16)}, kMostBytes) / (kVec * sizeof(bf16));
    RowInSharedMemory<<<p.rows, 256, kept * kVec * sizeof(bf16)>>>(
        AsVectors<kVec>(p.x), AsVectors<kVec>(p.scale), kept, p.cols, p.epsilon,
        AsVectors<kVec>(p.y));
  });
}

// Launches kernel(x, scale, cols, epsilon, y) with a block per row.
template <int kVec>
void PerRow(const Problem& p, int threads,
            void (*kernel)(const Vector<kVec>*, const Vector<kVec>*, int64_t, float,
                           Vector<kVec>*)) {
  kernel<<<p.rows, threads>>>(AsVectors<kVec>(p.x), AsVectors<kVec>(p.scale), p.cols, p.epsilon,
                              AsVectors<kVec>(p.y));
}

// Whether kThreads threads hold a row, kChunks vectors each; it is launched if they do.
template <bool kInFlight, int kThreads, int kChunks>
bool Held(const Problem& p) {
  bool fits = false;
  WithVectors(p, [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    fits = p.cols <= kVec * kThreads * kChunks;
    if (!fits) return;
    if constexpr (kInFlight) {
      PerRow(p, kThreads, AllLoadsInFlight<kVec, kThreads, kChunks>);
    } else {
      PerRow(p, kThreads, RowInRegisters<kVec, kThreads, kChunks>);
    }
  });
  return fits;
}

// A thread has four vectors of a row; a row that is too wide goes to shared memory. Weights and row
// together are more than 1024 threads have registers for.
template <bool kInFlight>
void HeldOrShared(const Problem& p) {
  Held<kInFlight, 128, 4>(p) || Held<kInFlight, 256, 4>(p) || Held<kInFlight, 512, 4>(p) ||
      Held<false, 1024, 4>(p) || (Step4(p), true);
}

// The forward kernel of cc/normalization.
void Library(const Problem& p) {
  static float* rstd = nullptr;
  if (!rstd) cudaMalloc(&rstd, sizeof(float) << 17);
  tf_ops::NormalizationProblem n{};
  n.dtype = n.weight_dtype = tf_ops::DType::kBFloat16;
  n.rows = p.rows, n.cols = p.cols, n.groups = 1, n.epsilon = p.epsilon;
  n.x = p.x, n.scale = p.scale, n.y = p.y, n.rstd = rstd;
  tf_ops::Normalize(tf_ops::Gpu{nullptr}, n);
}

struct Step {
  const char* name;
  void (*launch)(const Problem&);
};
const Step kSteps[] = {{"a thread per row", Step1},
                       {"a warp per row", Step2},
                       {"sixteen bytes a load", Step3},
                       {"the row in shared memory", Step4},
                       {"the row in registers", HeldOrShared<false>},
                       {"all loads in flight", HeldOrShared<true>},
                       {"cc/normalization", Library}};
template <int kThreads, int kChunks>
void Layout(const Problem& p) {
  Held<true, kThreads, kChunks>(p);
}
const Step kLayouts[] = {{"64 x 8", Layout<64, 8>},
                         {"128 x 4", Layout<128, 4>},
                         {"256 x 2", Layout<256, 2>},
                         {"512 x 1", Layout<512, 1>}};

void Must(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what.c_str(), cudaGetErrorString(error));
  std::exit(1);
}

// Device memory for `size` elements that start `offset` elements past an aligned address.
struct Buffer {
  bf16* memory;
  bf16* data;
  Buffer(int64_t size, int64_t offset = 0) {
    Must(cudaMalloc(&memory, (size + offset) * sizeof(bf16)), "cudaMalloc");
    Must(cudaMemset(memory, 0xff, (size + offset) * sizeof(bf16)), "cudaMemset");  // NaN
    data = memory + offset;
  }
  Buffer(const std::vector<bf16>& from, int64_t offset = 0) : Buffer(from.size(), offset) {
    Must(cudaMemcpy(data, from.data(), from.size() * sizeof(bf16), cudaMemcpyDefault), "copy");
  }
  ~Buffer() { cudaFree(memory); }
};

std::vector<bf16> Random(int64_t size, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<bf16> values(size);
  for (bf16& value : values) value = bf16(normal(generator));
  return values;
}

// Whether a step's result is the reference, rounded, or the number beside it.
bool Right(const std::vector<bf16>& x, const std::vector<bf16>& scale, const std::vector<bf16>& y,
           float epsilon) {
  const int64_t cols = scale.size(), rows = x.size() / cols;
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0.0;
    for (int64_t i = 0; i < cols; ++i) {
      const double value = float(x[row * cols + i]);
      squares += value * value;
    }
    const double rstd = 1.0 / std::sqrt(squares / cols + epsilon);
    for (int64_t i = 0; i < cols; ++i) {
      const double expected = double(float(x[row * cols + i])) * rstd * double(float(scale[i]));
      const double off = std::abs(double(float(y[row * cols + i])) - expected);
      if (!(off <= std::abs(expected) / 256 + 1e-30)) return false;
    }
  }
  return true;
}

int Check(const Step& step, int64_t rows, int64_t cols, int64_t offset) {
  const std::vector<bf16> x = Random(rows * cols, 1), scale = Random(cols, 2);
  Buffer device_x(x, offset), device_scale(scale, offset), device_y(x.size(), offset);
  Problem p{rows, cols, device_x.data, device_scale.data, device_y.data};
  step.launch(p);
  const std::string what = std::string(step.name) + ", " + std::to_string(rows) + " x " +
                           std::to_string(cols) + (offset ? ", unaligned" : "");
  Must(cudaGetLastError(), what);
  std::vector<bf16> y(x.size());
  Must(cudaMemcpy(y.data(), p.y, y.size() * sizeof(bf16), cudaMemcpyDefault), what);
  if (Right(x, scale, y, p.epsilon)) return 0;
  std::printf("WRONG: %s\n", what.c_str());
  return 1;
}

int CheckAll() {
  const int64_t widths[] = {1,    7,    8,    31,   33,   256,  1000,  1023,  1024,
                            1025, 4095, 4096, 4097, 8192, 9000, 33000, 131080};
  int failures = 0, count = 0;
  for (const Step& step : kSteps) {
    for (int64_t cols : widths) {
      for (int64_t offset : {0, 1}) {
        failures += Check(step, 5, cols, offset);
        ++count;
      }
    }
    failures += Check(step, 1000, 512, 0);
    ++count;
  }
  for (const Step& layout : kLayouts) {
    for (int64_t cols : {64, 4088, 4096}) failures += Check(layout, 5, cols, 0), ++count;
  }
  std::printf("%d cases, %d failures\n", count, failures);
  return failures;
}

// The median microseconds of a call: rounds of `batch` calls, call(0), call(1) and so on.
template <typename F>
double Microseconds(F call, int batch, int rounds) {
  cudaEvent_t start, stop;
  Must(cudaEventCreate(&start), "event"), Must(cudaEventCreate(&stop), "event");
  std::vector<float> times;
  int at = 0;
  for (int round = -2; round < rounds; ++round) {  // two to warm up
    cudaEventRecord(start);
    for (int i = 0; i < batch; ++i) call(at++);
    cudaEventRecord(stop);
    Must(cudaEventSynchronize(stop), "a launch");
    float milliseconds = 0.0f;
    cudaEventElapsedTime(&milliseconds, start, stop);
    if (round >= 0) times.push_back(1e3f * milliseconds / batch);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

constexpr int kSets = 4;  // of buffers: 1 GB at 16384 x 4096, many times a second-level cache

struct Sets {
  std::vector<Buffer*> x, y;
  Buffer scale;
  int64_t rows, cols;
  Sets(int64_t rows, int64_t cols) : scale(Random(cols, 2)), rows(rows), cols(cols) {
    const std::vector<bf16> values = Random(1 << 20, 3);
    for (int i = 0; i < kSets; ++i) {
      x.push_back(new Buffer(rows * cols));
      y.push_back(new Buffer(rows * cols));
      for (int64_t at = 0; at < rows * cols; at += values.size()) {
        const int64_t size = std::min<int64_t>(values.size(), rows * cols - at);
        cudaMemcpy(x[i]->data + at, values.data(), size * sizeof(bf16), cudaMemcpyDefault);
      }
    }
  }
  ~Sets() {
    for (int i = 0; i < kSets; ++i) delete x[i], delete y[i];
  }
  Problem problem(int i) const {
    return {rows, cols, x[i % kSets]->data, scale.data, y[i % kSets]->data};
  }
};

// TB/s of cudaMemcpy over `bytes`, read and written.
double CopyRate(int64_t bytes) {
  const int64_t size = bytes / sizeof(bf16);
  std::vector<Buffer*> buffers;
  for (int i = 0; i < 2 * kSets; ++i) buffers.push_back(new Buffer(size));
  const double us = Microseconds(
      [&](int i) {
        cudaMemcpyAsync(buffers[2 * (i % kSets)]->data, buffers[2 * (i % kSets) + 1]->data, bytes,
                        cudaMemcpyDeviceToDevice);
      },
      8, 25);
  for (Buffer* buffer : buffers) delete buffer;
  return 2 * bytes / us / 1e6;
}

struct Report {
  std::string json;
  double copy_rate;

  void Add(const char* list, const Step& step, const Sets& sets) {
    const double us = Microseconds([&](int i) { step.launch(sets.problem(i)); }, 8, 25);
    const double rate = 4.0 * sets.rows * sets.cols / us / 1e6;
    std::printf("%-9s%6ld x %-6ld%-26s%9.1f us%7.2f TB/s%7.1f%%\n", list, long(sets.rows),
                long(sets.cols), step.name, us, rate, 100 * rate / copy_rate);
    char text[256];
    std::snprintf(text, sizeof(text),
                  "%s\n  {\"list\": \"%s\", \"rows\": %ld, \"cols\": %ld, \"name\": \"%s\", "
                  "\"us\": %.2f, \"TBps\": %.4f, \"share\": %.4f}",
                  json.empty() ? "" : ",", list, long(sets.rows), long(sets.cols), step.name, us,
                  rate, rate / copy_rate);
    json += text;
  }
};

int TimeAll(const std::string& path) {
  constexpr int64_t kGigabyte = int64_t{1} << 30;
  Report report{"", CopyRate(kGigabyte)};
  const double copy_rate = CopyRate(kGigabyte / 8);
  std::printf("copy of 1 GiB: %.2f TB/s; of 128 MiB: %.2f\n", report.copy_rate, copy_rate);
  {
    Sets sets(16384, 4096);
    for (const Step& step : kSteps) report.Add("steps", step, sets);
    for (const Step& layout : kLayouts) report.Add("layouts", layout, sets);
  }
  {
    Sets sets(16384, 4095);
    for (const Step& step : kSteps) report.Add("odd", step, sets);
  }
  if (path.empty()) return 0;
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) return 1;
  cudaDeviceProp device;
  int driver = 0, runtime = 0;
  Must(cudaGetDeviceProperties(&device, 0), "the device's properties");
  cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
  std::fprintf(file,
               "{\n \"gpu\": \"%s\",\n \"cuda\": \"%d.%d, driver for %d.%d\",\n"
               " \"copy_TBps\": %.4f,\n \"copy_of_128_MiB_TBps\": %.4f,\n \"rows\": [%s\n ]\n}\n",
               device.name, runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10,
               report.copy_rate, copy_rate, report.json.c_str());
  return std::fclose(file);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string argument = argc > 1 ? argv[1] : "";
  if (argument == "--once") {
    Sets sets(16384, 4096);
    for (const Step& step : kSteps) step.launch(sets.problem(0));
    Must(cudaDeviceSynchronize(), "a launch");
    return 0;
  }
  if (CheckAll()) return 1;
  return argument == "--check" ? 0 : TimeAll(argument);
}
