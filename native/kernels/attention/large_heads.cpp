#include "attention/attend.hpp"

namespace eagle3::kernels::attention {

const attend attend_128 = attend_units<128 / LANES, 128 / LANES>;
const attend attend_256 = attend_units<256 / LANES, 256 / LANES>;

}  // namespace eagle3::kernels::attention
