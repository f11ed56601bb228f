// SPDX-License-Identifier: Apache-2.0
// Which pairs of a query and a key the dropout of attention keeps: a function of the seed and of
// the pair's place alone, so that every kernel, whatever its tiles, finds the same.
//
//   word(b, h, i, j) = Philox4x32-7(counter {j / 4, i, b heads + h, salt}, key)[j % 4]
//   {key, salt, _} = Philox4x32-7(counter {seed[1], 0, 0}, key seed[0])     low halves first
//
// A pair is kept where word >= threshold, which has 32 bits: rate 2^32, rounded. Seven rounds
// are the fewest that pass BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", 2011).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TF_OPS_HOST_DEVICE __host__ __device__
#else
#define TF_OPS_HOST_DEVICE
#endif

namespace tf_ops {

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMultipliers[2] = {0xd2511f53, 0xcd9e8d57};
constexpr uint32_t kPhiloxWeyl[2] = {0x9e3779b9, 0xbb67ae85};  // added to the key each round

struct PhiloxWords {
  uint32_t word[4];
};

TF_OPS_HOST_DEVICE inline PhiloxWords Philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kM0 = kPhiloxMultipliers[0], kM1 = kPhiloxMultipliers[1];
  constexpr uint32_t kWeyl0 = kPhiloxWeyl[0], kWeyl1 = kPhiloxWeyl[1];
  PhiloxWords c = counter;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kM0} * c.word[0], b = uint64_t{kM1} * c.word[2];
    c = {{uint32_t(b >> 32) ^ c.word[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c.word[3] ^ key1,
          uint32_t(a)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

// Of a call: what its seed, int64 [2], comes down to.
struct DropoutKey {
  uint32_t key[2], salt;
};

TF_OPS_HOST_DEVICE inline DropoutKey DropoutKeyOf(const int64_t* seed) {
  const uint64_t a = uint64_t(seed[0]), b = uint64_t(seed[1]);
  const PhiloxWords w =
      Philox({{uint32_t(b), uint32_t(b >> 32), 0, 0}}, uint32_t(a), uint32_t(a >> 32));
  return {{w.word[0], w.word[1]}, w.word[2]};
}

// The words of keys [4 key_block, 4 key_block + 4); `head` is b heads + h.
TF_OPS_HOST_DEVICE inline PhiloxWords DropoutWords(const DropoutKey& key, uint32_t head,
                                                   uint32_t query, uint32_t key_block) {
  return Philox({{key_block, query, head, key.salt}}, key.key[0], key.key[1]);
}

}  // namespace tf_ops
