// The reason why an entry is refused. Invalid arguments are ArgumentErrors instead.
#pragma once

#include <stdexcept>
#include <string>

namespace kvservice {

class LaneError : public std::runtime_error {
 public:
  // `reason` is that of a class in kvservice/errors.py; `field` may be empty.
  LaneError(const char* reason, const char* field, const std::string& message)
      : std::runtime_error(message), reason_(reason), field_(field) {}
  const char* reason() const { return reason_; }
  const char* field() const { return field_; }

 private:
  const char* reason_;
  const char* field_;
};

}  // namespace kvservice
