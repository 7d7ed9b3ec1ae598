// This takes the memory that a head's weights lie in.
#pragma once

#include "head/head.hpp"

namespace eagle3 {

// Makes buffers on h.device for all tensors of h.ctx, whose geometry and names are read: matrices that are
// only multiplied lie as the device's products of few rows want them. Throws EAGLE3_E_MEMORY.
void allocate_weights(head & h);

// Brings the tables that tokens are looked up in to a device that is not the CPU, where it has room: see
// head::d2t_ids. The weights are read. Throws EAGLE3_E_MEMORY.
void bring_tables(head & h);

}  // namespace eagle3
