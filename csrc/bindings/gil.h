// Taking the interpreter lock in threads that may still run while the interpreter ends.
//
// Before Python 3.14, such a thread is ended by pthread_exit when it takes the lock. That unwinds its stack, and at the
// first destructor C++ aborts the process. Here it waits for the end of the process instead, as in Python 3.14.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace kvservice {

// `function` takes the lock and runs no destructors of C++ while it may lose it.
template <class Function>
void wait_if_interpreter_ends(const Function& function) {
  try {
    function();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    wait_if_interpreter_ends([this] { PyEval_RestoreThread(thread_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const thread_;
};

}  // namespace kvservice
