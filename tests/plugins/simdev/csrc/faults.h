// Planted faults: SIMDEV_FAULT=name makes the device wrong in one way, for tests of the conformance suite.
#pragma once

#include <cstdlib>
#include <string>

namespace simdev {

inline bool has_fault(const char* name) {
  static const char* chosen = std::getenv("SIMDEV_FAULT");
  return chosen && std::string(chosen) == name;
}

}  // namespace simdev
