// This reads what a head's file says of it in its keys.
#pragma once

#include "head/head.hpp"
#include "head/metadata.hpp"

#include <string>

namespace eagle3 {

struct head_keys {
    metadata meta;
    head & h;
    std::string arch;

    std::string key(const char * name) const { return arch + "." + name; }
    void read_geometry();
    void read_rope();
};

}  // namespace eagle3
