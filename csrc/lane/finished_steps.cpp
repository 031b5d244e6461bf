#include "lane/finished_steps.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace kvservice {
namespace {

int open_eventfd() {
  const int descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  return descriptor;
}

}  // namespace

FinishedSteps::FinishedSteps() : descriptor_(open_eventfd()) {}

FinishedSteps::~FinishedSteps() { close(descriptor_); }

void FinishedSteps::add(std::list<FinishedStep>& step) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  steps_.splice(steps_.end(), step);
  any_.store(true, std::memory_order_release);
}

void FinishedSteps::signal() {
  if (!any_.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (steps_.empty() || signalled_) return;
  signalled_ = eventfd_write(descriptor_, 1) == 0;  // fails only if the counter overflows
}

std::vector<FinishedStep> FinishedSteps::take() {
  if (!any_.load(std::memory_order_acquire)) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<FinishedStep> taken(steps_.begin(), steps_.end());
  steps_.clear();
  any_.store(false, std::memory_order_relaxed);
  eventfd_t count = 0;
  if (signalled_) eventfd_read(descriptor_, &count);
  signalled_ = false;
  return taken;
}

}  // namespace kvservice
