// Lists in the order of use, whose links are members of their elements.
#pragma once

namespace kvservice {

// No initializers: arrays of elements are not touched when they are allocated.
template <class T>
struct Links {
  T* older;
  T* newer;
};

template <class T, Links<T> T::* kLinks>
class LinkedList {
 public:
  // nullptr if the list is empty
  T* oldest() const { return oldest_; }
  T* newest() const { return newest_; }
  bool empty() const { return oldest_ == nullptr; }

  void add(T& element) {
    element.*kLinks = {newest_, nullptr};
    (newest_ == nullptr ? oldest_ : (newest_->*kLinks).newer) = &element;
    newest_ = &element;
  }

  // Adds an element next to one that is newer, or the newest of all if that is nullptr.
  void add_before(T* newer, T& element) {
    if (newer == nullptr) return add(element);
    T* const older = (newer->*kLinks).older;
    element.*kLinks = {older, newer};
    (older == nullptr ? oldest_ : (older->*kLinks).newer) = &element;
    (newer->*kLinks).older = &element;
  }

  void remove(T& element) {
    const Links<T> links = element.*kLinks;
    (links.older == nullptr ? oldest_ : (links.older->*kLinks).newer) = links.newer;
    (links.newer == nullptr ? newest_ : (links.newer->*kLinks).older) = links.older;
  }

  // Whether the neighbours of an element refer to it.
  bool contains(const T& element) const {
    const Links<T> links = element.*kLinks;
    return (links.older == nullptr ? oldest_ : (links.older->*kLinks).newer) == &element &&
           (links.newer == nullptr ? newest_ : (links.newer->*kLinks).older) == &element;
  }

 private:
  T* oldest_ = nullptr;
  T* newest_ = nullptr;
};

}  // namespace kvservice
