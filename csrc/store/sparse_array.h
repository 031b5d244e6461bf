// Zeroed memory for an array of which most elements are never used.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace kvservice {

// An array whose pages are allocated on first use.
template <class T>
class SparseArray {
 public:
  // Throws std::bad_alloc if there is no address space.
  explicit SparseArray(size_t size) : num_bytes_(size * sizeof(T)) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, num_bytes_, MADV_NOHUGEPAGE);  // a huge page would have few elements in use
    data_ = static_cast<T*>(memory);
  }
  ~SparseArray() { munmap(data_, num_bytes_); }
  SparseArray(const SparseArray&) = delete;
  SparseArray& operator=(const SparseArray&) = delete;

  T* data() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_;
  size_t num_bytes_;
};

}  // namespace kvservice
