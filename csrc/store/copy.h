// Copies of blocks between the store and memory of a client.
#pragma once

#include <cstdint>
#include <vector>

namespace kvservice {

// Where blocks are. A block is contiguous in the store, and consists of pieces elsewhere.
struct BlockPlaces {
  char* store = nullptr;              // the memory of the store
  const uint64_t* offsets = nullptr;  // [num_blocks], in the store
  int64_t num_blocks = 0;
  int64_t block_bytes = 0;
  char* other = nullptr;                  // the memory of the client
  const uint64_t* places = nullptr;       // [num_blocks][num_pieces], in the memory of the client
  const uint64_t* piece_bytes = nullptr;  // [num_pieces], with the sum block_bytes
  int64_t num_pieces = 0;
};

// Up to `num_threads` threads copy: the caller's and others that end with the call. Each thread has at least a few MiB
// to copy, because a new thread costs tens of microseconds. What is returned are the checksums of the blocks.

// Copies blocks into the store.
std::vector<uint64_t> copy_into_store(const BlockPlaces& places, int num_threads);

// Copies blocks out of the store.
std::vector<uint64_t> copy_out_of_store(const BlockPlaces& places, int num_threads);

// Does the same a quarter faster, since it computes no checksums.
void move_out_of_store(const BlockPlaces& places, int num_threads);

// Reads blocks in the store. Uses neither places nor pieces.
std::vector<uint64_t> store_checksums(const BlockPlaces& places, int num_threads);

}  // namespace kvservice
