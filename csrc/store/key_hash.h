// The hash of a key: SipHash-1-3 with a secret seed. Clients choose the keys, and must not be able to choose
// collisions.
#pragma once

#include <cstdint>
#include <cstring>

#include "store/layout.h"

namespace kvservice {

struct Key {
  uint64_t words[kKeyBytes / 8];

  static Key load(const char* bytes) {
    Key key;
    std::memcpy(&key, bytes, kKeyBytes);
    return key;
  }

  bool operator==(const Key& other) const { return std::memcmp(words, other.words, kKeyBytes) == 0; }
};

class KeyHash {
 public:
  KeyHash(uint64_t k0, uint64_t k1) : k0_(k0), k1_(k1) {}

  // The hash of the 40 bytes: key, number of its namespace.
  uint64_t operator()(const Key& key, uint64_t namespace_number) const {
    State s = {k0_ ^ 0x736F6D6570736575U, k1_ ^ 0x646F72616E646F6DU, k0_ ^ 0x6C7967656E657261U,
               k1_ ^ 0x7465646279746573U};
    for (const uint64_t word : key.words) s.compress(word);
    s.compress(namespace_number);
    s.compress(uint64_t{40} << 56);
    s.v2 ^= 0xFF;
    for (int i = 0; i < 3; ++i) s.round();
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
  }

 private:
  struct State {
    uint64_t v0, v1, v2, v3;

    static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

    void round() {
      v0 += v1, v1 = rotate(v1, 13) ^ v0, v0 = rotate(v0, 32);
      v2 += v3, v3 = rotate(v3, 16) ^ v2;
      v0 += v3, v3 = rotate(v3, 21) ^ v0;
      v2 += v1, v1 = rotate(v1, 17) ^ v2, v2 = rotate(v2, 32);
    }

    void compress(uint64_t word) {
      v3 ^= word;
      round();
      v0 ^= word;
    }
  };

  uint64_t k0_, k1_;
};

}  // namespace kvservice
