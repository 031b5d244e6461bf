// An invalid argument, with its name. The bindings raise it as InvalidArgumentError.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace kvservice {

class ArgumentError : public std::runtime_error {
 public:
  ArgumentError(std::string field, const std::string& message)
      : std::runtime_error(message), field_(std::move(field)) {}
  const std::string& field() const { return field_; }

 private:
  std::string field_;
};

inline void require(bool condition, const char* field, const char* message) {
  if (!condition) throw ArgumentError(field, message);
}

}  // namespace kvservice
